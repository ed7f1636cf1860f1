"""Student's t distribution for whole degrees of freedom, from its finite series. It does not know what is being estimated."""

from __future__ import annotations

import math


def student_t(share: float, freedom: int) -> float:
    """The `share` quantile (0..1, exclusive) of Student's t with `freedom` degrees.

    Whole degrees of freedom have a finite series (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4) in theta = atan(t / sqrt(freedom));
    it rises with theta, so halving finds the quantile to the last bit.
    """
    if not 0.0 < share < 1.0 or freedom < 1:
        raise ValueError(f"student_t needs a share between 0 and 1 and 1 or more degrees of freedom, not {share} and {freedom}")
    if share < 0.5:
        return -student_t(1.0 - share, freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(64):
        middle = (low + high) / 2
        if _central_t(middle, freedom) < 2 * share - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _central_t(theta: float, freedom: int) -> float:
    """P(|t| <= sqrt(freedom) tan(theta))."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(freedom // 2):
        total += term
        term *= cosine * cosine * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
