"""Decode steps replayed from graphs against launched ones, end to end on a small random model: the same tokens, or an error."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.engine.engine import Engine
from harness.engine.graphs import GraphedDecoder, Recorder
from harness.engine.request import Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import scheduler_for
from harness.measure.clock import Clock
from harness.model.load import load_model
from harness.model.random_init import RandomShape
from kernels.api import Ops
from strategies.contiguous import Contiguous
from strategies.paged import Paged

SHAPE = RandomShape(vocab=258, hidden=256, intermediate=512, layers=2, query_heads=4, kv_heads=2, head_dim=64, context=1024)
CACHES = {
    "paged": (Paged, {}),
    "contiguous": (Contiguous, {}),
    "window": (Paged, {"window": 128, "sinks": 4}),
    "int8": (Contiguous, {"codec_k": "int8", "codec_v": "int8"}),
}
PROMPTS = (300, 5, 40, 1, 17)
FEW_TOKENS, MANY_TOKENS = 3, 40


def replays_agree(
    device: str, ops: Ops, recorder: Recorder, clock: Clock, storage: type, parameters: dict[str, Any], quick: bool = False
) -> Counter:
    """How the steps ran. AssertionError when a token differs, or nothing was replayed."""
    steps: Counter[str] = Counter()
    model = load_model("random", "bfloat16", device, ops, seed=1, shape=SHAPE)
    model.decoder.settle()
    lengths = PROMPTS[3:] if quick else PROMPTS
    requests = [Request(row, tuple((31 * row + 7 * i) % 258 for i in range(n)), _tokens(row, quick)) for row, n in enumerate(lengths)]
    answers = []
    for graphed in (False, True):
        cache = storage(model.geometry, None, ops, **parameters)
        if graphed:
            cache.reserve_scratch()
        decoder = GraphedDecoder(model.decoder, ops, recorder, clock, steps) if graphed else model.decoder
        engine = Engine(decoder, cache, scheduler_for(cache, 512, None), Sampler(), clock)
        engine.run(requests)
        answers.append({id_: completion.tokens for id_, completion in engine.completions.items()})
    assert answers[0] == answers[1], f"launched steps and replayed ones disagree: {answers}"
    assert steps["replayed"] > 0, f"nothing was replayed: {steps}"
    return steps


def checked(device: str, ops: Ops, recorder: Recorder, clock: Clock, quick: bool) -> list[dict]:
    """One finding for each cache, or in a quick run for the first: ok with its steps, or wrong with the reason."""
    found = []
    for name, (storage, parameters) in list(CACHES.items())[: 1 if quick else None]:
        try:
            steps = replays_agree(device, ops, recorder, clock, storage, parameters, quick)
            found.append({"graphs": name, "status": "ok", "steps": dict(steps)})
        except Exception as error:  # whatever a device raises is a finding, and the other caches are still to be checked
            found.append({"graphs": name, "status": "wrong", "message": f"{type(error).__name__}: {error}"[:600]})
    return found


def _tokens(row: int, quick: bool) -> int:
    """Sequences end one after another, so that graphs of several sizes are used."""
    return (FEW_TOKENS if quick else MANY_TOKENS) + row
