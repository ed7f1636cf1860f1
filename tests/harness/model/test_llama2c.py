"""The llama2.c format, read from a file written here and checked against an independent forward pass in NumPy."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from harness.errors import UserError
from tests.harness.model.tiny_models import logits_of, opened, some_ids

DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB, CONTEXT = 48, 40, 3, 6, 3, 300, 64
SHAPES = {
    "embedding": (VOCAB, DIM),
    "attention_norm": (LAYERS, DIM),
    "wq": (LAYERS, DIM, DIM),
    "wk": (LAYERS, DIM * KV // HEADS, DIM),
    "wv": (LAYERS, DIM * KV // HEADS, DIM),
    "wo": (LAYERS, DIM, DIM),
    "mlp_norm": (LAYERS, DIM),
    "w1": (LAYERS, HIDDEN, DIM),
    "w2": (LAYERS, DIM, HIDDEN),
    "w3": (LAYERS, HIDDEN, DIM),
    "final_norm": (DIM,),
    "cos": (CONTEXT, DIM // HEADS // 2),
    "sin": (CONTEXT, DIM // HEADS // 2),
    "output": (VOCAB, DIM),
}
WORDS = ["the", " the", "cat", " cat", "at", " c", " t", "he", "ca"]


@pytest.fixture(params=[True, False], ids=["tied", "own output"])
def written(request, tmp_path):
    """The weights, and the checkpoint with its tokenizer beside it."""
    tied = request.param
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}
    if tied:
        weights["output"] = weights["embedding"]
    path = tmp_path / "tiny.bin"
    with path.open("wb") as file:
        file.write(struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB if tied else -VOCAB, CONTEXT))
        for name, array in weights.items():
            if name != "output" or not tied:
                file.write(array.tobytes())
    write_tokenizer(tmp_path / f"tok{VOCAB}.bin")
    return weights, path


def write_tokenizer(path) -> list[bytes]:
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    letters = sorted({character for word in WORDS for character in word})
    pieces += [text.encode() for text in [*WORDS, *letters]]
    pieces += [f"filler{index}".encode() for index in range(VOCAB - len(pieces))]
    with path.open("wb") as file:
        file.write(struct.pack("<i", max(map(len, pieces))))
        for index, piece in enumerate(pieces):
            file.write(struct.pack("<fi", -float(index), len(piece)) + piece)
    return pieces


def forward(weights, ids) -> np.ndarray:
    """Logits [T, V] in float64: one token after another, rotating neighbouring lanes, by the format's own description."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    size, group = DIM // HEADS, HEADS // KV

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + 1e-5) * weight

    def turned(x, position):
        out = x.copy()
        for lane in range(0, size, 2):
            angle = position / 10000.0 ** (lane / size)
            a, b = x[:, lane].copy(), x[:, lane + 1].copy()
            out[:, lane] = a * np.cos(angle) - b * np.sin(angle)
            out[:, lane + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    keys, values, logits = [[] for _ in range(LAYERS)], [[] for _ in range(LAYERS)], []
    for position, token in enumerate(ids):
        x = w["embedding"][token]
        for layer in range(LAYERS):
            h = norm(x, w["attention_norm"][layer])
            q = turned((w["wq"][layer] @ h).reshape(HEADS, size), position)
            keys[layer].append(turned((w["wk"][layer] @ h).reshape(KV, size), position))
            values[layer].append((w["wv"][layer] @ h).reshape(KV, size))
            mixed = []
            for head in range(HEADS):
                scores = np.array([q[head] @ k[head // group] for k in keys[layer]]) / np.sqrt(size)
                share = np.exp(scores - scores.max())
                mixed.append((share / share.sum()) @ np.array([v[head // group] for v in values[layer]]))
            x = x + w["wo"][layer] @ np.concatenate(mixed)
            h = norm(x, w["mlp_norm"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        logits.append(w["output"] @ norm(x, w["final_norm"]))
    return np.array(logits)


def test_logits_equal_an_independent_forward_pass(written):
    weights, path = written
    ids = some_ids(20, VOCAB)
    got = logits_of(opened(f"llama2c:{path}", "float64"), ids, chunk=6).numpy()
    np.testing.assert_allclose(got, forward(weights, ids), atol=1e-4)  # angles are float32 here


def test_the_best_scored_pair_is_merged_first_and_unknown_characters_become_bytes(written):
    _, path = written
    tokenizer = opened(f"llama2c:{path}").tokenizer
    the, cat = 3 + 256 + WORDS.index(" the"), 3 + 256 + WORDS.index(" cat")
    assert tokenizer.encode("the cat", bos=True) == [1, the, cat]
    assert tokenizer.encode("the\n", bos=False) == [the, 3 + ord("\n")]
    assert tokenizer.encode("the\u00e9", bos=False)[1:] == [3 + byte for byte in "\u00e9".encode()]
    assert tokenizer.decode([1, the, cat, 3 + ord("\n")]) == "the cat\n"


def test_a_file_of_another_size_is_refused(written, tmp_path):
    _, path = written
    for data in (path.read_bytes()[:-4], path.read_bytes() + b"1234", b"abc"):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"not a (whole )?llama2\.c checkpoint"):
            opened(f"llama2c:{path}")


def test_a_missing_or_short_tokenizer_is_named(written):
    _, path = written
    beside = path.with_name(f"tok{VOCAB}.bin")
    beside.write_bytes(beside.read_bytes()[:-3])
    with pytest.raises(UserError, match=beside.name):
        opened(f"llama2c:{path}")
    beside.unlink()
    with pytest.raises(UserError, match=r"no tokenizer beside it.*tok300\.bin"):
        opened(f"llama2c:{path}")
