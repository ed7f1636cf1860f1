"""From what a user types to a subject: the name of a strategy's YAML file, or `module:Class` of a cache of their own.

Numbers that only set a scale (page size, window, group, ...) are made small, so that a short life crosses every boundary; one
promise checks the strategy exactly as configured. `module:Class` imports, and so runs, that module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.build import StrategySettings, strategy_settings
from harness.catalogue import strategy_mapping
from harness.conformance.subject import Factory, Subject
from harness.conformance.toy import geometry
from harness.errors import UserError
from kernels.api import Ops
from kernels.backend import BackendUnavailable, resolve
from strategies.base import KVCache
from strategies.geometry import Geometry, Refused

SMALL = {"page_size": 4, "window": 7, "sinks": 2, "slack": 5, "group": 4, "residual": 6, "value_group": 8}


def open_door(name: str, backend: str = "auto", seed: int = 0, examples: int = 30, folders: Sequence[Path] = ()) -> Subject:
    """The subject called `name`. UserError for an unknown name, a bad parameter or a backend that cannot run here."""
    settings = strategy_settings("strategy", strategy_mapping(name, folders))
    parameters = {**_defaults(settings.storage_class), **settings.parameters}
    try:
        ops = resolve(backend, "cpu")
    except (BackendUnavailable, ValueError) as error:
        raise UserError(str(error)) from error
    try:
        settings.storage_class(geometry(windows=(None, None)), None, ops, **parameters)
    except Refused as refusal:
        raise UserError(f"strategy {name!r} is refused: {refusal}") from refusal
    small = _smaller(settings, parameters, ops)
    return Subject(
        name=name,
        make=_factory(settings.storage_class, small),
        backend=backend,
        seed=seed,
        examples=examples,
        parameters=small,
        vary=lambda changed: _factory(settings.storage_class, changed),
        configured=_factory(settings.storage_class, parameters),
    )


def _defaults(storage: type) -> dict[str, Any]:
    parameters = inspect.signature(storage.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is not inspect.Parameter.empty}


def _smaller(settings: StrategySettings, parameters: Mapping[str, Any], ops: Ops) -> dict[str, Any]:
    """Parameters with their scales made small; as they are where the storage does not take the small ones."""
    small = {key: min(value, SMALL[key]) if key in SMALL and type(value) is int else value for key, value in parameters.items()}
    try:
        settings.storage_class(geometry(windows=(None, None)), None, ops, **small)
    except Refused:
        return dict(parameters)
    return small


def _factory(storage: type, parameters: Mapping[str, Any]) -> Factory:
    def make(geometry: Geometry, budget_bytes: int | None, ops: Ops) -> KVCache:
        return storage(geometry, budget_bytes, ops, **parameters)

    return make
