"""The text of a run, whichever way it was asked for: read through `datasets`, joined, and stamped with a checksum.

It does not know tokens, windows or prompts; those who do say how many tokens they need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.network import hub_or_cache
from harness.schema import BuiltinData, HubData, TextData

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Text:
    """A text, the name it goes by in a record, and the sha256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load_text(data: BuiltinData | TextData | HubData) -> Text:
    """The text that `data` describes. UserError in one sentence when it is missing, unreadable, unreachable or empty."""
    if isinstance(data, BuiltinData):
        text = joined(_builtin()["text"], row_end="\n", empty_row="")
    elif isinstance(data, TextData):
        text = joined(_file(data.path)["text"], row_end="", empty_row="")
    else:
        text = joined(_hub(data)[data.column], data.row_end, data.empty_row)
    name = data.name if data.name is not None else Path(data.path).name
    if text.strip() == "":
        raise UserError(f"the text {name!r} is empty: give a text with words in it, such as data=builtin")
    return Text(name, text, hashlib.sha256(text.encode("utf-8")).hexdigest())


def require_tokens(name: str, have: int, need: int, purpose: str) -> None:
    """UserError when the text `name` has fewer tokens than `purpose` (a noun phrase, such as 'one window of quality') needs."""
    if have < need:
        raise UserError(f"the text {name!r} has {have} tokens and {purpose} needs {need}: give a longer text or ask for fewer tokens")


def joined(rows: Iterable[str], row_end: str, empty_row: str) -> str:
    """Rows as one text: `row_end` after each; an empty row stands for `empty_row`."""
    return "".join((row if row != "" else empty_row) + row_end for row in rows)


def _builtin() -> Dataset:
    """Python's language reference: every topic, in the order of their names. It differs between Python versions."""
    from pydoc_data.topics import topics

    from datasets import Dataset

    return Dataset.from_dict({"text": [topics[name] for name in sorted(topics)]})


def _file(path: str) -> Dataset:
    """The whole file as one row, byte for byte, so that its checksum is the file's own; no cache that an edit would make stale."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path={path!r} is not UTF-8 text ({error.reason} at byte {error.start}): convert it first") from error
    except OSError as error:
        raise UserError(f"data.path={path!r} cannot be read ({error.strerror}): give the path of a UTF-8 text file") from error
    from datasets import Dataset

    return Dataset.from_dict({"text": [text]})


def _hub(data: HubData) -> Dataset:
    online = hub_or_cache()
    from datasets import load_dataset

    where = data.source if data.subset is None else f"{data.source} ({data.subset})"
    try:
        rows = load_dataset(data.source, data.subset, split=data.split)
    except (OSError, ValueError) as error:  # what `datasets` raises for no network, no such set, no such subset or split
        reason = str(error).splitlines()[0] if online else "the hub cannot be reached from here and no copy is in the cache"
        raise UserError(
            f"data={data.name} needs {where}, which cannot be loaded: {reason}; use data=builtin, which needs no network, "
            "or data=text data.path=FILE with a copy of the text"
        ) from error
    if data.column not in rows.column_names:
        raise UserError(f"data.column={data.column!r} is not in {where}: choose one of {', '.join(rows.column_names)}")
    return rows
