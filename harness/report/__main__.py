"""`python -m harness.report FOLDER`: the comparison tables of all records below a folder. It runs and changes nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.errors import UserError
from harness.measure.record import load_records


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables -> exit status: 0, or 2 with one sentence where there is nothing to show."""
    parser = argparse.ArgumentParser(prog="python -m harness.report", description="Compare the records of earlier runs.")
    parser.add_argument("folder", help="where the runs wrote their records, for example results/runs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of console tables")
    options = parser.parse_args(arguments)
    try:
        _show(options.folder, options.markdown)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _show(folder: str, as_markdown: bool) -> None:
    loaded = load_records(folder)
    for path, reason in loaded.broken:
        print(f"left out: {path} is not a record that can be read: {reason}", file=sys.stderr)
    for path in loaded.unfinished:
        print(f"left out: {path} has no record: that run is still going on, or it was killed", file=sys.stderr)
    if not loaded.records:
        raise UserError(f"there is no record in {folder}: run `python -m harness +strategy=paged` first, or name another folder")
    from harness.report.table import make_console, markdown_records, render_records

    if as_markdown:
        print(markdown_records(loaded.records), end="")
        return
    make_console(piped=not sys.stdout.isatty()).print(render_records(loaded.records))


if __name__ == "__main__":
    sys.exit(main())
