"""sha256 of weight files, computed once in a process.

It does not know what is in them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path


def sha256_of(paths: list[Path]) -> str:
    """Hex digest of one file; of several, the digest of their names and digests in name order."""
    if len(paths) == 1:
        return _digest(paths[0].resolve(), *_stamp(paths[0]))
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(f"{path.name} {_digest(path.resolve(), *_stamp(path))}\n".encode())
    return whole.hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    """Keyed by size and time of change as well, so that a rewritten file is read again."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
