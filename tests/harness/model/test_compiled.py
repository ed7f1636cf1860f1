"""`compile: true`: the compiled decoder answers like the plain one, in whole graphs, for any number of tokens; or it is refused."""

from __future__ import annotations

from copy import copy
from functools import partial

import pytest
import torch

from harness.errors import UserError
from harness.model.compiled import CompiledDecoder
from harness.model.random_init import RandomShape
from strategies.paged import Paged
from tests.harness.model.tiny_models import opened, some_ids

SHAPE = RandomShape(
    vocab=258, hidden=48, intermediate=64, layers=3, query_heads=6, kv_heads=3, head_dim=8, context=256, window=9, global_every=3
)


def logits(decoder, geometry, steps=((7,), (1,), (5,), (2,))) -> list[torch.Tensor]:
    """Of steps of several sizes, two sequences each."""
    cache = Paged(geometry, None, decoder.ops, page_size=4)
    sids, found, at = [cache.open(), cache.open()], [], 0
    for (count,) in steps:
        ids = some_ids(2 * count, vocab=258, seed=count)
        at += count
        plan = cache.plan(dict.fromkeys(sids, at))
        found.append(decoder(torch.tensor(ids), plan, cache))
        cache.commit(plan, ids)
    return found


def agrees(family: str) -> None:
    from dataclasses import replace

    model = opened("random", "float32", shape=replace(SHAPE, family=family))
    made = CompiledDecoder(model.decoder.architecture, model.decoder.weights, copy(model.decoder.ops))
    assert made.compiled and not model.decoder.compiled
    made.ops.chained = None  # compiled steps never ask the backend for its own way between attentions
    for got, want in zip(logits(made, model.geometry), logits(model.decoder, model.geometry), strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_both_halves_of_a_layer_are_whole_graphs(family, monkeypatch):
    """Traced and run without making code, which takes long: a break in a graph is an error all the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    agrees(family)


@pytest.mark.soak
def test_compiled_code_answers_like_the_plain_decoder():
    agrees("llama")


def test_without_a_compiler_one_sentence_says_what_to_do(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("No working C++ compiler found in clang, g++\nand much more")

    model = opened("random", "float32", shape=SHAPE)
    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(UserError) as refused:
        CompiledDecoder(model.decoder.architecture, model.decoder.weights, model.decoder.ops)
    assert "No working C++ compiler found in clang, g++)" in str(refused.value)
    assert str(refused.value).endswith("install a C++ compiler, or set compile=false")
    assert "\n" not in str(refused.value)
