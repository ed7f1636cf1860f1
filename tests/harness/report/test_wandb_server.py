"""An online run, a sync of an offline one and a report, end to end against a server of our own on the loopback device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness.report import comparison, tracking
from harness.report.__main__ import main
from harness.report.tracking import start_tracking
from harness.schema import Tracking
from tests.harness.report.test_report import folder, record  # noqa: F401 (a fixture)
from tests.harness.report.wandb_file import read_back
from tests.harness.report.wandb_stub import ENTITY, KEY, Stub


@pytest.fixture
def server(tmp_path, monkeypatch):
    stub = Stub()
    home = tmp_path / "home"
    home.mkdir()
    for name, value in (("WANDB_BASE_URL", stub.url), ("WANDB_API_KEY", KEY), ("HOME", str(home)), ("no_proxy", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    for name in ("WANDB_MODE", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield stub
    stub.close()


def track(folder, mode, said=None):  # noqa: F811
    said = [] if said is None else said
    tracker = start_tracking(
        Tracking(mode, "kvbench", None, "sweep 1"), folder, "r1", {"strategy": {"name": "paged"}}, "run", ("paged",), said.append
    )
    for step in range(4):
        tracker.log({"itl_s": 0.5 + step, "context": 20 + step}, step)
    tracker.histogram("itl_s_histogram", [0.5, 1.5])
    tracker.table("samples", ["side", "wall_s"], [["strategy", 1.0], ["reference", 2.0]])
    tracker.summarise({"metrics": {"decode_tok_per_s": 7.5}})
    (folder / "record.json").write_text('{"schema": 1}')
    tracker.keep(folder / "record.json", "record")
    return tracker


def check(stub: Stub) -> None:
    """The server has everything that `track` logged, under the labels of the run."""
    (run,) = stub.runs.values()
    assert (run["upsert"]["displayName"], run["upsert"]["groupName"], run["upsert"]["jobType"]) == ("r1", "sweep 1", "run")
    assert run["upsert"]["tags"] == ["paged"]
    assert run["config"]["strategy"] == {"name": "paged"}
    assert [(row["_step"], row["itl_s"], row["context"]) for row in run["history"] if "itl_s" in row] == [
        (step, 0.5 + step, 20 + step) for step in range(4)
    ]
    assert any("itl_s_histogram" in row for row in run["history"])
    assert run["summary"]["metrics"]["decode_tok_per_s"] == 7.5
    assert stub.uploads["artifact/record.json"] == b'{"schema": 1}'
    assert json.loads(stub.uploads["artifact/samples.table.json"])["data"] == [["strategy", 1.0], ["reference", 2.0]]
    assert {made["artifactTypeName"] for made in stub.artifacts} == {"record", "run_table"}


def test_an_online_run_arrives_whole(server, tmp_path):
    said = []
    tracker = track(tmp_path / "r1", "online", said)
    assert tracker.mode == "online"
    tracker.finish(failed=False)
    assert said == []
    check(server)
    assert [run["exit"] for run in server.runs.values()] == [0]


def test_an_offline_run_arrives_whole_when_it_is_synced(server, tmp_path):
    track(tmp_path / "r1", "offline").finish(failed=True)
    assert server.operations == []
    (place,) = (tmp_path / "r1" / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "sync", str(place)]
    done = subprocess.run(command, env={**os.environ, "WANDB_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    check(server)
    assert [run["exit"] for run in server.runs.values()] == [1]


def test_a_server_that_goes_away_stops_nobody_and_loses_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "_FINISH_S", 0.5)
    tracker = track(tmp_path / "r1", "online")
    server.close()
    server.close = lambda: None
    tracker.finish(failed=False)
    (file,) = (tmp_path / "r1").glob("wandb/run-*/run-*.wandb")
    file.parent.rename(file.parent.with_name("offline-run-x"))
    assert len([row for row in read_back(tmp_path / "r1")["history"] if "itl_s" in row]) == 4


def test_a_report_is_saved_on_the_server(server, folder, capsys):  # noqa: F811
    pytest.importorskip("wandb_workspaces")
    place = folder(record("paged"), record("none", number=1))
    assert main([place, "--wandb", "kvbench"]) == 0
    assert f"saved at {server.url}/{ENTITY}/kvbench/reports/" in capsys.readouterr().out
    sent = json.loads(server.views[-1]["spec"])
    assert panels(sent) >= {"Scatter Plot", "Run History Line Plot", "Bar Chart", "Parallel Coordinates Plot", "Run Comparer"}


def panels(spec: dict) -> set[str]:
    (grid,) = [block for block in spec["blocks"] if block["type"] == "panel-grid"]
    return {panel["viewType"] for panel in grid["metadata"]["panelBankSectionConfig"]["panels"]}


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(comparison, "obstacle", lambda: "nobody is logged in to W&B")


def test_without_a_server_the_report_is_written_down(alone, folder, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("wandb_workspaces")
    place = folder(record("paged"), record("int8", number=1))
    assert main([place, "--wandb", "kvbench"]) == 0
    assert "not saved on a server, because nobody is logged in" in capsys.readouterr().out
    written = json.loads((tmp_path / comparison.SPEC_NAME).read_text())
    assert written["project"]["name"] == "kvbench"
    spec = written["spec"]
    assert panels(spec) == {"Scatter Plot", "Run History Line Plot", "Bar Chart", "Parallel Coordinates Plot", "Run Comparer"}
    text = json.dumps(spec)
    for name in ("kv_bytes_per_token", "quality.perplexity", "itl_s", "decode_tok_per_s.low", "decode_tok_per_s.high", "context"):
        assert name in text
    assert "| paged |" in text


def test_a_server_that_will_not_have_it_is_no_loss(folder, tmp_path, monkeypatch, capsys):  # noqa: F811
    pytest.importorskip("wandb_workspaces")

    def refuse(*_):
        raise RuntimeError("no such project")

    monkeypatch.setattr(comparison, "obstacle", lambda: None)
    build = comparison.build
    monkeypatch.setattr(
        comparison, "build", lambda records, project, entity: refuse() if entity is None else build(records, project, entity)
    )
    assert main([folder(record("paged")), "--wandb", "kvbench"]) == 0
    assert "the server did not take it (RuntimeError: no such project)" in capsys.readouterr().out
    assert (tmp_path / comparison.SPEC_NAME).is_file()
