"""What somebody asks of the engine, and what came of it: plain data, no tensors.

It does not know the model's words, the cache or the clock. Finish reasons are named in `events`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One prompt and what to do with it.

    The last sampled token is never stored, so a sequence occupies at most len(prompt) + max_new_tokens - 1 rows.
    `samples` above 1 asks for that many continuations of one prompt (a fork each): it then takes the ids id, id + 1, ...,
    id + samples - 1, and continuation k is what request id + k would have produced alone. `draft_tokens` above 0 guesses that many tokens
    a step from the text so far and takes the wrong ones back (a rewind); it never changes the answer.
    `arrival_s` counts from the start of a run.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    arrival_s: float = 0.0
    samples: int = 1
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id} has an empty prompt: give at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.id} asks for max_new_tokens={self.max_new_tokens}: use 1 or more")
        if not self.temperature >= 0:
            raise ValueError(f"request {self.id} has temperature={self.temperature}: use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"request {self.id} has top_p={self.top_p}: use a value above 0, up to 1")
        if self.samples < 1:
            raise ValueError(f"request {self.id} asks for samples={self.samples}: use 1 or more")
        if self.draft_tokens < 0:
            raise ValueError(f"request {self.id} has draft_tokens={self.draft_tokens}: use 0 or more")
        if not self.arrival_s >= 0:
            raise ValueError(f"request {self.id} arrives at {self.arrival_s} s: use 0 or more")

    @property
    def ids(self) -> range:
        """The ids of its sequences."""
        return range(self.id, self.id + self.samples)

    @property
    def stored_tokens(self) -> int:
        """The most rows one of its sequences can occupy."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass(frozen=True)
class Completion:
    """One finished sequence: the tokens produced, why it ended (see `events`), and a sentence where it ended badly."""

    id: int
    tokens: tuple[int, ...]
    reason: str
    detail: str | None = None
