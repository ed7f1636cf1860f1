"""Which points of a sweep are done, and which one somebody is at.

It does not know how a point is run. A point is a configuration less what cannot change its numbers. Processes of one machine
that sweep into one folder share the work: each claims a point with a locked file, and the system drops the lock of a process
that dies, however it dies. (Windows has no such lock: run one sweep at a time there.)
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.measure.record import FILE_NAME, OK, read_record

try:
    import fcntl
except ImportError:
    fcntl = None

WITHOUT_EFFECT = ("results_dir", "tracking", "force")
LABELS = ("summary",)  # of a strategy: words for people


def point_id(config: Mapping[str, Any]) -> str:
    """A short digest of everything in a resolved configuration that can change its numbers."""
    kept = {key: _unlabelled(value) for key, value in config.items() if key not in WITHOUT_EFFECT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def _unlabelled(value: Any) -> Any:
    return {key: item for key, item in value.items() if key not in LABELS} if isinstance(value, Mapping) else value


def finished(results_dir: str | Path, point: str) -> Iterator[dict[str, Any]]:
    """Records of `point` with status ok, newest first. Whether text, model and machine are still the same is for the caller to see."""
    for path in sorted(Path(results_dir).glob(f"*/{FILE_NAME}"), reverse=True):
        try:
            record = read_record(path)
        except (OSError, ValueError):
            continue
        if record["status"] == OK and record.get("point") == point:
            yield record


@contextmanager
def claimed(results_dir: str | Path, point: str) -> Iterator[bool]:
    """Whether this process may run `point`: False while another one that lives is at it. Given back at the end."""
    if fcntl is None:
        yield True
        return
    name = hashlib.sha256(f"{Path(results_dir).resolve()} {point}".encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"kvbench-claims-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    handle = _locked(folder / name)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            (folder / name).unlink(missing_ok=True)  # before the lock is dropped: whoever opened it meanwhile sees that it is gone
            os.close(handle)


def _locked(path: Path) -> int | None:
    """An open handle that holds the lock on `path`, or None if another process holds it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # it was given back between our opening and our locking it
