"""The command line, run inside the test's process and in a folder of its own."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Typed:
    """What a command did."""

    code: int
    out: str
    err: str
    created: tuple[str, ...]  # what is new in the folder it was typed in


@pytest.fixture
def launch_folder(tmp_path, monkeypatch):
    """An empty folder that commands are typed in."""
    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def command(launch_folder, capsys):
    """command("+strategy=paged", ...) -> what it did. Nothing is stubbed."""

    def run(*arguments: str) -> Typed:
        from harness.cli import cli

        before = set(launch_folder.rglob("*"))
        capsys.readouterr()
        code = cli(arguments)
        out, err = capsys.readouterr()
        created = sorted(str(path.relative_to(launch_folder)) for path in set(launch_folder.rglob("*")) - before)
        return Typed(code, out, err, tuple(created))

    return run


@pytest.fixture
def runs(monkeypatch):
    """Replaces the run itself: the configurations that would have been run, in order. `runs.outcome` decides how each ends."""

    class Runs(list):
        outcome = staticmethod(lambda config: {"status": "ok"})

    seen = Runs()

    def run(config: dict, console: object) -> dict:
        seen.append(config)
        return seen.outcome(config)

    monkeypatch.setitem(sys.modules, "harness.run", types.SimpleNamespace(run=run))
    return seen
