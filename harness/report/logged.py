"""What W&B is told of a measured run: series by step, a histogram, the raw samples as a table.

It does not know wandb, nor how the numbers were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from harness.engine.events import EventLog
from harness.measure.metrics import itl_by_context, itl_s

if TYPE_CHECKING:
    from harness.measure.paired import Paired
    from harness.report.tracking import Tracker


def tell(tracker: Tracker, paired: Paired) -> None:
    """The typical pass step by step, its gaps between tokens as a histogram, and every sample of every side."""
    typical = paired.strategy.typical
    for step, values in series(typical):
        tracker.log(values, step)
    tracker.histogram("itl_s_histogram", itl_s(typical))
    tracker.table("samples", *samples(paired.raw()))


def series(log: EventLog) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, its values): how long it took, bytes, sequences; and the gap before its tokens, by the longest context among them."""
    gaps = _gaps(log)
    for step in log.steps:
        values: dict[str, Any] = {
            "step_s": step.end_s - step.start_s,
            "batch": step.batch_size,
            "tokens_fed": step.tokens_fed,
            "kv_reserved_bytes": step.kv_reserved_bytes,
            "kv_in_use_bytes": step.kv_in_use_bytes,
            "kv_live_bytes": step.kv_live_bytes,
        }
        yield step.step, values | gaps.get(step.step, {})


def samples(raw: dict[str, dict[str, list[float | None]]]) -> tuple[list[str], list[list[Any]]]:
    """Raw samples as (columns, rows): one row for each pass of each side."""
    timings = list(raw["strategy"])
    rows = [[side, number, *values] for side, found in raw.items() for number, values in enumerate(zip(*found.values(), strict=True))]
    return ["side", "pair", *timings], rows


def _gaps(log: EventLog) -> dict[int, dict[str, float]]:
    """step -> {itl_s: mean over its tokens that have a gap before them, context}."""
    later = iter(itl_by_context(log))
    by_request: dict[int, list[int]] = {}
    for token in log.tokens:
        by_request.setdefault(token.request_id, []).append(token.step)
    found: dict[int, list[tuple[int, float]]] = {}
    for steps in by_request.values():
        for step in steps[1:]:
            found.setdefault(step, []).append(next(later))
    return {
        step: {"context": max(context for context, _ in pairs), "itl_s": sum(gap_s for _, gap_s in pairs) / len(pairs)}
        for step, pairs in found.items()
    }
