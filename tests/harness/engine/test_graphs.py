"""Steps that are recorded and replayed answer like steps that are launched, are counted, and cost no measured time to record."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from harness.engine.engine import Engine
from harness.engine.events import EventLog
from harness.engine.graphs import CudaGraphs, GraphedDecoder
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.measure.clock import DeviceClock, ManualClock
from harness.model.decoder import Decoder
from harness.model.load import Model, load_model
from harness.model.random_init import RandomShape
from harness.sides import launched_because
from kernels.backend import resolve
from strategies.base import KVCache
from strategies.contiguous import Contiguous
from strategies.kivi import Kivi
from strategies.paged import Paged
from tests.harness.engine.stub_graphs import Repeats
from tests.interpreter import functions_patched_once, integers_unchecked

SHAPE = RandomShape(vocab=258, hidden=32, intermediate=48, layers=2, query_heads=4, kv_heads=2, head_dim=8, context=64)
REQUESTS = [Request(0, (7, 3, 9, 4, 1), 6), Request(1, (5,), 9), Request(2, (8, 8, 2), 3)]
STORAGES = {
    "contiguous": (Contiguous, {}),
    "paged": (Paged, {"page_size": 4}),
    "window": (Paged, {"page_size": 4, "window": 6, "sinks": 2}),
    "int8": (Contiguous, {"codec_k": "int8", "codec_v": "int8"}),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("random", "float32", "cpu", resolve("reference"), seed=3, shape=SHAPE)


def decoder_of(model: Model, backend: str) -> Decoder:
    return Decoder(model.decoder.architecture, model.decoder.weights, resolve(backend))


def answers(decoder, cache: KVCache, clock=None) -> tuple[dict[int, tuple[int, ...]], EventLog]:
    engine = Engine(decoder, cache, scheduler_for(cache, 64, None), Sampler(), ManualClock() if clock is None else clock)
    log = engine.run(REQUESTS)
    return {id_: completion.tokens for id_, completion in engine.completions.items()}, log


@pytest.mark.parametrize("storage", STORAGES)
def test_one_seed_gives_the_same_tokens_on_every_backend(model, storage):
    storage_class, parameters = STORAGES[storage]
    with functions_patched_once(), integers_unchecked():
        found = {
            backend: answers(decoder_of(model, backend), storage_class(model.geometry, None, resolve(backend), **parameters))[0]
            for backend in ("triton", "cpu", "reference")
        }
    assert found["triton"] == found["cpu"] == found["reference"]
    assert [len(found["triton"][request.id]) for request in REQUESTS] == [6, 9, 3]


@pytest.mark.parametrize("storage", STORAGES)
def test_replayed_steps_give_the_tokens_of_launched_ones(model, storage):
    """The Triton kernels read a plan's tensors only: with the host's numbers out of date they still answer rightly."""
    storage_class, parameters = STORAGES[storage]
    ops, steps = resolve("triton"), Counter()
    stub = Repeats(ops)
    plain = Decoder(model.decoder.architecture, model.decoder.weights, ops)
    cache = storage_class(model.geometry, None, ops, **parameters)
    cache.reserve_scratch()
    with functions_patched_once(), integers_unchecked():
        got, log = answers(GraphedDecoder(plain, ops, stub, ManualClock(), steps), cache)
    calls = Counter(ops.calls)
    want, launched = answers(decoder_of(model, "reference"), storage_class(model.geometry, None, resolve("reference"), **parameters))
    assert got == want
    assert sum(steps.values()) == len(log.steps) == len(launched.steps)
    assert steps["launched"] == sum(step.prefill_tokens_fed > 0 for step in log.steps) == 1
    assert steps["recorded"] == stub.recorded == 3  # 3, 2 and 1 sequences: graphs of 4, 2 and 1 spans
    attends = sum(count for op, count in calls.items() if op.startswith("attend"))
    assert attends == len(log.steps) * SHAPE.layers


def test_kernels_that_read_the_host_would_be_caught_replaying(model):
    """The stand-in is no friend: on the reference kernels, which may not be replayed, the tokens do go wrong."""
    cache, ops = Contiguous(model.geometry, None, resolve("reference")), resolve("reference")
    cache.reserve_scratch()
    plain = decoder_of(model, "reference")
    got, _ = answers(GraphedDecoder(plain, ops, Repeats(ops), ManualClock(), Counter()), cache)
    assert got != answers(plain, Contiguous(model.geometry, None, resolve("reference")))[0]


class Slow:
    """A decoder, and a recorder, that take time by the clock."""

    def __init__(self, decoder: Decoder, clock: ManualClock, seconds: float) -> None:
        self.decoder, self.clock, self.seconds = decoder, clock, seconds

    def __call__(self, *arguments) -> torch.Tensor:
        self.clock.advance(self.seconds)
        return self.decoder(*arguments)

    def record(self, call):
        self.clock.advance(100.0)
        return Repeats(self.decoder.ops).record(call)


def test_recording_takes_no_time_of_the_engines(model):
    ops, clock, steps = resolve("triton"), ManualClock(), Counter()
    slow = Slow(Decoder(model.decoder.architecture, model.decoder.weights, ops), clock, 1.0)
    cache = Contiguous(model.geometry, None, ops)
    cache.reserve_scratch()
    graphed = GraphedDecoder(slow, ops, slow, clock, steps)
    with functions_patched_once(), integers_unchecked():
        _, log = answers(graphed, cache, clock)
    assert [step.end_s - step.start_s for step in log.steps] == [1.0] * len(log.steps)
    assert graphed.recording_s == 101.0 * steps["recorded"] > 0


def test_sizes_of_graphs():
    assert [GraphedDecoder.pad_to(spans) for spans in (1, 2, 3, 4, 5, 8, 9, 16, 33)] == [1, 2, 4, 4, 8, 8, 16, 16, 40]


def test_steps_are_replayed_only_where_that_is_safe_and_asked_for(model):
    cache = Paged(model.geometry, None, resolve("reference"))
    assert launched_because("auto", "cuda", "triton", cache) is None
    assert launched_because("auto", "cuda:1", "triton", cache) is None
    assert launched_because("off", "cuda", "triton", cache) == "graphs=off"
    assert launched_because("auto", "cpu", "triton", cache) == "device cpu has no graphs"
    assert "read numbers on the host" in launched_because("auto", "cuda", "reference", cache)
    kivi = Kivi(model.geometry, None, resolve("reference"), value_group=8)
    assert launched_because("auto", "cuda", "triton", kivi) == "Kivi plans nothing that could be replayed"


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_graphs_on_a_gpu_give_the_tokens_of_launched_steps(storage):
    from tests.gpu.graphs import replays_agree

    storage_class, parameters = STORAGES[storage]
    steps = replays_agree("cuda", resolve("triton", "cuda"), CudaGraphs(), DeviceClock("cuda"), storage_class, parameters)
    assert steps["replayed"] > steps["recorded"] > 0
