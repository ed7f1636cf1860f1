"""`python -m harness.gate CURRENT.json`: fails when benchmarks got worse than the committed baseline.

It reads and writes files; what is worse is decided in `harness/measure/gate.py`. It measures nothing itself.

    python -m harness.gate CURRENT.json                        against results/baseline
    python -m harness.gate A.json B.json C.json                several runs of the same code, judged as one
    python -m harness.gate CURRENT.json --baseline FILE.json   against one file, measured on this class of machine
    python -m harness.gate H1.json H2.json H3.json --baseline B1.json B2.json B3.json --in-turns
                                                               the speed of two commits, measured in turns: B1 H1 B2 H2 B3 H3
    python -m harness.gate CURRENT.json --update all           write both parts of the baseline
    python -m harness.gate CURRENT.json --update portable      write only what does not depend on the machine

A baseline has two parts: `portable.json` (bytes and KL, the same on every machine) and `<machine class>/benchmarks.json` (what
pytest-benchmark wrote there, without raw samples). On a machine whose class has no baseline, or one measured under other
conditions, bytes and KL are gated and speed is not, and the output says so.

Exit codes: 0 pass, 1 regression, 2 refused (these files cannot be compared), 3 inconclusive (too noisy to judge speed).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.measure.gate import (
    EXIT_CODES,
    INCONCLUSIVE,
    MIN_RUNS,
    NOISE_LIMIT,
    PASS,
    REFUSED,
    Entry,
    Finding,
    Mean,
    Speed,
    changes,
    judge_content,
    judge_presence,
    judge_speed,
    of_runs,
    overall,
    settle,
    unmeasured_speed,
)

BASELINES = Path(__file__).resolve().parents[1] / "results" / "baseline"
PORTABLE, BY_MACHINE = "portable.json", "benchmarks.json"


@dataclass(frozen=True)
class Measured:
    """One file of benchmarks. machine and conditions are None in the portable part of a baseline."""

    path: Path
    machine: str | None
    conditions: dict[str, object] | None  # what else a speed depends on: versions, kernels, threads
    data_sha256: str  # of everything that determines the inputs
    entries: dict[str, Entry]
    raw: dict[str, Any]


def read(path: Path) -> Measured:
    """The benchmarks in a file. UserError if it is missing, is no such file, or holds none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"{path} does not exist: write it with pytest tests/benchmarks -p no:xdist --benchmark-enable --benchmark-json={path}"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): give a file that --benchmark-json wrote") from error
    try:
        info = raw.get("machine_info", {"machine": None, "conditions": None})
        entries = {benchmark["fullname"]: _entry(benchmark["extra_info"]) for benchmark in raw["benchmarks"]}
        found = Measured(path, info["machine"], info["conditions"], raw["data_sha256"], entries, raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} was not written by tests/benchmarks ({error} is missing or wrong): measure again with them") from error
    if not entries:
        raise UserError(f"{path} holds no benchmark: run tests/benchmarks with --benchmark-enable and without xdist")
    return found


def together(runs: Sequence[Measured]) -> Measured:
    """Runs of the same code as one. UserError if they are not that: other inputs, machine, conditions, benchmarks or bytes."""
    first = runs[0]
    for other in runs[1:]:
        same = [
            (run.data_sha256, run.machine, run.conditions, {name: entry.bytes for name, entry in run.entries.items()})
            for run in (first, other)
        ]
        if same[0] != same[1]:
            raise UserError(
                f"{other.path} is no second run of what {first.path} measured: give files of one machine and one state of the code"
            )
    speeds = of_runs([_speeds(run) for run in runs])
    entries = {name: replace(entry, speed=speeds.get(name)) for name, entry in first.entries.items()}
    raw = copy.deepcopy(first.raw)
    for benchmark in raw["benchmarks"]:
        speed = entries[benchmark["fullname"]].speed
        if speed is not None:
            benchmark["extra_info"]["against_calibration"] = asdict(speed)
    return replace(first, entries=entries, raw=raw)


def _speeds(measured: Measured) -> dict[str, Speed]:
    return {name: entry.speed for name, entry in measured.entries.items() if entry.speed is not None}


