"""A worker: llama.cpp's server in this process, through xllamacpp, over a GGUF file (see lines.py).

`python -m tests.benchmarks.peers.llama_side FILE KV THREADS`, KV one of f16, q8_0, q4_0, in an environment that has xllamacpp. It does
not know what it is compared with. The server's queue, sampler and answers are part of a step, as an engine's are.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.measure.clock import now
from tests.benchmarks.peers.lines import Tokens, serve, versions

SLOTS = 8
CONTEXT = 4608  # tokens of a slot
SHOWN = 16  # tokens whose ids are asked for
GREEDY = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "stream": False, "cache_prompt": True}


class Llama:
    """One server with a slot for each sequence, whose rows stay in its cache: a step reads the prompt's last token again and goes on."""

    def __init__(self, file: str, kv: str, threads: int) -> None:
        about = versions("xllamacpp")
        import xllamacpp

        wanted = xllamacpp.CommonParams()
        wanted.model.path = file
        wanted.n_parallel, wanted.n_ctx = SLOTS, SLOTS * CONTEXT
        wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = threads
        wanted.cache_type_k = wanted.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv.upper()}")
        wanted.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        wanted.cache_ram_mib = 0
        wanted.verbosity = 0
        self._server = xllamacpp.Server(wanted)
        self._prompts: Tokens = []
        self.about: dict[str, Any] = about | {"weights": Path(file).name, "kv": kv, "system": xllamacpp.get_system_info().strip()}
        self.start([[1, 2, 3] * 7], 4)
        self.step(3)
        self.drop()

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[float, Tokens]:
        """The ids of the tokens come from a second pass, untimed: asking for them slows the sampler."""
        self._prompts = [list(prompt) for prompt in prompts]
        began = now()
        self._complete(1, cache_prompt=False)
        seconds = now() - began
        answers = self._complete(1 + min(room, SHOWN), logprobs=1)
        return seconds, [[token["id"] for token in answer["choices"][0]["logprobs"]["content"]] for answer in answers]

    def step(self, count: int) -> tuple[float, Tokens]:
        """By the server's own clock, from each sequence's first token to its last; the tokens are those that `start` gave."""
        timings = [answer["timings"] for answer in self._complete(1 + count)]
        seconds = [timing["predicted_ms"] / 1e3 / (timing["predicted_n"] - 1) for timing in timings]
        return sum(seconds) / len(seconds), [[] for _ in self._prompts]

    def drop(self) -> None:
        self._prompts = []

    def _complete(self, count: int, **more: Any) -> list[dict[str, Any]]:
        """`count` tokens of every sequence, all at once: the answers."""
        answers: dict[int, dict[str, Any]] = {}

        def run(slot: int) -> None:
            request = {"prompt": self._prompts[slot], "n_predict": count, "id_slot": slot, **GREEDY, **more}
            self._server.handle_completions(json.dumps(request), lambda text: answers.update({slot: json.loads(text)}))

        threads = [threading.Thread(target=run, args=(slot,)) for slot in range(len(self._prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [answers.get(slot, {"error": "no answer"}) for slot in range(len(self._prompts))]
        for answer in found:
            if answer.get("usage", {}).get("completion_tokens") != count:
                raise RuntimeError(f"{count} tokens were asked for; the answer was {json.dumps(answer)[:300]}")
        return found


if __name__ == "__main__":
    serve(lambda: Llama(sys.argv[1], sys.argv[2], int(sys.argv[3])))
