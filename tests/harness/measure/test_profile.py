"""Where a step's time goes: own times of nested calls, whole runs whose parts add up, and each op in its row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import kernels.cpu
from harness.engine.events import DECODE, PREFILL, StepEvent, TokenEvent
from harness.measure.clock import ManualClock
from harness.measure.profile import CACHE, DECODER, ENGINE, HOST, KIND_OF, KINDS, ProfiledLog, Stopwatch
from tests.harness.tiny import MODEL, RUN

LAYERS = 2


def test_a_call_is_charged_what_the_calls_inside_it_were_not():
    clock = ManualClock()
    watch = Stopwatch(clock)

    def outer():
        clock.advance(1.0)
        inner()
        clock.advance(2.0)
        inner()
        return "done"

    inner = watch.keep("inner", lambda: clock.launch(4.0))  # device work: waited for inside
    assert watch.keep("outer", outer)() == "done"
    assert watch.taken() == ({"outer": 3.0, "inner": 8.0}, {"outer": 1, "inner": 2})
    assert watch.taken() == ({}, {})


def test_a_call_that_raises_is_charged_and_leaves_the_stopwatch_usable():
    clock = ManualClock()
    watch = Stopwatch(clock)

    def fails():
        clock.advance(1.0)
        raise KeyError("no")

    for _ in range(2):
        with pytest.raises(KeyError):
            watch.keep("outer", watch.keep("inner", fails))()
    assert watch.seconds == {"inner": 2.0, "outer": 0.0}


def test_a_call_made_of_parts_is_shared_out_among_them():
    clock = ManualClock()
    watch = Stopwatch(clock)
    parts = {"a": (Counter(linear=3, rope=1), Counter(linear=2, rope=1))}
    watch.keep("chain", lambda name: clock.advance(8.0), parts.get)("a")
    assert watch.taken() == ({"linear": 6.0, "rope": 2.0}, {"linear": 2, "rope": 1})


def test_only_decode_steps_count_and_what_no_part_took_is_the_engines():
    clock = ManualClock()
    watch = Stopwatch(clock)
    log = ProfiledLog(watch=watch)
    log.arrived(0, 0.0, 3)
    multiply = watch.keep("linear", lambda seconds: clock.advance(seconds))
    for number, (phase, inside) in enumerate(((PREFILL, 50.0), (DECODE, 3.0), (DECODE, 5.0))):
        start = clock.now()
        clock.advance(1.0)
        multiply(inside)
        fed = (3, 0) if phase == PREFILL else (0, 1)
        log.stepped(StepEvent(number, start, clock.now(), 1, *fed, 0, 1, 0, 0, 0, 0), [TokenEvent(0, number, phase, number, 3 + number, 7)])
    found = log.profile()
    assert (found.steps, found.step_s) == (2, 5.0)
    assert found.by_kind() == {"gemm": 4.0, "attention": 0, "write": 0, "pointwise": 0, "host": 1.0}
    assert [(row.name, row.calls, row.seconds) for row in found.rows] == [("linear", 1.0, 4.0), (ENGINE, 1.0, 1.0)]
    assert "| linear | gemm | 1 | 4000.000 | 80.0% |" in found.table()


def test_every_op_of_the_kernels_has_a_row():
    assert set(kernels.cpu.__all__) - {"new_rows"} == set(KIND_OF)


def profiled(command, launch_folder: Path, *arguments: str) -> tuple[dict, Path]:
    did = command(*RUN, "measure=profile", "measure.profile_steps=2", "workload.new_tokens=6", *arguments)
    assert did.code == 0, did.err
    (path,) = launch_folder.rglob("record.json")
    return json.loads(path.read_text())["profile"], path.parent


def test_the_parts_of_a_run_add_up_to_its_step_and_each_op_is_in_its_row(command, launch_folder):
    found, folder = profiled(command, launch_folder, "+strategy=paged")
    assert found["steps"] == 5
    assert sum(found["kinds"].values()) == pytest.approx(found["step_s"])
    assert sum(row["seconds"] for row in found["rows"]) == pytest.approx(found["step_s"])
    rows = {row["name"]: row for row in found["rows"]}
    assert all(row["kind"] in KINDS and row["seconds"] >= 0 for row in rows.values())
    assert {name: row["kind"] for name, row in rows.items() if row["kind"] != HOST} == {
        name: KIND_OF[name] for name in ("linear", "attend_paged", "write_rows", "rope", "rms_norm", "gated")
    }
    calls = {name: rows[name]["calls"] for name in ("linear", "attend_paged", "write_rows", CACHE, DECODER)}
    assert calls == {"linear": 4 * LAYERS + 1, "attend_paged": LAYERS, "write_rows": 2 * LAYERS, CACHE: LAYERS, DECODER: 1}
    assert "| attend_paged | attention |" in (folder / "profile.md").read_text()


def test_ops_that_run_as_one_call_are_in_the_rows_they_would_have_alone(command, launch_folder):
    """In bfloat16 the cpu backend chains what lies between two attentions, where it is compiled."""
    found, _ = profiled(command, launch_folder, "+strategy=paged", "dtype=bfloat16")
    rows = {row["name"]: row for row in found["rows"]}
    calls = {name: rows[name]["calls"] for name in ("linear", "rms_norm", "gated", "rope")}
    assert calls == {"linear": 4 * LAYERS + 1, "rms_norm": 2 * LAYERS + 1, "gated": LAYERS, "rope": LAYERS}
    assert sum(found["kinds"].values()) == pytest.approx(found["step_s"])


def test_the_trace_holds_the_prefill_and_the_steps_asked_for(command, launch_folder):
    found, folder = profiled(command, launch_folder, "+strategy=contiguous")
    names = [event.get("name") for event in json.loads((folder / found["trace"]).read_text())["traceEvents"]]
    assert names.count("attend_dense") == LAYERS * (1 + 2)
    assert names.count(DECODER) == 1 + 2


def test_attention_that_a_cache_does_itself_is_attention(command, launch_folder):
    found, _ = profiled(command, launch_folder, "+strategy=kivi4")
    assert {row["name"]: row["kind"] for row in found["rows"]}[CACHE] == "attention"
    assert found["kinds"]["attention"] > 0


def test_no_profile_unless_asked_for(command, launch_folder):
    did = command("+strategy=paged", *MODEL, *RUN)
    assert did.code == 0
    (path,) = launch_folder.rglob("record.json")
    assert "profile" not in json.loads(path.read_text())
    assert not list(launch_folder.rglob("trace.json"))
