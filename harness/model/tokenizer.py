"""Text to token ids and back, whatever the checkpoint's format. A BOS token is added when asked for, never by itself.

It does not know prompts or chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.errors import UserError


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    bos_id: int | None
    eos_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str, bos: bool) -> list[int]:
        """Token ids; with `bos`, the BOS token first. UserError if there is no such token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""


def with_bos(ids: list[int], bos: bool, bos_id: int | None) -> list[int]:
    if not bos:
        return ids
    if bos_id is None:
        raise UserError("bos=true, but this model's tokenizer has no BOS token: set bos=false")
    return [bos_id, *ids]


class FastTokenizer:
    """A tokenizer of the `tokenizers` package."""

    def __init__(self, inner: Any, bos_id: int | None, eos_ids: tuple[int, ...]) -> None:
        self._inner = inner
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, bos: bool) -> list[int]:
        return with_bos(self._inner.encode(text, add_special_tokens=False).ids, bos, self.bos_id)

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=True)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then BOS and EOS: for models with random weights, which have no vocabulary of their own."""

    bos_id = 256
    eos_ids = (257,)
    vocab_size = 258

    def encode(self, text: str, bos: bool) -> list[int]:
        return with_bos(list(text.encode("utf-8")), bos, self.bos_id)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def tokenizer_from_folder(folder: Path) -> FastTokenizer:
    """The tokenizer of a Hugging Face folder (its `tokenizer.json`). UserError if it has none."""
    import json

    from tokenizers import Tokenizer as Inner

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{folder} has no tokenizer.json: save the tokenizer in its fast form into the folder")
    inner = Inner.from_file(str(path))
    settings = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings[name] = json.loads((folder / name).read_text(encoding="utf-8"))
    return FastTokenizer(inner, _bos_id(settings, inner), _eos_ids(settings, inner))


def _bos_id(settings: Mapping[str, Mapping[str, Any]], inner: Any) -> int | None:
    ids = _ids(settings, "bos", inner)
    return min(ids) if ids else None


def _eos_ids(settings: Mapping[str, Mapping[str, Any]], inner: Any) -> tuple[int, ...]:
    return tuple(sorted(_ids(settings, "eos", inner)))


def _ids(settings: Mapping[str, Mapping[str, Any]], role: str, inner: Any) -> set[int]:
    """Token ids of a role: the tokenizer's own token by its text, else what the model's configs name by id."""
    token = settings.get("tokenizer_config.json", {}).get(f"{role}_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    own = None if text is None else inner.token_to_id(text)
    found = set() if own is None else {own}
    if role == "bos" and found:
        return found
    for name in ("config.json", "generation_config.json"):
        value = settings.get(name, {}).get(f"{role}_token_id")
        found |= set() if value is None else set(value) if isinstance(value, list) else {value}
    return found
