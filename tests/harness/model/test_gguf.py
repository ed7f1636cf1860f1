"""GGUF files give the same tensors and the same answers as the checkpoint they were converted from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.errors import UserError
from harness.model.gguf import checkpoint_from_gguf, open_gguf
from tests.harness.model.tiny_models import byte_bpe, expected_logits, logits_of, opened, some_ids

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MLP_NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def converted_name(name: str, family: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{leaf}"
    _, _, index, inner = stem.split(".", 3)
    return f"blk.{index}.{ {**LAYER_NAMES, **MLP_NORMS.get(family, MLP_NORMS['llama'])}[inner] }.{leaf}"


def paired_lanes(array: np.ndarray, heads: int) -> np.ndarray:
    """Row i of each head's first half beside row i of its second half: how converters write Llama's q and k."""
    out = np.empty_like(array)
    size = array.shape[0] // heads
    for head in range(heads):
        rows = array[head * size : (head + 1) * size]
        out[head * size : (head + 1) * size : 2] = rows[: size // 2]
        out[head * size + 1 : (head + 1) * size : 2] = rows[size // 2 :]
    return out


def write_gguf(path, model, family: str, extra=()) -> None:
    """Convert a transformers model as converters do: names, paired lanes, Gemma's norms with their 1 added."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
    for key, value in extra:
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{family}.{key}", value)
    inner = byte_bpe()
    vocab = sorted(inner.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab] + [f"[extra{index}]" for index in range(config.vocab_size - len(vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = paired_lanes(array, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        if family == "gemma3" and "norm" in name:
            array = array + 1
        writer.add_tensor(converted_name(name, family), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def small(saved, tmp_path):
    """A tiny GGUF file of a Llama with 6 query and 3 KV heads, and its model."""
    model, _ = saved("Llama", attention_bias=False)
    path = tmp_path / "small.gguf"
    write_gguf(path, model, "llama", [("rope.freq_base", 10_000.0)])
    return model, path


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 3), (6, 1), (4, 2), (6, 6)])
def test_q_and_k_rows_are_put_back_with_their_own_head_counts(saved, tmp_path, query_heads, kv_heads):
    model, _ = saved("Llama", num_attention_heads=query_heads, num_key_value_heads=kv_heads)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, "llama")
    checkpoint = checkpoint_from_gguf(open_gguf(path), "model")
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    ids = some_ids(25)
    torch.testing.assert_close(logits_of(opened(path), ids), expected_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "kind", "changes", "extra"),
    [
        ("qwen2", "Qwen2", {"hidden_size": 48}, []),
        ("qwen3", "Qwen3", {}, [("rope.freq_base", 10_000.0)]),
        (
            "gemma3",
            "Gemma3",
            {"num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0},
            [("attention.sliding_window", 6), ("rope.freq_base", 1_000_000.0), ("final_logit_softcapping", 4.0)],
        ),
        ("llama", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}}, [("rope.freq_base", 50.0)]),
    ],
)
def test_other_architectures_answer_as_before_conversion(saved, tmp_path, family, kind, changes, extra):
    model, _ = saved(kind, **changes)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, family, extra)
    if family == "llama":  # frequency factors are how this format writes any scaling
        path = with_divisors(path, tmp_path / "scaled.gguf", model, [3.0] * 4)
    ids = some_ids(30)
    torch.testing.assert_close(logits_of(opened(path), ids, chunk=7), expected_logits(model, ids), atol=2e-4, rtol=1e-4)


def with_divisors(path, target, model, divisors):
    import gguf

    file = open_gguf(path)
    writer = gguf.GGUFWriter(target, "llama")
    for key, value in file.metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key, value)
    for name in file.entries:
        writer.add_tensor(name, file.array(name))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_quantised_tensors_are_those_of_the_gguf_package(tmp_path):
    import gguf

    path = tmp_path / "quantised.gguf"
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16")]
    writer = gguf.GGUFWriter(path, "llama")
    for kind in kinds:
        writer.add_tensor(kind.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    file = open_gguf(path)
    for kind in kinds:
        wanted = gguf.quants.dequantize(reader[kind.name].data, kind)
        assert file.array(kind.name).shape == (6, 64)
        np.testing.assert_array_equal(file.array(kind.name), wanted.reshape(6, 64))


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.999])
def test_a_truncated_file_is_refused_in_one_sentence(small, tmp_path, kept):
    _, path = small
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(UserError, match="truncated") as error:
        opened(cut)
    assert str(cut) in str(error.value)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04 something else"])
def test_another_kind_of_file_is_refused_in_one_sentence(tmp_path, data):
    path = tmp_path / "notes.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match="not a GGUF file"):
        opened(path)


def test_an_unsupported_architecture_lists_the_supported_ones(tmp_path):
    import gguf

    path = tmp_path / "mamba.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"'mamba'.*llama, mistral, qwen2, qwen3, gemma3"):
        opened(path)


def test_a_file_is_hashed_once_and_again_after_it_changed(small):
    import hashlib
    import os

    from harness.model.hashing import sha256_of

    _, path = small
    assert sha256_of([path]) == hashlib.sha256(path.read_bytes()).hexdigest()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert sha256_of([path]) == hashlib.sha256(data).hexdigest()
