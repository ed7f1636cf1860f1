"""A worker for tests of the protocol: counts on from each prompt's last token, and prints where libraries would."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.peers.lines import Absent, Tokens, serve


class Stub:
    """Takes as many seconds a step as it is told to, by its own clock."""

    def __init__(self, seconds: float) -> None:
        print("a library says hello")
        self.about: dict[str, Any] = {"seconds": seconds}
        self._seconds = seconds
        self._last: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[float, Tokens]:
        self._last = [prompt[-1] + 1 for prompt in prompts]
        return len(prompts[0]) * self._seconds, [[last] for last in self._last]

    def step(self, count: int) -> tuple[float, Tokens]:
        if not self._last:
            raise RuntimeError("nothing was started")
        print("a library says more")
        found = [[last + 1 + i for i in range(count)] for last in self._last]
        self._last = [row[-1] for row in found]
        return self._seconds, found

    def drop(self) -> None:
        self._last = []


def make() -> Stub:
    """What the first argument asks for: seconds a step, `absent`, or a death."""
    if sys.argv[1] == "absent":
        raise Absent("the stub was told to be absent")
    if sys.argv[1] == "dies":
        sys.exit("the stub was told to die")
    return Stub(float(sys.argv[1]))


if __name__ == "__main__":
    serve(make)
