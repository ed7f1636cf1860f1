"""The event log on disk: there before the first step, whole up to the last line, and the same events when it is read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.engine.events import DECODE, LENGTH, PREFILL, StepEvent, TokenEvent
from harness.measure.eventfile import FILE_NAME, EventFile, read_logs, read_rows, read_unfinished

ROOT = Path(__file__).resolve().parents[3]


def fill(log, steps: int = 3):
    log.arrived(0, 1.0, 4)
    for step in range(steps):
        fed, phase = ((4, 0), PREFILL) if step == 0 else ((0, 1), DECODE)
        event = StepEvent(step, 1.0 + step, 1.5 + step, 1, *fed, 0, 1, 80, 40, 20, 0)
        log.stepped(event, [TokenEvent(0, step, phase, step, 4 + step, 7)])
    log.ended(0, LENGTH, 9.0)
    return log


def test_what_is_read_is_what_was_logged(tmp_path):
    file = EventFile(tmp_path, {"id": "x"})
    file.phase("measure")
    logs = [("reference", fill(file.new_log("reference"))), ("twin", fill(file.new_log("twin"), 5))]
    file.close()
    found = read_logs(tmp_path)
    assert [side for side, _ in found] == ["reference", "twin"]
    for (_, wrote), (_, read) in zip(logs, found, strict=True):
        assert (read.requests, read.steps, read.tokens) == (wrote.requests, wrote.steps, wrote.tokens)


def test_every_line_is_there_as_soon_as_it_happened(tmp_path):
    file = EventFile(tmp_path, {"id": "x", "config": {"seed": 0}})
    assert [row["row"] for row in read_rows(tmp_path)] == ["run"]
    log = file.new_log("strategy")
    assert len(read_rows(tmp_path)) == 1
    fill(log, 2)
    assert [row["row"] for row in read_rows(tmp_path)] == ["run", "pass", "request", "step", "step", "end"]
    file.close()


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    EventFile(tmp_path, {"id": "x"}).close()
    with open(tmp_path / FILE_NAME, "a") as file:
        file.write('{"row": "st')
    assert [row["row"] for row in read_rows(tmp_path)] == ["run"]


def test_a_run_folder_has_one_event_file(tmp_path):
    EventFile(tmp_path, {}).close()
    with pytest.raises(FileExistsError):
        EventFile(tmp_path, {})


def test_a_folder_says_how_far_its_run_got(tmp_path):
    assert read_unfinished(tmp_path).sentence == "it had not started"
    file = EventFile(tmp_path, {"id": "x"})
    file.phase("verify")
    file.phase("measure")
    fill(file.new_log("strategy"), 5)
    file.close()
    assert read_unfinished(tmp_path).sentence == "it had reached measure and done 5 timed steps"


def test_five_steps_survive_the_death_of_the_process(tmp_path):
    program = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from harness.measure.eventfile import EventFile\n"
        "from tests.harness.measure.test_eventfile import fill\n"
        "file = EventFile(Path(sys.argv[1]), {'config': {'seed': 0}, 'environment': {'threads': 1}})\n"
        "file.phase('measure')\n"
        "fill(file.new_log('strategy'), 5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    rows = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert rows[0] == {"row": "run", "config": {"seed": 0}, "environment": {"threads": 1}}
    assert len([row for row in rows if row["row"] == "step"]) == 5
