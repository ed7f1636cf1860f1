"""Faults planted in real kernels and codecs go through the benchmarks' own measurements into the gate, and each fails it alone.

Bytes and answers are measured here; the slow-down is too in the long test, and simulated in `test_gate.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.gate import Measured, judge
from harness.gate import main as gate
from harness.measure.gate import PASS, Entry, overall
from kernels.api import Ops
from kernels.codec import Codec

ROOT = Path(__file__).resolve().parents[2]
CODEC = "int8"


def measured() -> Measured:
    """What the benchmarks of every codec and of some strategies report of bytes and answers, now."""
    from tests.benchmarks import kernel_cases as cases
    from tests.benchmarks import test_steps as steps
    from tests.benchmarks import toy

    ops = toy.ops()
    entries = {}
    for codec in cases.CODEC_NAMES:
        stores = cases.stored(ops, codec, paged=True)
        entries[f"attend {codec}"] = Entry(stores.nbytes, cases.output_kl(cases.attend(ops, stores, paged=True)), None)
    for name in ("paged", "paged_int8", "kivi4"):
        entries[f"step {name}"] = Entry(toy.held(steps.at_length(name, 48).side.cache), toy.kl(name), None)
    return Measured(Path("measured now"), None, None, toy.data_sha256(), entries, {})


@pytest.fixture(scope="module")
def clean() -> Measured:
    """The same without any fault."""
    return measured()


def failed(clean: Measured) -> set[tuple[str, str]]:
    """(benchmark, aspect) of everything that fails now, against `clean`."""
    findings = judge(clean, measured())
    return {(finding.benchmark, finding.aspect) for finding in findings if finding.verdict != PASS}


def test_measuring_twice_finds_nothing(clean):
    assert overall(judge(clean, measured())) == PASS


def test_one_byte_more_in_a_codec_fails_and_nothing_else_does(clean, monkeypatch):
    honest = Codec.row_bytes
    monkeypatch.setattr(Codec, "row_bytes", lambda self, *size: honest(self, *size) + (self.name == CODEC))
    assert failed(clean) == {(f"attend {CODEC}", "bytes"), ("step paged_int8", "bytes")}


def test_coarser_codes_fail_on_kl_and_nothing_else_does(clean, monkeypatch):
    honest = Ops.write_rows

    def coarse(self, store, slots, rows):
        honest(self, store, slots, (rows * 2).round() / 2 if store.codec.name == CODEC else rows)

    monkeypatch.setattr(Ops, "write_rows", coarse)
    assert failed(clean) == {(f"attend {CODEC}", "kl"), ("step paged_int8", "kl")}


def test_an_attention_kernel_that_is_two_percent_off_fails_on_kl(clean, monkeypatch):
    honest = Ops.attend_paged

    def off(self, q, keys, values, *rest):
        return honest(self, q, keys, values, *rest) * 0.98

    monkeypatch.setattr(Ops, "attend_paged", off)
    assert ("step paged", "kl") in failed(clean)
    assert ("attend raw", "kl") in failed(clean)
    assert {aspect for _, aspect in failed(clean)} == {"kl"}


SLOW_KERNEL = """
from time import process_time

import kernels.api

honest = kernels.api.Ops.{op}


def slow(self, *given):
    start = process_time()
    answer = honest(self, *given)
    stop = start + 1.3 * (process_time() - start)
    while process_time() < stop:
        pass
    return answer


kernels.api.Ops.{op} = slow
"""


MOST_TURNS = 12


@pytest.mark.soak
def test_a_kernel_made_1_3_times_slower_fails_the_gate_alone(tmp_path, capsys):
    """Real timings, and turns are added until there is a verdict: inconclusive after 12 of them is a failure."""
    (tmp_path / "slow_kernel.py").write_text(SLOW_KERNEL.format(op="attend_paged"))

    def benchmarks(name: str, *plugin: str) -> str:
        path = str(tmp_path / name)
        command = [sys.executable, "-m", "pytest", "-q", "tests/benchmarks/test_kernels.py", "-p", "no:xdist", *plugin, "--passes", "60"]
        command += ["--benchmark-enable", f"--benchmark-json={path}", "-k", "test_attend and (raw or int8)"]
        path_of_plugin = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        subprocess.run(command, cwd=ROOT, env=path_of_plugin, check=True, capture_output=True)
        return path

    before, same, slow = [], [], []
    codes = [3]
    while 3 in codes and len(before) < MOST_TURNS:
        turn = len(before)
        before.append(benchmarks(f"before.{turn}.json"))
        same.append(benchmarks(f"same.{turn}.json"))
        slow.append(benchmarks(f"slow.{turn}.json", "-p", "slow_kernel"))
        codes = [gate([*current, "--baseline", *before, "--in-turns"]) for current in (same, slow)]
        said = capsys.readouterr().out
        with capsys.disabled():
            print(f"\nafter {len(before)} turns: {codes}")
    assert codes == [0, 1], said
    failing = [line for line in said.splitlines() if line.startswith("regression")]
    assert all("test_attend_paged" in line for line in failing), said
