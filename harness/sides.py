"""A strategy made ready to run on a model: its kernels, its decoder, and a fresh cache whenever one is asked for.

It does not know what is run on it, nor how the result is judged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from harness.build import Settings, StrategySettings, make_cache, make_ops
from harness.errors import UserError
from harness.schema import RandomModel

if TYPE_CHECKING:
    from harness.engine.decoding import DecoderLike
    from harness.engine.graphs import Recorder
    from harness.measure.clock import Clock
    from harness.model.decoder import Decoder
    from harness.model.load import Model
    from kernels.api import Ops
    from strategies.base import KVCache


@dataclass(frozen=True)
class Contender:
    """One side of a comparison. Each side counts its own kernel calls, though both share the weights."""

    settings: StrategySettings
    model: Model
    decoder: Decoder
    ops: Ops
    budget_bytes: int | None
    recorder: Recorder | None = None  # records decode steps; None: every step is launched, and `launched_because` says why
    launched_because: str | None = None
    steps: Counter[str] = field(default_factory=Counter)  # of the workload, by how they ran

    def cache(self) -> KVCache:
        """A fresh, empty cache under the run's budget."""
        return self._scratched(make_cache(self.settings, self.model.geometry, self.budget_bytes, self.ops))

    def unbounded_cache(self) -> KVCache:
        """A fresh, empty cache that reserves exactly what it is asked to hold."""
        return self._scratched(make_cache(self.settings, self.model.geometry, None, self.ops))

    def decoder_on_one_cache(self, clock: Clock) -> DecoderLike:
        """The decoder for one pass of the workload: it records and replays steps where that can be done."""
        from harness.engine.graphs import GraphedDecoder

        return self.decoder if self.recorder is None else GraphedDecoder(self.decoder, self.ops, self.recorder, clock, self.steps)

    def _scratched(self, cache: KVCache) -> KVCache:
        if self.recorder is not None:
            cache.reserve_scratch()
        return cache


def contenders(settings: Settings, device: str) -> tuple[Contender, Contender]:
    """The strategy and its reference. They share one set of weights unless they want different KV heads."""
    strategy = _contender(settings, settings.strategy, device, None)
    shared = strategy.model if settings.reference.heads == settings.strategy.heads else None
    return strategy, _contender(settings, settings.reference, device, shared)


def _contender(settings: Settings, strategy: StrategySettings, device: str, model: Model | None) -> Contender:
    from harness.engine.graphs import CudaGraphs
    from harness.model.compiled import CompiledDecoder
    from harness.model.decoder import Decoder

    ops = make_ops(settings.general.backend, device)
    if model is None:
        model = _load(settings, strategy, device, ops)
    make = CompiledDecoder if settings.general.compile else Decoder
    decoder = make(model.decoder.architecture, model.decoder.weights, ops)
    found = Contender(strategy, model, decoder, ops, settings.general.budget_bytes)
    because = launched_because(settings.general.graphs, device, ops.name, found.cache())  # also refuses what it cannot honour
    if because is not None:
        return replace(found, launched_because=because)
    decoder.settle()
    return replace(found, recorder=CudaGraphs())


def launched_because(graphs: str, device: str, backend: str, cache: KVCache) -> str | None:
    """Why decode steps are not replayed from graphs; None where they are."""
    if graphs == "off":
        return "graphs=off"
    if device.split(":")[0] != "cuda":
        return f"device {device} has no graphs"
    if backend != "triton":
        return f"the {backend} kernels read numbers on the host, which a graph would not see change"
    return None if cache.capturable else f"{type(cache).__name__} plans nothing that could be replayed"


def _load(settings: Settings, strategy: StrategySettings, device: str, ops: Ops) -> Model:
    from harness.model.load import load_model
    from harness.model.random_init import RandomShape

    general, wanted = settings.general, settings.model
    if isinstance(wanted, RandomModel):
        sizes = {name: value for name, value in asdict(wanted).items() if name in RandomShape.__dataclass_fields__}
        return load_model("random", general.dtype, device, ops, strategy.heads, general.seed, RandomShape(**sizes))
    return load_model(wanted.source, general.dtype, device, ops, strategy.heads, general.seed)


def bos_id(settings: Settings, model: Model) -> int | None:
    """The token that texts begin with, None when `model.bos` is off. UserError for a model that has no such token."""
    if not settings.model.bos:
        return None
    if model.tokenizer.bos_id is None:
        raise UserError(f"model.bos=true, but the tokenizer of {model.name} has no BOS token: set model.bos=false")
    return model.tokenizer.bos_id
