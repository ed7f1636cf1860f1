"""Facts are read from configs as they are written there, and what is not supported is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from harness.errors import UserError
from harness.model.hf_config import from_hf
from harness.model.random_init import RandomShape
from harness.model.weights import fuse
from strategies.geometry import LayerShape

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 5120,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
}


def test_head_dim_is_the_configs_own():
    assert from_hf({**LLAMA, "head_dim": 128}, "it").head_dim == 128
    assert from_hf({**LLAMA, "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64}, "it").head_dim == 64


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_head_dim_is_derived_only_where_the_config_has_none(absent):
    assert from_hf({**LLAMA, **absent}, "it").head_dim == 5120 // 32


def test_geometry_counts_kv_heads_and_not_query_heads():
    geometry = from_hf({**LLAMA, "head_dim": 128}, "it").geometry("float16", "cpu")
    assert geometry.layers == (LayerShape(8, 128, None),) * 2
    assert (geometry.query_heads, geometry.scale, geometry.dtype, geometry.context) == (32, 128**-0.5, "float16", 64)


def test_windows_of_gemma3_differ_by_layer_and_so_does_the_rotation():
    config = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 5, "hidden_activation": "gelu_pytorch_tanh"}
    layers = from_hf(config, "it").layers
    assert [layer.window for layer in layers] == ([5] * 5 + [None]) * 2
    assert {(layer.window, layer.rope.theta) for layer in layers} == {(5, 10_000.0), (None, 1_000_000.0)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2'.*llama, mistral, qwen2, qwen3, gemma3"),
        ({"model_type": None}, "None.*supported"),
        ({"hidden_act": "relu"}, "'relu'.*silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'.*llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "config of it has no factor"),
        ({"partial_rotary_factor": 0.5}, "0.5 of each head"),
        ({"num_key_value_heads": 5}, "32 query heads.*5 KV heads"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_sentence(changes, says):
    with pytest.raises(UserError, match=says):
        from_hf({**LLAMA, **changes}, "it")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_parameter_count_is_that_of_the_weights(family):
    from harness.model.random_init import random_checkpoint

    shape = RandomShape(family, vocab=70, hidden=24, intermediate=40, layers=3, query_heads=6, kv_heads=3, head_dim=4)
    weights = fuse(random_checkpoint(shape, 0, "cpu"), torch.float32, "cpu")
    layers = [tensor for layer in weights.layers for tensor in vars(layer).values() if tensor is not None]
    held = [weights.embedding, weights.head, weights.final_norm, *layers]
    assert shape.architecture().parameters == sum(tensor.numel() for tensor in held)


def test_the_table_of_facts_needs_no_torch():
    modules = "harness.model.architecture, harness.model.hf_config, harness.model.gguf_config"
    probe = f"import sys, json, {modules}; print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
