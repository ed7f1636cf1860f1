"""Every experiment file is a claim that runs, and says what it claims; every sweep file composes to the points that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import CONFIG_FOLDER
from tests.harness import tiny

EXPERIMENTS = sorted(Path(CONFIG_FOLDER, "experiment").glob("*.yaml"))
SWEEPS = sorted(file.stem for file in Path(CONFIG_FOLDER, "sweep").glob("*.yaml"))
RAGGED = (
    *("workload.batch=2", "workload.prompt_tokens_min=4", "workload.prompt_tokens_max=30"),
    *("workload.new_tokens_min=2", "workload.new_tokens_max=5"),
)
SMALL = {
    "slabs_waste": RAGGED,
    "prefixes_are_found_again": (*tiny.WORK, "workload.batch=2", "workload.prefix_tokens=32"),
    "a_window_stops_growing": (*tiny.WORK, "strategy.window=24"),
}


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_an_experiment_runs_by_its_name(command, launch_folder, file):
    done = command(f"experiment={file.stem}", *tiny.MODEL, *tiny.LIMITS, *SMALL.get(file.stem, tiny.WORK))
    assert done.code == 0, done.err
    (path,) = launch_folder.rglob("record.json")
    assert json.loads(path.read_text())["status"] == "ok"


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_an_experiment_says_what_it_claims(file):
    assert "# Claim: " in file.read_text() or file.stem == "example"


def test_a_shared_prefix_is_found_and_saves_feeding_it(command, launch_folder):
    command("experiment=prefixes_are_found_again", *tiny.MODEL, *tiny.LIMITS, *SMALL["prefixes_are_found_again"])
    (path,) = launch_folder.rglob("record.json")
    fed = json.loads(path.read_text())["metrics"]["tokens_fed"]
    assert fed < 2 * (32 + 20 + 3)


POINTS = {"strategies": None, "contexts": 12, "batches": 9, "models": 18}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_file_names_its_points(command, runs, name):
    more = ["strategy=paged,none"] if name == "strategies" else []
    done = command(f"+sweep={name}", *more)
    assert done.code == 0, done.err
    assert len(runs) == (2 if name == "strategies" else POINTS[name])
    assert f"point 1 of {len(runs)}" in done.err
    assert {config["tracking"]["group"] for config in runs} == {name}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_file_begins_with_what_to_type(name):
    assert "What to type: sweep=" + name in Path(CONFIG_FOLDER, "sweep", f"{name}.yaml").read_text().splitlines()[0]
