"""Helpers for model tests: sizes of tiny models, and the steps that feed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch

from harness.model.load import Model, load_model
from kernels.backend import resolve
from strategies.contiguous import Contiguous

TEXT = topics["slicings"] + topics["numbers"] + topics["strings"]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 60,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,  # wide enough that attention is far from flat
}


def logits_of(model: Model, ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
    """Logits [len(ids), V] of every token, fed `chunk` at a time through a contiguous cache."""
    cache = Contiguous(model.geometry, None, model.decoder.ops)
    sid = cache.open()
    step = len(ids) if chunk is None else chunk
    parts = []
    for start in range(0, len(ids), step):
        fed = ids[start : start + step]
        plan = cache.plan({sid: start + len(fed)})
        parts.append(model.decoder(torch.tensor(fed), plan, cache, torch.arange(len(fed))))
        cache.commit(plan, fed)
    return torch.cat(parts)


def opened(source: str | Path, dtype: str = "float32", **options) -> Model:
    """`load_model` on the CPU's own kernels."""
    return load_model(str(source), dtype, "cpu", resolve("cpu"), **options)


def byte_bpe() -> object:
    """A byte-level tokenizer without merges: enough for a folder to be complete."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def expected_logits(model: object, ids: Sequence[int]) -> torch.Tensor:
    """What transformers' own model answers, [len(ids), V]."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def some_ids(count: int, vocab: int = 300, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
