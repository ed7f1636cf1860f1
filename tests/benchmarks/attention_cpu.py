"""Decode attention on a CPU against the machine's own read bandwidth: `python -m tests.benchmarks.attention_cpu --out FILE`.

Every sample stands between two readings of the bandwidth, and all layouts take turns in random order, because that bandwidth
moves within seconds. Each format rotates through more memory than any cache holds. Beside that, pages are attended whose table
repeats a few of them: the same arithmetic with nothing to wait for. And a product of small matrices says what a second thread adds
(two that share a core add little). It judges nothing; it prints medians, ratios and their intervals, and writes every sample.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import kernels.cpu
from harness.measure.compare import paired_interval
from harness.measure.metrics import quantile
from kernels.api import Ops
from kernels.codec import codec_named
from kernels.cpu import plain
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

BATCH, CONTEXT, QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 4096, 9, 3, 64, 16
FORMATS = (("float32", "raw"), ("bfloat16", "raw"), ("bfloat16", "int8"), ("bfloat16", "q8_0"), ("bfloat16", "q4_0"), ("bfloat16", "fp8"))
READ_BYTES = 256 << 20
CACHED_PAGES = 8  # that a second-level cache holds in every format
PRODUCT, PRODUCTS = 256, 200  # side of the small matrices, and how often they are multiplied


@dataclass(frozen=True)
class Layout:
    """One thing that is timed: `attend(set number)` over `nbytes` of rows, and `cached()` of as many that lie in a cache, or None."""

    name: str
    nbytes: int
    sets: int
    attend: Callable[[int], torch.Tensor]
    cached: Callable[[], torch.Tensor] | None = None


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=60, help="samples of each layout")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--footprint-mib", type=int, default=1024, help="memory that each format rotates through")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    layouts = [layout for dtype, codec in FORMATS for layout in layouts_of(dtype, codec, asked.footprint_mib << 20)]
    result = {
        "kernels": kernels.cpu.FLAVOUR,
        "torch": torch.__version__,
        "threads": asked.threads,
        "shape": {
            "batch": BATCH,
            "context": CONTEXT,
            "query_heads": QUERY_HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "page_size": PAGE,
        },
        "footprint_bytes": asked.footprint_mib << 20,
        "product_flop_per_s": {str(threads): product_rate(threads) for threads in range(1, asked.threads + 1)},
        "samples": measure(layouts, asked.rounds),
    }
    result["layouts"] = summary(layouts, result["samples"])
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1))
    show(result)


def layouts_of(dtype_name: str, codec: str, footprint: int) -> list[Layout]:
    """Paged and contiguous over the same memory (the rows are random, so their order means nothing), and torch where it has an op."""
    dtype = getattr(torch, dtype_name)
    ops = Ops("cpu", kernels.cpu)
    rows = (BATCH * CONTEXT // PAGE + 1) * PAGE  # one scratch page
    first = [new_store(ops, codec, rows, dtype) for _ in "kv"]
    nbytes = sum(store.nbytes for store in first) * (rows - PAGE) // rows
    pairs = [first] + [[copied(store) for store in first] for _ in range(-(-footprint // nbytes) - 1)]
    q = torch.randn(BATCH, QUERY_HEADS, HEAD_DIM).to(dtype)  # [T, Hq, D]
    batch = Batch(torch.arange(BATCH + 1, dtype=torch.int32), torch.full((BATCH,), CONTEXT - 1), ((CONTEXT - 1, CONTEXT),) * BATCH)
    paged = PagedRows((1 + torch.randperm(BATCH * CONTEXT // PAGE)).to(torch.int32).view(BATCH, -1), PAGE)
    few = PagedRows(1 + torch.arange(BATCH * CONTEXT // PAGE, dtype=torch.int32).view(BATCH, -1) % CACHED_PAGES, PAGE)
    bases = [PAGE + b * CONTEXT for b in range(BATCH)]
    dense = DenseRows(torch.tensor(bases), tuple(bases))
    scale = HEAD_DIM**-0.5
    name = dtype_name if codec == "raw" else codec
    layouts = [
        Layout(
            f"{name} paged",
            nbytes,
            len(pairs),
            lambda n: ops.attend_paged(q, *pairs[n], paged, batch, Mask(), scale, None),
            lambda: ops.attend_paged(q, *pairs[0], few, batch, Mask(), scale, None),
        ),
        Layout(
            f"{name} contiguous", nbytes, len(pairs), lambda n: ops.attend_dense(q, *unpaged(pairs[n]), dense, batch, Mask(), scale, None)
        ),
    ]
    if codec == "raw":
        layouts.append(
            Layout(
                f"{name} contiguous, torch",
                nbytes,
                len(pairs),
                lambda n: plain.attend_dense(q, *pairs[n], dense, batch, Mask(), scale, None),
            )
        )
        layouts.append(Layout(f"{name} contiguous, torch sdpa", nbytes, len(pairs), lambda n: sdpa(q, pairs[n])))
    return layouts


def sdpa(q: torch.Tensor, pair: list[RowStore]) -> torch.Tensor:
    """torch's fused attention with the queries of a KV head as its rows, its quickest form for one token: [B, Hkv, G, D]."""
    k, v = (store.codes[PAGE:].view(BATCH, CONTEXT, KV_HEADS, HEAD_DIM).transpose(1, 2) for store in pair)
    return torch.nn.functional.scaled_dot_product_attention(q.view(BATCH, KV_HEADS, -1, HEAD_DIM), k, v)


