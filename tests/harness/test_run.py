"""Whole runs on a tiny random model, nothing stubbed: from the command line to the record on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import phases
from harness.measure.record import check

TINY = (
    *("model=random", "model.layers=2", "model.hidden=64", "model.intermediate=96", "model.query_heads=4", "model.kv_heads=2"),
    *("model.head_dim=16", "model.context=256", "dtype=float32"),
)
SHORT = (
    *("measure.seconds=0", "workload.prompt_tokens=20", "workload.new_tokens=4", "quality.context=64", "quality.windows=1"),
    *("tracking=disabled",),
)


def records(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("record.json"))]


@pytest.fixture
def run(command, launch_folder):
    """run("+strategy=paged", ...) -> (what the command did, the records it left)."""

    def typed(*arguments: str):
        did = command(*arguments, *TINY, *SHORT)
        return did, records(launch_folder)

    return typed


@pytest.mark.parametrize("name", ["none", "contiguous_growth", "paged", "window_q4", "kivi4", "mqa"])
def test_a_run_leaves_one_whole_record_and_shows_its_four_answers(run, name):
    more = ("strategy.window=24", "reference.slab=pow2") if name == "window_q4" else ()
    did, (record,) = run(f"+strategy={name}", *more)
    assert did.code == 0
    check(record)
    assert record["status"] == "ok"
    assert record["strategy"]["name"] == name
    assert record["audit"]["billed_bytes"] == record["audit"]["stored_bytes"]
    assert all(found["pairs"] >= 5 for found in record["reference"]["metrics"].values())
    assert record["quality"]["scored_tokens"] == 31
    assert {path.split("/")[0] for path in did.created} == {"results"}
    for answer in ("right?", "fast?", "bytes?", "quality?"):
        assert answer in did.out


def test_the_record_says_which_kernels_ran_and_how_rows_lie(run):
    _, (record,) = run("+strategy=paged_int8", "backend=reference")
    assert record["backend"]["name"] == "reference"
    assert record["backend"]["kernels"]["attend_paged"] > 0
    assert "attend_dense" not in record["backend"]["kernels"]
    assert "int8" in record["backend"]["storage_dtypes"]
    assert record["backend"]["graphs"] == {"launched_because": "device cpu has no graphs", "steps": {}}
    assert record["backend"]["compiled"] is False


def test_no_cache_recomputes_and_a_cache_does_not(run):
    _, (none,) = run("+strategy=none")
    assert none["metrics"]["tokens_fed"] == 20 + 21 + 22 + 23
    assert none["metrics"]["tokens_recomputed"] == none["metrics"]["tokens_fed"] - 23
    assert none["quality"]["cached_read_ratio"] == 0.0
    assert none["metrics"]["kv_reserved_bytes"] == 0


def test_a_cache_rereads_nothing_and_agrees_with_its_reference(run):
    _, (paged,) = run("+strategy=paged")
    assert paged["metrics"]["tokens_fed"] == 23
    assert paged["metrics"]["tokens_recomputed"] == 0
    assert paged["quality"]["kl_mean"] < 1e-9
    assert paged["quality"]["cached_read_ratio"] > 0.7


@pytest.mark.parametrize(
    ("storage", "sentence"),
    [("ForgetsValues", "the oracle says"), ("Underbills", "bills")],
)
def test_a_wrong_cache_is_incorrect_and_has_no_speed(run, storage, sentence):
    did, (record,) = run("+strategy=paged", f"strategy.storage=tests.harness.broken_cache:{storage}")
    assert did.code == 1
    assert record["status"] == "incorrect"
    assert sentence in record["error"]
    assert record["metrics"] is None
    assert record["reference"] is None
    assert "a wrong answer has no speed" in did.out


def test_a_failure_after_the_start_leaves_a_failed_record(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device fell over")

    monkeypatch.setattr(phases, "quality", fail)
    did, (record,) = run("+strategy=paged")
    assert did.code == 1
    assert record["status"] == "failed"
    assert "the device fell over" in record["error"]


def test_an_interrupt_leaves_a_record_marked_failed(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(phases, "measure", interrupt)
    did, (record,) = run("+strategy=paged")
    assert did.code == 130
    assert (record["status"], record["error"]) == ("failed", "interrupted from the keyboard")


def test_running_out_of_memory_has_a_status_of_its_own(run, monkeypatch):
    def exhaust(*_):
        raise MemoryError

    monkeypatch.setattr(phases, "measure", exhaust)
    _, (record,) = run("+strategy=paged")
    assert record["status"] == "oom"


REFUSED = [
    (("workload.prompt_tokens=300",), "300"),
    (("budget_bytes=9000",), "holds no page"),
    (("budget_bytes=17000",), "too small for one sequence"),
    (("budget_bytes=40000",), "quality window"),
    (("strategy.page_size=0",), "page_size=0"),
    (("quality.context=512",), "512"),
    (("data=text", "data.path=short.txt"), "tokens"),
    (("data=text", "data.path=empty.txt"), "empty"),
    (("backend=triton",), "needs a GPU"),
    (("results_dir=a_file",), "not a folder"),
    (("model=hf", "model.source=nowhere/at/all"), "does not exist"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_cannot_run_is_refused_in_one_sentence_and_leaves_nothing(command, launch_folder, arguments, sentence, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (launch_folder / "short.txt").write_text("too short")
    (launch_folder / "empty.txt").write_text("")
    (launch_folder / "a_file").write_text("")
    model = () if arguments[0].startswith("model=") else TINY
    did = command("+strategy=paged", *model, *SHORT, *arguments)
    assert did.code == 2
    assert did.created == ()
    assert sentence in did.err
    assert len(did.err.strip().splitlines()) == 1
