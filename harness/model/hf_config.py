"""Reads an architecture's facts from a Hugging Face `config.json`.

It does not know weights or files: it is given the parsed dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import UserError
from harness.model.architecture import FAMILIES, Architecture, Family, LayerFacts, Linear, Llama3, Rope, unsupported

MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

Config = Mapping[str, Any]


def from_hf(config: Config, where: str) -> Architecture:
    """The facts in `config`; `where` names its origin in messages. UserError for an architecture or a variant that is not supported."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise unsupported(model_type, where)
    if config.get("attn_logit_softcapping") is not None:
        raise UserError(f"{where} caps its attention scores (attn_logit_softcapping), which no supported architecture does")
    try:
        return _read(config, MODEL_TYPES[model_type], where)
    except KeyError as error:
        raise UserError(f"the config of {where} has no {error.args[0]}, which a {model_type} model needs: it is incomplete") from None


def _read(config: Config, name: str, where: str) -> Architecture:
    family = FAMILIES[name]
    head_dim = _head_dim(config)
    qkv_bias, output_bias = _biases(config, family)
    return Architecture(
        family=name,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=_layers(config, name, head_dim, where),
        query_heads=config["num_attention_heads"],
        kv_heads=_given(config, "num_key_value_heads", config["num_attention_heads"]),
        head_dim=head_dim,
        context=config["max_position_embeddings"],
        norm_eps=_given(config, "rms_norm_eps", 1e-6),
        activation=_activation(config, where),
        scale=_given(config, "query_pre_attn_scalar", 256 if name == "gemma3" else head_dim) ** -0.5,
        final_softcap=config.get("final_logit_softcapping"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=_given(config, "mlp_bias", False),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        embedding_scale=config["hidden_size"] ** 0.5 if family.scale_embeddings else None,
        tied=_given(config, "tie_word_embeddings", family.tied),
    )


def _given(config: Config, key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def _head_dim(config: Config) -> int:
    """The config's own head_dim; hidden / heads only where it has none (they often differ)."""
    return _given(config, "head_dim", config["hidden_size"] // config["num_attention_heads"])


def _biases(config: Config, family: Family) -> tuple[bool, bool]:
    """Whether q, k, v and the output projection have biases."""
    if family.qkv_bias is not None:
        return family.qkv_bias, False
    both = _given(config, "attention_bias", False)
    return both, both


def _activation(config: Config, where: str) -> str:
    name = _given(config, "hidden_activation", _given(config, "hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise UserError(f"{where} uses the activation {name!r}, which is not supported: supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _layers(config: Config, name: str, head_dim: int, where: str) -> tuple[LayerFacts, ...]:
    windows = _windows(config, name)
    if name != "gemma3":
        rope = _rope(config, None, 10_000.0, head_dim, where)
        return tuple(LayerFacts(window, rope) for window in windows)
    everywhere = _rope(config, "full_attention", 1_000_000.0, head_dim, where)
    nearby = _rope(config, "sliding_attention", 10_000.0, head_dim, where)
    return tuple(LayerFacts(window, everywhere if window is None else nearby) for window in windows)


def _windows(config: Config, name: str) -> list[int | None]:
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    if name == "mistral":
        return [config.get("sliding_window", 4096)] * count
    if name.startswith("qwen") and not _given(config, "use_sliding_window", False):
        return [None] * count
    kinds = config.get("layer_types")
    if kinds is not None:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if name.startswith("qwen"):
        first = _given(config, "max_window_layers", count)
        return [window if index >= first else None for index in range(count)]
    if name == "gemma3":
        every = _given(config, "sliding_window_pattern", 6)
        return [None if (index + 1) % every == 0 else window for index in range(count)]
    return [None] * count


def _rope(config: Config, kind: str | None, theta: float, head_dim: int, where: str) -> Rope:
    """The rotary facts of one layer kind, from today's `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    parameters = _given(config, "rope_parameters", {})
    if kind is not None:
        parameters = _given(parameters, kind, {})
    old_theta = config.get("rope_local_base_freq" if kind == "sliding_attention" else "rope_theta")
    old_scaling = {} if kind == "sliding_attention" else _given(config, "rope_scaling", {})
    theta = _given(parameters, "rope_theta", theta if old_theta is None else old_theta)
    fraction = _given(parameters, "partial_rotary_factor", _given(config, "partial_rotary_factor", 1.0))
    if fraction != 1.0:
        raise UserError(f"{where} rotates only {fraction} of each head, which is not supported for its architecture")
    scaling = parameters if "rope_type" in parameters else old_scaling
    return Rope(float(theta), head_dim, _scaling(scaling, where))


def _scaling(scaling: Config, where: str) -> Linear | Llama3 | None:
    kind = _given(scaling, "rope_type", _given(scaling, "type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(float(scaling["factor"]))
    if kind == "llama3":
        return Llama3(
            scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
        )
    raise UserError(f"{where} scales its rotary embedding by {kind!r}, which is not supported: supported are default, linear and llama3")
