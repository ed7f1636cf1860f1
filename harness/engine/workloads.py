"""What arrives: requests as a pure function of typed parameters, a seed and a stream of tokens.

It does not know the model, the cache or the clock. Prompts are slices of the stream (real text), different in every row, so
that no row profits from another by accident; where rows are meant to share, the workload's name says so.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.engine.request import Request
from harness.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """What all workloads have. The fields are the configuration schema; UserError names a value that makes no sense."""

    ignore_eos: bool = True  # every sequence produces all its new tokens, so that runs do equal work
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    step_tokens: int = 2048  # most tokens fed in one step; longer prompts are fed in chunks
    max_sequences: int | None = None  # sequences at once; None = as many as fit

    def __post_init__(self) -> None:
        at_least(self, 1, "step_tokens")
        if self.max_sequences is not None:
            at_least(self, 1, "max_sequences")
        if not self.temperature >= 0:
            raise UserError(f"workload.temperature={self.temperature}: use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"workload.top_p={self.top_p}: use a value above 0, up to 1")

    @abstractmethod
    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        """The requests, for a model whose sequences hold `context` tokens. UserError when they cannot be made."""

    def request(
        self, id_: int, prompt: Sequence[int], new_tokens: int, seed: int, arrival_s: float = 0.0, samples: int = 1, draft_tokens: int = 0
    ) -> Request:
        """A request with this workload's sampling."""
        how = (self.ignore_eos, self.temperature, self.top_p, seed)
        return Request(id_, tuple(prompt), new_tokens, *how, arrival_s, samples, draft_tokens)


@dataclass(frozen=True, kw_only=True)
class Steady(Workload):
    """The same number of sequences from the first step to the last."""

    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch", "prompt_tokens", "new_tokens")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        fits(self.prompt_tokens, self.new_tokens, context)
        prompts = slices(stream, [self.prompt_tokens] * self.batch, seed)
        return [self.request(row, prompt, self.new_tokens, seed) for row, prompt in enumerate(prompts)]


@dataclass(frozen=True, kw_only=True)
class Ragged(Workload):
    """Sequences of very different lengths at once, log-uniform between the bounds: where padding and slabs waste."""

    batch: int = 8
    prompt_tokens_min: int = 16
    prompt_tokens_max: int = 512
    new_tokens_min: int = 8
    new_tokens_max: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch", "prompt_tokens_min", "new_tokens_min")
        at_least(self, self.prompt_tokens_min, "prompt_tokens_max")
        at_least(self, self.new_tokens_min, "new_tokens_max")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        fits(self.prompt_tokens_max, self.new_tokens_max, context)
        rng = random.Random(seed)
        prompts = slices(stream, [log_uniform(rng, self.prompt_tokens_min, self.prompt_tokens_max) for _ in range(self.batch)], seed)
        news = [log_uniform(rng, self.new_tokens_min, self.new_tokens_max) for _ in prompts]
        return [self.request(row, prompt, new, seed) for row, (prompt, new) in enumerate(zip(prompts, news, strict=True))]


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Workload):
    """`batch` sequences that begin with the same `prefix_tokens` and go on differently: a system prompt. They arrive one by one."""

    batch: int = 8
    prefix_tokens: int = 256
    prompt_tokens: int = 32  # of each sequence's own, after the prefix
    new_tokens: int = 32
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch", "prefix_tokens", "prompt_tokens", "new_tokens")
        at_least(self, 0, "gap_s")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        fits(self.prefix_tokens + self.prompt_tokens, self.new_tokens, context)
        prefix, *rest = slices(stream, [self.prefix_tokens] + [self.prompt_tokens] * self.batch, seed)
        return [self.request(row, prefix + own, self.new_tokens, seed, arrival_s=row * self.gap_s) for row, own in enumerate(rest)]


@dataclass(frozen=True, kw_only=True)
class Fork(Steady):
    """n-best: each prompt is read once and then continued `samples` times."""

    samples: int = 4
    temperature: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "samples")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        fits(self.prompt_tokens, self.new_tokens, context)
        prompts = slices(stream, [self.prompt_tokens] * self.batch, seed)
        return [self.request(row * self.samples, prompt, self.new_tokens, seed, samples=self.samples) for row, prompt in enumerate(prompts)]


@dataclass(frozen=True, kw_only=True)
class Rewind(Steady):
    """Speculative decoding: every step guesses `draft_tokens` from the text so far, verifies them and takes the wrong ones back."""

    draft_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "draft_tokens")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        fits(self.prompt_tokens, self.new_tokens, context)
        prompts = slices(stream, [self.prompt_tokens] * self.batch, seed)
        return [self.request(row, prompt, self.new_tokens, seed, draft_tokens=self.draft_tokens) for row, prompt in enumerate(prompts)]


@dataclass(frozen=True, kw_only=True)
class Poisson(Ragged):
    """`batch` requests in all, arriving at random at `rate_per_s`, with ragged lengths."""

    rate_per_s: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rate_per_s > 0:
            raise UserError(f"workload.rate_per_s={self.rate_per_s}: use a rate above 0")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        rng = random.Random(f"arrivals {seed}")
        arrivals, at_s = [], 0.0
        for _ in range(self.batch):
            arrivals.append(at_s)
            at_s += rng.expovariate(self.rate_per_s)
        ragged = super().requests(stream, seed, context)
        return [self.request(r.id, r.prompt, r.max_new_tokens, seed, arrival_s=at) for r, at in zip(ragged, arrivals, strict=True)]


def slices(stream: Sequence[int], lengths: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """One slice of `stream` per length, all different and, where the text is long enough, apart. UserError if there are too few."""
    if not stream:
        raise UserError("the text has no tokens: give a text to take prompts from")
    taken: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for start in _starts(len(stream), max(lengths), len(lengths), random.Random(f"slices {seed}")):
        length = lengths[len(taken)]
        piece = tuple(stream[start : start + length])
        if len(piece) == length:
            taken[piece] = None
        if len(taken) == len(lengths):
            return list(taken)
    raise UserError(
        f"the text has {len(stream)} tokens, which is too short for {len(lengths)} different prompts of up to {max(lengths)} tokens: "
        "use a longer text, a smaller batch or shorter prompts"
    )


def _starts(tokens: int, longest: int, count: int, rng: random.Random) -> Iterator[int]:
    """Places to cut: first such that slices of `longest` do not overlap, if there are enough of them, then anywhere."""
    apart = tokens // longest
    if apart >= count:
        yield from (i * longest for i in rng.sample(range(apart), apart))
    yield from rng.sample(range(tokens), tokens)


def fits(prompt_tokens: int, new_tokens: int, context: int) -> None:
    """UserError unless a prompt and what follows it fit the model's context (the last new token is never stored)."""
    if prompt_tokens + new_tokens - 1 > context:
        raise UserError(
            f"a prompt of {prompt_tokens} tokens with {new_tokens} new tokens does not fit the model's context of {context} tokens: "
            f"use at most {context} for prompt + new tokens - 1"
        )


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer in low..high, each octave equally likely."""
    return min(high, math.floor(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def at_least(workload: Workload, least: float, *names: str) -> None:
    for name in names:
        value = getattr(workload, name)
        if not value >= least:
            raise UserError(f"workload.{name}={value}: use {least} or more")
