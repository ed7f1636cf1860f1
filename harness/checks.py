"""Checks plain values against type hints: unknown keys, missing values, wrong types, each told in one sentence.

It does not know which keys a configuration has, nor Hydra, torch or how anything is built from the values.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from harness.errors import UserError

MISSING = "???"  # how a YAML says that the user has to give a value
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def typed(schema: type, given: Mapping[str, Any], prefix: str) -> Any:
    """`schema(**given)` once every key and type fits; `prefix` is how the keys are typed on the command line ('' = top level)."""
    hints = typing.get_type_hints(schema)
    names = [field.name for field in dataclasses.fields(schema)]
    refuse_unknown(given, names, prefix)
    for field in dataclasses.fields(schema):
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in given and not optional:
            raise UserError(f"{_full(prefix, field.name)} is missing: give it {_wanted(hints[field.name])}")
    values = {name: coerced(_full(prefix, name), value, hints[name]) for name, value in given.items()}
    try:
        return schema(**values)
    except ValueError as error:  # a dataclass that knows no UserError, such as a strategy's own parameter type
        raise UserError(f"{prefix} is refused: {error}") from error


def refuse_unknown(given: Iterable[str], allowed: list[str], prefix: str) -> None:
    """UserError for the first key that is not allowed; it lists those that are."""
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {_full(prefix, near[0])}?" if near else ""
            listed = ", ".join(allowed) if allowed else "nothing"
            raise UserError(f"unknown key {_full(prefix, str(key))}: {prefix or 'the configuration'} takes {listed}{hint}")


def coerced(key: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` wants it (a whole number serves as a float, a dict as a dataclass); UserError names the key otherwise.

    A hint that this check does not understand lets the value through: the constructor that asked for it decides.
    """
    if value == MISSING and isinstance(value, str):
        raise UserError(f"{key} is missing: set {key}=VALUE to {_wanted(hint)}")
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(key, value, hint, arguments)
    if origin is Literal:
        if value not in arguments or type(value) is not type(arguments[arguments.index(value)]):
            raise _wrong(key, value, hint)
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _wrong(key, value, hint)
        return typed(hint, value, key)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise _wrong(key, value, hint)
        return origin(coerced(f"{key}[{i}]", item, arguments[0]) for i, item in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if hint in _WORDS and type(value) is not hint:
        raise _wrong(key, value, hint)
    return value


def _one_of(key: str, value: Any, hint: Any, arguments: tuple[Any, ...]) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [argument for argument in arguments if argument is not type(None)]
    if len(choices) == 1:
        try:
            return coerced(key, value, choices[0])
        except UserError:
            if isinstance(value, Mapping):
                raise
            raise _wrong(key, value, hint) from None
    for choice in choices:
        try:
            return coerced(key, value, choice)
        except UserError:
            continue
    raise _wrong(key, value, hint)


def at_least(key: str, value: float, low: float) -> None:
    """UserError when `value` is below `low` (NaN is)."""
    if not value >= low:
        raise UserError(f"{key}={value}: use {low} or more")


def _wrong(key: str, value: Any, hint: Any) -> UserError:
    if value is None:
        return UserError(f"{key} is null: use {_wanted(hint)}")
    return UserError(f"{key}={value!r} is {_WORDS.get(type(value), 'a ' + type(value).__name__)}: use {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(str(argument) for argument in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_wanted(argument) for argument in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return "keys " + ", ".join(field.name for field in dataclasses.fields(hint))
    return str(hint)


def _full(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
