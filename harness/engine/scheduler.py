"""Which sequences run in the next step and how far each is fed: integers only, no tensors.

It does not know tokens, rows or pages: it asks `bytes_for` what lengths would cost and lets the cache have the last word.

Order of service: sequences that need one token first, then the others, oldest first, each up to the tokens left in the step;
then waiting sequences, oldest first, while bytes and tokens last. A sequence that was preempted keeps its age.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.geometry import CacheFull

if TYPE_CHECKING:
    from strategies.base import KVCache


@dataclass(eq=False)
class Entry:
    """One sequence as the scheduler sees it. `known` tokens are in its log; `drafted` more are guesses to be verified."""

    id: int
    age: int  # lower is older
    known: int
    final: int  # the most rows it may ever occupy
    sid: int | None = None  # None while it waits
    drafted: int = 0
    started: bool = False  # a step of this stay was committed: taking it off is a preemption


class Scheduler:
    """Queues and the three limits: tokens a step, sequences at once, bytes of KV.

    step_tokens: tokens fed in one step. It may be exceeded by one sequence on its own, when the cache keeps nothing
        (bytes_for([1]) == 0): a partial feed of such a sequence would be lost, so it is always fed whole.
    max_sequences: sequences that run at once; None = no limit.
    budget_bytes, bytes_for: the KV budget (None = no limit) and the cost of sequences of these lengths.
    context: the most rows one sequence may reach.
    """

    def __init__(
        self, step_tokens: int, max_sequences: int | None, budget_bytes: int | None, bytes_for: Callable[[Sequence[int]], int], context: int
    ) -> None:
        if step_tokens < 1:
            raise ValueError(f"step_tokens={step_tokens}: use 1 or more")
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences={max_sequences}: use 1 or more, or null for no limit")
        self.step_tokens = step_tokens
        self.max_sequences = max_sequences
        self.budget_bytes = budget_bytes
        self.context = context
        self._bytes_for = bytes_for
        self._feeds_stick = bytes_for([1]) > 0
        self._waiting: list[Entry] = []
        self._running: list[Entry] = []
        self._full = False  # the cache refused a step: nobody enters until somebody leaves

    @property
    def running(self) -> tuple[Entry, ...]:
        """Sequences in the cache, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Sequences outside the cache, oldest first."""
        return tuple(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether one more sequence may run, bytes aside."""
        return self.max_sequences is None or len(self._running) < self.max_sequences

    def refusal(self, final: int) -> str | None:
        """Why a sequence that may occupy `final` rows can never run, or None if it can."""
        if final > self.context:
            return f"it needs {final} positions and the context has {self.context}"
        if self.budget_bytes is None:
            return None
        needed = self._bytes_for([final])
        if needed <= self.budget_bytes:
            return None
        return f"it needs {needed} bytes of KV for {final} tokens and the budget is {self.budget_bytes} bytes"

    def submit(self, entry: Entry) -> None:
        """Queue a sequence by age."""
        insort(self._waiting, entry, key=_age)

    def enter(self, entry: Entry, sid: int) -> None:
        """Run a sequence that the cache already holds (a fork)."""
        entry.sid = sid
        entry.started = True
        insort(self._running, entry, key=_age)

    def schedule(self, held: Callable[[int], int], opened: Callable[[Entry], int]) -> dict[int, int]:
        """The next step as {sid: stop}; empty when nothing can run.

        held(sid): tokens that need not be fed. opened(entry): let a waiting sequence into the cache -> sid; it may raise CacheFull.
        """
        stops: dict[int, int] = {}
        left = self.step_tokens
        for entry in sorted(self._running, key=lambda e: (e.known + e.drafted - held(e.sid) > 1, e.age)):
            left -= self._feed(entry, held(entry.sid), left, stops)
        while left > 0 and self._may_admit():
            entry = self._waiting[0]
            try:
                sid = opened(entry)
            except CacheFull:
                self._full = True
                break
            entry.sid = sid
            self._waiting.pop(0)
            insort(self._running, entry, key=_age)
            left -= self._feed(entry, held(sid), left, stops)
        return stops

    def youngest(self) -> Entry:
        """The running sequence to take off first when the cache is full."""
        return self._running[-1]

    def evict(self, entry: Entry) -> None:
        """Back to the queue, with its age; nobody enters until somebody leaves."""
        self._running.remove(entry)
        entry.sid, entry.drafted, entry.started = None, 0, False
        self.submit(entry)
        self._full = True

    def leave(self, entry: Entry) -> None:
        """The sequence is over, whether it ran, waited or was never queued."""
        if entry in self._waiting:
            self._waiting.remove(entry)
        if entry in self._running:
            self._running.remove(entry)
            entry.sid = None
            self._full = False

    def _feed(self, entry: Entry, held: int, left: int, stops: dict[int, int]) -> int:
        """Add the entry's span to `stops` -> tokens it takes from the step."""
        need = entry.known + entry.drafted - held
        if need > left and not self._feeds_stick:
            take = need if not stops else 0
        else:
            take = min(need, left)
        if take > 0:
            stops[entry.sid] = held + take
        return take

    def _may_admit(self) -> bool:
        if not self._waiting or (self._full and self._running):
            return False
        if not self.has_room:
            return False
        if self.budget_bytes is None or not self._running:
            return True
        lengths = [entry.known + entry.drafted for entry in (*self._running, self._waiting[0])]
        return self._bytes_for(lengths) <= self.budget_bytes


def _age(entry: Entry) -> int:
    return entry.age


def scheduler_for(cache: KVCache, step_tokens: int, max_sequences: int | None) -> Scheduler:
    """The scheduler that asks `cache` what lengths cost."""
    return Scheduler(
        step_tokens, max_sequences, cache.budget_bytes, lambda lengths: cache.bytes_for(lengths, chunk=step_tokens), cache.geometry.context
    )
