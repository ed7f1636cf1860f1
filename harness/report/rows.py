"""What a comparison table says: which records may stand side by side, in which order, and the text of each cell.

It does not know how a table is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Record = Mapping[str, object]
MISSING = "–"
_MIB = 1024**2
_STATUS_ORDER = {"ok": 0, "incorrect": 1, "oom": 2, "failed": 3}


@dataclass(frozen=True)
class Column:
    """One column: what it shows, in which unit, and how a record becomes the text of its cell."""

    title: str
    unit: str
    cell: Callable[[Record], str]
    numeric: bool = True


@dataclass(frozen=True)
class Group:
    """Records that may be compared, best first, and the facts they share ({name: text})."""

    facts: Mapping[str, str]
    records: tuple[Record, ...]


def facts(record: Record) -> dict[str, str]:
    """What must be equal before two records may share a table: model, text, start token, work, protocol, budget, machine."""
    model, data, env, config = (section(record, name) for name in ("model", "data", "environment", "config"))
    return {
        "model": _words(model.get("name"), model.get("dtype"), _short(model.get("sha256"))),
        "data": _words(data.get("name"), _short(data.get("sha256"))),
        "bos": {True: "yes", False: "no"}.get(data.get("bos"), MISSING),
        "workload": _settings(section(record, "workload") or section(config, "workload")),
        "quality": _settings(section(config, "quality")),
        "KV budget": f"{config['budget_bytes']:,} bytes" if config.get("budget_bytes") is not None else "none",
        "machine": _words(env.get("machine"), env.get("device"), f"{env.get('threads', MISSING)} threads"),
    }


def groups(records: Sequence[Record]) -> list[Group]:
    """Records split by `facts`, in the order in which the facts first appear; best first within each."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(json.dumps(facts(record)), []).append(record)
    return [Group(json.loads(key), tuple(sorted(members, key=_rank))) for key, members in found.items()]


def differing(several: Sequence[Group]) -> list[str]:
    """The names of the facts that are not the same in every group."""
    if not several:
        return []
    return [name for name in several[0].facts if len({group.facts[name] for group in several}) > 1]


def columns(group: Group) -> list[Column]:
    """The columns of a group's table. The reference is named in the title, or in each cell where the records have several."""
    references = sorted({name for name in (section(record, "reference").get("strategy") for record in group.records) if name})
    against = references[0] if len(references) == 1 else "reference"
    return [
        Column("strategy", "", lambda record: text(section(record, "strategy").get("name")), numeric=False),
        Column("right", "", right, numeric=False),
        Column("decode", "tok/s", lambda record: number(metric(record, "decode_tok_per_s"), 1)),
        Column(
            "decode rate", f"/ {against}", lambda record: against_reference(record, "decode_tok_per_s", len(references) > 1), numeric=False
        ),
        Column("TTFT p50", "ms", lambda record: milliseconds(metric(record, "ttft_s", "p50"))),
        Column("ITL p50", "ms", lambda record: milliseconds(metric(record, "itl_s", "p50"))),
        Column("ITL p99", "ms", lambda record: milliseconds(metric(record, "itl_s", "p99"))),
        Column("KV", "bytes/token", lambda record: number(metric(record, "kv_bytes_per_token"), 0)),
        Column("reserved", "MiB", lambda record: mebibytes(metric(record, "kv_reserved_bytes"))),
        Column("waste", "%", lambda record: percent(metric(record, "kv_waste_ratio"))),
        Column("perplexity", "a token", lambda record: number(section(record, "quality").get("perplexity"), 3)),
        Column("KL", "nats", lambda record: small(section(record, "quality").get("kl_mean"))),
        Column("top-1", "%", lambda record: percent(section(record, "quality").get("top1_agreement"))),
        Column("kernels", "", kernels, numeric=False),
    ]


def remarks(group: Group) -> list[str]:
    """Sentences that belong under a group's table: what went wrong in which record, and a mix of commits."""
    lines = []
    commits = {env.get("commit") for env in (section(record, "environment") for record in group.records)}
    if len(commits) > 1:
        lines.append(f"These records come from {len(commits)} different commits.")
    for record in group.records:
        if record["error"] is not None:
            lines.append(f"{text(section(record, 'strategy').get('name'))} ({record['id']}): {record['status']}: {record['error']}")
        for name, value in section(record, "nonfinite").items():
            lines.append(f"{text(section(record, 'strategy').get('name'))} ({record['id']}): {name} is {value}")
    return lines


def right(record: Record) -> str:
    """The verdict on the answers: yes, NO, or the status of a run that did not get so far."""
    return {"ok": "yes", "incorrect": "NO"}.get(record["status"], record["status"])


def kernels(record: Record) -> str:
    """Whose kernels ran, and what ran beside launching them one by one."""
    backend = section(record, "backend")
    ways = [text(backend.get("name"))]
    if section(section(backend, "graphs"), "steps").get("replayed"):
        ways.append("graphs")
    if backend.get("compiled"):
        ways.append("torch.compile")
    return ", ".join(ways)


def against_reference(record: Record, name: str, named: bool) -> str:
    """ratio [low, high] verdict of one metric, with the reference's name where `named`."""
    reference = section(record, "reference")
    found = section(reference, "metrics").get(name)
    if found is None:
        return MISSING
    interval = f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}] {found['verdict']}"
    return f"{interval} ({reference['strategy']})" if named else interval


def section(record: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A mapping inside a record; empty where the run did not get so far."""
    value = record.get(name)
    return {} if value is None else value


def metric(record: Record, name: str, part: str | None = None) -> float | None:
    """One metric, or one part of a summary; None where the record has none."""
    value = section(record, "metrics").get(name)
    return value if part is None or value is None else value.get(part)


def text(value: object) -> str:
    """The value, or a dash."""
    return MISSING if value is None else str(value)


def number(value: float | None, digits: int) -> str:
    """With thousands separators."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def milliseconds(value_s: float | None) -> str:
    """Seconds as milliseconds."""
    return MISSING if value_s is None else f"{value_s * 1e3:,.2f}"


def mebibytes(value_bytes: float | None) -> str:
    """Bytes as MiB."""
    return MISSING if value_bytes is None else f"{value_bytes / _MIB:,.2f}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage."""
    return MISSING if share is None else f"{share * 100:.2f}"


def small(value: float | None) -> str:
    """A quantity that may be tiny: three significant digits."""
    return MISSING if value is None else f"{value:.3g}"


def _rank(record: Record) -> tuple[int, float, str]:
    rate = metric(record, "decode_tok_per_s")
    return (_STATUS_ORDER[record["status"]], 0.0 if rate is None else -rate, str(record["id"]))


def _words(*values: object) -> str:
    present = [str(value) for value in values if value is not None]
    return " ".join(present) if present else MISSING


def _short(sha256: object) -> str | None:
    return None if sha256 is None else f"({str(sha256)[:8]})"


def _settings(settings: Mapping[str, object]) -> str:
    """The name, then key=value for everything else."""
    rest = [f"{key}={_plain(value)}" for key, value in settings.items() if key not in ("name", "kind")]
    return _words(settings.get("name", settings.get("kind")), *rest)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
