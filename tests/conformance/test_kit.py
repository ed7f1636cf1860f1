"""The kit as others use it: the report card, its exit codes, its doors, its poison; and no pytest anywhere in it."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.catalogue import strategy_names
from harness.conformance.__main__ import main
from harness.conformance.doors import open_door
from harness.conformance.poison import PoisonOps
from harness.conformance.promise import KINDS, fare, promises
from harness.conformance.toy import geometry
from harness.conformance.world import World, allowed, probe
from harness.errors import UserError
from kernels.backend import resolve
from kernels.codec import codec_named
from kernels.rows import Batch, DenseRows, Mask
from strategies.contiguous import Contiguous
from strategies.geometry import Refused


class Refusing(Contiguous):
    """Takes no model at all."""

    def __init__(self, geometry, budget_bytes, backend):
        raise Refused("not on a toy")


ROOT = Path(__file__).resolve().parents[2]


def test_the_card_counts_every_kind_and_exits_well(capsys):
    assert main(["none", "--backend", "cpu", "--examples", "2"]) == 0
    out = capsys.readouterr().out
    for kind in KINDS:
        assert f"│ {kind} " in out
    assert "0 failed" in out
    assert "stores nothing" in out


def test_a_failing_cache_is_told_of_in_full_and_exits_with_one(capsys):
    assert main(["tests.conformance.mutants.caches:LogitsOfTheLastRow", "--backend", "cpu", "--kinds", "P", "--examples", "2"]) == 1
    out = capsys.readouterr().out
    assert "failed P ragged_prompts_keep_their_own_positions (cases P01, P09)" in out
    assert "logit_rows [9, 9] should end each span" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["pagd"], "no strategy 'pagd': choose one of"),
        (["nowhere:Cache"], "nowhere"),
        (["strategies.paged:Pages"], "no class 'Pages'"),
        (["tests.conformance.test_kit:Refusing"], "strategy 'tests.conformance.test_kit:Refusing' is refused: not on a toy"),
        (["paged", "--kinds", "Z"], "--kinds takes letters"),
        (["paged", "--examples", "0"], "--examples 1 or more"),
        (["paged", "--backend", "cuda"], "unknown backend 'cuda'"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(arguments, sentence, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_without_hypothesis_one_sentence_says_what_to_install(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.split(".")[0] == "hypothesis":
            raise ImportError("No module named 'hypothesis'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["none", "--backend", "cpu", "--kinds", "A"]) == 2
    assert "pip install 'kvbench[conformance]'" in capsys.readouterr().err


def test_the_kit_loads_neither_pytest_nor_hypothesis_nor_a_model():
    program = (
        "import sys; from harness.conformance.promise import promises; promises(); import harness.conformance.card; "
        "print(sorted({'pytest', 'hypothesis', 'transformers', 'harness.model', 'hydra', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_every_strategy_file_opens_and_is_made_small():
    for name in strategy_names():
        subject = open_door(name, "cpu")
        shape = subject.geometry()
        assert subject.facts(shape).reach < 40, name
    assert open_door("window", "cpu").parameters["window"] == 7


def test_an_exception_of_any_sort_is_a_failure_not_a_crash():
    def broken(*arguments):
        raise OSError("disk")

    subject = open_door("paged", "cpu")
    faulty = type(subject)("broken", broken)
    assert {fare(one, faulty).status for one in promises() if one.kind == "D"} == {"failed"}


def test_the_rule_as_a_set():
    assert allowed(9, 4, 2) == {0, 1, 6, 7, 8, 9}
    assert allowed(2, None, 0) == {0, 1, 2}


def test_the_probe_lists_what_was_attended():
    subject = open_door("window", "cpu")
    sets = probe(subject, subject.geometry(windows=(None,), head_dim=24), [5, 5, 1, 1])
    assert sets[0][11] == {0, 1, 5, 6, 7, 8, 9, 10, 11}


def test_a_refusing_geometry_is_replaced_by_the_nearest_one():
    assert open_door("mqa", "cpu").geometry(heads=(6, 3)).layers[0].kv_heads == 1
    assert open_door("mha", "cpu").geometry(heads=(6, 3)).layers[0].kv_heads == 6
    assert {layer.window for layer in open_door("kivi4", "cpu").geometry(windows=(5, None)).layers} == {None}


class TestPoison:
    def _store(self, ops):
        store = ops.new_rows(codec_named("raw"), 12, 1, 4, torch.float64, "cpu", None)
        ops.write_rows(store, torch.arange(4), torch.ones(4, 1, 4, dtype=torch.float64))
        return store

    def test_new_rows_are_not_a_number(self):
        store = self._store(PoisonOps(resolve("reference")))
        assert store.codes[4:].isnan().all()
        assert not store.codes[:4].isnan().any()

    def test_reading_what_is_not_yours_shows(self):
        ops = PoisonOps(resolve("reference"))
        store = self._store(ops)
        batch = Batch(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32), ((5, 6),))
        out = ops.attend_dense(torch.ones(1, 1, 4).double(), store, store, DenseRows(torch.tensor([0]), (0,)), batch, Mask(), 1.0, None)
        assert out.isnan().all()

    def test_rows_are_as_they_were_after_an_attend(self):
        ops = PoisonOps(resolve("reference"), 65504.0)
        store = self._store(ops)
        before = store.codes.clone()
        batch = Batch(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), ((3, 4),))
        out = ops.attend_dense(torch.ones(1, 1, 4).double(), store, store, DenseRows(torch.tensor([0]), (0,)), batch, Mask(2), 1.0, None)
        assert torch.equal(out, torch.ones(1, 1, 4).double())
        assert torch.equal(store.codes.nan_to_num(-1), before.nan_to_num(-1))

    @pytest.mark.parametrize(
        ("slots", "sentence"), [([1, 1], "writes a row twice"), ([-1, 2], "leave the store"), ([3, 12], "leave the store")]
    )
    def test_slots_that_make_no_sense_are_caught(self, slots, sentence):
        ops = PoisonOps(resolve("reference"))
        with pytest.raises(AssertionError, match=sentence):
            ops.write_rows(self._store(ops), torch.tensor(slots), torch.ones(2, 1, 4).double())


def test_a_world_checks_a_cache_between_any_two_calls():
    subject = open_door("paged", "cpu")
    world = World(subject, geometry())
    sid = world.start([1, 2, 3, 4, 5], 2)
    world.raw._histories[sid].length = 9
    with pytest.raises(AssertionError, match="5 tokens, it claims to hold 9"):
        world.check()


def test_budgets_too_small_are_refused_by_name():
    with pytest.raises(UserError, match="strategy.page_size"):
        from harness.build import strategy_settings

        strategy_settings("strategy", {"name": "x", "storage": "paged", "page_size": "many"})
