"""Token ids equal those of a plain re-implementation, BOS is added only when asked for, and text survives the round trip."""

from __future__ import annotations

import json
import re

import pytest

from harness.errors import UserError
from harness.model.gguf import open_gguf
from harness.model.gguf_tokenizer import tokenizer_from_gguf
from harness.model.tokenizer import ByteTokenizer, tokenizer_from_folder
from tests.harness.model.tiny_models import TEXT, byte_bpe

# GPT-2's splitting rule for ASCII text, after every digit has been taken out on its own.
PIECES = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z]+|\s+(?!\S)|\s+")
SPACE = "\u2581"


def plain_bpe(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merge the lowest-ranked neighbours, leftmost first, until none is left."""
    while len(symbols) > 1:
        best = min(range(len(symbols) - 1), key=lambda at: ranks.get((symbols[at], symbols[at + 1]), 1 << 60))
        if (symbols[best], symbols[best + 1]) not in ranks:
            break
        symbols = [*symbols[:best], symbols[best] + symbols[best + 1], *symbols[best + 2 :]]
    return symbols


def visible_byte(byte: int) -> str:
    """GPT-2's letter for a byte: itself when printable Latin-1, else the next unused code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + hidden.index(byte))


def test_smollm2_ids_equal_a_plain_implementation(smollm2):
    metadata = open_gguf(smollm2).metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    text = TEXT.encode("ascii", "ignore").decode()[:6000]
    wanted = []
    for run in re.split(r"(\d)", text):  # every digit stands alone
        for piece in PIECES.findall(run):
            wanted += [vocab[symbol] for symbol in plain_bpe([visible_byte(byte) for byte in piece.encode()], ranks)]
    tokenizer = tokenizer_from_gguf(metadata, "it")
    assert tokenizer.encode(text, bos=False) == wanted
    assert tokenizer.decode(wanted) == text


def test_smollm2_marks_its_chat_tokens(smollm2):
    tokenizer = tokenizer_from_gguf(open_gguf(smollm2).metadata, "it")
    ids = tokenizer.encode("<|im_start|>user\nHi 123<|im_end|>", bos=False)
    assert (ids[0], ids[-1], tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, 2, 1, (2,), 49152)
    assert tokenizer.decode(ids) == "user\nHi 123"
    assert tokenizer.encode("Hi", bos=True) == [1, *tokenizer.encode("Hi", bos=False)]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["1234", "56", "x"]),
        ("llama-bpe", ["123", "4", "56", "x"]),  # at most three digits together
        ("qwen2", ["1", "2", "3", "4", "5", "6", "x"]),
        ("smollm", ["1", "2", "3", "4", "5", "6", "x"]),
    ],
)
def test_digits_are_split_by_the_rule_of_the_file(rule, pieces):
    merges = [("1", "2"), ("12", "3"), ("123", "4"), ("5", "6")]
    tokens = [visible_byte(byte) for byte in range(256)] + ["".join(merge) for merge in merges]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule, "tokenizer.ggml.tokens": tokens}
    metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    ids = tokenizer_from_gguf(metadata, "it").encode("123456x", bos=False)
    assert [tokens[index] for index in ids] == pieces


def gemma_like() -> dict:
    """A SentencePiece vocabulary merged in vocabulary order, with runs of spaces stored as spaces."""
    words = ["  ", "   ", "he", "the", SPACE + "the", "hel", "ll", "lo", "hello", SPACE + "hello", SPACE + "h"]
    letters = [SPACE, *"helot\n"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *[f"<0x{byte:02X}>" for byte in range(256)], *words, *letters, "<tool>"]
    kinds = [3, 3, 3, 2, 4, *[6] * 256, *[1] * (len(words) + len(letters)), 4]
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


def test_gemma_ids_equal_transformers_own_tokenizer(transformers, tmp_path):
    import gguf

    metadata = gemma_like()
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = transformers.models.gemma.GemmaTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = tokenizer_from_gguf(open_gguf(path).metadata, "it")
    for text in ("hello the  hello", "   the\n\nhello", "h\u00e9llo <tool>hello<bos>the", "", " ", "lol  "):
        assert ours.encode(text, bos=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text, bos=False)) == text.replace("<bos>", "")


def test_an_unknown_kind_or_rule_is_refused():
    with pytest.raises(UserError, match=r"'bert'.*gpt2, llama"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "bert"}, "it")
    with pytest.raises(UserError, match="no vocabulary"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"}, "it")
    with pytest.raises(UserError, match=r"'poro'.*smollm"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "poro"}, "it")


def test_bytes_survive_the_round_trip():
    tokenizer = ByteTokenizer()
    text = "na\u00efve \U0001f389\n"
    assert tokenizer.encode(text, bos=True) == [256, *text.encode()]
    assert tokenizer.decode([*tokenizer.encode(text, bos=True), 257, 300]) == text


def test_a_folder_says_its_special_tokens(tmp_path):
    byte_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 5, "eos_token_id": [257, 7]}))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (5, (7, 257))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (7, 257))
    assert tokenizer.encode("hi", bos=True) == [256, *tokenizer.encode("hi", bos=False)]


def test_bos_is_refused_where_there_is_none(tmp_path):
    byte_bpe().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"bos=true.*bos=false"):
        tokenizer_from_folder(tmp_path).encode("hi", bos=True)
