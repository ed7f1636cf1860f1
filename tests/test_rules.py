"""The rules of the design hold in every source file, and each rule finds the fault that it is there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rules

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
    for package in rules.OURS
    for file in sorted((ROOT / package).rglob("*.py"))
}
TESTS = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("*.py"))}
RULES = (rules.layers, rules.one_place, rules.clock, rules.unpickles, rules.shape)
FOLDERS = {"strategies", "harness", "kernels", "conf", "tests", "results"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_source_file_keeps_the_rule(rule):
    assert [fault for path, text in SOURCES.items() for fault in rule(path, text)] == []


@pytest.mark.parametrize("path", rules.TORCH_FREE)
def test_what_needs_no_tensor_loads_no_torch(path):
    assert "torch" not in rules.loaded_by(path, SOURCES)


@pytest.mark.parametrize("path", ["harness/__main__.py", "harness/build.py"])
def test_the_command_line_loads_nothing_heavy(path):
    assert rules.loaded_by(path, SOURCES) & rules.HEAVY == set()


def test_the_repository_has_no_other_top_level_folder():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    folders = {line.split("/")[0] for line in tracked.stdout.splitlines() if "/" in line}
    assert {folder for folder in folders if not folder.startswith(".")} <= FOLDERS


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_is_content(arguments):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    done = subprocess.run([ruff, *arguments, "--no-cache", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(TESTS))
def test_every_test_file_says_what_it_is_for(path):
    assert [fault for fault in rules.shape(path, TESTS[path]) if "docstring" in fault or "banner" in fault or "undone" in fault] == []


PLANTED = [
    (rules.layers, "kernels/x.py", "import strategies.base"),
    (rules.layers, "kernels/x.py", "def f():\n    from harness import cli"),
    (rules.layers, "kernels/x.py", "import triton"),
    (rules.layers, "kernels/gpu/x.py", "import transformers"),
    (rules.layers, "strategies/x.py", "from harness.errors import UserError"),
    (rules.layers, "strategies/x.py", "import scipy"),
    (rules.layers, "harness/x.py", "from tests import rules"),
    (rules.layers, "harness/x.py", "from . import cli"),
    (rules.one_place, "harness/x.py", "from hydra import compose"),
    (rules.one_place, "harness/cli.py", "import wandb"),
    (rules.one_place, "strategies/x.py", "from time import perf_counter"),
    (rules.one_place, "harness/cli.py", "def f():\n    import subprocess"),
    (rules.clock, "harness/x.py", "torch.cuda.synchronize()"),
    (rules.clock, "harness/x.py", "datetime.now(timezone.utc)"),
    (rules.unpickles, "harness/x.py", "import pickle"),
    (rules.unpickles, "harness/x.py", "torch.load('x', weights_only=False)"),
    (rules.shape, "harness/x.py", "x = 1"),
    (rules.shape, "harness/x.py", '"""x."""\n' + "x = 1\n" * 300),
    (rules.shape, "harness/x.py", '"""x."""\n# TODO later'),
    (rules.shape, "harness/x.py", '"""x."""\n# ---- part two'),
    (rules.shape, "harness/x.py", '"""x."""\ndef f():\n' + "    x = 1\n" * 61),
    (rules.shape, "harness/x.py", '"""x."""\ndef f(**options):\n    pass'),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"), PLANTED, ids=[f"{rule.__name__}-{number}" for number, (rule, _, _) in enumerate(PLANTED)]
)
def test_a_planted_fault_is_found(rule, path, text):
    assert len(rule(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kernels/gpu/x.py", "import triton"),
        ("kernels/cpu/x.py", "import numba"),
        ("strategies/x.py", "import numpy\nimport torch\nfrom kernels.api import Ops"),
        ("harness/x.py", "import transformers\nfrom strategies.base import Plan"),
        ("harness/cli.py", "import hydra"),
        ("harness/x.py", "from datetime import datetime\ndatetime.fromisoformat('2026-01-01')"),
        ("harness/measure/clock.py", "import time\ntorch.cuda.synchronize()"),
    ],
)
def test_what_is_allowed_is_not_called_a_fault(path, text):
    assert [fault for rule in RULES if rule is not rules.shape for fault in rule(path, text)] == []


def test_loading_is_followed_through_our_own_modules_and_not_into_functions():
    sources = {
        "harness/__init__.py": "",
        "harness/a.py": "from harness import b\nif TYPE_CHECKING:\n    import wandb\ndef f():\n    import datasets",
        "harness/b.py": "import kernels.codec",
        "kernels/__init__.py": "import numpy",
        "kernels/codec.py": "class C:\n    import torch",
    }
    assert rules.loaded_by("harness/a.py", sources) & rules.HEAVY == {"numpy", "torch"}
