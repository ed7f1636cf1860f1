"""The three phases of a run, each a function of what it needs: verify, measure, quality.

It does not know configurations, records or what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.engine.engine import Engine, scheduler_for
from harness.engine.events import COMPLETE, EventLog
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.errors import UserError
from harness.measure.clock import DeviceClock
from harness.measure.compare import BreakEven
from harness.measure.paired import Paired, measure_pairs
from harness.measure.points import beats_from, itl_law
from harness.measure.quality import Protocol, Quality, measure_quality
from harness.measure.reading import Side
from harness.measure.shadow import VerifyResult
from harness.measure.shadow import verify as shadow_verify
from harness.sides import Contender

Progress = Callable[[int, int], None]


class Unserved(RuntimeError):
    """The engine could not finish a request of the workload."""


@dataclass(frozen=True)
class Load:
    """A workload's requests and how many tokens and sequences one step may take."""

    requests: tuple[Request, ...]
    step_tokens: int
    max_sequences: int | None


@dataclass(frozen=True)
class Audit:
    """Bytes billed by the formula against bytes of the tensors held at the end of one run of the workload, no budget set."""

    billed_bytes: int
    stored_bytes: int

    @property
    def agree(self) -> bool:
        return self.billed_bytes == self.stored_bytes


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


def serve(contender: Contender, load: Load, device: str) -> EventLog:
    """One run of the workload on a fresh cache. Unserved when a request could not be finished."""
    return _served(contender, contender.cache(), load, device)


def _served(contender: Contender, cache: Any, load: Load, device: str) -> EventLog:
    scheduler = scheduler_for(cache, load.step_tokens, load.max_sequences)
    engine = Engine(contender.decoder, cache, scheduler, Sampler(), DeviceClock(device), contender.model.tokenizer.eos_ids)
    log = engine.run(load.requests)
    for completion in engine.completions.values():
        if completion.reason not in COMPLETE:
            raise Unserved(completion.detail or f"request {completion.id} ended with {completion.reason}")
    return log


def audit(contender: Contender, load: Load, device: str) -> Audit:
    """Serve the workload once with no budget, then compare the formula with the tensors that the cache holds."""
    cache = contender.unbounded_cache()
    _served(contender, cache, load, device)
    lengths = [request.stored_tokens for request in load.requests for _ in request.ids]
    billed = cache.bytes_for(lengths, min(load.step_tokens, max(len(request.prompt) for request in load.requests)))
    return Audit(billed, sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors()))


def measure(
    strategy: Contender,
    reference: Contender,
    load: Load,
    device: str,
    seed: int,
    pairs: int,
    seconds: float,
    warmup: int,
    threads: int | None,
    progress: Progress,
) -> Paired:
    """The workload on both, interleaved."""
    runs = [lambda side=side: serve(side, load, device) for side in (strategy, reference)]
    return measure_pairs(*runs, DeviceClock(device), seed, pairs, seconds, warmup, threads, progress)


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
