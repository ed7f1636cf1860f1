"""Each kernel broken on purpose, one line at a time: the checks that the tests run must say so.

A mutant is a copy of the kernels with one piece of source replaced, imported under another name.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kernels.api import Ops
from tests.kernels.gpu.mutants import MUTANTS, Mutant

SOURCES = Path(__file__).parents[3] / "kernels" / "gpu"


def broken(mutant: Mutant, folder: Path) -> Ops:
    """The triton backend with one piece of its source replaced."""
    package = "mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    (folder / package).mkdir()
    for path in SOURCES.glob("*.py"):
        text = path.read_text()
        if path.name == mutant.file:
            assert mutant.old in text, f"{mutant.file} no longer says {mutant.old!r}"
            text = text.replace(mutant.old, mutant.new)
        (folder / package / path.name).write_text(text.replace("kernels.gpu", package))
    return Ops("triton", importlib.import_module(package))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_noticed(mutant, ops, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        backend = broken(mutant, tmp_path)
        with pytest.raises(Exception) as caught:
            mutant.check(backend)
        assert not isinstance(caught.value, ImportError | SyntaxError | NameError), caught.value
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("mutant_"):
                del sys.modules[name]


@pytest.mark.parametrize(
    "check", {mutant.check for mutant in MUTANTS if mutant.check.__name__ != "<lambda>"}, ids=lambda check: check.__name__
)
def test_the_check_passes_on_the_kernels_as_they_are(check, ops):
    check(ops)
