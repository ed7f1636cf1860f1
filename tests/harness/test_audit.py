"""The audit: bytes equal their bill whatever the workload shares, and whatever answers in a kernel's place is found out."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch

from harness import sides
from harness.audit import Audit, _wide_rows
from harness.measure.allocation import TensorBytes
from kernels.api import Ops
from kernels.codec import CODECS, Codec
from tests.harness import tiny


@pytest.fixture
def run(command, launch_folder):
    def typed(*arguments: str) -> dict:
        command(*arguments, *tiny.RUN, "quality=off")
        return json.loads(sorted(launch_folder.rglob("record.json"))[-1].read_text())

    return typed


@pytest.mark.parametrize("strategy", ["paged", "contiguous_growth", "paged_prefix"])
@pytest.mark.parametrize(
    "workload", [("workload=fork", "workload.samples=3"), ("workload=shared_prefix", "workload.prefix_tokens=32", "workload.batch=2")]
)
def test_sharing_changes_no_verdict_on_the_bill(run, strategy, workload):
    record = run(f"strategy={strategy}", *workload)
    assert record["status"] == "ok"
    audit = record["audit"]
    assert audit["billed_bytes"] == audit["reserved_bytes"] == audit["stored_bytes"] > 0
    assert 0 < audit["live_peak_bytes"] <= audit["in_use_peak_bytes"] <= audit["reserved_peak_bytes"]
    assert audit["transient_peak_bytes"] > 0


def test_the_record_says_whose_code_ran(run):
    backend = run("strategy=paged", "backend=reference")["backend"]
    assert backend["sources"]["attend_paged"] == "kernels.reference"
    assert run("strategy=paged", "backend=cpu")["backend"]["sources"]["attend_paged"].startswith("kernels.cpu")


@pytest.mark.parametrize(
    ("storage", "sentence"),
    [
        ("Underbills", "the byte formula bills"),
        ("Overstates", "the cache says that it reserved"),
        ("AnswersItself", "something else answered in their place"),
        ("StoresWide", "rows are to be stored as int8 codes"),
        ("LivesBeyondItsMeans", "cannot be right"),
    ],
)
def test_a_lie_about_bytes_or_kernels_is_incorrect(run, storage, sentence):
    more = ("strategy.codec_k=int8", "strategy.codec_v=int8") if storage == "StoresWide" else ()
    record = run("strategy=paged", f"strategy.storage=tests.harness.broken_cache:{storage}", *more)
    assert record["status"] == "incorrect"
    assert sentence in record["error"]
    assert record["metrics"] is None


@pytest.mark.parametrize(
    ("codec", "dtype_bytes"), [(Codec("ten_bits", 10, None, 0), {"int16": 96}), (SimpleNamespace(name="fitted"), {"float32": 96})]
)
def test_codes_of_somebody_elses_width_are_no_lie(codec, dtype_bytes):
    found = Audit((32,), 96, 96, 96, 96, 96, 96, 0, 1, {}, dtype_bytes, None)
    cache = SimpleNamespace(codec_k=codec, codec_v=CODECS["int8"], dtype=torch.float32)
    assert _wide_rows(found, cache) is None
    both = SimpleNamespace(codec_k=CODECS["int8"], codec_v=CODECS["int8"], dtype=torch.float32)
    assert "int8 codes" in _wide_rows(found, both)


def test_another_backends_code_in_a_kernels_place_is_a_silent_fallback(run, monkeypatch):
    source = Ops.source
    monkeypatch.setattr(Ops, "source", lambda self, op: "kernels.reference" if op == "attend_paged" else source(self, op))
    record = run("strategy=paged", "backend=cpu")
    assert record["status"] == "incorrect"
    assert "silent fallback" in record["error"]


def test_tensor_bytes_are_exact_and_peaks_stay():
    weights = torch.zeros(100)
    with TensorBytes() as seen:
        kept = torch.empty(1000)
        assert seen.held_bytes == 4000
        view = kept.view(10, 100)
        del kept
        assert seen.held_bytes == 4000
        grown = view + weights
        assert seen.held_bytes == 8000
        del grown, view
        weights.view(10, 10).mul_(2.0)
    assert (seen.held_bytes, seen.peak_bytes) == (0, 8000)


def test_a_run_leaves_no_buffer_and_no_byte_to_the_next(run, monkeypatch):
    made: list[weakref.ref] = []
    make = sides.make_cache

    def watched(*arguments):
        cache = make(*arguments)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(sides, "make_cache", watched)
    alone = run("strategy=paged_int8")
    gc.collect()
    assert made
    assert not [ref for ref in made if ref() is not None]
    run("strategy=contiguous_max")
    after = run("strategy=paged_int8")
    kept = [name for name in alone["metrics"] if name.startswith("kv_")]
    assert len(kept) >= 5
    assert [after["metrics"][name] for name in kept] == [alone["metrics"][name] for name in kept]
    assert after["audit"] == alone["audit"]
