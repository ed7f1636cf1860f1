"""The survey on a tiny random model: one reference for all, one reading for those that read the same rows."""

from __future__ import annotations

import json

import pytest

from harness.capacity import largest_batch
from harness.model.random_init import RandomShape
from harness.survey import main

SHAPE = RandomShape(vocab=300, hidden=32, intermediate=48, layers=2, query_heads=6, kv_heads=3, head_dim=8, context=256)


@pytest.fixture
def asked(monkeypatch, tmp_path, capsys):
    """asked("--strategies", ...) -> (exit code, rows by strategy, what was printed)."""
    import harness.model.load as load

    real = load.load_model
    monkeypatch.setattr(load, "load_model", lambda source, *rest: real("random", *rest, shape=SHAPE))

    def ask(*arguments: str):
        out = tmp_path / "rows.json"
        code = main(["tiny", "--context", "64", "--windows", "2", "--length", "100", "--dtype", "float32", "--out", str(out), *arguments])
        rows = {row["strategy"]: row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
        return code, rows, capsys.readouterr()

    return ask


def test_strategies_that_read_the_same_rows_are_read_once_and_say_so(asked):
    code, shared, printed = asked("--strategies", "contiguous,paged,int8,paged_int8")
    assert code == 0
    assert {name: row["measured_as"] for name, row in shared.items()} == {
        "contiguous": None,
        "paged": "contiguous",
        "int8": None,
        "paged_int8": "int8",
    }
    assert "paged_int8 (as int8)" in printed.out
    _, each, _ = asked("--strategies", "contiguous,paged,int8,paged_int8", "--each")
    for name, row in each.items():
        assert row["measured_as"] is None
        assert row["quality"]["perplexity"] == pytest.approx(shared[name]["quality"]["perplexity"], rel=1e-6)


def test_a_strategy_that_the_model_cannot_have_is_listed_with_its_reason(asked):
    code, rows, printed = asked("--strategies", "contiguous,gqa,mha", "--config-dir", ".")
    assert code == 0 and "mha" in rows and rows["mha"]["heads"] == "expanded"
    assert rows["gqa"]["heads"] == "native"
    assert "| contiguous |" in printed.out


def test_the_reference_against_itself_differs_by_nothing(asked):
    _, rows, _ = asked("--strategies", "contiguous")
    assert rows["contiguous"]["quality"]["kl_mean"] == 0.0


def test_a_length_beyond_the_context_is_refused(asked):
    code, rows, printed = asked("--strategies", "contiguous", "--length", "1000")
    assert code == 2 and not rows and "256" in printed.err


@pytest.mark.parametrize(("budget", "batch"), [(9, 0), (10, 1), (99, 9), (1000, 100)])
def test_the_largest_batch_is_the_last_that_fits(budget, batch):
    assert largest_batch(lambda lengths: sum(lengths), 10, budget) == batch


def test_what_costs_nothing_has_no_largest_batch():
    assert largest_batch(lambda lengths: 0, 10, 5) is None
