"""The progress bar of everything that takes longer than a breath. It does not know what progresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def bar(console: Console, title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is gone when it is done -> progress(done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None)

        def progress(done: int, total: int) -> None:
            bars.update(task, completed=done, total=max(done, total))

        yield progress
