"""Opens a model by its source string: weights, facts, head sharing, tokenizer and decoder in one object.

It does not know configs or the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.errors import UserError
from harness.model.architecture import Architecture
from harness.model.decoder import Decoder
from harness.model.gguf import checkpoint_from_gguf, open_gguf
from harness.model.gguf_tokenizer import tokenizer_from_gguf
from harness.model.heads import share_heads
from harness.model.hub import hub_folder
from harness.model.llama2c import checkpoint_from_llama2c, tokenizer_from_llama2c
from harness.model.packages import package_file
from harness.model.random_init import RandomShape, random_checkpoint
from harness.model.safetensors import checkpoint_from_folder
from harness.model.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from_folder
from harness.model.weights import Checkpoint, fuse, laid_out
from kernels.api import Ops
from strategies.geometry import Geometry, HeadSharing

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class Model:
    """A model ready to run, and what a record says of it."""

    name: str
    sha256: str
    architecture: Architecture
    decoder: Decoder
    tokenizer: Tokenizer
    heads_label: str  # native | converted, not up-trained | expanded
    geometry: Geometry

    @property
    def dtype(self) -> str:
        """The working dtype's name."""
        return self.geometry.dtype


def load_model(
    source: str, dtype: str, device: str, ops: Ops, heads: HeadSharing | None = None, seed: int = 0, shape: RandomShape | None = None
) -> Model:
    """Open `source`, one of

    - `package:NAME`: a model installed as a Python package
    - a path of a .gguf file, or of a Hugging Face folder (safetensors)
    - `owner/name`: a model on the hub
    - `llama2c:PATH`: a llama2.c checkpoint, its tokenizer beside it
    - `random`: random weights of `shape`, drawn from `seed`

    dtype: `auto` takes bfloat16 where the hardware computes it natively, else float32. `heads` replaces the KV heads (see
    `heads.py`; random ones are drawn from `seed`). UserError for anything that cannot be opened.
    """
    name = resolve_dtype(dtype, device)
    checkpoint, tokenizer = _opened(source, seed, device, shape)
    weights = fuse(checkpoint, getattr(torch, name), device)
    architecture, weights, label = share_heads(checkpoint.architecture, weights, heads, seed)
    decoder = Decoder(architecture, laid_out(weights), ops)
    return Model(checkpoint.name, checkpoint.sha256, architecture, decoder, tokenizer, label, architecture.geometry(name, device))


def resolve_dtype(dtype: str, device: str) -> str:
    """The working dtype's name. UserError for an unknown one."""
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cuda":
        native = torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8
    else:
        native = _cpu_computes_bfloat16()
    return "bfloat16" if native else "float32"


def _cpu_computes_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 (AVX512-BF16 or AMX), rather than widening it first."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)


def _opened(source: str, seed: int, device: str, shape: RandomShape | None) -> tuple[Checkpoint, Tokenizer]:
    if source == "random":
        return _random(RandomShape() if shape is None else shape, seed, device)
    if shape is not None:
        raise UserError(f"model sizes were given for {source!r}, but only the source 'random' takes any: drop them, or use 'random'")
    kind, _, rest = source.partition(":")
    if kind == "package":
        return _gguf(package_file(rest))
    if kind == "llama2c":
        return _llama2c(_existing(rest))
    path = Path(source).expanduser()
    if source == "":
        raise _missing(source)
    if path.is_dir():
        return checkpoint_from_folder(path, path.resolve().name), tokenizer_from_folder(path)
    if path.is_file():
        return _gguf(path)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source) or path.suffix == ".gguf":
        raise _missing(source)
    folder = hub_folder(source)
    return checkpoint_from_folder(folder, source), tokenizer_from_folder(folder)


def _gguf(path: Path) -> tuple[Checkpoint, Tokenizer]:
    file = open_gguf(path)
    return checkpoint_from_gguf(file, path.stem), tokenizer_from_gguf(file.metadata, str(path))


def _llama2c(path: Path) -> tuple[Checkpoint, Tokenizer]:
    checkpoint = checkpoint_from_llama2c(path)
    return checkpoint, tokenizer_from_llama2c(path, checkpoint.architecture.vocab)


def _existing(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise _missing(path)
    return file


def _missing(path: str) -> UserError:
    return UserError(
        f"model path {path!r} does not exist: give a .gguf file, a Hugging Face folder, owner/name on the hub, or package:NAME"
    )


def _random(shape: RandomShape, seed: int, device: str) -> tuple[Checkpoint, Tokenizer]:
    tokenizer = ByteTokenizer()
    if shape.vocab < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab={shape.vocab} is too small: random models read bytes, which need {tokenizer.vocab_size} tokens or more"
        )
    return random_checkpoint(shape, seed, device), tokenizer
