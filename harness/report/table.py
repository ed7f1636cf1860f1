"""Draws records: the four answers of one run, and comparison tables for the console and in Markdown.

It does not know how a number came about; `rows` decides what may stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.markup import escape
from rich.table import Table

from harness.report.rows import (
    Group,
    Record,
    against_reference,
    columns,
    differing,
    groups,
    kernels,
    mebibytes,
    metric,
    milliseconds,
    number,
    percent,
    remarks,
    right,
    section,
    small,
    text,
)

NOT_MEASURED = "not measured"
PIPED_COLUMNS = 240  # wide enough for every column; a table takes only what it needs


SHOWN = ("ttft_s", "itl_p50_s", "prefill_tok_per_s", "decode_tok_per_s")  # of the ratios to the reference; the record has all


def make_console(piped: bool) -> Console:
    """A console as wide as the terminal, or wide enough for whole rows where the output is piped or saved."""
    return Console(width=PIPED_COLUMNS) if piped else Console()


def render_run(record: Record) -> RenderableType:
    """The four answers of one run: right, fast, bytes, quality; then what really ran."""
    table = Table(title=escape(_heading(record)), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for question, answer in (
        ("right?", _right_answer(record)),
        ("fast?", _speed_answer(record)),
        ("bytes?", _bytes_answer(record)),
        ("quality?", _quality_answer(record)),
        ("ran on", _ran_on(record)),
    ):
        table.add_row(question, escape(answer))
    return table


def render_records(records: Sequence[Record]) -> RenderableType:
    """One table for each group of comparable records, best first."""
    several = groups(records)
    parts: list[RenderableType] = [escape(line) for line in _preface(several)]
    for group in several:
        parts += [_group_table(group), *(escape(line) for line in remarks(group)), ""]
    return Stack(*parts)


def markdown_records(records: Sequence[Record]) -> str:
    """The same tables in Markdown."""
    several = groups(records)
    parts = ["\n".join(_preface(several))]
    for group in several:
        shown = columns(group)
        lines = [
            _markdown_row(f"{column.title} {column.unit}".strip() for column in shown),
            _markdown_row("---:" if column.numeric else "---" for column in shown),
            *(_markdown_row(column.cell(record) for column in shown) for record in group.records),
        ]
        parts += [_facts_line(group.facts), "\n".join(lines), "\n".join(f"- {line}" for line in remarks(group))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _group_table(group: Group) -> Table:
    table = Table(title=escape(_facts_line(group.facts)), title_justify="left")
    shown = columns(group)
    for column in shown:
        table.add_column(escape(f"{column.title}\n{column.unit}".strip()), justify="right" if column.numeric else "left", overflow="fold")
    for record in group.records:
        style = None if record["status"] == "ok" else "red"
        table.add_row(*(escape(column.cell(record)) for column in shown), style=style)
    return table


def _preface(several: Sequence[Group]) -> list[str]:
    if len(several) < 2:
        return []
    names = ", ".join(differing(several))
    return [f"{len(several)} tables that must not be compared with each other: they differ in {names}."]


def _facts_line(facts: Mapping[str, str]) -> str:
    return " · ".join(f"{name}: {value}" for name, value in facts.items())


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _heading(record: Record) -> str:
    strategy, model, data = (section(record, name) for name in ("strategy", "model", "data"))
    return f"{text(strategy.get('name'))} on {text(model.get('name'))} ({text(model.get('dtype'))}), {text(data.get('name'))}"


def _right_answer(record: Record) -> str:
    answer = right(record) if record["error"] is None else f"{right(record)}: {record['error']}"
    verify = section(record, "verify")
    checks = [f"{verify['attends']:,} attends compared with the oracle"] if "attends" in verify else []
    if verify.get("worst"):
        checks.append(f"worst error {small(max(verify['worst']))} of what rounding explains")
    lines = [f"{answer} ({', '.join(checks)})" if checks else answer]
    return "\n".join([*lines, *(f"not checked: {reason}" for reason in verify.get("skipped", ()))])


def _speed_answer(record: Record) -> str:
    if record["status"] == "incorrect":
        return "not reported: a wrong answer has no speed"
    if not section(record, "metrics"):
        return NOT_MEASURED
    lines = [
        f"decode {number(metric(record, 'decode_tok_per_s'), 1)} tok/s, prefill {number(metric(record, 'prefill_tok_per_s'), 1)} tok/s",
        f"time to first token p50 {milliseconds(metric(record, 'ttft_s', 'p50'))} ms; between tokens p50 "
        f"{milliseconds(metric(record, 'itl_s', 'p50'))} ms, p99 {milliseconds(metric(record, 'itl_s', 'p99'))} ms",
    ]
    limit_s, itl_s = section(record, "limits").get("limit_s"), metric(record, "itl_s", "p50")
    if limit_s and itl_s:
        share = percent(limit_s / itl_s)
        lines.append(f"{share} % of what this machine allows: a decode step takes {milliseconds(limit_s)} ms at the least")
    reference = section(record, "reference")
    compared = section(reference, "metrics")
    for name in (name for name in SHOWN if name in compared):
        found = compared[name]
        pairs = f"{found['pairs']} pairs"
        lines.append(f"{name} / {reference['strategy']}: {against_reference(record, name, named=False)} ({pairs})")
    busy = section(reference, "pairs")
    if busy.get("set_aside"):
        kept = (
            f", {busy['disturbed']} more count although they were disturbed: measure again on a quieter machine"
            if busy["disturbed"]
            else ""
        )
        lines.append(f"other processes kept a core busy: {busy['set_aside']} pairs were taken again{kept}")
    return "\n".join(lines)


def _bytes_answer(record: Record) -> str:
    if not section(record, "metrics"):
        return NOT_MEASURED
    lines = [
        f"{number(metric(record, 'kv_bytes_per_token'), 0)} bytes of KV a token",
        f"KV reserved {mebibytes(metric(record, 'kv_reserved_bytes'))} MiB; peak in use "
        f"{mebibytes(metric(record, 'kv_in_use_bytes_peak'))} MiB, live {mebibytes(metric(record, 'kv_live_bytes_peak'))} MiB; "
        f"waste {percent(metric(record, 'kv_waste_ratio'))} %",
        f"peak of the process {mebibytes(metric(record, 'host_peak_rss_bytes'))} MiB, of the device "
        f"{mebibytes(metric(record, 'device_peak_bytes'))} MiB",
        f"tokens fed {number(metric(record, 'tokens_fed'), 0)}, of them again {number(metric(record, 'tokens_recomputed'), 0)}",
    ]
    return "\n".join(lines)


def _quality_answer(record: Record) -> str:
    quality = section(record, "quality")
    if not quality:
        return NOT_MEASURED
    return (
        f"perplexity {number(quality.get('perplexity'), 4)} a token, {number(quality.get('bits_per_byte'), 4)} bits per byte, "
        f"over {number(quality.get('scored_tokens'), 0)} scored tokens\n"
        f"KL to the reference {small(quality.get('kl_mean'))} nats, same top-1 token {percent(quality.get('top1_agreement'))} % "
        f"(the reference against itself: {small(quality.get('noise_kl_mean'))} nats, {percent(quality.get('noise_top1_agreement'))} %); "
        f"changes of perplexity from {percent(quality.get('perplexity_detectable'))} % on would show\n"
        f"{percent(quality.get('cached_read_ratio'))} % of the keys attended were read from the cache"
    )


def _ran_on(record: Record) -> str:
    backend, env = section(record, "backend"), section(record, "environment")
    counted = ", ".join(f"{op} {calls:,}" for op, calls in section(backend, "kernels").items())
    stored = _names(backend.get("storage_dtypes"))
    return (
        f"{kernels(record)} kernels ({counted or 'none counted'}), storage {stored}\n"
        f"{text(env.get('machine'))}, {text(env.get('threads'))} threads; record {record['id']}"
    )


def _names(value: object) -> str:
    """A list or mapping of names as one phrase."""
    if value is None:
        return text(None)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
