"""Builds a tokenizer from the vocabulary inside a GGUF file.

It does not know the model's weights. Byte-level BPE ("gpt2") and SentencePiece-style BPE ("llama") are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import UserError
from harness.model.tokenizer import FastTokenizer

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": LLAMA3_SPLIT,
    "qwen2": LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),
}
SINGLE_DIGITS = ("smollm",)


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> FastTokenizer:
    """The tokenizer in GGUF metadata; `where` names the file in messages. UserError for a kind that is not supported."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UserError(f"{where} has a tokenizer of kind {kind!r}, which is not supported: supported are {', '.join(builders)}")
    if "tokenizer.ggml.tokens" not in metadata:
        raise UserError(f"{where} has no vocabulary (tokenizer.ggml.tokens) in its metadata: the file is incomplete")
    tokens = [_spelled(token) for token in metadata["tokenizer.ggml.tokens"]] if kind == "llama" else metadata["tokenizer.ggml.tokens"]
    inner = builders[kind](tokens, metadata, where)
    _add_special(inner, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    eos = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    return FastTokenizer(inner, metadata.get("tokenizer.ggml.bos_token_id"), tuple(sorted(eos)))


def _spelled(token: str) -> str:
    """Runs of real spaces are stored as such, but text reaches the merges with its spaces already written as SPACE."""
    return SPACE * len(token) if token and token.isspace() and set(token) == {" "} else token


def _byte_level(tokens: list[str], metadata: Mapping[str, Any], where: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    inner = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    split = metadata.get("tokenizer.ggml.pre", "default")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if split in SINGLE_DIGITS:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    elif split in SPLITS:
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"), whole])
    elif split in ("default", "gpt-2"):
        inner.pre_tokenizer = by_bytes
    else:
        known = ", ".join(["default", "gpt-2", *SINGLE_DIGITS, *SPLITS])
        raise UserError(f"{where} splits text by the rule {split!r}, which is not supported: supported are {known}")
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(tokens: list[str], metadata: Mapping[str, Any], where: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    ranks = _ranks(tokens, metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    inner = Tokenizer(
        models.BPE(vocab, _merges(vocab, ranks), fuse_unk=True, byte_fallback=True, unk_token=None if unknown is None else tokens[unknown])
    )
    spaces = normalizers.Replace(" ", SPACE)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    if not prefix:
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return inner


def _ranks(tokens: list[str], metadata: Mapping[str, Any]) -> list[float]:
    """How late a token is merged. Gemma merges in the order of its vocabulary; elsewhere the best score is merged first."""
    if metadata.get("general.architecture", "").startswith("gemma"):
        return list(range(len(tokens)))
    return [-score for score in metadata["tokenizer.ggml.scores"]]


def _merges(vocab: Mapping[str, int], ranks: list[float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, the earliest merged token first; ties by the parts' own places in the vocabulary."""
    found = []
    for token, index in vocab.items():
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(vocab[left], vocab[right], left, right) for left, right in cuts if left in vocab and right in vocab]
        found += [(ranks[index], pair) for pair in sorted(pairs)]
    found.sort(key=lambda entry: entry[0])
    return [(left, right) for _, (_, _, left, right) in found]


def _add_special(inner: Any, tokens: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    control = [AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    user = [AddedToken(token, normalized=False, special=False) for token, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED]
    inner.add_special_tokens(control)
    inner.add_tokens(user)
