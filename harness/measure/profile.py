"""Where a decode step's time goes: every op of the kernels, the decoder, the sampler and the cache's own work, which add up to the step.

It does not know what a strategy is: it is handed the pieces of an engine and hands back pieces that keep their own time. On a
device, each piece waits for it, so that a launch and what it launched are in one row; such steps are slower than others.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engine.events import DECODE, EventLog, StepEvent, TokenEvent
from harness.measure.clock import Clock

if TYPE_CHECKING:
    from kernels.api import Ops
    from kernels.chained import Chain, ChainModel

GEMM, ATTENTION, WRITE, POINTWISE, HOST = KINDS = ("gemm", "attention", "write", "pointwise", "host")
KIND_OF = {
    "linear": GEMM,
    "attend_dense": ATTENTION,
    "attend_paged": ATTENTION,
    "attend_packed": ATTENTION,
    "write_rows": WRITE,
    "copy_pages": WRITE,
    "move_rows": WRITE,
    "read_rows": WRITE,
    "rope": POINTWISE,
    "rms_norm": POINTWISE,
    "gated": POINTWISE,
}
# What is not an op: its own time, less that of the ops inside it.
CHAIN = "chain"  # ops that ran as one call, in a trace; the table shares its time out by their time stamps
CACHE, DECODER, SAMPLER, ENGINE = "cache.attend", "decoder", "sampler", "engine"


@dataclass(frozen=True)
class Row:
    """One line of the table: calls and seconds of the mean decode step."""

    name: str
    kind: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class StepProfile:
    """The mean decode step. The rows' seconds add up to `step_s`."""

    steps: int
    step_s: float
    rows: tuple[Row, ...]

    def by_kind(self) -> dict[str, float]:
        """Seconds of each of `KINDS`."""
        return {kind: sum(row.seconds for row in self.rows if row.kind == kind) for kind in KINDS}

    def as_dict(self) -> dict[str, Any]:
        """The form a record stores."""
        return {"steps": self.steps, "step_s": self.step_s, "kinds": self.by_kind(), "rows": [vars(row) for row in self.rows]}

    def table(self) -> str:
        """Markdown."""
        lines = [
            f"mean of {self.steps} decode steps: {1e3 * self.step_s:.3f} ms",
            "",
            "| part | kind | calls | ms | share |",
            "|---|---|---:|---:|---:|",
        ]
        parts = [*self.rows, *(Row(f"all {kind}", kind, 0, seconds) for kind, seconds in self.by_kind().items())]
        for row in parts:
            calls = f"{row.calls:,.0f}" if row.calls else ""
            lines.append(f"| {row.name} | {row.kind} | {calls} | {1e3 * row.seconds:.3f} | {row.seconds / self.step_s:.1%} |")
        return "\n".join(lines)


class Stopwatch:
    """Keeps the own time of nested calls: what a call took, less the calls inside it that are kept as well."""

    def __init__(self, clock: Clock, annotate: Callable[[str], AbstractContextManager] = lambda name: nullcontext()) -> None:
        self._clock = clock
        self._annotate = annotate
        self._inside: list[float] = []  # of each call that is running, seconds that kept calls inside it took
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def keep(self, name: str, call: Callable[..., Any], parts: Callable[..., tuple[Counter, Counter]] | None = None) -> Callable[..., Any]:
        """`call`, timed under `name`; or, with `parts(its arguments)` -> (weights, calls) by name, shared out among those."""

        def kept(*arguments: Any) -> Any:
            began = self._clock.now()
            self._inside.append(0.0)
            try:
                with self._annotate(name):
                    found = call(*arguments)
                    self._clock.synchronise()
            finally:
                took = self._clock.now() - began
                self._charge(name, took - self._inside.pop(), None if parts is None else parts(*arguments))
                if self._inside:
                    self._inside[-1] += took
            return found

        return kept

    def _charge(self, name: str, own: float, parts: tuple[Counter, Counter] | None) -> None:
        weights, calls = (Counter({name: 1}), Counter({name: 1})) if parts is None else parts
        whole = sum(weights.values())
        for part, weight in weights.items():
            self.seconds[part] += own * weight / whole
        self.calls.update(calls)

    def taken(self) -> tuple[Counter[str], Counter[str]]:
        """(seconds, calls) since the last time this was asked."""
        found = self.seconds, self.calls
        self.seconds, self.calls = Counter(), Counter()
        return found


@dataclass
class ProfiledLog(EventLog):
    """An event log that asks the stopwatch what each step was made of. `after(decode steps so far)` is called behind each step."""

    watch: Stopwatch | None = None
    after: Callable[[int], None] = lambda steps: None
    decodes: list[tuple[float, Counter[str], Counter[str]]] = field(default_factory=list)  # (seconds, own seconds, calls) of each

    def stepped(self, step: StepEvent, tokens: Sequence[TokenEvent]) -> None:
        super().stepped(step, tokens)
        seconds, calls = self.watch.taken()
        if step.phase == DECODE:
            self.decodes.append((step.end_s - step.start_s, seconds, calls))
        self.after(len(self.decodes))

    def profile(self) -> StepProfile:
        """ValueError when no step only decoded."""
        if not self.decodes:
            raise ValueError("no step of this workload only decodes: give it more new tokens, or all requests at once")
        steps = len(self.decodes)
        step_s = sum(whole for whole, _, _ in self.decodes) / steps
        seconds, calls = (sum((step[part] for step in self.decodes), Counter()) for part in (1, 2))
        own = not any(KIND_OF.get(name) == ATTENTION for name in seconds)  # the cache attends without an op of the kernels
        rows = [Row(name, _kind(name, own), calls[name] / steps, taken / steps) for name, taken in seconds.items()]
        rows.append(Row(ENGINE, HOST, 1.0, step_s - sum(row.seconds for row in rows)))
        return StepProfile(steps, step_s, tuple(sorted(rows, key=lambda row: (KINDS.index(row.kind), -row.seconds))))


def _kind(name: str, own_attention: bool) -> str:
    return ATTENTION if name == CACHE and own_attention else KIND_OF.get(name, HOST)


def kept_ops(ops: Ops, watch: Stopwatch) -> Ops:
    """The same ops, counting where they counted, each timed."""
    kept = copy.copy(ops)
    for name in KIND_OF:
        if hasattr(ops, name):
            setattr(kept, name, watch.keep(name, getattr(ops, name)))

    def chained(model: ChainModel, tokens: int) -> Chain | None:
        chain = ops.chained(model, tokens)
        if chain is not None:
            chain.run = watch.keep(CHAIN, chain.run, lambda program: (program.ticks(), Counter(program.names)))
        return chain

    kept.chained = chained
    return kept


def traced(path: Path, run: Callable[[Callable[[str], AbstractContextManager], Callable[[int], None]], None], steps: int) -> None:
    """Run with torch's profiler until `steps` decode steps are done, and write a Chrome trace (chrome://tracing, Perfetto) to `path`.

    run(annotate, after): annotate(name) marks a piece, after(n) tells that n decode steps are done.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = profile(activities=activities)
    recording = True
    profiler.start()

    def after(done: int) -> None:
        nonlocal recording
        if recording and done >= steps:
            recording = False
            profiler.stop()

    try:
        run(lambda name: record_function(name) if recording else nullcontext(), after)
    finally:
        if recording:
            profiler.stop()
    profiler.export_chrome_trace(str(path))
