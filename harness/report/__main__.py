"""`python -m harness.report FOLDER`: the comparison tables of all records below a folder. It runs nothing.

With `--wandb PROJECT` it lays out a W&B report of the same records instead; only then does it write anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.errors import UserError
from harness.measure.eventfile import read_unfinished
from harness.measure.record import load_records


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables -> exit status: 0, or 2 with one sentence where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description="Compare the records of earlier runs.")
    parser.add_argument("folder", help="where the runs wrote their records, for example results/runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of console tables")
    parser.add_argument("--wandb", metavar="PROJECT", help="build a W&B report: FOLDER/wandb-report.json, and saved there if possible")
    parser.add_argument("--entity", help="whose W&B project it is (default: whoever is logged in)")
    options = parser.parse_args(arguments)
    try:
        records = _loaded(options.folder)
        if options.wandb is None:
            _show(records, options.markdown)
        else:
            _publish(records, Path(options.folder), options.wandb, options.entity)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _loaded(folder: str) -> tuple[dict[str, object], ...]:
    """The records below `folder`; what is left out is said."""
    loaded = load_records(folder)
    for path, reason in loaded.broken:
        print(f"left out: {path} is not a record that can be read: {reason}", file=sys.stderr)
    for path in loaded.unfinished:
        far = read_unfinished(Path(folder) / path).sentence
        print(f"left out: {path} has no record: that run is still going on, or it was killed; {far}", file=sys.stderr)
    if not loaded.records:
        raise UserError(f"there is no record in {folder}: run `python -m harness +strategy=paged` first, or name another folder")
    return loaded.records


def _show(records: Sequence[Mapping[str, object]], as_markdown: bool) -> None:
    from harness.report.table import make_console, markdown_records, render_records

    if as_markdown:
        print(markdown_records(records), end="")
        return
    make_console(piped=not sys.stdout.isatty()).print(render_records(records))


def _publish(records: Sequence[Mapping[str, object]], folder: Path, project: str, entity: str | None) -> None:
    from harness.report.comparison import write_report

    path, outcome = write_report(records, folder, project, entity)
    print(f"{path}: the report's specification; {outcome}")


if __name__ == "__main__":
    sys.exit(main())
