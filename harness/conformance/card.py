"""The report card: every promise checked on one subject, counted kind by kind, failures told in full.

It does not know what any promise means, nor where the subject came from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from harness.conformance.promise import KINDS, Outcome, fare, promises
from harness.conformance.subject import Subject


def check(subject: Subject, kinds: Sequence[str], console: Console) -> list[Outcome]:
    """All outcomes of the promises of these kinds, with a progress bar."""
    chosen = [one for one in promises() if one.kind in kinds]
    outcomes = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(subject.name, total=len(chosen))
        for one in chosen:
            progress.update(task, description=f"{one.kind} {one.name.replace('_', ' ')}")
            outcomes.append(fare(one, subject))
            progress.advance(task)
    return outcomes


def card(subject: Subject, outcomes: Sequence[Outcome]) -> Table:
    """Passed, failed and not applicable by kind."""
    title = f"conformance of {subject.name}: kernels {subject.ops.name}, seed {subject.seed}, {subject.examples} random lives of each sort"
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("kind", "left"),
        ("what may go wrong", "left"),
        ("passed", "right"),
        ("failed", "right"),
        ("not applicable", "left"),
    ):
        table.add_column(column, justify=justify)
    for kind, meaning in KINDS.items():
        own = [outcome for outcome in outcomes if outcome.promise.kind == kind]
        if not own:
            continue
        count = Counter(outcome.status for outcome in own)
        reasons = Counter(outcome.why for outcome in own if outcome.status == "not applicable")
        why = "; ".join(f"{number}: {reason}" for reason, number in reasons.items())
        verdict = f"[red]{count['failed']}[/red]" if count["failed"] else "0"
        table.add_row(kind, meaning, str(count["passed"]), verdict, why)
    return table


def show(subject: Subject, outcomes: Sequence[Outcome], console: Console) -> bool:
    """Print the card and every failure; True when something was checked and nothing failed."""
    console.print(card(subject, outcomes))
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        cases = ", ".join(outcome.promise.cases)
        console.print(f"[red]failed[/red] {outcome.promise.kind} {outcome.promise.name} (cases {cases})", highlight=False)
        console.print(f"  promised: {' '.join((outcome.promise.check.__doc__ or '').split())}", markup=False, highlight=False)
        console.print(f"  found: {outcome.why}", markup=False, highlight=False)
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    console.print(f"{passed} passed, {len(failed)} failed, {len(outcomes) - passed - len(failed)} not applicable", highlight=False)
    return passed > 0 and not failed
