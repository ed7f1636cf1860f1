"""The command line: Hydra composes a configuration, every point of it is checked, run and counted.

The only file that imports Hydra. It does not know how a run is done, and imports nothing heavy until one starts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.arguments import hydra_arguments, is_multirun
from harness.errors import UserError
from harness.manual import manual
from harness.schema import text_keys
from harness.sweep import Sweep, expanded

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit codes
_HERE = Path(__file__).resolve().parent
CONFIG_FOLDER = next((str(folder) for folder in (_HERE / "_conf", _HERE.parent / "conf") if (folder / "config.yaml").is_file()), "conf")


class PointEnded(Exception):
    """A point of a sweep that ended badly in a process of its own: how Hydra's launchers hear of it."""


def main() -> None:
    """The console script and `python -m harness`."""
    sys.exit(cli(sys.argv[1:]))


def cli(arguments: Sequence[str]) -> int:
    """Run what `arguments` ask for and return the exit code: 0 all right, 1 failed or incorrect, 2 refused, 130 interrupted."""
    if "--help" in arguments or "-h" in arguments:
        print(manual([Path(CONFIG_FOLDER), *_extra_folders(arguments)]), end="")
        return OK
    codes: list[int] = []
    process = os.getpid()
    sweep: Sweep | None = None

    def point(config: DictConfig) -> None:
        code = _run_point(config, sweep)
        if os.getpid() != process:
            if code != OK:
                raise PointEnded(f"exit code {code}")
            return
        codes.append(code)

    try:
        typed, name = expanded(arguments, [*_extra_folders(arguments), Path(CONFIG_FOLDER)])
        ready = hydra_arguments(typed, text_keys())
        if is_multirun(typed):
            sweep = Sweep(name, _say)
            # Hydra has to write its multirun.yaml somewhere; each record holds all that it would say.
            with tempfile.TemporaryDirectory(prefix="kvbench-sweep-") as folder:
                _compose_and_call([f"hydra.sweep.dir={folder}", *ready], point)
        else:
            _compose_and_call(ready, point)
    except (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        _complain(one_sentence(error))
        return REFUSED
    except PointEnded as error:
        _complain(f"a point of the sweep ended badly: {error}")
        return FAILED
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on from here" if sweep is not None else "interrupted")
        return INTERRUPTED
    if sweep is not None:
        print(sweep.ended(), end="")
    return _exit_code(codes)


def _extra_folders(arguments: Sequence[str]) -> list[Path]:
    """Folders given with --config-dir."""
    joined = [argument.partition("=")[2] for argument in arguments if argument.startswith("--config-dir=")]
    return [Path(folder) for folder in [*joined, *(value for flag, value in pairwise(arguments) if flag in ("--config-dir", "-cd"))]]


def _exit_code(codes: list[int]) -> int:
    """2 only if nothing ran: once something did, a refused point is a failed sweep."""
    if not codes or set(codes) == {OK}:
        return OK
    if len(codes) > 1:
        bad = len([code for code in codes if code != OK])
        _complain(f"{bad} of {len(codes)} points were refused, failed or incorrect")
    return REFUSED if set(codes) == {REFUSED} else FAILED


def _run_point(config: DictConfig, sweep: Sweep | None) -> int:
    """One configuration, from check to record. Never raises, so that a sweep goes on; Ctrl-C excepted."""
    runtime = HydraConfig.get()
    if sweep is None:
        return _outcome(config, runtime, None)[0]
    if sweep.started == 0:
        sweep.total, sweep.swept = _points(runtime)
    label = sweep.label([override.lstrip("+") for override in runtime.overrides.task])
    sweep.begin(label)
    code, sweep.states[label] = _outcome(config, runtime, sweep)
    return code


def _outcome(config: DictConfig, runtime: Any, sweep: Sweep | None) -> tuple[int, str]:
    """(exit code, what became of it) of one configuration."""
    try:
        plain = _plain(config, runtime) if sweep is None else sweep.grouped(_plain(config, runtime))
        from harness.build import parse

        settings = parse(plain)
        from rich.console import Console

        from harness.run import run

        console = Console()
        record = run(plain, console) if sweep is None else sweep.record(plain, settings, lambda: run(plain, console))
    except UserError as error:
        _complain(str(error))
        return REFUSED, f"refused: {error}"
    except Exception as error:  # the record, if there is one, says so too; whoever has to mend it needs the place
        traceback.print_exc()
        return FAILED, f"failed: {type(error).__name__}: {_first_line(error)}"
    if record is None:
        return OK, "left to another process"
    return OK if record["status"] == "ok" else FAILED, record["status"]


def _points(runtime: Any) -> tuple[int | None, tuple[str, ...]]:
    """How many points this sweep has (None where a sweeper decides that as it goes), and the keys that differ between them."""
    if not runtime.sweeper._target_.endswith(".BasicSweeper"):
        return None, ()
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides(sys.argv[1 : 1 + _flags_begin(sys.argv[1:])])
    swept = tuple(override.key_or_group for override in overrides if override.is_sweep_override())
    return sum(len(batch) for batch in BasicSweeper.split_arguments(overrides, None)), swept


def _flags_begin(arguments: Sequence[str]) -> int:
    """Overrides stand first, flags and their values after them."""
    return next((place for place, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))


def _plain(config: DictConfig, runtime: Any) -> dict[str, Any]:
    """The configuration as plain dicts and lists, interpolations resolved."""
    for group, choice in runtime.runtime.choices.items():
        if not isinstance(choice, str) and choice is not None:
            raise UserError(f"{group}={list(choice)} would merge them into one: choose one with {group}=NAME")
    if "strategy" not in config:
        raise UserError(_strategies())
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be resolved: {_first_line(error)}") from error
    return plain


def _strategies() -> str:
    """What to choose from: every strategy file on the search path, with the line it says of itself."""
    loader = GlobalHydra.instance().config_loader()
    names = loader.get_group_options("strategy")
    width = max((len(name) for name in names), default=0)
    lines = [f"  {name:<{width}}  {_summary(loader, name)}".rstrip() for name in names]
    return "\n".join(["no strategy given: choose one with +strategy=NAME, or all of them with -m '+strategy=glob(*)'", *lines])


def _summary(loader: Any, name: str) -> str:
    try:
        found = loader.repository.load_config(f"strategy/{name}")
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return f"(cannot be read: {one_sentence(error)})"
    return str(found.config.get("summary", "")) if found is not None else ""


def _compose_and_call(arguments: list[str], point: Any) -> None:
    """Hydra's own main, with its faults raised instead of printed, and no state left behind."""
    task = hydra.main(version_base="1.3", config_path=CONFIG_FOLDER, config_name="config")(point)
    with _as_command(arguments):
        GlobalHydra.instance().clear()
        try:
            task()
        finally:
            GlobalHydra.instance().clear()


@contextmanager
def _as_command(arguments: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and raises to its caller only when HYDRA_FULL_ERROR says so."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["kvbench", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def one_sentence(error: Exception) -> str:
    """What went wrong in the user's own terms; Hydra's advice to add a + is dropped, since + adds nothing here."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None and error.options is not None:
        group, _, name = str(error.missing_cfg_file).partition("/")
        hint = "; a file, folder or hub id goes into model.source, with model=gguf or model=hf" if group == "model" else ""
        return f"{group}={name!r} is unknown: choose one of {', '.join(error.options)}{hint}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r} ({_first_line(error)}): write key=value, and quote a value with special characters"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    message = _first_line(error)
    if message.startswith("Ambiguous value"):
        return f"{message}: to run several points add -m, to give one value with commas put it in quotes of its own"
    if error.__cause__ is not None and isinstance(error.__cause__, OmegaConfBaseException):
        message += f" ({_first_line(error.__cause__)})"
    return message


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _complain(message: str) -> None:
    print(f"kvbench: {message}", file=sys.stderr)
