"""Arrivals replayed from a trace file: Azure's CSV (times and lengths) or Mooncake's JSON lines (shared prefixes too).

It does not know the model or the clock. Traces hold no text: prompts are made from the token stream, and two prompts share
tokens exactly where the trace says that they share a prefix block.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.engine.request import Request
from harness.engine.workloads import Workload, at_least
from harness.errors import UserError

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for (Mooncake, Qin et al. 2025)
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # Splitwise, Patel et al. 2024
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True)
class Arrival:
    """One line of a trace. `blocks` names the prefix blocks of the prompt; empty = it shares nothing."""

    at_s: float
    prompt_tokens: int
    new_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trace(Workload):
    """The first `count` requests of a trace file (.csv: Azure, .jsonl: Mooncake).

    speed: 2 halves every gap. shrink: 8 divides every length, and the block that a shared prefix is made of, by 8, so that a
    long-context trace fits a small model. A request that is still too long is refused by the engine, by name.
    """

    path: str
    count: int = 32
    speed: float = 1.0
    shrink: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "count", "shrink")
        if not self.speed > 0:
            raise UserError(f"workload.speed={self.speed}: use a factor above 0")

    def requests(self, stream: Sequence[int], seed: int, context: int) -> list[Request]:
        arrivals = read_trace(self.path, self.count)
        block = max(1, round(MOONCAKE_BLOCK / self.shrink))
        made = []
        for id_, arrival in enumerate(arrivals):
            length = max(1, round(arrival.prompt_tokens / self.shrink))
            prompt = _prompt(stream, arrival.blocks, block, length, f"{seed}/{id_}")
            new = max(1, round(arrival.new_tokens / self.shrink))
            made.append(self.request(id_, prompt, new, seed, arrival_s=arrival.at_s / self.speed))
        return made


def read_trace(path: str, count: int) -> list[Arrival]:
    """The first `count` arrivals, the first at 0 s. UserError for a missing, empty or unknown file."""
    file = Path(path)
    readers = {".csv": _azure, ".jsonl": _mooncake}
    if file.suffix not in readers:
        raise UserError(f"trace {path!r} is neither .csv (Azure) nor .jsonl (Mooncake)")
    if not file.is_file():
        raise UserError(f"there is no trace file {path!r}")
    with file.open(encoding="utf-8", newline="") as lines:
        try:
            arrivals = readers[file.suffix](lines, count)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"trace {path!r} is not in the expected format: {error!r}") from error
    if not arrivals:
        raise UserError(f"trace {path!r} holds no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    return [Arrival(a.at_s - first_s, a.prompt_tokens, a.new_tokens, a.blocks) for a in arrivals]


def _azure(lines, count: int) -> list[Arrival]:
    when, prompt, new = AZURE_COLUMNS
    arrivals = []
    for row in csv.DictReader(lines):
        whole, _, fraction = row[when].partition(".")
        at_s = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
        arrivals.append(Arrival(at_s, int(row[prompt]), int(row[new])))
        if len(arrivals) == count:
            break
    return arrivals


def _mooncake(lines, count: int) -> list[Arrival]:
    when, prompt, new, blocks = MOONCAKE_KEYS
    arrivals = []
    for line in lines:
        if len(arrivals) == count:
            break
        if line.strip():
            row = json.loads(line)
            arrivals.append(Arrival(row[when] / 1000.0, int(row[prompt]), int(row[new]), tuple(row[blocks])))
    return arrivals


def _prompt(stream: Sequence[int], blocks: Sequence[int], block: int, length: int, own: str) -> tuple[int, ...]:
    """`length` tokens: each whole block is the slice that its id names; what no whole block covers is this request's own."""
    tokens: list[int] = []
    for id_ in blocks:
        if len(tokens) + block > length:
            break
        tokens += _piece(stream, f"block {id_}", block)
    return tuple(tokens + _piece(stream, f"own {own}", length - len(tokens)))


def _piece(stream: Sequence[int], name: str, length: int) -> list[int]:
    """`length` tokens from a place in the stream that only `name` decides, going round at its end."""
    if not stream:
        raise UserError("the text has no tokens: give a text to take prompts from")
    start = random.Random(name).randrange(len(stream))
    return [stream[(start + i) % len(stream)] for i in range(length)]
