"""What W&B was told, read back from its own file."""

from __future__ import annotations

import pytest

from harness.report.tracking import start_tracking
from harness.schema import Tracking
from tests.harness.report.wandb_file import read_back


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder in which nothing may appear, and no way to the network."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def start(folder, mode="offline", run_id="r1", value=1, said=None):
    said = [] if said is None else said
    tracking = Tracking(mode, "kvbench", None, "sweep 1")
    return start_tracking(tracking, folder, run_id, {"strategy": {"name": "paged", "page_size": value}}, "run", ("a", "b"), said.append)


def test_an_offline_run_keeps_config_series_summary_and_labels(tmp_path, home):
    tracker = start(tmp_path / "r1")
    for step in range(4):
        tracker.log({"itl_s": 0.5 + step}, step)
    tracker.summarise({"perplexity": 18.075, "verdict": "faster"})
    tracker.finish(failed=False)
    told = read_back(tmp_path / "r1")
    assert told["config"]["strategy"] == {"name": "paged", "page_size": 1}
    assert [(row["_step"], row["itl_s"]) for row in told["history"]] == [(step, 0.5 + step) for step in range(4)]
    assert (told["summary"]["perplexity"], told["summary"]["verdict"]) == (18.075, "faster")
    assert told["exit_code"] == 0
    run = told["run"]
    assert (run.project, run.display_name, run.run_group, run.job_type, list(run.tags)) == ("kvbench", "r1", "sweep 1", "run", ["a", "b"])
    assert list(home.iterdir()) == []


def test_runs_in_one_process_stay_apart_and_a_failed_one_is_marked(tmp_path, home):
    for value, failed in enumerate([False, True, False]):
        tracker = start(tmp_path / f"r{value}", run_id=f"r{value}", value=value)
        for step in range(4):
            tracker.log({"x": value}, step)
        tracker.finish(failed)
    told = [read_back(tmp_path / f"r{value}") for value in range(3)]
    assert [one["config"]["strategy"]["page_size"] for one in told] == [0, 1, 2]
    assert [[row["x"] for row in one["history"]] for one in told] == [[0] * 4, [1] * 4, [2] * 4]
    assert [one["exit_code"] for one in told] == [0, 1, 0]


def test_a_run_that_was_left_open_does_not_swallow_the_next(tmp_path, home):
    start(tmp_path / "r1").log({"x": 1}, 0)
    tracker = start(tmp_path / "r2", run_id="r2")
    tracker.log({"x": 2}, 0)
    tracker.finish(failed=False)
    assert [row["x"] for row in read_back(tmp_path / "r2")["history"]] == [2]


def test_disabled_tracking_writes_nothing(tmp_path, home):
    tracker = start(tmp_path / "r1", "disabled")
    tracker.log({"x": 1}, 0)
    tracker.summarise({"y": 2})
    tracker.finish(failed=True)
    assert tracker.mode == "disabled"
    assert not (tmp_path / "r1").exists()


def test_online_without_a_server_goes_on_offline_and_says_so(tmp_path, home, monkeypatch):
    monkeypatch.setattr("harness.report.tracking.answers", lambda url, wait_s: False)
    said = []
    tracker = start(tmp_path / "r1", "online", said=said)
    tracker.log({"x": 1}, 0)
    tracker.finish(failed=False)
    assert tracker.mode == "offline"
    assert len(said) == 1
    assert "cannot be reached" in said[0]
    assert read_back(tmp_path / "r1")["history"][0]["x"] == 1


def test_online_without_a_login_goes_on_offline_and_says_so(tmp_path, home, monkeypatch):
    monkeypatch.setattr("harness.report.tracking.answers", lambda url, wait_s: True)
    said = []
    tracker = start(tmp_path / "r1", "online", said=said)
    tracker.finish(failed=False)
    assert tracker.mode == "offline"
    assert "nobody is logged in" in said[0]


def test_the_users_own_folders_are_given_back(tmp_path, home, monkeypatch):
    import os

    monkeypatch.setenv("WANDB_CACHE_DIR", "mine")
    tracker = start(tmp_path / "r1")
    assert os.environ["WANDB_CACHE_DIR"] == str(tmp_path / "r1" / "wandb")
    tracker.finish(failed=False)
    assert os.environ["WANDB_CACHE_DIR"] == "mine"
    assert "WANDB_DATA_DIR" not in os.environ
