"""The decoder's own promises: which rows get logits, what caches are given, and what chunking may not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.model.decoder import Decoder
from harness.model.random_init import RandomShape
from kernels.api import Ops
from kernels.backend import resolve
from strategies.contiguous import Contiguous
from strategies.none import NoCache
from strategies.paged import Paged
from tests.harness.model.tiny_models import logits_of, opened, some_ids

SHAPE = RandomShape(
    vocab=258, hidden=48, intermediate=64, layers=3, query_heads=6, kv_heads=3, head_dim=8, context=2048, window=9, global_every=3
)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def model(request):
    return opened("random", "float64", shape=replace(SHAPE, family=request.param))


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunking_changes_nothing(model, chunk):
    ids = some_ids(33, vocab=258)
    torch.testing.assert_close(logits_of(model, ids, chunk), logits_of(model, ids), atol=1e-10, rtol=1e-10)


def test_sequences_in_one_step_do_not_see_each_other(model):
    prompts = [some_ids(n, vocab=258, seed=n) for n in (7, 1, 12)]
    cache = Contiguous(model.geometry, None, model.decoder.ops)
    plan = cache.plan({cache.open(): len(prompt) for prompt in prompts})
    together = model.decoder(torch.tensor([token for prompt in prompts for token in prompt]), plan, cache)
    alone = torch.stack([logits_of(model, prompt)[-1] for prompt in prompts])
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-10)


def test_only_the_rows_asked_for_get_logits(model):
    ids = some_ids(20, vocab=258)
    everything = logits_of(model, ids)
    for rows in ([19], [3, 0, 11], []):
        cache = NoCache(model.geometry, None, model.decoder.ops)
        plan = cache.plan({cache.open(): 20})
        got = model.decoder(torch.tensor(ids), plan, cache, torch.tensor(rows, dtype=torch.int64))
        torch.testing.assert_close(got, everything[rows], atol=1e-10, rtol=1e-10)


def test_positions_past_the_first_table_are_right(model):
    """The cos and sin tables grow on the way; a model that starts there gets the same answer."""
    ids = some_ids(1100, vocab=258)
    warm = logits_of(model, ids, chunk=600)[-3:]
    fresh = opened("random", "float64", shape=SHAPE) if model.architecture.family == "llama" else model
    torch.testing.assert_close(logits_of(fresh, ids)[-3:], warm, atol=1e-9, rtol=1e-9)


def test_a_cache_for_plain_keys_gets_them_unrotated():
    """What it is given, rotated by the reference op, is what the usual cache is given."""

    class Listening(NoCache):
        def attend(self, layer, q, k, v, plan):
            self.seen.append(k.clone())
            return super().attend(layer, q, k, v, plan)

    model = opened("random", "float64", shape=RandomShape(vocab=258, layers=1, hidden=48, query_heads=6, kv_heads=3, head_dim=8))
    ids, keys = torch.tensor(some_ids(10, vocab=258)), {}
    for kind in ("plain", "rotated"):
        cache = Listening(model.geometry, None, model.decoder.ops)
        cache.keys, cache.seen = kind, []
        model.decoder(ids, cache.plan({cache.open(): 10}), cache)
        keys[kind] = cache.seen[0]
    angles = torch.arange(10)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    turned = resolve("reference").rope(keys["plain"], angles.cos(), angles.sin())
    torch.testing.assert_close(turned, keys["rotated"], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(keys["plain"], keys["rotated"])


def test_every_backend_computes_the_same_model():
    ids = some_ids(24, vocab=258)
    model = opened("random", shape=SHAPE)
    own = logits_of(model, ids, 7)
    model.decoder.ops = resolve("reference")
    torch.testing.assert_close(own, logits_of(model, ids, 7), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("storage", [Contiguous, Paged])
def test_a_step_that_runs_as_one_call_between_attentions_gives_the_same_bits(storage, monkeypatch):
    """On backends that have such a thing, in bfloat16; elsewhere this compares a step with itself."""
    shape = replace(SHAPE, hidden=64, head_dim=32, query_heads=2, kv_heads=1)
    model = opened("random", "bfloat16", shape=shape)
    prompts = [some_ids(n, vocab=258, seed=n) for n in (7, 1, 12)]

    def decoded():
        decoder = Decoder(model.architecture, model.decoder.weights, resolve("cpu"))
        cache = storage(model.geometry, None, decoder.ops)
        sids = [cache.open(expect=20) for _ in prompts]
        plan = cache.plan({sid: len(prompt) for sid, prompt in zip(sids, prompts, strict=True)})
        fed = [token for prompt in prompts for token in prompt]
        found = [decoder(torch.tensor(fed), plan, cache)]
        cache.commit(plan, fed)
        for step in range(3):
            plan = cache.plan({sid: len(prompt) + step + 1 for sid, prompt in zip(sids, prompts, strict=True)})
            fed = found[-1].argmax(-1)
            found.append(decoder(fed, plan, cache))
            cache.commit(plan, fed.tolist())
        return torch.stack(found), decoder.ops.calls

    found, calls = decoded()
    monkeypatch.setattr(Ops, "chained", lambda *_: None)
    assert torch.equal(found, (wanted := decoded())[0])
    assert calls == wanted[1]
