"""The side-by-side driver with stub workers: what goes over the line, what is measured, and what is made of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.measure.compare import MIN_PAIRS
from tests.benchmarks.peers.lines import Failed, Peer
from tests.benchmarks.peers.side_by_side import ROOT, measure
from tests.benchmarks.peers.summary import REFERENCE, summarised, table


@pytest.fixture
def peer():
    started: list[Peer] = []

    def start(name: str, what: str, folder: Path = ROOT) -> Peer:
        command = [sys.executable, "-m", "tests.benchmarks.peers.stub_side", what]
        started.append(Peer(name, command, folder, {"PYTHONPATH": ""}))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_answers_come_back_and_prints_do_not_mix_with_them(peer):
    stub = peer("stub", "0.5")
    assert stub.ready()
    assert stub.about == {"seconds": 0.5}
    answer = stub.ask(do="start", prompts=[[1, 2], [5, 6]], room=4)
    assert (answer["seconds"], answer["tokens"]) == (1.0, [[3], [7]])
    assert answer["peak_rss_bytes"] > 1 << 20
    assert stub.ask(do="step", count=2)["tokens"] == [[4, 5], [8, 9]]
    assert stub.ask(do="drop") == {}


def test_a_fault_is_told_and_survived(peer):
    stub = peer("stub", "0.5")
    stub.ready()
    with pytest.raises(Failed, match="stub: RuntimeError: nothing was started"):
        stub.ask(do="step", count=1)
    with pytest.raises(Failed, match="unknown request 'leap'"):
        stub.ask(do="leap")
    assert stub.ask(do="start", prompts=[[1]], room=1)["tokens"] == [[2]]


def test_an_absent_side_says_why(peer):
    stub = peer("stub", "absent")
    assert not stub.ready()
    assert stub.absent == "the stub was told to be absent"


def test_a_dead_worker_is_reported_with_its_last_words(peer):
    with pytest.raises(Failed, match="the stub was told to die"):
        peer("stub", "dies").ready()


def test_a_cell_counts_every_round_and_compares_pair_by_pair(peer):
    peers = {REFERENCE: peer(REFERENCE, "0.4"), "contiguous": peer("contiguous", "0.1")}
    assert all(each.ready() for each in peers.values())
    cells = {f"1x{n}": measure(peers, [[*range(n)]], rounds=6, prefill_rounds=5, steps=2) for n in (3, 30, 40)}
    found = summarised(cells)
    slow, fast = found["cells"]["1x30"]
    assert (slow["step_s"]["samples"], slow["start_s"]["samples"]) == (6, 5)
    assert (slow["step_s"]["p50"], fast["start_s"]["p50"]) == (0.4, pytest.approx(3.0))
    assert fast["step_s"][f"over {REFERENCE}"]["ratio"] == pytest.approx(0.25)
    assert fast["decode_tok_per_s"] == pytest.approx(10)
    assert fast["equal_tokens"] == 1.0
    assert found["laws"]["1"]["contiguous"]["intercept_s"] == pytest.approx(0.1)
    assert "| contiguous | 100.00 | 0.250 [0.250, 0.250] |" in table(found)


def test_one_reading_of_the_prompts_is_kept_without_an_interval(peer):
    peers = {REFERENCE: peer(REFERENCE, "0.4"), "contiguous": peer("contiguous", "0.1")}
    assert all(each.ready() for each in peers.values())
    _, fast = summarised({"2x4": measure(peers, [[1, 2, 3, 4]] * 2, rounds=5, prefill_rounds=0, steps=1)})["cells"]["2x4"]
    assert (fast["start_s"]["samples"], fast["start_s"][f"over {REFERENCE}"]) == (1, None)
    assert fast["prefill_tok_per_s"] == pytest.approx(8 / 0.4)


def test_a_cell_that_is_out_of_time_keeps_the_rounds_that_an_interval_needs(peer):
    peers = {REFERENCE: peer(REFERENCE, "0.4"), "contiguous": peer("contiguous", "0.1")}
    assert all(each.ready() for each in peers.values())
    cell = measure(peers, [[1, 2]], rounds=50, prefill_rounds=0, steps=1, seconds=0.0)
    assert [len(row["step_s"]) for row in cell["sides"].values()] == [MIN_PAIRS] * 2
