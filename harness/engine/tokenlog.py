"""One sequence's tokens: its prompt, what it produced, and guesses to be verified. Pure Python.

It does not know the cache. A `Fed` span says which positions of a log one step feeds and which of their logits matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.engine.events import DECODE, LENGTH, PREFILL, STOP
from harness.engine.request import Request
from harness.engine.sampler import Draw
from harness.engine.scheduler import Entry


@dataclass(eq=False)
class TokenLog:
    """The engine's view of one sequence; `entry` is the scheduler's view of the same one."""

    request: Request
    entry: Entry
    tokens: list[int]
    guesses: list[int] = field(default_factory=list)  # tokens past the log, fed only to be verified
    forks: list[TokenLog] = field(default_factory=list)  # continuations that split off at the first produced token
    highest: int = 0  # tokens of the log that were fed at some time
    caught_up: bool = False  # it has read all its known tokens since it last entered the cache

    @property
    def id(self) -> int:
        return self.entry.id

    @property
    def produced(self) -> tuple[int, ...]:
        """The tokens after the prompt."""
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def phase(self) -> str:
        """Prefill while it re-reads known tokens, decode afterwards."""
        return DECODE if self.caught_up else PREFILL

    def draw(self, position: int) -> Draw:
        """How the token at `position` is drawn."""
        request = self.request
        return Draw(request.temperature, request.top_p, request.seed, self.id, position)

    def take(self, sampled: Sequence[int], eos_ids: frozenset[int]) -> tuple[list[int], str | None]:
        """Append what `sampled` allows -> (the new tokens, the finish reason or None)."""
        new = []
        for token in sampled:
            new.append(token)
            self.tokens.append(token)
            if token in eos_ids and not self.request.ignore_eos:
                return new, STOP
            if len(self.tokens) == len(self.request.prompt) + self.request.max_new_tokens:
                return new, LENGTH
        return new, None


@dataclass(frozen=True)
class Fed:
    """One span of a step: packed rows row, row + 1, ... feed positions start..stop-1 of `log`."""

    log: TokenLog
    start: int
    stop: int
    row: int

    @property
    def ids(self) -> list[int]:
        known = len(self.log.tokens)
        return self.log.tokens[self.start : self.stop] + self.log.guesses[max(0, self.start - known) : max(0, self.stop - known)]

    @property
    def sampled(self) -> range:
        """Positions that get a token sampled: those past the end of the known log."""
        return range(len(self.log.tokens), self.stop + 1)

    @property
    def rows(self) -> range:
        """The packed rows whose logits those tokens are drawn from."""
        return range(self.row + len(self.log.tokens) - 1 - self.start, self.row + self.stop - self.start) if self.sampled else range(0)

    @property
    def recomputed(self) -> int:
        """Tokens of this span that had been fed before."""
        return max(0, min(self.stop, self.log.highest) - self.start)

    def verified(self, drawn: Sequence[int]) -> list[int]:
        """The draws that count: a guess is right when it is the token that would have been drawn in its place."""
        right = 0
        while right < len(drawn) - 1 and drawn[right] == self.log.guesses[right]:
            right += 1
        return list(drawn[: right + 1])
