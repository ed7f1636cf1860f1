"""What a peer measurement compares: things that decode a batch of prompts and say how long each step took.

It does not know how the times are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from harness.engine.engine import Engine, scheduler_for
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.measure.clock import DeviceClock, now
from harness.measure.metrics import decode_s, prefill_s


@dataclass(frozen=True)
class Run:
    """One run: seconds of the whole prefill and of the mean decode step, and every sequence's tokens."""

    prefill_s: float
    step_s: float
    tokens: tuple[tuple[int, ...], ...]


class Side(Protocol):
    """Decodes `new_tokens` greedily after each prompt; all prompts have one length."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run: ...


@dataclass(frozen=True)
class Ours:
    """One of our caches on our engine."""

    name: str
    model: Any
    storage: Any
    parameters: dict[str, Any]

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
        cache = self.storage(self.model.geometry, None, self.model.decoder.ops, **self.parameters)
        engine = Engine(self.model.decoder, cache, scheduler_for(cache, 1 << 20, None), Sampler(), DeviceClock("cpu"))
        log = engine.run([Request(row, tuple(prompt), new_tokens) for row, prompt in enumerate(prompts)])
        tokens = tuple(engine.completions[row].tokens for row in range(len(prompts)))
        return Run(prefill_s(log), decode_s(log) / (new_tokens - 1), tokens)


@dataclass(frozen=True)
class Transformers:
    """transformers' own model with its DynamicCache."""

    name: str
    model: Any

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Run:
        from transformers import DynamicCache

        cache, ids = DynamicCache(config=self.model.config), torch.tensor([list(prompt) for prompt in prompts])
        started, found, ends = now(), [], []
        for _ in range(new_tokens):
            logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            found.append(ids[:, 0].tolist())
            ends.append(now())
        return Run(ends[0] - started, (ends[-1] - ends[0]) / (new_tokens - 1), tuple(zip(*found, strict=True)))
