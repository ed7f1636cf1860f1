"""`pytest tests/benchmarks` as it is typed: what it writes, what it leaves out, and that nothing is timed unless asked for."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from harness.gate import read

ROOT = Path(__file__).resolve().parents[2]
SOME = ("tests/benchmarks/test_planning.py", "-k", "paged")


def typed(*options: str) -> subprocess.CompletedProcess:
    """A few benchmarks, in a process of their own."""
    command = [sys.executable, "-m", "pytest", *SOME, "-q", "-p", "no:cacheprovider", *options]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # not a worker of whoever runs this test
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """What the benchmarks write when they are asked to."""
    path = tmp_path_factory.mktemp("measured") / "measured.json"
    done = typed("-p", "no:xdist", "--benchmark-enable", f"--benchmark-json={path}")
    assert done.returncode == 0, done.stdout
    return path


def test_a_run_holds_bytes_and_speeds_for_the_gate(written):
    entries = read(written).entries
    assert sorted(name.split("::")[1] for name in entries) == [f"test_planning[{name}]" for name in ("paged", "paged_prefix")]
    assert all(entry.bytes["stored_bytes"] > 0 and entry.speed.freedom == 11 for entry in entries.values())


def test_a_run_is_grouped_and_holds_no_raw_samples(written):
    for benchmark in json.loads(written.read_text())["benchmarks"]:
        assert benchmark["group"] == "planning on the host"
        assert benchmark["stats"]["rounds"] == 60
        assert "data" not in benchmark["stats"]


def test_a_run_names_no_host_and_no_folder(written):
    text = written.read_text()
    assert str(ROOT) not in text
    assert platform.node() == "" or f'"{platform.node()}"' not in text


def test_plain_benchmark_compare_reads_it(written):
    done = typed("-p", "no:xdist", "--benchmark-enable", f"--benchmark-compare={written}", "--benchmark-compare-fail=median:1000000%")
    assert done.returncode == 0, done.stdout
    assert "NOW" in done.stdout
    assert "machine_info is different" not in done.stdout + done.stderr


def test_nothing_is_timed_unless_asked_for(pytestconfig):
    """The setting that this very run got from pyproject.toml."""
    assert pytestconfig.getoption("benchmark_disable")
