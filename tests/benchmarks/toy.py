"""What the benchmarks run on: a small seeded model, seeded text, every strategy of `conf/strategy` at toy size.

It does not know what is timed. Everything here follows from constants, so that one checksum names all inputs.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
import yaml

from harness.build import StrategySettings, make_cache, make_ops, strategy_settings
from harness.measure.gate import Mean, mean_of
from harness.measure.quality import Scores
from harness.measure.reading import Side, reading
from harness.model.load import Model, load_model
from harness.model.random_init import RandomShape
from kernels.api import Ops
from strategies.base import KVCache
from strategies.geometry import HeadSharing
from tests.benchmarks import kernel_cases

CONF = Path(__file__).resolve().parents[2] / "conf" / "strategy"
SHAPE = RandomShape(vocab=320, hidden=192, intermediate=384, layers=2, query_heads=6, kv_heads=3, head_dim=32, context=512)
# At toy lengths these sizes would change nothing: a window longer than the text, a residual that nothing ages out of.
AT_TOY_SIZE = {"window": 64, "residual": 32}
LENGTH = 128  # tokens held when a decode step is timed
CHUNK = 32  # tokens of the prefill chunk that is timed; it ends at LENGTH
SCORED_FROM = 64
SCORED_CHUNK = 16
PLANNED = [40 + 3 * number for number in range(32)]  # lengths of the sequences whose next step is planned
NAMES = tuple(sorted(path.stem for path in CONF.glob("*.yaml")))


@lru_cache(maxsize=1)
def tokens() -> list[int]:
    """The text: LENGTH + 33 tokens."""
    rng = random.Random(4)
    return [rng.randrange(SHAPE.vocab) for _ in range(LENGTH + 33)]


def data_sha256() -> str:
    """A checksum of all that determines the inputs of every benchmark: sizes, seeds, text. The same on every machine."""
    facts = [asdict(SHAPE), AT_TOY_SIZE, LENGTH, CHUNK, SCORED_FROM, SCORED_CHUNK, PLANNED, tokens(), kernel_cases.FACTS]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def ops() -> Ops:
    """The kernels that are benchmarked: those that `backend=auto` picks on a CPU."""
    return make_ops("auto", "cpu")


@lru_cache(maxsize=8)
def model(heads: HeadSharing | None) -> Model:
    """The model, with the KV heads that a strategy asks for."""
    return load_model("random", "float32", "cpu", ops(), heads, seed=0, shape=SHAPE)


@lru_cache(maxsize=64)
def settings(name: str) -> StrategySettings:
    """A strategy of `conf/strategy`, with windows and residuals at toy size."""
    given = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return strategy_settings("strategy", given | {key: size for key, size in AT_TOY_SIZE.items() if key in given})


def side(name: str) -> Side:
    """The model that strategy `name` needs, and a new, empty cache."""
    own = model(settings(name).heads)
    return Side(own.decoder, make_cache(settings(name), own.geometry, None, ops()))


def held(cache: KVCache) -> dict[str, int]:
    """Every byte count of a cache: what it says, what one token takes, and what its tensors really hold."""
    stored = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in cache.tensors()}
    return {**asdict(cache.stats()), "stored_bytes": sum(stored.values()), "per_1000_tokens_bytes": round(1000 * cache.bytes_per_token())}


def kl(name: str) -> Mean:
    """KL of strategy `name` against no cache at all on the model's own heads, token by token over the scored text."""
    scores = Scores()
    text = tokens()
    spans = [(first, min(first + SCORED_CHUNK, len(text) - 1)) for first in range(SCORED_FROM, len(text) - 1, SCORED_CHUNK)]
    with reading(side(name), text) as reader:
        reader.feed(0, SCORED_FROM)
        for first, stop in spans:
            scores.add(reader.read(first, stop), _expected()[first:stop], text[first + 1 : stop + 1], first + 1)
    return mean_of(scores.kl)


@lru_cache(maxsize=1)
def _expected() -> torch.Tensor:
    """Logits [N - 1, V] without a cache."""
    text = tokens()
    with reading(side("none"), text) as reader:
        return reader.read(0, len(text) - 1)
