"""Fetches a model folder from the Hugging Face hub, or says in one sentence, within seconds, why it cannot.

It does not know what is in the folder.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import UserError
from harness.network import hub_or_cache

WANTED = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def hub_folder(repository: str) -> Path:
    """The local snapshot of a hub model, fetched if need be. UserError at once without a network; pickled weights are never fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    cached = _cached(repository)
    if cached is not None:
        return cached
    if not hub_or_cache():
        raise UserError(
            f"model {repository!r} is not on this machine and the hub cannot be reached: give a local path, or check the network"
        )
    try:
        return Path(snapshot_download(repository, allow_patterns=WANTED))
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model {repository!r}, or it is private: check the name, or log in with `hf auth login`") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model {repository!r} could not be fetched from the hub ({type(error).__name__}): try again, or give a local folder"
        ) from None


def _cached(repository: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, allow_patterns=WANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None
