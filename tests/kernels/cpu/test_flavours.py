"""Which CPU kernels run is never silent: what is compiled, what goes through torch, and what keeps a bad address from being read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kernels.cpu
from kernels.api import Ops
from kernels.backend import resolve
from kernels.codec import codec_named
from kernels.cpu import plain
from kernels.rows import DenseRows, PagedRows
from tests.kernels.cases import Case, step_of

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
compiled_only = pytest.mark.skipif(not kernels.cpu.COMPILED, reason="needs the compiled kernels")


def test_the_backend_says_which_kernels_it_has() -> None:
    ops = resolve("cpu")
    assert ops.name == "cpu"
    assert ops.flavour == kernels.cpu.FLAVOUR
    assert kernels.cpu.FLAVOUR.startswith("compiled" if kernels.cpu.COMPILED else "torch")
    assert resolve("reference").flavour is None


def test_every_op_says_for_which_dtypes_it_is_compiled() -> None:
    assert set(kernels.cpu.NATIVE) | {"read_rows", "move_rows", "new_rows"} == set(kernels.cpu.__all__)
    assert all(bool(dtypes) == kernels.cpu.COMPILED for dtypes in kernels.cpu.NATIVE.values())


def test_without_numba_everything_still_runs_and_says_so() -> None:
    script = """
import sys
sys.modules["numba"] = None
import torch
from kernels.backend import resolve
ops = resolve("cpu")
assert ops.flavour.startswith("torch ("), ops.flavour
assert "numba" in ops.flavour and "kvbench[cpu]" in ops.flavour, ops.flavour
assert ops.gated(torch.ones(2, 8), "silu").shape == (2, 4)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@compiled_only
@pytest.mark.parametrize("module", ["chain", "native", "streams"])
def test_a_fault_of_our_own_is_no_missing_compiler(module: str) -> None:
    script = f"import sys; sys.modules['kernels.cpu.{module}'] = None; import kernels.cpu"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert f"kernels.cpu.{module}" in done.stderr, done.stderr


@compiled_only
@pytest.mark.soak
def test_a_host_with_narrower_registers_passes_the_same_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.cpu.narrow_host", "-p", "no:cacheprovider"]
    script = "import tests.kernels.cpu.narrow_host, kernels.cpu; print(kernels.cpu.FLAVOUR)"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("compiled, 8 floats a vector"), said
    done = subprocess.run([*command, str(FOLDER), "-m", "not soak"], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@compiled_only
def test_float64_goes_through_torch() -> None:
    step = step_of(Case(torch.float64), Ops("cpu", kernels.cpu))
    assert torch.equal(step.attend(Ops("cpu", kernels.cpu)), step.attend(Ops("cpu", plain)))


@compiled_only
@pytest.mark.parametrize("spans", [((700, 701),), ((0, 700),)], ids=["decode", "chunk"])
def test_any_pool_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, spans: tuple[tuple[int, int], ...]) -> None:
    from kernels.cpu import team

    ops = Ops("cpu", kernels.cpu)
    step = step_of(Case(spans=spans, head_dim=64, page_size=16), ops)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        shared = step.attend(ops)
        monkeypatch.setattr(team, "_openmp_fork", lambda: None)
        assert team.described() == "Python threads"
        assert torch.equal(step.attend(ops), shared)
    finally:
        torch.set_num_threads(threads)


@compiled_only
def test_a_kernel_made_again_is_read_from_disk() -> None:
    from kernels.cpu.decode import make_decode

    make_decode(1)
    assert make_decode(1).cache_hits == 1


@compiled_only
def test_query_heads_are_passed_in_few_and_full_groups() -> None:
    from kernels.cpu.decode import group_of

    assert [group_of(heads, 1) for heads in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)] == [1, 2, 3, 4, 3, 3, 4, 4, 3, 4]


@compiled_only
@pytest.mark.parametrize("spans", [((5, 6),), ((0, 6),)], ids=["decode", "chunk"])
def test_addresses_outside_the_store_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    ops = Ops("cpu", kernels.cpu)
    step = step_of(Case(spans=spans), ops)
    with pytest.raises(IndexError, match=f"outside the store of {step.keys.count} rows"):
        replace(step, where=PagedRows(step.where.pages + 1000, 4)).attend(ops)
    dense = step_of(Case(spans=spans, page_size=None), ops)
    for base in (-3, dense.keys.count):
        with pytest.raises(IndexError, match="outside the store"):
            replace(dense, where=DenseRows(torch.tensor([base]), (base,))).attend(ops)


@compiled_only
@pytest.mark.parametrize("slot", [-1, 8])
def test_slots_outside_the_store_are_refused(slot: int) -> None:
    ops = Ops("cpu", kernels.cpu)
    store = ops.new_rows(codec_named("int8"), 8, 1, 32, torch.float32, "cpu", None)
    with pytest.raises(IndexError, match="lead outside the store of 8 rows"):
        ops.write_rows(store, torch.tensor([2, slot]), torch.zeros(2, 1, 32))


@compiled_only
def test_pages_outside_the_store_are_refused() -> None:
    ops = Ops("cpu", kernels.cpu)
    store = ops.new_rows(codec_named("raw"), 8, 1, 32, torch.float32, "cpu", 4)
    with pytest.raises(IndexError, match="lead outside the store of 2 pages"):
        ops.copy_pages([store], torch.tensor([0]), torch.tensor([2]))
