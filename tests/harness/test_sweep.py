"""Sweeps: what is done is not done again, what fails stops nothing, nobody runs a point twice, and the end is a table."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import phases
from harness.errors import UserError
from harness.measure.record import load_records
from harness.points import claimed, point_id
from harness.report.__main__ import main as report
from harness.sweep import Sweep, expanded
from tests.harness import tiny

ROOT = Path(__file__).resolve().parents[2]
TRACKED = (*(argument for argument in tiny.RUN if not argument.startswith("tracking=")), "tracking=offline")


def records(folder: Path) -> dict[str, dict]:
    return {record["id"]: record for record in load_records(folder / "results").records}


def points(folder: Path) -> list[str]:
    return sorted(record["point"] for record in records(folder).values())


def test_a_finished_sweep_is_skipped_and_force_repeats_it(command, launch_folder):
    sweep = ("-m", "strategy=paged,none", *tiny.RUN)
    first = command(*sweep)
    assert first.code == 0
    before = records(launch_folder)
    again = command(*sweep)
    assert again.code == 0
    assert again.err.count("skipped: ") == 2
    assert records(launch_folder).keys() == before.keys()
    assert again.out.count("| paged |") == first.out.count("| paged |") == 1
    forced = command(*sweep, "+force=true")
    assert (forced.code, len(records(launch_folder))) == (0, 4)
    assert len(set(points(launch_folder))) == 2


def test_a_single_run_is_never_skipped(command, launch_folder):
    for _ in range(2):
        assert command("strategy=none", *tiny.RUN).code == 0
    assert len(records(launch_folder)) == 2


def test_another_text_is_another_point(command, launch_folder):
    text = launch_folder / "text.txt"
    text.write_text("one word after another " * 200)
    sweep = ("-m", "strategy=none", "data=text", "data.path=text.txt", *tiny.RUN)
    assert command(*sweep).code == 0
    text.write_text("another word after one " * 200)
    assert "skipped" not in command(*sweep).err
    assert "skipped" in command(*sweep).err
    assert len(records(launch_folder)) == 2


def test_a_point_that_fails_leaves_a_record_and_is_tried_again(command, launch_folder, monkeypatch):
    quality = phases.quality

    def fail(strategy, *rest):
        if strategy.settings.name == "none":
            raise RuntimeError("planted")
        return quality(strategy, *rest)

    monkeypatch.setattr(phases, "quality", fail)
    sweep = ("-m", "strategy=paged,none,contiguous", *tiny.RUN)
    done = command(*sweep)
    assert done.code == 1
    assert [record["status"] for record in records(launch_folder).values()] == ["ok", "failed", "ok"]
    assert "| strategy=none | failed: RuntimeError: planted |" in done.out
    assert "1 of 3 points" in done.err
    monkeypatch.undo()
    monkeypatch.chdir(launch_folder)
    again = command(*sweep)
    assert again.code == 0
    assert again.err.count("skipped: ") == 2
    assert again.out.count("| none |") == 1
    assert "failed" not in again.out


def test_a_refused_point_is_counted_and_leaves_nothing(command, launch_folder):
    done = command("-m", "strategy=paged", "strategy.page_size=16,0", *tiny.RUN)
    assert done.code == 1
    assert len(records(launch_folder)) == 1
    assert "| strategy.page_size=0 | refused: " in done.out


def test_progress_says_how_many_points_are_left(command, runs):
    said = command("-m", "strategy=paged,none", "seed=1,2").err
    assert "point 1 of 4: strategy=paged seed=1" in said
    assert "point 4 of 4, at most about 0 s left: strategy=none seed=2" in said


def test_the_same_command_is_one_group_and_another_is_another(command, runs):
    command("-m", "strategy=paged,none", "results_dir=a")
    command("-m", "strategy=paged,none", "results_dir=b")
    command("-m", "strategy=paged,none", "seed=1,2")
    command("-m", "strategy=paged,none", "tracking.group=mine")
    groups = [config["tracking"]["group"] for config in runs]
    assert len(set(groups[:4])) == 1
    assert len({groups[0], groups[4], groups[8]}) == 3
    assert groups[8] == "mine"


def test_only_what_can_change_a_number_makes_another_point():
    config = {"strategy": {"name": "paged", "summary": "a"}, "seed": 0, "results_dir": "a", "tracking": {"mode": "offline"}, "force": False}
    same = {**config, "strategy": {"summary": "b", "name": "paged"}, "results_dir": "b", "tracking": {"mode": "disabled"}, "force": True}
    assert point_id(config) == point_id(same)
    assert point_id(config) != point_id({**config, "seed": 1})


def test_a_sweep_file_stands_for_what_it_says_and_what_is_typed_wins(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "mine.yaml").write_text("strategy: [a, b]\nseed: 3\nworkload.ignore_eos: true\nbudget_bytes: null\n")
    typed, name = expanded(["+sweep=mine", "+seed=4"], [tmp_path])
    assert name == "mine"
    assert typed == ["-m", "strategy=a,b", "workload.ignore_eos=true", "budget_bytes=null", "+seed=4"]


@pytest.mark.parametrize("value", ["a,b", "[a]", "", "null", "nowhere"])
def test_a_sweep_that_is_not_one_file_is_refused(tmp_path, value):
    with pytest.raises(UserError, match="sweep="):
        expanded([f"sweep={value}"], [tmp_path])


def test_time_left_is_that_of_the_points_that_really_ran():
    said = []
    sweep = Sweep("s", said.append, total=4)
    sweep.begin("first")
    sweep.run_s.append(120.0)
    sweep.begin("second")
    assert said[0] == "\npoint 1 of 4: first"
    assert said[1] == "\npoint 2 of 4, at most about 6 min left: second"


def hold(folder: str, connection) -> None:
    with claimed(folder, "p") as ours:
        connection.send(ours)
        connection.recv()


@pytest.fixture
def holder(tmp_path):
    """Another process that is at point p until it is sent a word."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=hold, args=(str(tmp_path), there))
    process.start()
    assert here.poll(120)
    assert here.recv()
    yield process, here
    process.kill()
    process.join()


