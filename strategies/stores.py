"""Row stores of all layers: making them, copying between them, adding up what they hold.

It does not know which sequence or page a row belongs to.
"""

from __future__ import annotations

import torch

from kernels.codec import Codec
from kernels.rows import RowStore
from strategies.base import KVCache

Stores = list[tuple[RowStore, RowStore]]  # (keys, values) of each layer


def new_pair(cache: KVCache, layer: int, rows: int, page_size: int | None, codecs: tuple[Codec, Codec]) -> tuple[RowStore, RowStore]:
    """Empty K and V stores of `rows` rows for one layer, in the backend's layout."""
    shape, device = cache.geometry.layers[layer], cache.geometry.device
    keys, values = (cache.ops.new_rows(codec, rows, shape.kv_heads, shape.head_dim, cache.dtype, device, page_size) for codec in codecs)
    return keys, values


def flat(stores: Stores) -> list[RowStore]:
    """Every store, keys and values alike."""
    return [store for pair in stores for store in pair]


def store_tensors(stores: Stores) -> list[torch.Tensor]:
    """Every tensor held."""
    return [tensor for store in flat(stores) for tensor in (store.codes, store.scales) if tensor is not None]


def held_bytes(stores: Stores) -> int:
    """Bytes of the tensors held, counted from the tensors."""
    return sum(store.nbytes for store in flat(stores))


def copy_rows(sources: Stores, first: int, targets: Stores, target_first: int, count: int) -> None:
    """Copy `count` encoded rows as bytes. The leading axis of both must be rows (or, for whole stores, pages)."""
    for source, target in zip(flat(sources), flat(targets), strict=True):
        for old, new in ((source.codes, target.codes), (source.scales, target.scales)):
            if old is not None:
                new[target_first : target_first + count] = old[first : first + count]


def copy_moved(old: torch.Tensor, new: torch.Tensor, moved: dict[int, int], page_rows: int) -> None:
    """Copy pages old[id] -> new[moved[id]] as bytes; a page is `page_rows` entries of the leading axis of both."""
    ids, names = (torch.tensor(list(pages), dtype=torch.int64, device=old.device) for pages in (moved, moved.values()))  # [n] each
    new.view(-1, page_rows, *new.shape[1:])[names] = old.view(-1, page_rows, *old.shape[1:])[ids]
