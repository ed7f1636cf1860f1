"""Every supported architecture answers as transformers' own model of it does."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import UserError
from tests.harness.model.tiny_models import expected_logits, logits_of, opened, some_ids

LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]

CASES = {
    "llama": ("Llama", {}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "llama, a KV head each": ("Llama", {"num_key_value_heads": 6}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}}),
    "llama, llama3 rope scaling": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows on later layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"layer_types": MIXED, "sliding_window": 6, "query_pre_attn_scalar": 20}),
    "gemma3, capped logits": ("Gemma3", {"layer_types": MIXED, "sliding_window": 6, "final_logit_softcapping": 3.0}),
    "gemma3, window pattern": ("Gemma3", {"sliding_window_pattern": 2, "sliding_window": 9}),
}


def built(saved, case):
    kind, changes = CASES[case]
    if kind == "Qwen2":
        changes = {**changes, "hidden_size": 48}  # it takes no head_dim: 48 / 6 heads
    if kind != "Gemma3":
        return saved(kind, **changes)
    return saved("Gemma3", **changes)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(saved, case):
    model, folder = built(saved, case)
    ids = some_ids(40)
    got = logits_of(opened(folder, "float64"), ids, chunk=11)
    torch.testing.assert_close(got, expected_logits(model.double(), ids), atol=3e-5, rtol=1e-5)  # its norms stay in float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_working_dtype_is_the_one_asked_for_and_costs_only_its_rounding(saved, dtype):
    model, folder = saved("Llama")
    ids = some_ids(30)
    loaded = opened(folder, dtype)
    got = logits_of(loaded, ids)
    wanted = expected_logits(model.double(), ids)
    own_error = (expected_logits(model.to(getattr(torch, dtype)), ids).double() - wanted).abs().max()
    assert (loaded.dtype, got.dtype) == (dtype, torch.float32)
    assert loaded.decoder.weights.layers[0].qkv.dtype == getattr(torch, dtype)
    assert (got.double() - wanted).abs().max() <= 2 * own_error


def test_shards_give_the_same_model_as_one_file(saved, tmp_path):
    model, folder = saved("Llama", shard="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = some_ids(12)
    torch.testing.assert_close(logits_of(opened(folder), ids), expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_a_missing_shard_is_named(saved):
    _, folder = saved("Llama", shard="60KB")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=lost.name):
        opened(folder)


def test_rope_facts_of_older_configs_are_read(saved):
    model, folder = saved("Llama", rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    path.write_text(json.dumps({**config, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.5}}))
    ids = some_ids(20)
    torch.testing.assert_close(logits_of(opened(folder), ids), expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_a_bare_model_without_output_projection_is_read_when_tied(saved):
    model, folder = saved("Llama", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    bare = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(bare, file, metadata={"format": "pt"})
    ids = some_ids(9)
    torch.testing.assert_close(logits_of(opened(folder), ids), expected_logits(model, ids), atol=1e-4, rtol=1e-4)
