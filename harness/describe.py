"""The sections of a record that say what ran, read from the live objects and not from what was asked for.

It does not know how a run goes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.audit import Audit
    from harness.sides import Contender


def describe_strategy(side: Contender) -> dict[str, Any]:
    """The `strategy` section of a record, read from the cache itself, not from what was asked for."""
    cache = side.cache()
    masks = Counter(cache.mask(layer) for layer in range(len(cache.geometry.layers)))
    heads = cache.heads
    return {
        "name": side.settings.name,
        "storage": side.settings.storage,
        "page_size": getattr(cache, "page_size", None),
        "mask": {
            "window": getattr(cache, "window", None),
            "sinks": getattr(cache, "sinks", 0),
            "layers": [asdict(mask) | {"layers": count} for mask, count in masks.items()],
        },
        "codec_k": cache.codec_k.name,
        "codec_v": cache.codec_v.name,
        "heads": None if heads is None else asdict(heads) | {"label": side.model.heads_label},
        "rewind": None if cache.rewind == float("inf") else cache.rewind,
        "parameters": {name: str(value) if name == "heads" else value for name, value in side.settings.parameters.items()},
    }


def describe_model(side: Contender) -> dict[str, Any]:
    """The `model` section of a record."""
    model = side.model
    shapes = model.geometry.layers
    return {
        "name": model.name,
        "sha256": model.sha256,
        "architecture": model.architecture.family,
        "layers": len(shapes),
        "query_heads": model.geometry.query_heads,
        "kv_heads": sorted({shape.kv_heads for shape in shapes})[-1],
        "head_dim": sorted({shape.head_dim for shape in shapes})[-1],
        "heads": model.heads_label,
        "dtype": model.dtype,
    }


def describe_backend(side: Contender, audit: Audit) -> dict[str, Any]:
    """The activation proof: which kernels ran how often, whose code they are, and in which dtypes rows lie."""
    return {
        "name": side.ops.name,
        "flavour": side.ops.flavour,
        "kernels": dict(sorted(side.ops.calls.items())),
        "sources": {op: facts["source"] for op, facts in audit.ran.items()},
        "storage_dtypes": list(audit.dtype_bytes),
        "compiled": side.decoder.compiled,
        "graphs": {"launched_because": side.launched_because, "steps": dict(sorted(side.steps.items()))},
    }
