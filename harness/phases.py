"""The phases of a run, each a function of what it needs: verify, audit, measure, quality.

It does not know configurations, records or what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.audit import Audit
from harness.audit import audit as audited
from harness.engine.engine import Engine
from harness.engine.events import COMPLETE, EventLog
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.errors import UserError
from harness.measure.clock import DeviceClock, quiet
from harness.measure.compare import BreakEven
from harness.measure.paired import Paired, measure_pairs
from harness.measure.points import beats_from, itl_law
from harness.measure.profile import CACHE, DECODER, SAMPLER, ProfiledLog, StepProfile, Stopwatch, kept_ops, traced
from harness.measure.quality import Protocol, Quality, measure_quality
from harness.measure.reading import Side
from harness.measure.shadow import VerifyResult
from harness.measure.shadow import verify as shadow_verify
from harness.schema import Measure
from harness.sides import Contender
from strategies.base import KVCache

Progress = Callable[[int, int], None]
NewLog = Callable[[], EventLog]


class Unserved(RuntimeError):
    """The engine could not finish a request of the workload."""


@dataclass(frozen=True)
class Load:
    """A workload's requests and how many tokens and sequences one step may take."""

    requests: tuple[Request, ...]
    step_tokens: int
    max_sequences: int | None


def require_room(contender: Contender, load: Load) -> None:
    """UserError when the budget cannot hold even the largest request alone."""
    if contender.budget_bytes is None:
        return
    largest = max(request.stored_tokens for request in load.requests)
    needed = contender.cache().bytes_for([largest], min(load.step_tokens, largest))
    if needed > contender.budget_bytes:
        raise UserError(
            f"budget_bytes={contender.budget_bytes} is too small for one sequence of {largest} tokens, which needs {needed} with "
            f"{contender.settings.name}: raise the budget, or lower workload.prompt_tokens or workload.new_tokens"
        )


def verify(contender: Contender, tokens: Sequence[int], progress: Progress) -> VerifyResult:
    """Every attend of a short script against the float64 oracle."""
    return shadow_verify(contender.decoder, contender.unbounded_cache, tokens, contender.model.geometry, progress)


def serve(
    contender: Contender, cache: KVCache, load: Load, device: str, new_log: NewLog = EventLog, sampler: Callable | None = None
) -> EventLog:
    """One pass of the workload on `cache`, which is empty. Unserved when a request could not be finished."""
    scheduler = scheduler_for(cache, load.step_tokens, load.max_sequences)
    eos_ids = contender.model.tokenizer.eos_ids
    sampler, clock = Sampler() if sampler is None else sampler, DeviceClock(device)
    engine = Engine(contender.decoder_on_one_cache(clock), cache, scheduler, sampler, clock, eos_ids, new_log)
    log = engine.run(load.requests)
    for completion in engine.completions.values():
        if completion.reason not in COMPLETE:
            raise Unserved(completion.detail or f"request {completion.id} ended with {completion.reason}")
    return log


def audit(contender: Contender, load: Load, tokens: Sequence[int], device: str) -> Audit:
    """Bytes against their bill, and what really ran; nothing is timed."""
    return audited(contender, load.requests, load.step_tokens, tokens, lambda cache: serve(contender, cache, load, device))


def measure(
    strategy: Contender,
    reference: Contender,
    load: Load,
    device: str,
    seed: int,
    settings: Measure,
    new_log: Callable[[str], EventLog],
    progress: Progress,
) -> Paired:
    """The workload on both, and on the reference again for the noise floor, interleaved. new_log(side) makes each pass its log."""

    def run(name: str, side: Contender) -> Callable[[], EventLog]:
        return lambda: serve(side, side.cache(), load, device, lambda: new_log(name))

    sides = run("strategy", strategy), run("reference", reference)
    limits = (seed, settings.pairs, settings.seconds, settings.warmup, settings.threads)
    return measure_pairs(*sides, DeviceClock(device), *limits, progress, twin=run("twin", reference))


def profile(contender: Contender, load: Load, device: str, steps: int, trace: Path) -> StepProfile:
    """Where a decode step's time goes, over one pass; the first `steps` decode steps of a second one go to `trace`."""

    def run(annotate: Callable[[str], Any], after: Callable[[int], None]) -> ProfiledLog:
        watch = Stopwatch(DeviceClock(device), annotate)
        ops = kept_ops(contender.ops, watch)
        decoder = watch.keep(DECODER, type(contender.decoder)(contender.decoder.architecture, contender.decoder.weights, ops))
        side = replace(contender, decoder=decoder, ops=ops)
        cache = side.cache()
        cache.attend = watch.keep(CACHE, cache.attend)
        return serve(side, cache, load, device, lambda: ProfiledLog(watch=watch, after=after), watch.keep(SAMPLER, Sampler()))

    with quiet():
        found = run(lambda name: nullcontext(), lambda done: None).profile()
    traced(trace, run, steps)
    return found


def laws(paired: Paired, context: int) -> dict[str, Any]:
    """ITL = a + b * context of both sides, and the context from which the strategy is faster; None where too little was decoded."""
    fits = {name: itl_law(side.logs) for name, side in (("strategy", paired.strategy), ("reference", paired.reference))}
    wins: BreakEven | None = beats_from(paired.strategy.logs, paired.reference.logs, context)
    return {name: None if fit is None else asdict(fit) for name, fit in fits.items()} | {"faster": None if wins is None else asdict(wins)}


def quality(
    strategy: Contender, reference: Contender, tokens: Sequence[int], protocol: Protocol, noise: bool, progress: Progress
) -> Quality:
    """Both in lock-step over the windows of the text; `noise` adds the reference against itself."""
    sides = [Side(side.decoder, side.cache()) for side in (strategy, reference)]
    again = Side(reference.decoder, reference.cache()) if noise else None
    return measure_quality(*sides, again, tokens, strategy.model.tokenizer.decode, protocol, progress)
