"""How many sequences a KV budget holds, from the byte formulas alone. No torch, no allocation.

It does not know strategies; it asks `bytes_for`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def largest_batch(bytes_for: Callable[[Sequence[int]], int], length: int, budget_bytes: int) -> int | None:
    """The most sequences of `length` tokens whose bytes stay within `budget_bytes`; None when they cost nothing."""
    if bytes_for([length]) == 0:
        return None
    if bytes_for([length]) > budget_bytes:
        return 0
    low, high = 1, 2
    while bytes_for([length] * high) <= budget_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for([length] * middle) <= budget_bytes else (low, middle)
    return low
