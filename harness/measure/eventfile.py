"""The event log on disk: one JSON line for each step as it ends, so that a run which dies leaves all it had done.

It does not know what is run. The first line says what the run is (configuration and environment included) and is there before
the first step; a file without its record belongs to a run that never ended, and no report averages it in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from harness.engine.events import EventLog, StepEvent, TokenEvent

FILE_NAME = "events.jsonl"


class EventFile:
    """Lines go to the operating system one by one: what was written survives the death of the process."""

    def __init__(self, folder: Path, header: Mapping[str, object]) -> None:
        self.folder = folder
        self._file: TextIO = open(folder / FILE_NAME, "x", encoding="utf-8", buffering=1)  # 1 = flushed at each line's end
        self.write({"row": "run", **header})

    def write(self, row: Mapping[str, object]) -> None:
        """One line."""
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def phase(self, name: str) -> None:
        """A phase of the run begins: verify, audit, measure, profile, quality."""
        self.write({"row": "phase", "name": name})

    def new_log(self, side: str) -> EventLog:
        """A log whose rows are written here too; `side` is strategy, reference or twin."""
        return WrittenLog(self, side)

    def close(self) -> None:
        self._file.close()


class WrittenLog(EventLog):
    """An event log that writes each row down when it happens."""

    def __init__(self, file: EventFile, side: str) -> None:
        super().__init__()
        self._file = file
        self._side = side

    def arrived(self, request_id: int, arrival_s: float, prompt_tokens: int) -> None:
        if not self.requests:
            self._file.write({"row": "pass", "side": self._side})
        super().arrived(request_id, arrival_s, prompt_tokens)
        self._file.write({"row": "request", "request_id": request_id, "arrival_s": arrival_s, "prompt_tokens": prompt_tokens})

    def stepped(self, step: StepEvent, tokens: Sequence[TokenEvent]) -> None:
        super().stepped(step, tokens)
        emitted = [[token.request_id, token.index, token.context, token.token_id, token.phase] for token in tokens]
        self._file.write({"row": "step", **asdict(step), "tokens": emitted})

    def ended(self, request_id: int, reason: str, end_s: float) -> None:
        super().ended(request_id, reason, end_s)
        self._file.write({"row": "end", "request_id": request_id, "reason": reason, "end_s": end_s})


@dataclass(frozen=True)
class Unfinished:
    """How far a run without a record got."""

    header: Mapping[str, object] | None  # None where even the first line is missing
    phase: str | None
    steps: int

    @property
    def sentence(self) -> str:
        if self.header is None:
            return "it had not started"
        return f"it had reached {self.phase or 'its start'} and done {self.steps} timed steps"


def read_unfinished(folder: Path) -> Unfinished:
    """What a run folder without a record says of its run. A last line that was cut off is left out."""
    header, phase, steps = None, None, 0
    for row in read_rows(folder):
        if row["row"] == "run":
            header = row
        elif row["row"] == "phase":
            phase = str(row["name"])
        elif row["row"] == "step":
            steps += 1
    return Unfinished(header, phase, steps)


def read_rows(folder: Path) -> list[dict[str, object]]:
    """Every whole line of the folder's event file; none where there is no file."""
    path = folder / FILE_NAME
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole]


def read_logs(folder: Path) -> list[tuple[str, EventLog]]:
    """(side, log) of each pass of the workload in the file, in order; the last one may be cut short."""
    logs: list[tuple[str, EventLog]] = []
    for row in read_rows(folder):
        kind = row.pop("row")
        if kind == "pass":
            logs.append((str(row["side"]), EventLog()))
        elif kind == "request":
            logs[-1][1].arrived(**row)
        elif kind == "step":
            tokens = [
                TokenEvent(request, row["step"], phase, index, context, id_) for request, index, context, id_, phase in row.pop("tokens")
            ]
            logs[-1][1].stepped(StepEvent(**row), tokens)
        elif kind == "end":
            logs[-1][1].ended(**row)
    return logs
