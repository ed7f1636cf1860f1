"""What the kit checks: promises, each a function of one subject, filed under the kind of fault that breaks them.

It does not know any particular promise; the chapters in `kinds/` register theirs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from harness.errors import UserError

KINDS = {
    "B": "window, page and chunk boundaries",
    "P": "positions",
    "L": "leaks between sequences and calls",
    "R": "rollback, fork, abort",
    "Q": "quantisation",
    "A": "allocation",
    "N": "non-finite and extreme values",
    "X": "addressing, layout, head mapping",
    "D": "dependence on mates, chunks, placement",
    "C": "byte accounting",
}
CHAPTERS = {
    "B": "boundaries",
    "P": "positions",
    "L": "leaks",
    "R": "rollback",
    "Q": "quantised",
    "A": "allocation",
    "N": "extremes",
    "X": "addressing",
    "D": "dependence",
    "C": "accounting",
}


class NotApplicable(Exception):
    """This promise says nothing about this strategy; the message says why."""


@dataclass(frozen=True)
class Promise:
    """One promise. `cases` are the ids of public bug reports that it would have caught."""

    kind: str
    name: str
    cases: tuple[str, ...]
    check: Callable[..., None]


@dataclass(frozen=True)
class Outcome:
    """How one promise fared: `passed`, `failed` or `not applicable`, and why in a sentence."""

    promise: Promise
    status: str
    why: str


_REGISTERED: dict[str, Promise] = {}


def promise(kind: str, *cases: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check; its name reads as a sentence and its docstring says what is promised."""

    def register(check: Callable[..., None]) -> Callable[..., None]:
        _REGISTERED[check.__name__] = Promise(kind, check.__name__, cases, check)
        return check

    return register


def promises() -> list[Promise]:
    """All promises, chapter by chapter."""
    for chapter in (*CHAPTERS.values(), "life"):
        import_module(f"harness.conformance.kinds.{chapter}")
    order = list(KINDS)
    return sorted(_REGISTERED.values(), key=lambda one: order.index(one.kind))


def fare(one: Promise, subject: object) -> Outcome:
    """Check one promise on one subject. Every exception is a failure, whoever raised it, but for `NotApplicable` and `UserError`."""
    try:
        one.check(subject)
    except NotApplicable as reason:
        return Outcome(one, "not applicable", str(reason))
    except UserError:
        raise
    except Exception as error:  # a cache under test may raise anything, and the card must still be printed
        text = str(error).strip() or "no message"
        said = text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
        return Outcome(one, "failed", "\n    ".join((said, *getattr(error, "__notes__", ()))))  # hypothesis notes the shortest life
    return Outcome(one, "passed", "")
