"""The shape of a configuration: frozen dataclasses, one for each kind of thing that can be chosen.

It does not know Hydra, torch, or how anything is built from the values.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from harness.checks import at_least, typed
from harness.engine import traces, workloads
from harness.errors import UserError


@dataclass(frozen=True)
class PretrainedModel:
    """Weights from a package, a file, a folder or the hub. `bos`: texts begin with the model's own BOS token."""

    kind: str
    source: str
    bos: bool


@dataclass(frozen=True)
class RandomModel:
    """Seeded random weights; the sizes are those of `harness.model.random_init.RandomShape`, which explains and checks them."""

    kind: str
    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    window: int | None
    global_every: int | None
    bos: bool


@dataclass(frozen=True)
class BuiltinData:
    """The text that ships with Python."""

    kind: str
    name: str


@dataclass(frozen=True)
class TextData:
    """One UTF-8 text file. `name` None: the file's own."""

    kind: str
    name: str | None
    path: str


@dataclass(frozen=True)
class HubData:
    """A text column of a data set on the hub: rows joined with `row_end` after each; an empty row stands for `empty_row`."""

    kind: str
    name: str
    source: str
    subset: str | None
    split: str
    column: str
    row_end: str
    empty_row: str


@dataclass(frozen=True)
class Quality:
    """Teacher-forced windows of `context` tokens: the second half is fed `chunk` tokens a step and scored."""

    enabled: bool
    context: int
    windows: int
    chunk: int

    def __post_init__(self) -> None:
        at_least("quality.context", self.context, 4)
        at_least("quality.windows", self.windows, 1)
        at_least("quality.chunk", self.chunk, 1)


@dataclass(frozen=True)
class Measure:
    """At least `pairs` interleaved pairs, and more until `seconds` have passed; `threads` None: as torch chose.

    profile_steps: decode steps that a trace of where the time goes holds; 0: no profile.
    """

    pairs: int
    seconds: float
    warmup: int
    threads: int | None
    profile_steps: int = 0

    def __post_init__(self) -> None:
        at_least("measure.pairs", self.pairs, 5)
        at_least("measure.seconds", self.seconds, 0)
        at_least("measure.warmup", self.warmup, 1)
        at_least("measure.profile_steps", self.profile_steps, 0)
        if self.threads is not None:
            at_least("measure.threads", self.threads, 1)


@dataclass(frozen=True)
class Tracking:
    """What Weights & Biases is told, and how."""

    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    group: str | None


@dataclass(frozen=True)
class General:
    """The keys that belong to no group. `force`: a sweep repeats points that are finished. `graphs`: decode steps are replayed from
    captured graphs, where that can be done. `compile`: what lies between attentions is made by torch.compile."""

    seed: int
    backend: Literal["auto", "reference", "cpu", "triton"]
    device: str
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"]
    budget_bytes: int | None
    results_dir: str
    graphs: Literal["auto", "off"] = "auto"
    compile: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        if self.budget_bytes is not None:
            at_least("budget_bytes", self.budget_bytes, 1)


# Group -> kind -> schema. A group without kinds has one schema.
KINDS: dict[str, dict[str, type]] = {
    "model": {"pretrained": PretrainedModel, "random": RandomModel},
    "data": {"builtin": BuiltinData, "text": TextData, "hub": HubData},
    "workload": {
        "steady": workloads.Steady,
        "ragged": workloads.Ragged,
        "shared_prefix": workloads.SharedPrefix,
        "fork": workloads.Fork,
        "rewind": workloads.Rewind,
        "poisson": workloads.Poisson,
        "trace": traces.Trace,
    },
}
PLAIN: dict[str, type] = {"quality": Quality, "measure": Measure, "tracking": Tracking}
LABELS = ("kind", "name")  # a file says these of itself; a schema that has no use for them need not list them
CACHE_ROLES = ("strategy", "reference")
STRATEGY_TEXT = ("name", "storage", "summary")


def section(group: str, given: Any) -> Any:
    """The frozen dataclass of one group's dict."""
    if not isinstance(given, Mapping):
        raise UserError(f"{group}={given!r} is not a group of keys: choose a file with {group}=NAME, or set {group}.KEY=VALUE")
    if group in PLAIN:
        return typed(PLAIN[group], given, group)
    kind = given.get("kind")
    if kind not in KINDS[group]:
        raise UserError(f"{group}.kind={kind!r} is unknown: choose one of {', '.join(KINDS[group])}")
    schema = KINDS[group][kind]
    known = {field.name for field in fields(schema)}
    return typed(schema, {key: value for key, value in given.items() if key in known or key not in LABELS}, group)


def text_keys() -> frozenset[str]:
    """Keys whose value is text, whatever it looks like: the command line hands these over letter for letter."""
    keys = {f"{role}.{name}" for role in CACHE_ROLES for name in STRATEGY_TEXT} | {"results_dir"}
    schemas = [(group, schema) for group, kinds in KINDS.items() for schema in kinds.values()] + list(PLAIN.items())
    for group, schema in schemas:
        hints = typing.get_type_hints(schema)
        keys |= {f"{group}.{name}" for name, hint in hints.items() if hint is str or hint == (str | None)}
    return frozenset(keys)
