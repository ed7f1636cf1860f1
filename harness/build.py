"""From a plain configuration to checked settings and live objects: storage class, cache, kernels, device.

A storage's keyword-only constructor signature is the schema of its parameters. It does not know Hydra, and it loads no model.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from harness.checks import coerced, refuse_unknown, typed
from harness.engine.workloads import Workload
from harness.errors import UserError
from harness.schema import (
    CACHE_ROLES,
    KINDS,
    PLAIN,
    STRATEGY_TEXT,
    BuiltinData,
    General,
    HubData,
    Measure,
    PretrainedModel,
    Quality,
    RandomModel,
    TextData,
    Tracking,
    section,
)

if TYPE_CHECKING:
    from kernels.api import Ops
    from strategies.base import KVCache
    from strategies.geometry import Geometry, HeadSharing


@dataclass(frozen=True)
class StrategySettings:
    """One strategy: what it is called, the class that stores its rows, and that class's keyword arguments."""

    name: str
    storage: str
    summary: str
    storage_class: type
    parameters: Mapping[str, Any]

    @property
    def heads(self) -> HeadSharing | None:
        """The KV heads that the loader must give the model; None = the model's own."""
        return self.parameters.get("heads")


@dataclass(frozen=True)
class Settings:
    """A whole configuration, every key and type checked."""

    strategy: StrategySettings
    reference: StrategySettings
    model: PretrainedModel | RandomModel
    data: BuiltinData | TextData | HubData
    workload: Workload
    quality: Quality
    measure: Measure
    tracking: Tracking
    general: General


def parse(config: Mapping[str, Any]) -> Settings:
    """Check a resolved configuration dict. UserError in one sentence for the first fault; nothing is built or loaded but classes."""
    general_keys = [field.name for field in fields(General)]
    groups = [*KINDS, *PLAIN]
    refuse_unknown(config, [*CACHE_ROLES, *groups, *general_keys], "")
    missing = [key for key in (*CACHE_ROLES, *groups) if key not in config]
    if missing:
        raise UserError(f"the configuration has no {missing[0]}: choose one with {missing[0]}=NAME")
    general = typed(General, {key: config[key] for key in config if key in general_keys}, "")
    sections = {group: section(group, config[group]) for group in groups}
    strategies = {role: strategy_settings(role, config[role]) for role in CACHE_ROLES}
    return Settings(**strategies, **sections, general=general)


def strategy_settings(role: str, given: Any) -> StrategySettings:
    """Check one strategy's mapping (name, storage, summary, the storage's parameters); `role` is the key it stands under."""
    if not isinstance(given, Mapping) or "storage" not in given:
        raise UserError(f"{role} has no storage: choose a strategy with {role}=NAME, or set {role}.storage")
    text = {key: coerced(f"{role}.{key}", given.get(key, ""), str) for key in STRATEGY_TEXT}
    storage = storage_class(text["storage"], f"{role}.storage")
    hints = parameter_hints(storage)
    extra = {key: value for key, value in given.items() if key not in STRATEGY_TEXT}
    label = text["name"] if text["name"] != "" else text["storage"]
    try:
        refuse_unknown(extra, list(hints), role)
    except UserError as error:
        raise UserError(f"{error} ({role} is {label!r}, stored by {text['storage']!r})") from None
    parameters = {key: coerced(f"{role}.{key}", value, hints[key]) for key, value in extra.items()}
    required = [key for key, parameter in _keyword_only(storage).items() if parameter.default is inspect.Parameter.empty]
    for key in required:
        if key not in parameters:
            raise UserError(f"{role}.{key} is missing: {text['storage']!r} has no default for it; set {role}.{key}=VALUE")
    return StrategySettings(label, text["storage"], text["summary"], storage, parameters)


def storage_class(storage: str, key: str = "storage") -> type:
    """The class called `storage`: a name of `strategies.registry`, or `module:Class`, which imports (and so runs) that module."""
    if ":" in storage:
        return _imported(storage, key)
    from strategies.registry import STORAGES

    if storage not in STORAGES:
        near = difflib.get_close_matches(storage, STORAGES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={storage!r} is unknown: choose one of {', '.join(STORAGES)}, or module:Class for your own{hint}")
    return STORAGES[storage]


def _imported(storage: str, key: str) -> type:
    module_name, _, class_name = storage.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UserError(f"{key}={storage!r} cannot be imported ({error}): put the folder of {module_name!r} on PYTHONPATH") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UserError(f"{key}={storage!r}: module {module_name!r} has no class {class_name!r}")
    return found


def parameter_hints(storage: type) -> dict[str, Any]:
    """The keyword-only parameters of a storage's constructor and their types; `Any` where one has no annotation."""
    try:
        hints = typing.get_type_hints(storage.__init__)
    except NameError as error:
        raise UserError(f"the annotations of {storage.__module__}:{storage.__name__} cannot be read ({error})") from error
    return {name: hints.get(name, Any) for name in _keyword_only(storage)}


def _keyword_only(storage: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(storage.__init__).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY}


def make_cache(strategy: StrategySettings, geometry: Geometry, budget_bytes: int | None, ops: Ops) -> KVCache:
    """A fresh, empty cache. UserError with the storage's own words when it cannot honour what it was given."""
    try:
        return strategy.storage_class(geometry, budget_bytes, ops, **strategy.parameters)
    except ValueError as error:  # strategies.geometry.Refused is one
        raise UserError(f"strategy {strategy.name!r} is refused: {error}") from error


def make_ops(backend: str, device: str) -> Ops:
    """The kernels of `backend` for `device`. UserError when they cannot run here."""
    from kernels.backend import BackendUnavailable, resolve

    try:
        return resolve(backend, device)
    except (BackendUnavailable, ValueError) as error:
        raise UserError(str(error)) from error


def pick_device(device: str) -> str:
    """`device`, with `auto` decided: cuda where there is one, else cpu. UserError for one that is not here."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index != "" and not index.isdigit()) or (kind == "cpu" and index != ""):
        raise UserError(f"device={device!r} is unknown: use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device!r} needs a GPU that torch can use, and there is none here: use device=cpu or auto")
    if index != "" and int(index) >= torch.cuda.device_count():
        raise UserError(f"device={device!r} is not here: torch sees {torch.cuda.device_count()} GPUs, cuda:0 and up")
    return device
