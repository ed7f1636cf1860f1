"""A sweep: what is typed for it, what it is called, how far it has got, which of its points need no run, and how it ends.

It does not know Hydra, nor how a point is run. A sweep file is a command line with a name: YAML keys and values that stand for
`key=value` after `-m`; what is typed beside it wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from harness.measure.clock import now
from harness.points import WITHOUT_EFFECT, claimed, finished, point_id

if TYPE_CHECKING:
    from harness.build import Settings

Say = Callable[[str], None]
_MINUTE_S, _HOUR_S = 60, 3600


def expanded(arguments: Sequence[str], folders: Sequence[Path]) -> tuple[list[str], str]:
    """`arguments` with `sweep=NAME` replaced by what its file says, and the sweep's name; without one, a name made of them."""
    names = [argument.partition("=")[2] for argument in arguments if argument.lstrip("+").startswith("sweep=")]
    rest = [argument for argument in arguments if not argument.lstrip("+").startswith("sweep=")]
    if not names:
        return rest, _made_name(rest)
    if len(names) > 1 or names[0] in ("", "null") or "," in names[0] or "[" in names[0]:
        raise UserError(f"sweep={','.join(names)} does not choose one sweep: give one name with sweep=NAME")
    typed = {_key(argument) for argument in rest}
    added = [f"{key}={value}" for key, value in _read(names[0], folders).items() if key not in typed]
    return ["-m", *added, *rest], names[0]


def _made_name(arguments: Sequence[str]) -> str:
    """The same for the same points, so that a sweep that is taken up again goes by the same name."""
    kept = sorted(argument.lstrip("+") for argument in arguments if "=" in argument and not _key(argument).startswith(WITHOUT_EFFECT))
    return "sweep-" + hashlib.sha256("\n".join(kept).encode()).hexdigest()[:8]


def _key(argument: str) -> str:
    return argument.lstrip("+").partition("=")[0]


def _read(name: str, folders: Sequence[Path]) -> dict[str, str]:
    import yaml

    found = [folder / "sweep" / f"{name}.yaml" for folder in folders if (folder / "sweep" / f"{name}.yaml").is_file()]
    if not found:
        known = sorted({file.stem for folder in folders for file in (folder / "sweep").glob("*.yaml")})
        raise UserError(f"sweep={name!r} is unknown: choose one of {', '.join(known)}, or write conf/sweep/{name}.yaml")
    values = yaml.safe_load(found[0].read_text(encoding="utf-8"))
    if not isinstance(values, Mapping):
        raise UserError(f"{found[0].name} is not a sweep: write one `key: value` a line, values as after `-m key=`")
    return {str(key): _typed(value) for key, value in values.items()}


def _typed(value: Any) -> str:
    """A YAML value as it would be typed."""
    if isinstance(value, list):
        return ",".join(map(_typed, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


@dataclass
class Sweep:
    """The points so far. `total` is None where nobody knows how many there will be."""

    name: str
    say: Say
    total: int | None = None
    swept: tuple[str, ...] = ()  # keys that differ between points; empty where nobody knows
    started: int = 0
    run_s: list[float] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)  # label -> what became of it
    results_dir: str | None = None

    def label(self, overrides: Sequence[str]) -> str:
        """A point in as few words as tell it from the others."""
        telling = [override for override in overrides if _key(override).partition("@")[0] in self.swept or _key(override) in self.swept]
        return " ".join(telling or overrides)

    def begin(self, label: str) -> None:
        """Say which point is next and how long the rest may take."""
        of = "" if self.total is None else f" of {self.total}"
        self.started += 1
        self.say(f"\npoint {self.started}{of}{self._left()}: {label}")

    def _left(self) -> str:
        if self.total is None or not self.run_s:
            return ""
        left_s = sum(self.run_s) / len(self.run_s) * (self.total - self.started + 1)
        return f", at most about {_duration(left_s)} left"

    def grouped(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """`config` whose tracked run belongs to this sweep's group, unless a group was given."""
        tracking = config.get("tracking")
        if not isinstance(tracking, Mapping) or tracking.get("group") is not None:
            return dict(config)
        return {**config, "tracking": {**tracking, "group": self.name}}

    def record(self, config: Mapping[str, Any], settings: Settings, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The record of this point: of the run that finished it before, or of `run()`; None while another process is at it."""
        point, general = point_id(config), settings.general
        self.points.append(point)
        self.results_dir = general.results_dir
        with claimed(general.results_dir, point) as ours:
            if not ours:
                self.say("left to another process, which is running this point")
                return None
            done = None if general.force else next(_valid(finished(general.results_dir, point), settings), None)
            if done is not None:
                commit = done["environment"].get("commit")
                by = f", at commit {commit[:10]}" if commit else ""
                self.say(f"skipped: {done['id']} has finished this point{by}; force=true repeats it")
                return done
            start_s = now()
            try:
                return run()
            finally:
                self.run_s.append(now() - start_s)

    def ended(self) -> str:
        """The closing words: the points that did not end well, then the comparison of all records of this sweep, in Markdown."""
        bad = {label: state for label, state in self.states.items() if state != "ok"}
        rows = [f"| {label} | {state} |" for label, state in bad.items()]
        table = "\n".join(["| point | outcome |", "| --- | --- |", *rows, ""]) if rows else ""
        return "\n".join(part for part in (table, self._comparison()) if part)

    def _comparison(self) -> str:
        from harness.measure.record import load_records
        from harness.report.table import markdown_records

        if self.results_dir is None or not Path(self.results_dir).is_dir():
            return ""
        newest: dict[object, Mapping[str, Any]] = {}
        for record in load_records(self.results_dir).records:
            before = newest.get(record.get("point"))
            if record.get("point") in self.points and (before is None or before["status"] != "ok" or record["status"] == "ok"):
                newest[record["point"]] = record
        return markdown_records(list(newest.values())) if newest else ""


def _valid(records: Iterator[dict[str, Any]], settings: Settings) -> Iterator[dict[str, Any]]:
    """Those measured on this class of machine, with the text and the weights that are there now."""
    for record in records:
        from harness.build import pick_device
        from harness.measure.datasets import load_text
        from harness.measure.environment import fingerprint

        weights = _weights_sha256(settings)
        same_machine = record["environment"].get("machine") == fingerprint(pick_device(settings.general.device), 0, 0)["machine"]
        same_text = record["data"]["sha256"] == load_text(settings.data).sha256
        if same_machine and same_text and weights in (None, record["model"]["sha256"]):
            yield record


def _weights_sha256(settings: Settings) -> str | None:
    """The checksum of the weights where it can be had without loading them: one file, here. None elsewhere."""
    from harness.model.hashing import sha256_of
    from harness.model.packages import package_file

    source = getattr(settings.model, "source", "")
    kind, _, rest = source.partition(":")
    if kind == "package":
        return sha256_of([package_file(rest)])
    path = Path(source).expanduser()
    return sha256_of([path]) if path.is_file() else None


def _duration(seconds: float) -> str:
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < _HOUR_S else f"{seconds / _HOUR_S:.1f} h"