def _entry(extra: dict[str, Any]) -> Entry:
    kl, speed = extra.get("kl_nats"), extra.get("against_calibration")
    return Entry(extra.get("bytes"), None if kl is None else Mean(**kl), None if speed is None else Speed(**speed))


def check_comparable(baseline: Measured, current: Measured, speed: bool) -> None:
    """UserError where the two, or their speeds, cannot be compared."""
    if baseline.data_sha256 != current.data_sha256:
        raise UserError(
            f"{current.path} was measured on other inputs (checksum {current.data_sha256[:12]}) than {baseline.path} "
            f"({baseline.data_sha256[:12]}): write a new baseline with `make baseline`"
        )
    if speed and baseline.machine != current.machine:
        raise UserError(
            f"{baseline.path} is from machine class {baseline.machine!r} and {current.path} from {current.machine!r}: "
            "speeds are compared on one class of machine only; give a baseline of this one"
        )
    if speed and baseline.conditions != current.conditions:
        raise UserError(f"{baseline.path} was measured under other conditions ({_differences(baseline, current)}): measure it again")


def judge(baseline: Measured, current: Measured) -> list[Finding]:
    """What `current` shows against `baseline` in bytes and KL, and which benchmarks there are. UserError: not comparable."""
    check_comparable(baseline, current, speed=False)
    findings = judge_presence(baseline.entries, current.entries)
    for name in baseline.entries.keys() & current.entries.keys():
        findings += judge_content(name, baseline.entries[name], current.entries[name])
    return findings


def judge_speeds(baseline: Measured, current: Measured) -> list[Finding]:
    """The speeds of two sessions. UserError: not comparable."""
    check_comparable(baseline, current, speed=True)
    return _findings([(baseline, current)], settle(changes(_speeds(baseline), _speeds(current))))


def judge_in_turns(baseline: Sequence[Measured], current: Sequence[Measured]) -> list[Finding]:
    """The speeds of two commits: baseline[i] and current[i] were measured one after the other. UserError: not comparable."""
    if len(baseline) != len(current):
        raise UserError(f"{len(baseline)} files of the baseline and {len(current)} of now are not in turns: give as many of each")
    turns = list(zip(baseline, current, strict=True))
    for before, after in turns:
        check_comparable(before, after, speed=True)
    return _findings(turns, of_runs([changes(_speeds(before), _speeds(after)) for before, after in turns]))


def _findings(turns: Sequence[tuple[Measured, Measured]], changed: Mapping[str, Speed]) -> list[Finding]:
    """What follows from changes, and which benchmarks of both sides have none."""
    findings = [judge_speed(name, change) for name, change in changed.items()]
    before, after = turns[0]
    for name in (before.entries.keys() & after.entries.keys()) - changed.keys():
        side = "baseline" if any(name not in _speeds(turn[0]) for turn in turns) else "current run"
        findings.append(unmeasured_speed(name, side))
    return findings


def judge_folder(folder: Path, current: Measured) -> tuple[list[Finding], str | None]:
    """Everything against the committed baseline, and why speed was not judged (None: it was)."""
    findings = judge(read(folder / PORTABLE), current)
    path = folder / str(current.machine) / BY_MACHINE
    if not path.exists():
        return findings, f"no baseline for machine class {current.machine!r} (`make baseline` on this machine writes one)"
    baseline = read(path)
    if baseline.machine == current.machine and baseline.conditions != current.conditions:
        return findings, f"{path} was measured under other conditions ({_differences(baseline, current)})"
    return findings + judge_speeds(baseline, current), None


