"""A comparison report for the W&B web pages, laid out from records: saved there when it can be, and written down as a file always.

The only file that imports wandb_workspaces (the extra `report`). It knows the names under which runs are tracked, not how they ran.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from harness.report.rows import section
from harness.report.table import markdown_records
from harness.report.tracking import obstacle

if TYPE_CHECKING:
    import wandb_workspaces.reports.v2 as wr

SPEC_NAME = "wandb-report.json"
STRATEGY = "config.strategy.name"
BARS = ("decode_tok_per_s", "itl_p50_s", "ttft_s")  # comparisons with the reference
AXES = (
    ("metrics.kv_bytes_per_token", "KV bytes a token"),
    ("metrics.kv_reserved_bytes", "KV reserved, bytes"),
    ("metrics.decode_tok_per_s", "decode, tok/s"),
    ("metrics.ttft_s.p50", "TTFT p50, s"),
    ("quality.perplexity", "perplexity"),
    ("quality.kl_mean", "KL, nats"),
)


def write_report(records: Sequence[Mapping[str, Any]], folder: Path, project: str, entity: str | None) -> tuple[Path, str]:
    """Write the report's specification to FOLDER/wandb-report.json and save the report on the server if one can be reached.

    -> the file, and in one sentence where the report is or why it was not saved. UserError without the extra `report`.
    """
    reason, outcome = "WANDB_MODE says offline" if _offline() else obstacle(), ""
    report = None
    if reason is None:
        report, outcome, reason = _saved(records, project, entity)
    if report is None:
        report = build(records, project, "" if entity is None else entity)
        outcome = f"the report is not saved on a server, because {reason}"
    path = folder / SPEC_NAME
    path.write_text(spec(report), encoding="utf-8")
    return path, outcome


def _saved(records: Sequence[Mapping[str, Any]], project: str, entity: str | None) -> tuple[wr.Report | None, str, str | None]:
    """(report, where it is, None), or (None, "", why not): whatever a server answers, the file is written all the same."""
    _workspaces()
    try:
        report = build(records, project, entity)
        report.save()
        return report, f"the report is saved at {report.url}", None
    except UserError:
        raise
    except Exception as error:  # of three client libraries, which share no class for it
        return None, "", f"the server did not take it ({type(error).__name__}: {str(error).strip().splitlines()[0]})"


def build(records: Sequence[Mapping[str, Any]], project: str, entity: str | None) -> wr.Report:
    """The report; entity None asks the server for the one that is logged in."""
    wr = _workspaces()
    names = sorted({str(section(record, "strategy").get("name")) for record in records if section(record, "strategy")})
    if not names:
        raise UserError("no record says which strategy it ran: there is nothing to compare")
    # Without a project of its own the run set is the report's, and building it asks no server.
    runs = wr.Runset(name="strategies", filters=f"Config('strategy.name') in {names}", groupby=[STRATEGY])
    owner = {} if entity is None else {"entity": entity}
    blocks = [
        wr.H1("KV-cache strategies side by side"),
        wr.MarkdownBlock(markdown_records(records)),
        wr.PanelGrid(runsets=[runs], panels=_panels(wr)),
    ]
    return wr.Report(project=project, title="KV-cache strategies", description=", ".join(names), blocks=blocks, **owner)


def spec(report: wr.Report) -> str:
    """The report as the JSON that the server is sent."""
    return report._to_model().model_dump_json(by_alias=True, exclude_none=True)


def _panels(wr: Any) -> list[Any]:
    bars = [
        wr.BarPlot(
            title=f"{name} / reference: low, ratio, high",
            metrics=[f"reference.metrics.{name}.{part}" for part in ("low", "ratio", "high")],
            groupby=STRATEGY,
            layout=wr.Layout(x=8 * number, y=14, w=8, h=7),
        )
        for number, name in enumerate(BARS)
    ]
    return [
        wr.ScatterPlot(
            title="quality against bytes",
            x="metrics.kv_bytes_per_token",
            y="quality.perplexity",
            legend_template="${config:strategy.name}",
            layout=wr.Layout(x=0, y=0, w=12, h=7),
        ),
        wr.LinePlot(
            title="time between tokens by context",
            x="context",
            y=["itl_s"],
            groupby=STRATEGY,
            layout=wr.Layout(x=12, y=0, w=12, h=7),
        ),
        wr.LinePlot(title="KV in use", x="Step", y=["kv_in_use_bytes"], groupby=STRATEGY, layout=wr.Layout(x=0, y=7, w=12, h=7)),
        wr.ParallelCoordinatesPlot(
            title="trade-offs",
            columns=[wr.ParallelCoordinatesPlotColumn(metric=metric, display_name=label) for metric, label in AXES],
            layout=wr.Layout(x=12, y=7, w=12, h=7),
        ),
        *bars,
        wr.RunComparer(diff_only="split", layout=wr.Layout(x=0, y=21, w=24, h=10)),
    ]


def _workspaces() -> Any:
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as error:
        raise UserError(f"reports need the package wandb-workspaces ({error}): pip install 'kvbench[report]'") from error
    return wr


def _offline() -> bool:
    return os.environ.get("WANDB_MODE") in ("offline", "disabled")
