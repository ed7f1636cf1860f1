"""Reads an architecture's facts from GGUF metadata.

It does not know tensors or files: it is given the parsed key-value pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.errors import UserError
from harness.model.architecture import FAMILIES, Architecture, Divisors, LayerFacts, Linear, Rope, unsupported

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
# GGUF files of Gemma 3 leave these out because every reader knows them: every sixth layer sees everything, the others rotate
# faster, and the largest model (62 layers) scales its scores by hidden / heads instead of head_dim.
GEMMA3_GLOBAL_EVERY = 6
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_LARGEST_LAYERS = 62


def from_gguf(metadata: Mapping[str, Any], where: str, tied: bool, divisors: Iterable[float] | None) -> Architecture:
    """The facts in `metadata`; `where` names the file in messages, `tied` says that it has no output projection of its own, and
    `divisors` are its frequency factors, if it has such a tensor. UserError for an architecture that is not supported."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unsupported(architecture, where)
    name = ARCHITECTURES[architecture]
    get = _Getter(metadata, architecture, where)
    family = FAMILIES[name]
    hidden, query_heads, layers = get("embedding_length"), get("attention.head_count"), get("block_count")
    head_dim = get.optional("attention.key_length", hidden // query_heads)
    by_hidden = name == "gemma3" and layers == GEMMA3_LARGEST_LAYERS
    return Architecture(
        family=name,
        vocab=get.optional("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden=hidden,
        intermediate=get("feed_forward_length"),
        layers=_layers(get, name, layers, head_dim, divisors),
        query_heads=query_heads,
        kv_heads=get.optional("attention.head_count_kv", query_heads),
        head_dim=head_dim,
        context=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if name == "gemma3" else "silu",
        scale=(hidden / query_heads if by_hidden else head_dim) ** -0.5,
        final_softcap=get.optional("final_logit_softcapping", None),
        qkv_bias=family.qkv_bias is True,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        embedding_scale=hidden**0.5 if family.scale_embeddings else None,
        tied=tied,
    )


class _Getter:
    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self._metadata = metadata
        self._architecture = architecture
        self._where = where

    def __call__(self, key: str) -> Any:
        value = self.optional(key, None)
        if value is None:
            raise UserError(f"{self._where} has no {self._architecture}.{key} in its metadata: the file is incomplete")
        return value

    def optional(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(f"{self._where} has a different {key} in each layer, which is not supported")
            return value[0]
        return value

    @property
    def where(self) -> str:
        return self._where


def _layers(get: _Getter, name: str, count: int, head_dim: int, divisors: Iterable[float] | None) -> tuple[LayerFacts, ...]:
    lanes = get.optional("rope.dimension_count", head_dim)
    theta = get.optional("rope.freq_base", 10_000.0)
    everywhere = Rope(theta, lanes, _scaling(get, divisors))
    window = get.optional("attention.sliding_window", None)
    if name != "gemma3":
        return tuple(LayerFacts(window, everywhere) for _ in range(count))
    nearby = Rope(GEMMA3_LOCAL_THETA, lanes)
    return tuple(
        LayerFacts(None, everywhere) if (index + 1) % GEMMA3_GLOBAL_EVERY == 0 else LayerFacts(window, nearby) for index in range(count)
    )


def _scaling(get: _Getter, divisors: Iterable[float] | None) -> Linear | Divisors | None:
    if divisors is not None:
        return Divisors(tuple(float(value) for value in divisors))
    kind = get.optional("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return Linear(get("rope.scaling.factor"))
    raise UserError(
        f"{get.where} scales its rotary embedding by {kind!r}, which is not supported: supported are none, linear and frequency factors"
    )