def update(folder: Path, current: Measured, speed: bool) -> list[Path]:
    """Make `current` the baseline -> the files written. UserError, and nothing written, when its speeds are missing."""
    benchmarks = [
        {"fullname": name, "extra_info": {key: entry["extra_info"].get(key) for key in ("bytes", "kl_nats")}}
        for name, entry in sorted((benchmark["fullname"], benchmark) for benchmark in current.raw["benchmarks"])
    ]
    written = {folder / PORTABLE: {"data_sha256": current.data_sha256, "benchmarks": benchmarks}}
    if speed:
        if current.machine is None or any(entry.speed is None for entry in current.entries.values()):
            raise UserError(f"{current.path} has benchmarks without a speed: measure with --benchmark-enable and without xdist")
        written[folder / current.machine / BY_MACHINE] = current.raw
    for path, document in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(beside, path)
    return list(written)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command -> its exit code."""
    options = _parser().parse_args(arguments)
    try:
        runs = [read(path) for path in options.current]
        current = together(runs)
        folder = options.baseline[0] if len(options.baseline) == 1 and not options.baseline[0].is_file() else None
        if options.in_turns and folder is not None:
            raise UserError("--in-turns needs --baseline FILE.json ...: what was measured of the other commit, in turns with this one")
        if options.update is not None:
            if folder is None:
                raise UserError("--update writes a folder of baselines: give one folder with --baseline, or none")
            return _update(folder, current, speed=options.update == "all")
        if folder is not None and folder.is_dir():
            findings, not_judged = judge_folder(folder, current)
        else:
            before = [read(path) for path in options.baseline]
            baseline, not_judged = together(before), None
            findings = judge_in_turns(before, runs) if options.in_turns else judge(baseline, current) + judge_speeds(baseline, current)
    except UserError as error:
        print(f"gate: refused: {error}", file=sys.stderr)
        return EXIT_CODES[REFUSED]
    return _say(findings, not_judged)


def _parser() -> argparse.ArgumentParser:
    about, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m harness.gate", description=about, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("current", type=Path, nargs="+", help="what --benchmark-json wrote; several files: runs of the same code")
    parser.add_argument(
        "--baseline", type=Path, nargs="+", default=[BASELINES], help="a folder of baselines, or files (default: results/baseline)"
    )
    parser.add_argument("--in-turns", action="store_true", help="judge only the speed of what both commits have, measured in turns")
    parser.add_argument("--update", choices=("all", "portable"), help="make CURRENT the baseline instead of judging it")
    return parser


def _update(folder: Path, current: Measured, speed: bool) -> int:
    speeds = _speeds(current)
    if speed and speeds:
        unknown = any(found.spread is None for found in speeds.values())
        typical = statistics.median(found.noise for found in speeds.values())
        if unknown or typical > NOISE_LIMIT:
            why = f"fewer than {MIN_RUNS} runs" if unknown else f"the typical noise is {typical:.1%}, above {NOISE_LIMIT:.0%}"
            print(f"gate: inconclusive: no baseline was written: {why}; add runs, or measure on a quieter machine")
            return EXIT_CODES[INCONCLUSIVE]
        print(f"gate: the typical noise is {typical:.1%}, the largest {max(found.noise for found in speeds.values()):.1%}")
    before = read(folder / PORTABLE).entries if (folder / PORTABLE).exists() else {}
    for path in update(folder, current, speed):
        print(f"gate: wrote {path}")
    for name in sorted(before.keys() - current.entries.keys()):
        print(f"gate: no longer in the baseline: {name}")
    return EXIT_CODES[PASS]


def _say(findings: Sequence[Finding], not_judged: str | None) -> int:
    verdict = overall(findings)
    for finding in sorted(findings, key=lambda found: (found.verdict, found.aspect, found.benchmark)):
        if finding.verdict != PASS:
            print(f"{finding.verdict:12} {finding.aspect:8} {finding.benchmark} {finding.text}")
    counts = Counter((finding.aspect, finding.verdict) for finding in findings)
    parts = [f"{aspect} {count} {outcome}" for (aspect, outcome), count in sorted(counts.items())]
    print(f"gate: {verdict}: {', '.join(parts)}")
    if not_judged is not None:
        print(f"gate: SPEED WAS NOT GATED: {not_judged}. Bytes and KL were.")
    return EXIT_CODES[verdict]


def _differences(baseline: Measured, current: Measured) -> str:
    before, now = ({} if side.conditions is None else side.conditions for side in (baseline, current))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return ", ".join(f"{key}: {before.get(key)} then, {now.get(key)} now" for key in keys)


if __name__ == "__main__":
    sys.exit(main())
