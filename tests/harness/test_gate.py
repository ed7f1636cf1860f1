"""`python -m harness.gate` on files: its exit codes, what it refuses, and the two parts of a baseline."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest

from harness.gate import BY_MACHINE, PORTABLE, main

NAMES = ("tests/benchmarks/test_x.py::test_step[paged]", "tests/benchmarks/test_x.py::test_step[int8]")


def document() -> dict:
    """What pytest-benchmark writes for two benchmarks, as far as the gate reads it."""
    extra = {
        "bytes": {"stored_bytes": 4096},
        "kl_nats": {"mean": 0.1, "low": 0.09, "high": 0.11, "samples": 96},
        "against_calibration": {"log_ratio": 0.5, "noise": 0.005, "freedom": 11, "runs": 4, "spread": 0.01},
    }
    conditions = {"torch": "2.13.0", "threads": 1}
    return {
        "machine_info": {"machine": "cpu-of-ours-2c", "conditions": conditions},
        "data_sha256": "a" * 64,
        "benchmarks": [{"fullname": name, "stats": {"median": 0.001}, "extra_info": copy.deepcopy(extra)} for name in NAMES],
    }


@pytest.fixture
def gate(tmp_path, capsys):
    """gate(current, *options) -> exit code and output. The folder of baselines is tmp_path / "baseline"."""

    def run(current: dict, *options: str) -> tuple[int, str]:
        path = tmp_path / "current.json"
        path.write_text(json.dumps(current))
        given = options if "--baseline" in options else ("--baseline", str(tmp_path / "baseline"), *options)
        code = main([str(path), *given])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.fixture
def baseline(gate, tmp_path):
    """A committed baseline of document(), both parts."""
    (tmp_path / "baseline").mkdir()
    assert gate(document(), "--update", "all")[0] == 0
    return tmp_path / "baseline"


def changed(change) -> dict:
    """document() after change(its first benchmark's extra_info)."""
    current = document()
    change(current["benchmarks"][0]["extra_info"])
    return current


def test_no_change_passes(gate, baseline):
    code, said = gate(document())
    assert (code, "gate: pass" in said, "NOT GATED" in said) == (0, True, False)


REGRESSIONS = {
    "speed": lambda extra: extra["against_calibration"].update(log_ratio=0.5 + math.log(1.3)),
    "bytes": lambda extra: extra["bytes"].update(stored_bytes=4097),
    "kl": lambda extra: extra["kl_nats"].update(mean=0.2, low=0.18, high=0.22),
}


@pytest.mark.parametrize("aspect", REGRESSIONS)
def test_one_regression_fails_alone_and_is_named(gate, baseline, aspect):
    code, said = gate(changed(REGRESSIONS[aspect]))
    lines = [line.split() for line in said.splitlines() if line.startswith("regression")]
    assert code == 1
    assert [(line[1], line[2]) for line in lines] == [(aspect, NAMES[0])]


@pytest.mark.parametrize("aspect", REGRESSIONS)
def test_one_file_is_a_baseline_too(gate, baseline, aspect):
    path = str(baseline / "cpu-of-ours-2c" / BY_MACHINE)
    assert gate(document(), "--baseline", path)[0] == 0
    assert gate(changed(REGRESSIONS[aspect]), "--baseline", path)[0] == 1


def test_in_turns_against_a_folder_is_refused(gate, baseline):
    code, said = gate(document(), "--in-turns")
    assert (code, "--baseline FILE.json" in said) == (2, True)


def test_noise_is_inconclusive_with_an_exit_code_of_its_own(gate, baseline):
    code, said = gate(changed(lambda extra: extra["against_calibration"].update(noise=0.1)))
    assert (code, "quieter machine" in said) == (3, True)


def test_a_regression_beside_noise_is_a_regression(gate, baseline):
    current = changed(lambda extra: extra["against_calibration"].update(noise=0.1))
    current["benchmarks"][1]["extra_info"]["bytes"]["stored_bytes"] = 1
    assert gate(current)[0] == 1


@pytest.mark.parametrize("side", ["baseline", "current"])
def test_a_benchmark_missing_on_either_side_fails(gate, baseline, side):
    shorter, whole = document(), document()
    del shorter["benchmarks"][1]
    if side == "baseline":
        assert gate(shorter, "--update", "all")[0] == 0
    code, said = gate(whole if side == "baseline" else shorter)
    assert (code, NAMES[1] in said) == (1, True)


def test_another_machine_class_is_gated_on_bytes_and_kl_and_says_that_speed_was_not(gate, baseline):
    elsewhere = changed(REGRESSIONS["speed"])
    elsewhere["machine_info"]["machine"] = "cpu-of-theirs-64c"
    code, said = gate(elsewhere)
    assert (code, "SPEED WAS NOT GATED" in said, "cpu-of-theirs-64c" in said) == (0, True, True)
    elsewhere["benchmarks"][0]["extra_info"]["bytes"]["stored_bytes"] += 1
    assert gate(elsewhere)[0] == 1


def runs(tmp_path, name: str, log_ratios: list[tuple[float, float]]) -> list[str]:
    """One file for each run: the log ratios of the two benchmarks in it."""
    paths = []
    for number, levels in enumerate(log_ratios):
        one = document()
        for benchmark, level in zip(one["benchmarks"], levels, strict=True):
            benchmark["extra_info"]["against_calibration"].update(log_ratio=level, runs=1, spread=None)
        paths.append(tmp_path / f"{name}.{number}.json")
        paths[-1].write_text(json.dumps(one))
    return [str(path) for path in paths]


STEADY = [(0.5, 0.7), (0.502, 0.698), (0.498, 0.702), (0.5, 0.7)]


def test_what_differs_between_runs_is_noise(tmp_path, capsys):
    """The second benchmark is steady, and yet it cannot be judged beside one that jumps: a few runs say too little about one."""
    before = runs(tmp_path, "before", [(0.5, 0.7), (0.8, 0.7), (0.6, 0.7), (0.5, 0.7)])
    assert main([*before, "--baseline", *before]) == 3
    assert capsys.readouterr().out.count("noise 10.0%") == 2  # sqrt(2) * sqrt((0.1^2 + 0.2^2 + 0 + 0.1^2) / 3 / 4)
    steady = runs(tmp_path, "steady", STEADY)
    slower = runs(tmp_path, "slower", [(first, second + 0.26) for first, second in STEADY])
    assert main([*steady, "--baseline", *steady]) == 0
    assert main([*slower, "--baseline", *steady]) == 1
    out = capsys.readouterr().out
    assert out.count("regression   speed") == 1
    assert "test_step[int8] takes 1.297x" in out


def test_one_run_is_held_to_the_spread_of_the_baselines_runs(tmp_path, capsys):
    before = runs(tmp_path, "before", STEADY)
    slower = [(0.5, 0.7), (0.76, 0.7), (1.0, 0.7)]  # 1, 1.3 and 1.65 times
    assert [main([path, "--baseline", *before]) for path in runs(tmp_path, "quiet", slower)] == [0, 1, 1]
    jumpy = runs(tmp_path, "jumpy", [(0.5, 0.7), (0.58, 0.7), (0.42, 0.7), (0.5, 0.7)])
    assert [main([path, "--baseline", *jumpy]) for path in runs(tmp_path, "jumps", slower)] == [3, 3, 1]


def test_too_few_runs_on_both_sides_are_inconclusive(tmp_path, capsys):
    few = runs(tmp_path, "few", STEADY[:3])
    assert main([*few, "--baseline", *few]) == 3
    assert "too few runs" in capsys.readouterr().out


def test_two_commits_in_turns_are_held_against_each_other_by_the_speed_of_what_both_have(tmp_path, capsys):
    """The machine moves by 1.5x from turn to turn; what is compared was measured within one."""
    moved = [(first + drift, second + drift) for (first, second), drift in zip(STEADY, (0.0, 0.4, -0.3, 0.1), strict=True)]
    base, same, slow = (
        runs(tmp_path, name, [(first + more, second) for first, second in moved])
        for name, more in (("base", 0.0), ("same", 0.004), ("slow", 0.26))
    )
    for path in (*same, *slow):
        grown = json.loads(Path(path).read_text())
        grown["benchmarks"][0]["extra_info"]["bytes"]["stored_bytes"] = 1
        grown["benchmarks"].append(grown["benchmarks"][0] | {"fullname": "tests/benchmarks/test_x.py::test_step[new]"})
        Path(path).write_text(json.dumps(grown))
    assert main([*same, "--baseline", *base, "--in-turns"]) == 0
    assert main([*slow, "--baseline", *base, "--in-turns"]) == 1
    assert capsys.readouterr().out.count("regression   speed") == 1
    assert main([*slow, "--baseline", *base[1:], "--in-turns"]) == 2


def test_runs_of_other_code_are_not_put_together(tmp_path, gate, capsys):
    first, second = runs(tmp_path, "run", [(0.5, 0.5), (0.5, 0.5)])
    other = document()
    other["benchmarks"][0]["extra_info"]["bytes"]["stored_bytes"] = 1
    (tmp_path / "run.1.json").write_text(json.dumps(other))
    assert main([first, second]) == 2
    assert "is no second run of what" in capsys.readouterr().err


def test_other_conditions_are_not_compared_and_named(gate, baseline):
    current = changed(REGRESSIONS["speed"])
    current["machine_info"]["conditions"]["torch"] = "2.14.0"
    code, said = gate(current)
    assert (code, "torch: 2.13.0 then, 2.14.0 now" in said) == (0, True)


@pytest.mark.parametrize(("key", "value"), [("machine", "cpu-of-theirs-64c"), ("conditions", {"torch": "2.14.0", "threads": 1})])
def test_a_file_from_another_machine_is_refused(gate, baseline, key, value):
    current = document()
    current["machine_info"][key] = value
    code, said = gate(current, "--baseline", str(baseline / "cpu-of-ours-2c" / BY_MACHINE))
    assert (code, said.startswith("gate: refused: ")) == (2, True)


def test_a_baseline_filed_under_the_wrong_machine_is_refused(gate, baseline):
    (baseline / "cpu-of-ours-2c").rename(baseline / "cpu-of-theirs-64c")
    current = document()
    current["machine_info"]["machine"] = "cpu-of-theirs-64c"
    assert gate(current)[0] == 2


def test_other_inputs_are_refused(gate, baseline):
    code, said = gate(document() | {"data_sha256": "b" * 64})
    assert (code, "other inputs" in said) == (2, True)


@pytest.mark.parametrize("current", [{}, {"benchmarks": []}, {"benchmarks": [], "data_sha256": "a"}, []])
def test_a_file_that_holds_no_benchmarks_is_refused(gate, baseline, current):
    assert gate(current)[0] == 2


def test_a_file_that_nothing_wrote_is_refused_and_the_command_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    assert "pytest tests/benchmarks -p no:xdist" in capsys.readouterr().err


def test_no_baseline_at_all_is_refused(gate, tmp_path):
    (tmp_path / "baseline").mkdir()
    assert gate(document())[0] == 2


def test_the_portable_part_holds_no_time_and_no_machine(baseline):
    text = (baseline / PORTABLE).read_text()
    assert all(word not in text for word in ("stats", "machine", "calibration", "conditions"))


def test_the_portable_part_can_be_written_alone(gate, baseline):
    lighter = changed(lambda extra: extra["bytes"].update(stored_bytes=2048))
    before = (baseline / "cpu-of-ours-2c" / BY_MACHINE).read_bytes()
    assert gate(lighter, "--update", "portable")[0] == 0
    assert (baseline / "cpu-of-ours-2c" / BY_MACHINE).read_bytes() == before
    assert gate(lighter)[0] == 0


@pytest.mark.parametrize(
    ("noise", "spread", "code"), [(0.019, 0.038, 0), (0.021, 0.042, 3), (0.005, None, 3)], ids=["quiet", "noisy", "too few runs"]
)
def test_only_quiet_speeds_of_several_runs_become_a_baseline(gate, baseline, noise, spread, code):
    before = {path: path.read_bytes() for path in baseline.rglob("*.json")}
    current = document()
    for benchmark in current["benchmarks"]:
        benchmark["extra_info"]["against_calibration"].update(noise=noise, spread=spread)
    assert gate(current, "--update", "all")[0] == code
    assert ({path: path.read_bytes() for path in baseline.rglob("*.json")} == before) == (code == 3)


def test_speeds_that_nobody_took_do_not_become_a_baseline(gate, baseline):
    assert gate(changed(lambda extra: extra.pop("against_calibration")), "--update", "all")[0] == 2
