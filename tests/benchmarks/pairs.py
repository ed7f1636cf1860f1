"""Rounds of a benchmark on fresh state, each at the side of one run of a calibration kernel that never changes.

It does not know what is benchmarked. Never change the calibration kernel without writing every baseline again.

Times are CPU seconds of this process, whose work is all done by one thread: what other processes take from it is not counted.
That makes a busy machine readable, and it is blind to waiting; the suite's own runs measure real time.

A machine that is shared changes its state from second to second, and rounds taken together all see the same one. So a session goes
over all its benchmarks PASSES times (`conftest.py` repeats the tests) and takes a few rounds of each: the spread between passes is
the noise.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from pytest_benchmark.stats import Metadata

from harness.measure.clock import quiet
from harness.measure.gate import MIN_PASSES, Mean, Pass, speed

PASSES = 20
ROUNDS = 3  # of one pass
WARMUP_ROUNDS = 1


def group(name: str) -> pytest.MarkDecorator:
    """The mark of benchmarks that are shown together."""
    return pytest.mark.benchmark(group=name, timer=time.process_time)


class Calibration:
    """A fixed mix of what the host's share of a step is made of: many different small ops, each once, and Python objects.

    A loop over few ops would stay in the cache and hardly feel the neighbours that slow the benchmarks down.
    """

    def __init__(self) -> None:
        self._x = torch.randn(4, 192, generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def __call__(self) -> float:
        """Run once, about half a millisecond -> a number that depends on all of it."""
        return self._tensors() + self._objects()

    def _tensors(self) -> float:
        x, steps = self._x, torch.arange(16)
        ends, positive = steps.cumsum(0), x > 0
        sums = torch.where(positive, x, -x).sum(-1)
        codes = (x * 10).round().to(torch.int8)
        padded = torch.nn.functional.pad(codes.to(torch.float32), (0, 4))
        table = torch.zeros(8, 192).index_copy_(0, torch.tensor([1, 3]), x[:2])
        found = torch.searchsorted(ends, steps) + torch.bincount(steps)
        parts = (
            torch.cat([x, x]) @ x.t().contiguous(),
            torch.topk(x, 3).values,
            x.reshape(8, -1).amax(0),
            torch.exp(-sums),
            padded,
            table,
            found,
            steps.repeat_interleave(2),
            torch.nn.functional.layer_norm(x, (192,)),
            torch.outer(sums, sums),
        )
        return sum(float(part.sum()) for part in parts) + sum(torch.stack([steps, ends]).tolist()[1])

    def _objects(self) -> float:
        made = {number: (number * 7919 % 300, [number, number + 1]) for number in range(300)}
        return float(sum(later[0] for _, later in sorted(made.values())[::2]))


_taken: dict[str, tuple[Metadata, list[Pass]]] = {}  # of each benchmark, by its full name: what its first pass reported, all passes


def paired(
    benchmark: BenchmarkFixture,
    setup: Callable[[], Any],
    target: Callable[[Any], Any],
    held_bytes: Callable[[Any], dict[str, int]] | None = None,
    kl_nats: Mean | None = None,
) -> list[Any]:
    """One pass: benchmark target(state) on a new state = setup() in every round -> what each call returned, warm-up included.

    Everything the gate needs goes into extra_info: bytes (held_bytes of the last state), KL, and, once enough passes were made,
    the speed against the calibration kernel, which runs right before every round.
    """
    calibration = Calibration()
    calibration_s: list[float] = []
    results, last = [], []

    def prepared() -> tuple[tuple[Any], dict[str, Any]]:
        last[:] = [setup()]
        start_s = time.process_time()
        calibration()
        calibration_s.append(time.process_time() - start_s)
        return tuple(last), {}

    def call(state: Any) -> None:
        results.append(target(state))

    if benchmark.enabled and benchmark.fullname not in _taken:
        gc.collect()
        gc.freeze()  # what is loaded by now stays: looking through it in every pass would take longer than the rounds
    with quiet():
        benchmark.pedantic(call, setup=prepared, rounds=ROUNDS, warmup_rounds=WARMUP_ROUNDS)
    benchmark.extra_info["bytes"] = None if held_bytes is None else held_bytes(last[0])
    benchmark.extra_info["kl_nats"] = None if kl_nats is None else asdict(kl_nats)
    if benchmark.enabled:
        _keep(benchmark, calibration_s[-ROUNDS:])
    return results


def _keep(benchmark: BenchmarkFixture, calibration_s: list[float]) -> None:
    """Put this pass to the earlier ones: their first report gets the samples, and this one is left without any (`conftest.py` drops it)."""
    measured_s = list(benchmark.stats.stats.data)
    first, passes = _taken.setdefault(benchmark.fullname, (benchmark.stats, []))
    passes.append(Pass(measured_s, calibration_s))
    if first is not benchmark.stats:
        first.stats.data.extend(measured_s)
        benchmark.stats.stats.data.clear()
    if len(passes) >= MIN_PASSES:
        first.extra_info["against_calibration"] = asdict(speed(passes))
