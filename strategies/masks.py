"""What masks leave of histories: the rows that may still be read, and which two masks go together. It knows no storage."""

from __future__ import annotations

from collections.abc import Iterable

from kernels.rows import Mask
from strategies.geometry import Refused


def live_union(mask: Mask, lengths: Iterable[int]) -> int:
    """Distinct rows of one run that histories of these lengths share and that the query at a history's length, or a later one, may read."""
    covered = live = 0
    for length in sorted(lengths):
        first = mask.first_visible(length)
        sinks = min(mask.sinks, first)
        live += max(0, sinks - covered) + length - max(first, covered, sinks)
        covered = length
    return live


def combined_mask(model_window: int | None, window: int | None, sinks: int) -> Mask:
    """Keys that both the model's own window and the strategy's window + sinks allow. Refused when no Mask says that."""
    if window is None or (model_window is not None and model_window <= window):
        return Mask(model_window)
    if model_window is not None and sinks:
        raise Refused(
            f"window={window} with sinks={sinks} cannot be combined with the model's own window of {model_window}: "
            f"the sinks would leave the model's window; use sinks=0 or a window of {model_window} or more"
        )
    return Mask(window, sinks)
