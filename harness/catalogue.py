"""The strategy files there are, read without Hydra: for small commands that need a strategy by name and no configuration.

It does not know what a strategy's keys mean; `build.py` checks them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError

_HERE = Path(__file__).resolve().parent
# In a wheel the files lie inside the package, in a checkout beside it.
CONFIG_FOLDER = next((folder for folder in (_HERE / "_conf", _HERE.parent / "conf") if (folder / "config.yaml").is_file()), _HERE / "_conf")


def strategy_names(folders: Sequence[Path] = ()) -> list[str]:
    """The strategies that have a YAML file, here or in `folders` of the user's own."""
    return sorted({file.stem for folder in (*folders, CONFIG_FOLDER) for file in (folder / "strategy").glob("*.yaml")})


def strategy_mapping(name: str, folders: Sequence[Path] = ()) -> Mapping[str, Any]:
    """The keys of a strategy: those of NAME's file, or of `module:Class` (a cache of one's own; its module is imported, and so run)."""
    import yaml

    if ":" in name:
        return {"name": name, "storage": name}
    for folder in (*folders, CONFIG_FOLDER):
        file = folder / "strategy" / f"{name}.yaml"
        if file.is_file():
            return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    raise UserError(f"no strategy {name!r}: choose one of {', '.join(strategy_names(folders))}, or module:Class for a cache of your own")
