"""A strategy made ready to run on a model: its kernels, its decoder, and a fresh cache whenever one is asked for.

It does not know what is run on it, nor how the result is judged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from harness.build import Settings, StrategySettings, make_cache, make_ops
from harness.errors import UserError
from harness.schema import RandomModel

if TYPE_CHECKING:
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

    def cache(self) -> KVCache:
        """A fresh, empty cache under the run's budget."""
        return make_cache(self.settings, self.model.geometry, self.budget_bytes, self.ops)

    def unbounded_cache(self) -> KVCache:
        """A fresh, empty cache that reserves exactly what it is asked to hold."""
        return make_cache(self.settings, self.model.geometry, None, self.ops)


def contenders(settings: Settings, device: str) -> tuple[Contender, Contender]:
    """The strategy and its reference. They share one set of weights unless they want different KV heads."""
    strategy = _contender(settings, settings.strategy, device, None)
    shared = strategy.model if settings.reference.heads == settings.strategy.heads else None
    return strategy, _contender(settings, settings.reference, device, shared)


def _contender(settings: Settings, strategy: StrategySettings, device: str, model: Model | None) -> Contender:
    from harness.model.decoder import Decoder

    ops = make_ops(settings.general.backend, device)
    if model is None:
        model = _load(settings, strategy, device, ops)
    decoder = Decoder(model.decoder.architecture, model.decoder.weights, ops)
    found = Contender(strategy, model, decoder, ops, settings.general.budget_bytes)
    found.cache()  # refuses what it cannot honour before anything has started
    return found


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
