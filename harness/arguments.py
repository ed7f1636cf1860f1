"""Makes what people type into what Hydra understands: `strategy=`, `+strategy=` and `++strategy=` mean the same, text stays text.

It does not know Hydra's classes, or which files a group has. Keys are passed on whether they exist or not, because Hydra would
let `+wrong=1` through: the configuration is checked as a whole, later, in one place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.errors import UserError

GROUPS = ("strategy", "reference", "model", "data", "workload", "quality", "measure", "tracking", "experiment", "sweep")
_VALUE_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p", "--info", "-i")
_OVERRIDE = re.compile(r"(?P<plus>\+{0,2})(?P<key>[A-Za-z_][\w.\-]*)=(?P<value>.*)", re.DOTALL)
_NOT_A_NAME = re.compile(r"[-+\d.][^,]*|true|false", re.IGNORECASE)  # Hydra would take these for numbers and truth values
_SWEEP_FUNCTION = re.compile(r"(glob|choice|range|interval|sort|shuffle|tag|extend_list)\(.*\)", re.DOTALL)


def hydra_arguments(arguments: Sequence[str], text_keys: frozenset[str]) -> list[str]:
    """`arguments` for Hydra's own parser, which wants overrides together. UserError for a group set to nothing or to a list.

    A list would merge the group's files into one configuration.
    """
    multirun = is_multirun(arguments)
    shows = [argument for argument in arguments if argument in ("--cfg", "-c", "--info", "-i")]
    if multirun and shows:
        raise UserError(f"{shows[0]} shows one configuration, and a sweep has several: leave out -m or sweep=NAME")
    overrides: list[str] = []
    flags: list[str] = []
    for argument in arguments:
        takes_value = bool(flags) and flags[-1] in _VALUE_FLAGS and not (flags[-1] in ("--info", "-i") and "=" in argument)
        _refuse_hyphens(argument, takes_value)
        if takes_value or argument.startswith("-"):
            flags.append(argument)
        else:
            overrides.append(_rewritten(argument, text_keys, multirun))
    return [*overrides, *flags]


def _refuse_hyphens(argument: str, is_value: bool) -> None:
    match = re.fullmatch(r"--?([A-Za-z_][\w.]*)=(.*)", argument, re.DOTALL)
    if match is not None and not is_value and f"--{match[1]}" not in _VALUE_FLAGS:
        raise UserError(f"{argument} is not an option: keys are set without hyphens, {match[1]}={match[2]}")


def is_multirun(arguments: Sequence[str]) -> bool:
    """Whether Hydra will run several points."""
    return any(argument in ("-m", "--multirun", "hydra.mode=MULTIRUN") for argument in arguments)


def _rewritten(argument: str, text_keys: frozenset[str], multirun: bool) -> str:
    match = _OVERRIDE.fullmatch(argument)
    if match is None or match["key"].split(".")[0] == "hydra":
        return argument
    key, value = match["key"], match["value"]
    if key in GROUPS:
        _refuse_odd_choice(key, value)
        name = f'"{value}"' if _NOT_A_NAME.fullmatch(value) else value
        return f"{'strategy@reference' if key == 'reference' else key}={name}"
    if key in text_keys:
        value = _text_values(value) if multirun else _text(value)
    return f"++{key}={value}"


def _refuse_odd_choice(group: str, value: str) -> None:
    if value in ("null", ""):
        raise UserError(f"{group}={value} chooses nothing: give a name with {group}=NAME")
    if value.startswith("["):
        names = value.strip("[]")
        raise UserError(f"{group}={value} would merge them into one: choose one with {group}=NAME, or run each with -m {group}={names}")


def _text_values(value: str) -> str:
    """A sweep over texts: split at commas that are not inside quotes or parentheses, unless it is one of Hydra's own functions."""
    if _SWEEP_FUNCTION.fullmatch(value):
        return value
    pieces = re.findall(r"""(?:'[^']*'|"[^"]*"|\([^)]*\)|[^,])+""", value)
    return ",".join(_text(piece) for piece in pieces)


def _text(value: str) -> str:
    """`value` in quotes, so that Hydra's grammar sees text: 1e-4, a=b and a,b stay letter for letter. null and ??? keep their meaning."""
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    if quoted or value in ("null", "???", ""):
        return value
    # Inside quotes a backslash is special only where a quote follows it.
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value)
    return f'"{escaped}"'
