"""How a measurement talks to a side that lives in a process, and perhaps a virtual environment, of its own: one JSON object a line.

Python's standard library only, so that any environment can run a worker. It does not know what a side is or what is compared.

A worker first says what it is ({"about": {...}}) or why it cannot be ({"absent": "why"}), then answers each request:

    {"do": "start", "prompts": [[...]], "room": 64}  ->  {"seconds": 0.5, "tokens": [[...]], "peak_rss_bytes": 1}
    {"do": "step", "count": 8}                       ->  {"seconds": 0.1, "tokens": [[...]], "peak_rss_bytes": 1}
    {"do": "drop"}                                   ->  {}

or {"error": "..."}. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.measure.memory import host_peak_rss_bytes, restart_peaks

Tokens = list[list[int]]  # of each sequence
STEP_TOKENS = 4096  # that a side with a scheduler reads in one step at most
TAIL = 2000  # characters of a dead worker's last words


class Absent(RuntimeError):
    """A side cannot run here; the message says why and what would help."""


class Failed(RuntimeError):
    """A worker answered with an error, or died."""


class Side(Protocol):
    """Decodes greedily. `about` says which versions and settings these are."""

    about: dict[str, Any]

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[float, Tokens]:
        """Read all prompts: seconds until the last of them has its first token, and the tokens so far. `room`: most steps to follow."""

    def step(self, count: int) -> tuple[float, Tokens]:
        """`count` more tokens of every sequence: mean seconds a step, and the tokens."""

    def drop(self) -> None:
        """Forget the sequences."""


def serve(make: Callable[[], Side]) -> None:
    """Be a worker: make the side, answer requests until there are no more. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    try:
        side = make()
    except (Absent, ImportError) as error:
        answer(absent=f"{error}")
        return
    answer(about=side.about)
    for line in sys.stdin:
        try:
            answer(**_answered(side, json.loads(line)))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


def _answered(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    do = request.pop("do")
    if do == "drop":
        side.drop()
        return {}
    if do not in ("start", "step"):
        raise ValueError(f"unknown request {do!r}: use start, step or drop")
    restart_peaks("cpu")
    seconds, tokens = getattr(side, do)(**request)
    return {"seconds": seconds, "tokens": tokens, "peak_rss_bytes": host_peak_rss_bytes()}


def most_steps(prompts: Sequence[Sequence[int]]) -> int:
    """Steps that reading the prompts may take; sequences that were read first decode in the later ones."""
    return len(prompts) + sum(map(len, prompts)) // STEP_TOKENS + 1


def collector_off() -> None:
    """While sequences live: nothing that is timed waits for a garbage collection."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collector_on() -> None:
    """Behind the last step: what the sequences left is collected."""
    gc.enable()
    gc.unfreeze()
    gc.collect()


def versions(*distributions: str) -> dict[str, str]:
    """What is installed of these. Absent where one is not."""
    try:
        return {name: importlib.metadata.version(name) for name in distributions}
    except importlib.metadata.PackageNotFoundError as error:
        raise Absent(f"{error.name} is not installed") from error


class Peer:
    """The other end of a worker, which is started here. Failed if it dies; `absent` says why if it never was."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            list(command),
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        self.about: dict[str, Any] = {}
        self.absent: str | None = None

    def ready(self) -> bool:
        """Wait for its first line; whether it can run."""
        first = self._heard()
        self.about, self.absent = first.get("about", {}), first.get("absent")
        return self.absent is None

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer. Failed with the worker's words when it could not."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._died()) from None
        answer = self._heard()
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """No more requests: the worker ends."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _heard(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._died())
        return json.loads(line)

    def _died(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        return f"{self.name} ended with {code}: {self._log.read()[-TAIL:].strip()}"