def test_a_point_somebody_is_at_is_left_alone_until_they_are_done(holder, tmp_path):
    process, connection = holder
    with claimed(tmp_path, "p") as ours:
        assert not ours
    with claimed(tmp_path, "another") as ours:
        assert ours
    connection.send("go")
    process.join()
    for _ in range(2):
        with claimed(tmp_path, "p") as ours:
            assert ours


def test_a_claim_dies_with_its_process(holder, tmp_path):
    process, _ = holder
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with claimed(tmp_path, "p") as ours:
        assert ours


def test_a_point_that_is_claimed_elsewhere_is_not_run(command, runs, monkeypatch):
    from contextlib import contextmanager

    @contextmanager
    def taken(*_):
        yield False

    monkeypatch.setattr("harness.sweep.claimed", taken)
    done = command("-m", "strategy=paged,none")
    assert (done.code, list(runs)) == (0, [])
    assert done.out.count("left to another process") == 2


def test_killed_in_the_middle_and_started_again_it_ends_with_the_same_points(command, launch_folder, capsys):
    sweep = ("-m", "strategy=none,paged", *tiny.MODEL, *tiny.LIMITS, "workload.prompt_tokens=20", "workload.new_tokens=60")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *sweep], cwd=launch_folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    results = launch_folder / "results" / "runs"
    try:
        while not any(steps(folder) >= 5 for folder in second(results)):
            assert process.poll() is None, "it ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    (killed,) = second(results)
    rows = [json.loads(line) for line in (killed / "events.jsonl").read_text().split("\n")[:-1]]
    assert rows[0]["config"]["strategy"]["name"] == "paged"
    assert rows[0]["environment"]["packages"]["torch"]
    assert len([row for row in rows if row["row"] == "step"]) >= 5
    survivors = records(launch_folder)
    assert len(survivors) == 1
    assert report([str(results), "--markdown"]) == 0
    shown = capsys.readouterr()
    assert "| none |" in shown.out
    assert "| paged |" not in shown.out
    assert "it had reached measure" in shown.err
    done = command(*sweep)
    assert done.code == 0
    assert done.err.count("skipped: ") == 1
    assert survivors.keys() < records(launch_folder).keys()
    assert len(set(points(launch_folder))) == len(points(launch_folder)) == 2


def second(results: Path) -> list[Path]:
    """Folders of runs that are not over, once one is."""
    folders = sorted(results.glob("2*"))
    return [folder for folder in folders[1:] if not (folder / "record.json").exists()]


def steps(folder: Path) -> int:
    events = folder / "events.jsonl"
    return events.read_text().count('"row": "step"') if events.exists() else 0


def test_runs_in_one_process_reach_wandb_apart_and_the_crashed_one_is_marked(command, launch_folder, monkeypatch):
    from tests.harness.report.wandb_file import read_back

    quality = phases.quality

    def fail(strategy, *rest):
        if strategy.settings.name == "none":
            raise RuntimeError("planted")
        return quality(strategy, *rest)

    monkeypatch.setattr(phases, "quality", fail)
    assert command("-m", "strategy=paged,none,contiguous", *TRACKED).code == 1
    told = [read_back(folder) for folder in sorted((launch_folder / "results" / "runs").glob("2*"))]
    assert [one["config"]["strategy"]["name"] for one in told] == ["paged", "none", "contiguous"]
    assert [len([row for row in one["history"] if "step_s" in row]) for one in told] == [4, 4, 4]
    assert [one["exit_code"] for one in told] == [0, 1, 0]
    assert len({one["run"].run_group for one in told}) == 1
    paged = told[0]
    assert [(row["context"], row["batch"]) for row in paged["history"] if "itl_s" in row] == [(21, 1), (22, 1), (23, 1)]
    assert any(key.startswith("itl_s_histogram") for row in paged["history"] for key in row)
    assert {kind for kind, _ in paged["artifacts"]} == {"run_table", "record"}
    assert paged["summary"]["metrics"]["kv_bytes_per_token"] == 512
    assert set(paged["run"].tags) == {"paged", "random-llama", "steady"}


def test_results_lie_in_the_runs_own_folders_wherever_the_command_is_typed(command, launch_folder, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    for folder, arguments in ((launch_folder, ["strategy=none"]), (other, ["-m", "strategy=none,contiguous"])):
        (folder / "text.txt").write_text("a relative path counts from where the command is typed " * 100)
        monkeypatch.chdir(folder)
        assert command(*arguments, *TRACKED, "data=text", "data.path=text.txt").code == 0
        assert {path.name for path in folder.iterdir()} == {"text.txt", "results"}
        runs = list((folder / "results" / "runs").iterdir())
        assert len(runs) == len(arguments)
        assert all({path.name for path in run.iterdir()} == {"record.json", "events.jsonl", "wandb"} for run in runs)


def test_a_hub_text_without_a_network_is_one_sentence_and_the_builtin_text_needs_none(command):
    done = command("strategy=none", *tiny.RUN, "data=wikitext2")
    assert done.code == 2
    assert done.created == ()
    assert len(done.err.strip().splitlines()) == 1
    assert command("strategy=none", *tiny.RUN, "data=builtin").code == 0
