"""From event logs to the law ITL = a + b * context, and to the context from which one strategy beats another. No torch.

It does not know what was run; it takes the median over runs at each context, so that a rare hiccup bends no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from harness.engine.events import EventLog
from harness.measure.compare import BreakEven, Fit, break_even, fit
from harness.measure.metrics import itl_by_context, quantile

LEAST_CONTEXTS = 3


def itl_points(logs: Sequence[EventLog]) -> list[tuple[float, float]]:
    """(context, median inter-token seconds over all runs and sequences), by rising context."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for log in logs:
        for context, gap_s in itl_by_context(log):
            seconds[context].append(gap_s)
    return [(float(context), quantile(values, 0.5)) for context, values in sorted(seconds.items())]


def itl_law(logs: Sequence[EventLog]) -> Fit | None:
    """The line through those points; None when fewer than three contexts were decoded."""
    points = itl_points(logs)
    return fit(points) if len(points) >= LEAST_CONTEXTS else None


def beats_from(strategy: Sequence[EventLog], reference: Sequence[EventLog], limit: float) -> BreakEven | None:
    """Where, up to context `limit`, the strategy's line lies below the reference's; None when either has no line."""
    ours, theirs = itl_law(strategy), itl_law(reference)
    return None if ours is None or theirs is None else break_even(theirs, ours, limit)
