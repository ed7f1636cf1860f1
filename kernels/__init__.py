"""What the device does: attention, row writes and pointwise ops, each with a plain-torch specification.

Knows tensors only. It has never heard of a sequence, a strategy or a config, and importing it imports nothing heavy:
`transformers` probes any package called `kernels`, so this file must stay importable in microseconds and never raise.
"""

from __future__ import annotations

import importlib
from typing import Any

# Below every version that transformers takes for Hugging Face's package of the same name; never raise it to 0.9 or above.
__version__ = "0.0.0"

_HOMES = {
    "Ops": "kernels.api",
    "BACKENDS": "kernels.backend",
    "BackendUnavailable": "kernels.backend",
    "resolve": "kernels.backend",
    "Batch": "kernels.rows",
    "DenseRows": "kernels.rows",
    "Mask": "kernels.rows",
    "PagedRows": "kernels.rows",
    "RowStore": "kernels.rows",
    "CODECS": "kernels.codec",
    "Codec": "kernels.codec",
    "codec_named": "kernels.codec",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
