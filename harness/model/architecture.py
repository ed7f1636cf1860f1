"""A decoder-only transformer as a table of facts: sizes, norms, rotary embedding, windows, activation.

It does not know where the facts were read (`hf_config.py`, `gguf_config.py`, `llama2c.py` and `random_init.py` fill the
table) nor what a weight is, and it imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.errors import UserError
from strategies.geometry import Geometry, LayerShape


@dataclass(frozen=True)
class Family:
    """What all checkpoints of one architecture share; sizes and numbers are in each checkpoint's own config."""

    qkv_bias: bool | None = None  # None: the config's `attention_bias` decides, for q, k, v and the output projection alike
    tied: bool = False  # where the config does not say: the output projection is the embedding
    qk_norm: bool = False  # RMS norm over each query and key head, before rope
    post_norms: bool = False  # a norm after attention and after the MLP too, before each joins the residual
    norm_offset: float = 0.0  # added to the norm weights of safetensors checkpoints (GGUF files have it folded in)
    scale_embeddings: bool = False  # embeddings are multiplied by sqrt(hidden)
    interleaved_in_gguf: bool = False  # GGUF files pair rotary lanes (2i, 2i+1): q and k rows must be put back into halves


# Llama: Touvron et al. 2023. Mistral: Jiang et al. 2023. Qwen2 and Qwen3: their technical reports. Gemma 3: its technical report.
FAMILIES = {
    "llama": Family(interleaved_in_gguf=True),
    "mistral": Family(qkv_bias=False),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "gemma3": Family(tied=True, qk_norm=True, post_norms=True, norm_offset=1.0, scale_embeddings=True),
}


@dataclass(frozen=True)
class Linear:
    """Every position is divided by `factor` (position interpolation: Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Low frequencies are divided by `factor`, high ones kept, the ones between blended (Llama 3.1's context extension)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Divisors:
    """Frequency i is divided by values[i]: how GGUF files store any frequency-wise scaling."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `lanes` lanes of a head, lane i paired with lane i + lanes / 2 (Su et al. 2021)."""

    theta: float
    lanes: int
    scaling: Linear | Llama3 | Divisors | None = None


@dataclass(frozen=True)
class LayerFacts:
    """What may differ from layer to layer: the attention window (counting the query itself; None = all) and the rotary embedding."""

    window: int | None
    rope: Rope


@dataclass(frozen=True)
class Architecture:
    """Everything about a model except its weights."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: tuple[LayerFacts, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int  # the most tokens one sequence may reach
    norm_eps: float
    activation: str  # silu or gelu_tanh
    scale: float  # multiplies q . k
    softcap: float | None = None  # on attention scores
    final_softcap: float | None = None  # on logits
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float | None = None
    tied: bool = False  # the output projection is the embedding

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise UserError(
                f"{self.query_heads} query heads cannot share {self.kv_heads} KV heads evenly: kv_heads must divide the query heads"
            )
        for layer in self.layers:
            if layer.rope.lanes % 2 or layer.rope.lanes > self.head_dim:
                raise UserError(
                    f"rotary embedding over {layer.rope.lanes} lanes does not fit head_dim={self.head_dim}: use an even number up to it"
                )

    def geometry(self, dtype: str, device: str) -> Geometry:
        """What a cache has to know of this model, in working dtype `dtype` on `device`."""
        layers = tuple(LayerShape(self.kv_heads, self.head_dim, layer.window) for layer in self.layers)
        return Geometry(layers, self.query_heads, self.scale, self.softcap, dtype, device, self.context)

    def with_kv_heads(self, kv_heads: int) -> Architecture:
        """The same model with another number of KV heads in every layer."""
        return replace(self, kv_heads=kv_heads)

    @property
    def parameters(self) -> int:
        """Weights of the model, a tied output projection counted once."""
        heads = (self.query_heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * (heads + self.query_heads * self.head_dim) + (2 * self.head_dim if self.qk_norm else 0)
        biases = (heads if self.qkv_bias else 0) + (self.hidden if self.output_bias else 0)
        mlp = 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden if self.mlp_bias else 0)
        norms = self.hidden * (4 if self.post_norms else 2)
        head = 0 if self.tied else self.vocab * self.hidden
        return len(self.layers) * (attention + biases + mlp + norms) + self.vocab * self.hidden + self.hidden + head


def supported() -> str:
    """The supported architectures, for messages."""
    return ", ".join(FAMILIES)


def unsupported(name: object, where: str) -> UserError:
    return UserError(f"{where} is a {name!r} model, which is not supported: supported architectures are {supported()}")
