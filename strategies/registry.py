"""The storages there are, by the name a strategy's YAML gives: one line for each.

It does not know parameters: each class's own keyword-only signature is their schema.
"""

from __future__ import annotations

from strategies.base import KVCache
from strategies.contiguous import Contiguous
from strategies.kivi import Kivi
from strategies.none import NoCache
from strategies.paged import Paged

STORAGES: dict[str, type[KVCache]] = {
    "none": NoCache,
    "contiguous": Contiguous,
    "paged": Paged,
    "kivi": Kivi,
}
