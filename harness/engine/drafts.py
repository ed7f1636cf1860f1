"""Guesses at the next tokens, copied from the text so far: no model, no tensors.

It does not know whether a guess is right; the engine verifies each one.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 3  # tokens; shorter matches are tried when it has none


def lookup(log: Sequence[int], count: int) -> list[int]:
    """`count` tokens that followed the latest earlier occurrence of the last few tokens (prompt lookup, Saxena 2023).

    With no earlier occurrence, or too short a continuation, the last token is repeated.
    """
    guesses: list[int] = []
    for size in range(min(LONGEST_MATCH, len(log) - 1), 0, -1):
        at = _latest(log, size)
        if at is not None:
            guesses = list(log[at : at + count])
            break
    return guesses + [log[-1]] * (count - len(guesses))


def _latest(log: Sequence[int], size: int) -> int | None:
    """Where the latest earlier occurrence of the last `size` tokens ends, or None."""
    tail = list(log[-size:])
    for end in range(len(log) - 1, size - 1, -1):
        if list(log[end - size : end]) == tail:
            return end
    return None
