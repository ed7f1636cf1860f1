"""Head sharing: what is pooled with what, what expanding keeps, and what is refused."""

from __future__ import annotations

import pytest
import torch

from harness.errors import UserError
from harness.model.random_init import RandomShape
from strategies.geometry import HeadSharing
from tests.harness.model.tiny_models import expected_logits, logits_of, opened, some_ids

SHAPE = RandomShape(vocab=258, hidden=48, intermediate=64, layers=2, query_heads=12, kv_heads=6, head_dim=8, context=128)


def key_heads(model) -> torch.Tensor:
    """[Hkv, D, E] of the first layer."""
    a = model.architecture
    return model.decoder.weights.layers[0].qkv.unflatten(0, (-1, a.head_dim))[a.query_heads : a.query_heads + a.kv_heads]


def shared(kv_heads: int, init: str = "mean", shape: RandomShape = SHAPE, seed: int = 0):
    return opened("random", heads=HeadSharing(kv_heads, init), shape=shape, seed=seed)


@pytest.mark.parametrize("heads", [None, HeadSharing(6), HeadSharing(6, "random")])
def test_the_checkpoints_own_heads_stay_as_they_are(heads):
    model = opened("random", heads=heads, shape=SHAPE)
    assert model.heads_label == "native"
    assert torch.equal(key_heads(model), key_heads(opened("random", shape=SHAPE)))


@pytest.mark.parametrize("kv_heads", [3, 2, 1])
def test_neighbouring_heads_are_averaged(kv_heads):
    own = key_heads(opened("random", shape=SHAPE))
    model = shared(kv_heads)
    size = 6 // kv_heads
    wanted = torch.stack([own[size * i : size * (i + 1)].mean(dim=0) for i in range(kv_heads)])
    torch.testing.assert_close(key_heads(model), wanted)
    assert model.heads_label == "converted, not up-trained"
    assert {layer.kv_heads for layer in model.geometry.layers} == {kv_heads}


def test_first_takes_the_first_head_of_each_group():
    own = key_heads(opened("random", shape=SHAPE))
    assert torch.equal(key_heads(shared(2, "first")), own[[0, 3]])


def test_random_heads_have_the_checkpoints_spread_and_their_own_seed():
    own, drawn = key_heads(opened("random", shape=SHAPE)), key_heads(shared(2, "random"))
    assert drawn.std().item() == pytest.approx(own.std().item(), rel=0.1)
    assert torch.equal(drawn, key_heads(shared(2, "random")))
    assert not torch.equal(drawn, key_heads(shared(2, "random", seed=1)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_expanding_to_every_query_head_keeps_every_answer(family):
    shape = RandomShape(family, vocab=258, hidden=48, intermediate=64, layers=2, query_heads=6, kv_heads=3, head_dim=8, context=128)
    ids = some_ids(40, vocab=258)
    model = shared(6, shape=shape)
    assert (model.heads_label, model.geometry.layers[0].kv_heads) == ("expanded", 6)
    torch.testing.assert_close(logits_of(model, ids), logits_of(opened("random", shape=shape), ids), atol=1e-5, rtol=1e-5)


def test_a_conversion_answers_as_a_model_built_with_the_pooled_weights(saved, transformers):
    """transformers given the pooled projections computes the same logits: groups, biases and head order agree."""
    own, folder = saved("Llama", num_attention_heads=6, num_key_value_heads=6, attention_bias=True)
    config = transformers.LlamaConfig(**{**own.config.to_dict(), "num_key_value_heads": 3})
    pooled = transformers.LlamaForCausalLM(config).eval()
    state = own.state_dict()
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = torch.cat([tensor.unflatten(0, (6, 8))[2 * i : 2 * i + 2].mean(dim=0) for i in range(3)])
    pooled.load_state_dict(state)
    ids = some_ids(30)
    model = opened(folder, heads=HeadSharing(3))
    torch.testing.assert_close(logits_of(model, ids), expected_logits(pooled, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kv_heads", "says"), [(4, "kv_heads=4 does not divide the checkpoint's 6"), (9, "kv_heads=9.*6 KV heads for 12")])
def test_numbers_that_do_not_divide_are_refused_naming_both(kv_heads, says):
    with pytest.raises(UserError, match=says):
        shared(kv_heads)
