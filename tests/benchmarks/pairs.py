"""Rounds of a benchmark on fresh state, each at the side of one run of a calibration kernel that never changes.

It does not know what is benchmarked. Never change the calibration kernel without writing every baseline again.

Times are CPU seconds of this process, whose work is all done by one thread: what other processes take from it is not counted.
That makes a busy machine readable, and it is blind to waiting; the suite's own runs measure real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from harness.measure.clock import quiet
from harness.measure.gate import Mean, speed

ROUNDS = 25
WARMUP_ROUNDS = 2


def group(name: str) -> pytest.MarkDecorator:
    """The mark of benchmarks that are shown together."""
    return pytest.mark.benchmark(group=name, timer=time.process_time)


class Calibration:
    """A fixed mix of what a decoder step is made of: small matrix products, gathers, pointwise ops, and Python between them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(32, 192, generator=generator)
        self._up = torch.randn(192, 768, generator=generator)
        self._down = torch.randn(768, 192, generator=generator) / 768
        self._table = torch.randn(2048, 192, generator=generator)
        self._rows = torch.randint(0, 2048, (256,), generator=generator)

    @torch.inference_mode()
    def __call__(self) -> float:
        """Run once, about a millisecond -> a number that depends on all of it."""
        x = self._x
        for _ in range(2):
            x = x + torch.nn.functional.silu(x @ self._up) @ self._down
            keys = self._table.index_select(0, self._rows)
            x = torch.softmax(x @ keys.T, dim=-1) @ keys
        for _ in range(40):
            x = x * 1.0001
        total = 0
        for number in range(4000):
            total += number & 3
        return float(x[0, 0]) + total


def paired(
    benchmark: BenchmarkFixture,
    setup: Callable[[], Any],
    target: Callable[[Any], Any],
    held_bytes: Callable[[Any], dict[str, int]] | None = None,
    kl_nats: Mean | None = None,
) -> list[Any]:
    """Benchmark target(state) on a new state = setup() in every round -> what each call returned, warm-up included.

    Everything the gate needs goes into extra_info: bytes (held_bytes of the last state), KL, and, unless benchmarks are
    disabled, the speed against the calibration kernel, which runs right before every round.
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

    with quiet():
        benchmark.pedantic(call, setup=prepared, rounds=ROUNDS, warmup_rounds=WARMUP_ROUNDS)
    benchmark.extra_info["bytes"] = None if held_bytes is None else held_bytes(last[0])
    benchmark.extra_info["kl_nats"] = None if kl_nats is None else asdict(kl_nats)
    if benchmark.enabled:
        benchmark.extra_info["against_calibration"] = asdict(speed(benchmark.stats.stats.data, calibration_s[-ROUNDS:]))
    return results
