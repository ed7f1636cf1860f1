"""The steps of check.sh, one after another, and the table and JSON of what they found. Exit code 1 when anything is wrong."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.api import Ops

OUT = Path("results/gpu/check.json")
SWEEP = ("+strategy=glob(*)", "backend=triton", "device=cuda", "dtype=bfloat16", "tracking=disabled", "results_dir=results/gpu/runs")
MEMORY_CHECK_S, SWEEP_S = 120, 240


def main() -> int:
    options = parser().parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("there is no GPU here: run this on one, or with --dry-run to check the script itself", file=sys.stderr)
        return 2
    device = "cpu" if options.dry_run else "cuda"
    from tests.gpu.agreement import agreements
    from tests.gpu.device import on_device

    found = {"machine": machine(device), "agreement": agreements(on_device(device), options.dry_run or options.memory_check)}
    if not options.memory_check:
        found |= later_steps(device, options.dry_run)
    show(found)
    out = options.out or (None if options.dry_run or options.memory_check else OUT)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    failed = [step for step in found["agreement"] if step["status"] == "wrong"]
    failed += [step for step in found.get("graphs", []) + found.get("programs", []) if step["status"] == "wrong"]
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tests/gpu/check.sh", description="What only a GPU can show, in under ten minutes.")
    made.add_argument("--dry-run", action="store_true", help="on the CPU in Triton's interpreter, with tiny shapes")
    made.add_argument("--memory-check", action="store_true", help="a small run only: what the memory checker runs")
    made.add_argument("--out", type=Path, help=f"where the JSON goes (default {OUT})")
    return made


def later_steps(device: str, dry_run: bool) -> dict:
    from kernels.backend import resolve
    from tests.gpu.timings import measured

    ops = resolve("triton", device)
    timed, replayed = measured(ops, device, dry_run), graphs(ops, device, dry_run)
    if dry_run:
        return {"timings": timed, "graphs": replayed, "programs": []}
    memory_check = [sys.executable, "-m", "tests.gpu.check", "--memory-check"]
    programs = [
        program("compute-sanitizer", ["compute-sanitizer", "--error-exitcode", "9", *memory_check], MEMORY_CHECK_S),
        program("sweep", [sys.executable, "-m", "harness", "-m", *SWEEP], SWEEP_S),
    ]
    return {"timings": timed, "graphs": replayed, "programs": programs}


def graphs(ops: Ops, device: str, dry_run: bool) -> list[dict]:
    """Replayed decode steps against launched ones. A dry run has a stand-in for the device's graphs."""
    from harness.engine.graphs import CudaGraphs
    from harness.measure.clock import DeviceClock
    from tests.gpu.graphs import checked
    from tests.harness.engine.stub_graphs import Repeats

    return checked(device, ops, Repeats(ops) if dry_run else CudaGraphs(), DeviceClock(device), dry_run)


def program(name: str, command: list[str], limit_s: int) -> dict:
    """ok, absent, wrong or unfinished: how a program of its own ended."""
    if shutil.which(command[0]) is None:
        return {"program": name, "status": "absent", "message": f"{command[0]} is not installed"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"program": name, "status": "unfinished", "message": f"stopped after {limit_s} s"}
    status = "ok" if done.returncode == 0 else "wrong"
    return {"program": name, "status": status, "message": (done.stdout + done.stderr)[-4000:]}


def machine(device: str) -> dict:
    import torch

    name = None if device == "cpu" else torch.cuda.get_device_name()
    return {"gpu": name, "torch": torch.__version__, "triton": version("triton")}


def show(found: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    console.print(found["machine"])
    statuses = [step["status"] for step in found["agreement"]]
    console.print(
        f"kernels against references: {statuses.count('ok')} ok, {statuses.count('refused')} refused, {statuses.count('wrong')} wrong"
    )
    if "graphs" in found:
        console.print(
            f"replayed steps against launched ones: {sum(step['status'] == 'ok' for step in found['graphs'])} of {len(found['graphs'])} ok"
        )
    for step in found["agreement"] + found.get("graphs", []) + found.get("programs", []):
        if step["status"] != "ok":
            console.print(step, markup=False)
    if "timings" not in found:
        return
    if found["machine"]["gpu"] is None:
        console.print(f"decode attention: {len(found['timings']['attention'])} measurements ran; no GPU, so their times mean nothing")
        return
    table = Table(title=f"decode attention; a copy moves {found['timings']['bandwidth_gb_s']:.3g} GB/s")
    for heading in ("kernel", "codec", "batch", "context", "us", "GB/s", "of bandwidth"):
        table.add_column(heading)
    for row in found["timings"]["attention"]:
        figures = (
            (row["failed"], "", "")
            if "failed" in row
            else (f"{row['seconds'] * 1e6:.4g}", f"{row['gb_s']:.4g}", f"{row['of_bandwidth']:.0%}")
        )
        table.add_row(row["kernel"], row["codec"], str(row["batch"]), str(row["context"]), *figures)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
