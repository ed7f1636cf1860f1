"""A cache from another folder, with its own YAML and its own format, goes through the kit and through the whole command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.conformance.__main__ import main
from harness.conformance.doors import open_door
from harness.conformance.promise import NotApplicable, fare, promises

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "example_cache"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield FOLDER / "conf"
    sys.modules.pop("my_cache", None)


def test_its_yaml_keeps_every_promise(example):
    subject = open_door("mine", "cpu", 0, 10, [example])
    outcomes = [fare(one, subject) for one in promises()]
    assert [(outcome.promise.name, outcome.why) for outcome in outcomes if outcome.status == "failed"] == []
    assert sum(outcome.status == "passed" for outcome in outcomes) > 60


def test_its_class_goes_through_the_same_door(example, capsys):
    assert main(["my_cache:Concat", "--backend", "reference", "--kinds", "QR", "--examples", "3"]) == 0
    assert "conformance of my_cache:Concat" in capsys.readouterr().out


def test_its_parameter_is_checked(example):
    with pytest.raises(NotApplicable, match="limit=0: a sequence has 1 token or more"):
        open_door("mine", "cpu", 0, 1, [example]).varied({"limit": 0}).geometry()


def test_the_command_line_runs_it_from_its_own_folder(tmp_path):
    """Verified against the oracle on a model, timed against the reference, recorded."""
    model = ["model=random", "model.layers=2", "model.hidden=64", "model.intermediate=96", "model.head_dim=16", "model.query_heads=4"]
    quick = [
        "quality=off",
        "tracking=disabled",
        "measure.seconds=0.1",
        "workload.prompt_tokens=24",
        "workload.new_tokens=4",
        "dtype=float32",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "harness", "+strategy=mine", "--config-dir", str(FOLDER / "conf"), *model, *quick],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(FOLDER)))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "results" / "runs").glob("*/record.json")]
    assert record["status"] == "ok"
    assert record["strategy"]["name"] == "mine"
    assert record["strategy"]["codec_k"] == "half"