def new_store(ops: Ops, codec: str, rows: int, dtype: torch.dtype) -> RowStore:
    """Random rows, every one written."""
    store = ops.new_rows(codec_named(codec), rows, KV_HEADS, HEAD_DIM, dtype, "cpu", PAGE)
    ops.write_rows(store, torch.arange(rows), torch.randn(rows, KV_HEADS, HEAD_DIM).to(dtype))
    return store


def copied(store: RowStore) -> RowStore:
    """The same rows elsewhere in memory."""
    return replace(store, codes=store.codes.clone(), scales=None if store.scales is None else store.scales.clone())


def unpaged(pair: list[RowStore]) -> list[RowStore]:
    """The same rows addressed one after another."""
    return [replace(store, page_size=None) for store in pair]


def measure(layouts: list[Layout], rounds: int) -> list[dict[str, float | str | int]]:
    """`rounds` samples of each layout, in random order, after one unmeasured call of each."""
    for layout in layouts:
        layout.attend(0)
    memory = torch.ones(READ_BYTES // 4)
    order = random.Random(0)
    samples = []
    for number in range(rounds):
        for layout in order.sample(layouts, len(layouts)):
            before = read_rate(memory)
            began = time.perf_counter()
            layout.attend(number % layout.sets)
            took = time.perf_counter() - began
            after = read_rate(memory)
            sample = {"layout": layout.name, "round": number, "s": took, "read_before_bytes_per_s": before, "read_after_bytes_per_s": after}
            if layout.cached is not None:
                began = time.perf_counter()
                layout.cached()
                sample["cached_s"] = time.perf_counter() - began
            samples.append(sample)
    return samples


def product_rate(threads: int) -> float:
    """Floating-point operations a second of small float32 matrix products on this many threads, the median of nine."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, rates = torch.randn(PRODUCT, PRODUCT), []
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(PRODUCTS):
            a @ a
        rates.append(2 * PRODUCT**3 * PRODUCTS / (time.perf_counter() - began))
    torch.set_num_threads(before)
    return statistics.median(rates)


def read_rate(memory: torch.Tensor) -> float:
    """Bytes a second of one pass over `memory`."""
    began = time.perf_counter()
    memory.sum()
    return memory.numel() * memory.element_size() / (time.perf_counter() - began)


def summary(layouts: list[Layout], samples: list[dict]) -> dict[str, dict]:
    """Medians, spread, share of the read rate taken at the same time, and paired ratios to the contiguous layouts."""
    times = {layout.name: [sample["s"] for sample in samples if sample["layout"] == layout.name] for layout in layouts}
    rows = {}
    for layout in layouts:
        own = [sample for sample in samples if sample["layout"] == layout.name]
        rates = [layout.nbytes / sample["s"] for sample in own]
        reads = [(sample["read_before_bytes_per_s"] + sample["read_after_bytes_per_s"]) / 2 for sample in own]
        rows[layout.name] = {
            "bytes": layout.nbytes,
            "median_s": statistics.median(times[layout.name]),
            "cached_s": statistics.median(sample["cached_s"] for sample in own) if layout.cached is not None else None,
            "p10_s": quantile(times[layout.name], 0.1),
            "p90_s": quantile(times[layout.name], 0.9),
            "bytes_per_s": statistics.median(rates),
            "read_bytes_per_s": statistics.median(reads),
            "share_of_read": statistics.median(rate / read for rate, read in zip(rates, reads, strict=True)),
            "over_own_contiguous": ratio(times, layout.name, f"{layout.name.split(' ')[0]} contiguous"),
            "over_bfloat16_contiguous": ratio(times, layout.name, "bfloat16 contiguous"),
        }
    return rows


def ratio(times: dict[str, list[float]], name: str, reference: str) -> dict[str, float] | None:
    """Time over the reference's in the same round: geometric mean and 95 % interval. None for the reference itself."""
    if name == reference:
        return None
    interval = paired_interval(times[name], times[reference])
    return {"ratio": interval.ratio, "low": interval.low, "high": interval.high}


def show(result: dict) -> None:
    """The table on standard output."""
    print(f"{result['kernels']}; {result['threads']} threads; torch {result['torch']}")
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s on {threads}" for threads, rate in result["product_flop_per_s"].items())
    print(f"small float32 products, by threads: {rates}")
    print(
        f"{'layout':32} {'median ms':>9} {'p10':>7} {'p90':>7} {'cached':>7} {'GB/s':>6} {'of read':>8}   "
        "vs own contiguous        vs bfloat16 contiguous"
    )
    for name, row in result["layouts"].items():
        ratios = "   ".join(shown(row[key]) for key in ("over_own_contiguous", "over_bfloat16_contiguous"))
        milliseconds = " ".join(f"{1e3 * row[key]:{width}.3f}" for key, width in (("median_s", 9), ("p10_s", 7), ("p90_s", 7)))
        cached = "" if row["cached_s"] is None else f"{1e3 * row['cached_s']:.3f}"
        print(f"{name:32} {milliseconds} {cached:>7} {row['bytes_per_s'] / 1e9:6.1f} {row['share_of_read']:8.0%}   {ratios}")


def shown(interval: dict[str, float] | None) -> str:
    """A ratio with its interval, in a column."""
    return f"{'':22}" if interval is None else f"{interval['ratio']:6.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


if __name__ == "__main__":
    main()
