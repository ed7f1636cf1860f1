"""The GPU check's own script, run dry: every step runs on the CPU in Triton's interpreter, with tiny shapes, and nothing claims a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_dry_run_takes_every_step(tmp_path):
    out = tmp_path / "check.json"
    command = ["bash", str(ROOT / "tests" / "gpu" / "check.sh"), "--dry-run", "--out", str(out)]
    done = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["gpu"] is None and "their times mean nothing" in done.stdout
    assert {step["status"] for step in found["agreement"]} == {"ok"}
    assert {row["kernel"] for row in found["timings"]["attention"]} == {"paged", "dense", "torch sdpa"}
    (graph,) = found["graphs"]
    assert graph["status"] == "ok" and graph["steps"]["replayed"] > 0
