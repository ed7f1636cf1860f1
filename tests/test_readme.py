"""What README.md tells a reader to type is what the code takes. It knows the text's code blocks and nothing else."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)  # (language, text) of each
LINES = [line.split("#")[0].strip() for language, block in BLOCKS if not language for line in block.splitlines()]
RUNS = [line for line in LINES if line.startswith("python -m harness ")]
TOOLS = [line for line in LINES if re.match(r"python -m harness\.\w+ ", line)]
MAKES = [line for line in LINES if line.startswith("make ")]


def test_the_readme_has_commands_of_every_sort():
    assert len(RUNS) >= 3
    assert {line.split()[2] for line in TOOLS} >= {"harness.report", "harness.survey", "harness.conformance"}
    assert {line.split()[1] for line in MAKES} >= {"run", "test"}


@pytest.mark.parametrize("line", RUNS)
def test_every_run_in_the_readme_composes(line):
    from harness.cli import cli

    arguments = shlex.split(line)[3:]
    swept = [argument for argument in arguments if argument == "-m" or argument.startswith("sweep=") or "glob" in argument]
    if swept:
        arguments = [argument for argument in arguments if argument not in swept] + ["+strategy=paged"]
    assert cli([*arguments, "--cfg", "job"]) == 0


@pytest.mark.parametrize("line", MAKES)
def test_every_make_target_in_the_readme_exists(line):
    assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("line", TOOLS)
def test_every_tool_in_the_readme_is_there(line):
    module = line.split()[2].split(".")[1]
    assert (ROOT / "harness" / f"{module}.py").is_file() or (ROOT / "harness" / module / "__main__.py").is_file()


def test_every_strategy_file_is_named_in_the_readme():
    names = {file.stem for file in (ROOT / "conf" / "strategy").glob("*.yaml")}
    missing = {name for name in names if f"`{name}`" not in TEXT and not (name.startswith("paged_") and "`paged_*`" in TEXT)}
    assert missing == set()
