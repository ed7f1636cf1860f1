"""The compile gate: what is compiled is what is launched, the committed card is of these sources, and its rules can be broken.

The compiler runs in a process of its own, because this one has Triton's interpreter in its place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from harness import kernels_card
from harness.kernels_table import family_of, markdown
from kernels.codec import codec_named
from kernels.gpu.launch import FP_FUSION
from kernels.gpu.specialisations import LISTED, Attend, Copy, Merge, Pointwise, Rows
from kernels.rows import Mask
from tests.kernels.cases import Case, step_of

ROOT = Path(__file__).parents[3]
MANGLED = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float16: "*fp16",
}


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append(dict(zip(self.kernel.arg_names, arguments, strict=False)) | options)

    def seen(self) -> tuple[dict, dict, int, int, int | None]:
        """Types by argument, constants, warps, stages and registers of the only launch."""
        (launch,) = self.launches
        assert launch.pop("enable_fp_fusion") is FP_FUSION
        options = launch.pop("num_warps"), launch.pop("num_stages", 3), launch.pop("maxnreg", None)
        constants = {name: launch[name] for name in launch if name.isupper()}
        return {name: mangled(launch[name]) for name in launch if not name.isupper()}, constants, *options


def mangled(value) -> str | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return MANGLED[value.dtype]
    return {int: "i32", float: "fp32"}[type(value)]


@pytest.fixture
def compiled_form(monkeypatch):
    """Launches as a GPU would get them: full tiles, listed forms only."""
    from kernels.gpu import attention, launch

    monkeypatch.setattr(launch, "interpreted", False)
    monkeypatch.setattr(attention, "processors", lambda device: 1)

    def record(module, name: str) -> Recorder:
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
        return recorder

    return record


def assert_same(recorder: Recorder, spec) -> None:
    from kernels.gpu.compiled import request

    assert spec in LISTED
    asked = request(spec, "sm_90")
    assert recorder.seen() == (asked.types, asked.constants, asked.warps, asked.stages, asked.registers)


@pytest.mark.parametrize(
    ("layout", "codec", "mask"),
    [("dense", "raw", Mask(window=5, sinks=2)), ("dense", "int8", Mask()), ("paged", "q4_0", Mask()), ("paged", "int8", Mask(window=5))],
)
def test_what_is_compiled_is_what_attention_launches(ops, compiled_form, codec, layout, mask):
    from kernels.gpu import attention

    case = Case(dtype=torch.bfloat16, codec_k=codec, codec_v=codec, head_dim=64, mask=mask, page_size=None if layout == "dense" else 16)
    step = step_of(replace(case, spans=((4, 5), (0, 1))), resolve_reference())
    recorder = compiled_form(attention, "attend_kernel")
    step.attend(ops)
    assert_same(recorder, Attend(layout, codec, codec, "bfloat16", 64, 16, mask.window is not None))


def test_what_is_compiled_is_what_the_other_ops_launch(ops, compiled_form):
    from kernels.gpu import attention, layers, storage

    store = ops.new_rows(codec_named("q4_0"), 32, 2, 64, torch.bfloat16, "cpu", 16)
    slots, rows = torch.arange(4), torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    x, weight, angle = torch.zeros(4, 1024, dtype=torch.bfloat16), torch.ones(1024, dtype=torch.bfloat16), torch.zeros(4, 32)
    parts = torch.zeros(4, 2, 3, 64)
    calls = (
        (storage, "write_kernel", Rows("write", "q4_0", "bfloat16", 64), lambda: ops.write_rows(store, slots, rows)),
        (storage, "read_kernel", Rows("read", "q4_0", "bfloat16", 64), lambda: ops.read_rows(store, slots)),
        (storage, "copy_kernel", Copy(8), lambda: ops.copy_pages([store], slots[:1], slots[1:2])),
        (attention, "merge_kernel", Merge("bfloat16", 64), lambda: attention.merge(parts, parts[..., 0].contiguous(), rows)),
        (layers, "rope_kernel", Pointwise("rope", "bfloat16", 64), lambda: ops.rope(rows, angle, angle)),
        (layers, "rms_norm_kernel", Pointwise("rms_norm residual", "bfloat16", 1024), lambda: ops.rms_norm(x, weight, 1e-5, x)),
        (layers, "gated_kernel", Pointwise("gated silu", "bfloat16", 1024), lambda: ops.gated(x, "silu")),
    )
    for module, name, spec, call in calls:
        recorder = compiled_form(module, name)
        call()
        assert_same(recorder, spec)


def committed_card() -> dict:
    """The card in results/; the tests that need one are skipped until there is one."""
    if not kernels_card.CARD.is_file():
        pytest.skip(f"no card is committed: python -m harness.kernels_card makes {kernels_card.CARD.name}")
    return json.loads(kernels_card.CARD.read_text())


def test_the_committed_card_holds():
    """Every listed form is on the card, made from this source; a covering sample compiled now breaks no rule and has not grown."""
    made_by = committed_card()["triton"]
    if version("triton") != made_by:
        pytest.skip(f"the card was made by triton {made_by} and this is {version('triton')}: figures of two compilers do not compare")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "harness.kernels_card", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 problems" in done.stdout


def test_the_interpreter_makes_no_card(capsys):
    assert kernels_card.main(["--check"]) == 2
    assert "TRITON_INTERPRET=1 turns the compiler off: unset it" in capsys.readouterr().err


GOOD = {
    "registers": 116,
    "spills": 0,
    "scalar_spills": 0,
    "local_bytes": 0,
    "shared_bytes": 39168,
    "widest_load_bytes": 16,
    "matrix_instructions": 32,
    "loop_load_bytes": 32768,
    "loop_widest_load_bytes": 16,
    "loop_exponentials": 10,
}
FORM = Attend("paged", "raw", "raw", "bfloat16", 128, 16)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spills": 4}, "spills 4"),
        ({"local_bytes": 8}, "8 bytes of local memory"),
        ({"shared_bytes": 400_000}, "400000 bytes of shared memory"),
        ({"matrix_instructions": 0}, "no matrix instruction"),
        ({"loop_widest_load_bytes": 8}, "8 bytes at a time"),
        ({"loop_load_bytes": 49152}, "not whole tiles of 32768 bytes"),
        ({"loop_load_bytes": 65536}, "each used once"),
    ],
)
def test_a_form_that_costs_too_much_is_named(ops, changes, complaint):
    assert kernels_card.broken_rules(FORM, "sm_90", GOOD) == []
    (problem,) = kernels_card.broken_rules(FORM, "sm_90", GOOD | changes)
    assert complaint in problem


def test_a_figure_that_grew_is_named():
    entry = {"name": "x", "target": "sm_90", **GOOD}
    assert kernels_card.grown(entry, entry) == []
    assert kernels_card.grown(entry | {"registers": 130}, entry) == ["x on sm_90: registers grew from 116 to 130"]


def test_the_card_is_the_committed_shape():
    card = committed_card()
    assert card["schema"] == 1
    assert {entry["target"] for entry in card["kernels"]} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert all(GOOD.keys() <= entry.keys() for entry in card["kernels"])


def test_the_committed_table_is_the_cards():
    card = committed_card()
    assert kernels_card.CARD.with_suffix(".md").read_text() == markdown(card)


def test_a_table_has_a_row_for_each_family_and_a_range_where_forms_differ():
    names = ("attend paged raw bfloat16 head_dim=64 rows=16", "attend paged int8 bfloat16 head_dim=128 rows=16 windowed")
    entries = [{"name": name, "target": "sm_90", **GOOD, "registers": 90 + at} for at, name in enumerate(names)]
    entries.append({"name": "attend dense raw float32 head_dim=256 rows=64", "target": "sm_90", **GOOD, "spills": 8})
    lines = markdown({"triton": "9", "kernels": entries}).splitlines()
    assert lines[-1] == "| attend paged, decode | 2 | refused | 90–91 / 0 / 39 / 16 / 32 | refused | refused |"
    assert lines[-2] == "| attend dense, prefill, float32, head_dim 256 | 1 | refused | 116 / 8 / 39 / 16 / 32 | refused | refused |"


def test_every_listed_form_has_a_family():
    families = {family_of(spec.name) for spec in LISTED}
    assert {"merge", "read_rows", "write_rows", "copy_pages", "rope", "rms_norm", "rms_norm residual", "gated silu"} <= families
    assert {"attend paged, decode", "attend dense, prefill", "attend packed, prefill, head_dim 256"} <= families
    assert len(families) < 30


def resolve_reference():
    from kernels.backend import resolve

    return resolve("reference")
