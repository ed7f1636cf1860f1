"""Seeded random weights of any geometry: for speed and memory at sizes nobody has a checkpoint of, and for tests.

The values mean nothing, but their scale is that of a working model: activations neither vanish nor explode with depth.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from harness.errors import UserError
from harness.model.architecture import FAMILIES, Architecture, LayerFacts, Rope, supported
from harness.model.weights import Checkpoint


@dataclass(frozen=True)
class RandomShape:
    """The sizes of a model with random weights. `window` applies to all layers but every `global_every`-th (None: to all)."""

    family: str = "llama"
    vocab: int = 512
    hidden: int = 256
    intermediate: int = 704
    layers: int = 4
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 4096
    window: int | None = None
    global_every: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(f"model.family={self.family!r} is not supported: supported architectures are {supported()}")
        for name in ("vocab", "hidden", "intermediate", "layers", "query_heads", "kv_heads", "head_dim", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)}: use 1 or more")
        if self.head_dim % 2:
            raise UserError(f"model.head_dim={self.head_dim} is odd, but rotary embedding pairs its lanes: use an even number")
        if self.global_every is not None and (self.global_every < 1 or self.window is None):
            raise UserError(f"model.global_every={self.global_every} needs a window and must be 1 or more")

    def architecture(self) -> Architecture:
        """The facts of this model."""
        family = FAMILIES[self.family]
        rope = Rope(10_000.0, self.head_dim)
        return Architecture(
            family=self.family,
            vocab=self.vocab,
            hidden=self.hidden,
            intermediate=self.intermediate,
            layers=tuple(LayerFacts(self._window(index), rope) for index in range(self.layers)),
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            context=self.context,
            norm_eps=1e-6,
            activation="gelu_tanh" if self.family == "gemma3" else "silu",
            scale=self.head_dim**-0.5,
            softcap=self.softcap,
            qkv_bias=family.qkv_bias is True,
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            embedding_scale=self.hidden**0.5 if family.scale_embeddings else None,
        )

    def _window(self, index: int) -> int | None:
        return None if self.global_every is not None and (index + 1) % self.global_every == 0 else self.window


def random_checkpoint(shape: RandomShape, seed: int, device: str) -> Checkpoint:
    """Every tensor of `shape` drawn on `device` from `seed` and its own name, so that order does not matter.

    `sha256` is of what determines the values: the shape, the seed, the kind of device.
    """
    architecture = shape.architecture()
    sizes = _sizes(architecture)

    def tensor(name: str) -> torch.Tensor:
        size, mean, spread = sizes[name]
        own_seed = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
        generator = torch.Generator(device=device).manual_seed(own_seed)
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).mul_(spread).add_(mean)

    description = f"random {architecture!r} seed={seed} {torch.device(device).type}"
    return Checkpoint(
        f"random-{architecture.family}", hashlib.sha256(description.encode()).hexdigest(), architecture, tensor, norm_offset=0.0
    )


Size = tuple[tuple[int, ...], float, float]  # shape, mean, standard deviation


def _sizes(a: Architecture) -> dict[str, Size]:
    """name -> shape, mean and spread. A matrix keeps the variance of what it reads; those that join the residual add a share of it."""
    joining = (2 * len(a.layers)) ** -0.5
    embedding_spread = 1.0 if a.embedding_scale is None else 1.0 / a.embedding_scale
    sizes: dict[str, Size] = {
        "model.embed_tokens.weight": ((a.vocab, a.hidden), 0.0, embedding_spread),
        "lm_head.weight": ((a.vocab, a.hidden), 0.0, a.hidden**-0.5),
        "model.norm.weight": ((a.hidden,), 1.0, 0.1),
    }
    queries, kv = a.query_heads * a.head_dim, a.kv_heads * a.head_dim
    layer: dict[str, Size] = {
        "self_attn.q_proj.weight": ((queries, a.hidden), 0.0, a.hidden**-0.5),
        "self_attn.k_proj.weight": ((kv, a.hidden), 0.0, a.hidden**-0.5),
        "self_attn.v_proj.weight": ((kv, a.hidden), 0.0, a.hidden**-0.5),
        "self_attn.q_proj.bias": ((queries,), 0.0, 0.1),
        "self_attn.k_proj.bias": ((kv,), 0.0, 0.1),
        "self_attn.v_proj.bias": ((kv,), 0.0, 0.1),
        "self_attn.o_proj.weight": ((a.hidden, queries), 0.0, joining * queries**-0.5),
        "mlp.gate_proj.weight": ((a.intermediate, a.hidden), 0.0, a.hidden**-0.5),
        "mlp.up_proj.weight": ((a.intermediate, a.hidden), 0.0, a.hidden**-0.5),
        "mlp.down_proj.weight": ((a.hidden, a.intermediate), 0.0, joining * a.intermediate**-0.5),
    }
    for norm in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
        layer[f"{norm}.weight"] = ((a.hidden,), joining if a.post_norms and norm.startswith("post_") else 1.0, 0.1)
    for norm in ("q_norm", "k_norm"):
        layer[f"self_attn.{norm}.weight"] = ((a.head_dim,), 1.0, 0.1)
    sizes.update({f"model.layers.{index}.{name}": size for index in range(len(a.layers)) for name, size in layer.items()})
    return sizes
