"""The only file that reads a clock or waits for a device, and the rules that make a reading worth keeping.

It does not know what is being timed.

A device runs behind the host: a reading means something only after `synchronise`. The first call of anything pays for
compiling, allocating and paging in, so it is reported apart and never enters a mean. While `quiet`, the garbage collector is
off and the thread count is fixed and recorded.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """What an engine or a measurement needs of time, so that tests can hand in their own."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""

    def synchronise(self) -> None:
        """Return when the device has finished everything launched so far."""


def now() -> float:
    """Seconds since some fixed moment: monotonic, at the highest resolution there is."""
    return time.perf_counter()


def synchronise(device: str) -> None:
    """Wait until `device` ("cpu", "cuda", "cuda:1") has finished; the CPU always has."""
    if device.split(":")[0] != "cuda":
        return
    import torch

    torch.cuda.synchronize(device)


@dataclass(frozen=True)
class DeviceClock:
    """The real clock of one device."""

    device: str

    def now(self) -> float:
        return now()

    def synchronise(self) -> None:
        synchronise(self.device)


class ManualClock:
    """A clock that moves only when told to. `launch` queues device work that `synchronise` waits for."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._queued_s = 0.0

    def now(self) -> float:
        return self._now_s

    def synchronise(self) -> None:
        self._now_s += self._queued_s
        self._queued_s = 0.0

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass on the host."""
        self._now_s += seconds

    def launch(self, device_s: float) -> None:
        """Queue `device_s` seconds of work and return at once, as a kernel launch does."""
        self._queued_s += device_s


def timed(clock: Clock, call: Callable[[], object]) -> float:
    """Seconds that one `call` takes on a device that was idle before and is idle after."""
    clock.synchronise()
    start_s = clock.now()
    call()
    clock.synchronise()
    return clock.now() - start_s


def device_timed(device: str, call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds that `device` spends on each of `repeats` calls, by its own events around each: launching is no part of it.

    A CPU has no events: there the host's clock says it.
    """
    if device.split(":")[0] != "cuda":
        clock = DeviceClock(device)
        return [timed(clock, call) for _ in range(repeats)]
    import torch

    with torch.cuda.device(device):
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for first, last in marks:
            first.record()
            call()
            last.record()
        synchronise(device)
    return [first.elapsed_time(last) / 1e3 for first, last in marks]  # torch tells milliseconds


@dataclass(frozen=True)
class WarmUp:
    """What was spent before the first sample that counts."""

    first_call_s: float  # compiling and first use included
    steady_call_s: float  # the fastest of the later warm-up calls
    calls: int

    @property
    def first_use_s(self) -> float:
        """What the first call cost beyond a steady one: compiling, allocating, paging in."""
        return max(0.0, self.first_call_s - self.steady_call_s)


def warm_up(clock: Clock, call: Callable[[], object], calls: int = 3) -> WarmUp:
    """Run `call` until first use is behind it. At least two calls: one to pay, one to see what a call costs afterwards."""
    if calls < 2:
        raise ValueError(f"warm_up calls={calls}: use 2 or more, so that first use can be told from steady time")
    first_s, *later_s = [timed(clock, call) for _ in range(calls)]
    return WarmUp(first_s, min(later_s), calls)


@dataclass(frozen=True)
class Conditions:
    """How the process was set up while its times were taken; belongs in the record."""

    threads: int
    interop_threads: int
    garbage_collection: bool


@contextmanager
def quiet(threads: int | None = None) -> Iterator[Conditions]:
    """Time inside this: garbage collected before and not during, `threads` pinned (None = as they are); all restored after."""
    import torch

    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: use 1 or more, or null to leave them as they are")
    collecting, threads_before = gc.isenabled(), torch.get_num_threads()
    gc.collect()
    gc.disable()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield Conditions(torch.get_num_threads(), torch.get_num_interop_threads(), garbage_collection=False)
    finally:
        torch.set_num_threads(threads_before)
        if collecting:
            gc.enable()


@dataclass(frozen=True)
class Moment:
    """A wall-clock reading fit for a record: `id` sorts by time and is unique between processes and within a microsecond."""

    utc: str
    id: str


def moment() -> Moment:
    """The time of day, and an identifier made from it that nobody else will make."""
    at = datetime.now(timezone.utc)
    return Moment(at.isoformat(timespec="microseconds"), f"{at:%Y%m%d-%H%M%S-%f}-{secrets.token_hex(4)}")
