"""Opens a Hugging Face model folder: `config.json` and safetensors, in one file or in shards. Nothing is ever unpickled.

It does not know how the folder got there (`hub.py` fetches one).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from harness.errors import UserError
from harness.model.architecture import FAMILIES
from harness.model.hashing import sha256_of
from harness.model.hf_config import from_hf
from harness.model.weights import Checkpoint

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def checkpoint_from_folder(folder: Path, name: str) -> Checkpoint:
    """The checkpoint in a folder. UserError for a folder without a config or without safetensors, or an unsupported architecture."""
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UserError(f"{folder} has no config.json: give a Hugging Face model folder, a .gguf file or a hub id")
    architecture = from_hf(_json(config_path), name)
    files = _files(folder)
    sha256 = sha256_of(sorted(set(files)))
    return Checkpoint(name, sha256, architecture, _reader(_located(files)), FAMILIES[architecture.family].norm_offset)


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON ({error}): fetch it again") from None


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        files = [folder / shard for shard in sorted(set(_json(folder / INDEX)["weight_map"].values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(f"{folder} lacks {len(missing)} of its {len(files)} weight files ({missing[0]} first): fetch them again")
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise UserError(f"{folder} has pickled weights only, which are never loaded: save the model as safetensors")
    raise UserError(f"{folder} has no {SINGLE}: give a folder with safetensors weights, a .gguf file or a hub id")


def _located(files: list[Path]) -> dict[str, Path]:
    """Which file holds each tensor. Read from the files, so that a wrong index cannot mislead."""
    from safetensors import SafetensorError, safe_open

    located = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                located.update(dict.fromkeys(opened.keys(), file))
        except SafetensorError as error:
            raise UserError(f"{file} is truncated or damaged ({error}): fetch it again") from None
    return located


def _reader(located: dict[str, Path]) -> Callable[[str], torch.Tensor]:
    from safetensors import safe_open

    opened = {file: safe_open(file, framework="pt") for file in set(located.values())}

    def read(name: str) -> torch.Tensor:
        if name not in located and name.startswith("model."):
            name = name.removeprefix("model.")  # checkpoints of the bare model, without its output projection
        return opened[located[name]].get_tensor(name)

    return read
