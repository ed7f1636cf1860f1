"""Published bytes and capacities: KV heads and not query heads, codes and not floats, one budget and not one for each sequence."""

from __future__ import annotations

import pytest

from kernels.backend import resolve
from strategies.contiguous import Contiguous
from strategies.geometry import CacheFull, Geometry, LayerShape
from strategies.paged import Paged

PAGE = 16
BYTES = {"raw": 256, "int8": 160, "q4_0": 80}  # of one token with 2 layers, 8 query heads on 2 KV heads, head_dim 16, float16


def geometry(kv_heads: int = 2, query_heads: int = 8) -> Geometry:
    return Geometry((LayerShape(kv_heads, 16, None),) * 2, query_heads, 0.25, None, "float16", "cpu", 8192)


def filled(cache, length: int, most: int) -> int:
    """How many sequences of `length` tokens the cache takes, all alive, `most` at most."""
    for number in range(most):
        sid = cache.open(expect=length)
        try:
            cache.commit(cache.plan({sid: length}), [0] * length)
        except CacheFull:
            return number
    return most


@pytest.mark.parametrize("codec", BYTES)
@pytest.mark.parametrize("storage", [Contiguous, Paged])
def test_a_token_takes_its_codes_and_scales_by_formula_and_in_the_tensors(storage, codec):
    ops = resolve("reference")
    for kv_heads, share in ((2, 1), (1, 2)):
        cache = storage(geometry(kv_heads), None, ops, codec_k=codec, codec_v=codec)
        assert cache.bytes_per_token() == BYTES[codec] / share
        before = sum(tensor.nbytes for tensor in cache.tensors())
        filled(cache, 4 * PAGE, 1)
        assert sum(tensor.nbytes for tensor in cache.tensors()) - before in (
            4 * PAGE * BYTES[codec] // share,
            (4 + 1) * PAGE * BYTES[codec] // share,  # with the page that padding is written to
        )


def test_one_budget_holds_as_many_tokens_as_the_format_says():
    budget = 1_000_000
    held = {codec: filled(Paged(geometry(), budget, resolve("reference"), codec_k=codec, codec_v=codec), PAGE, 2000) for codec in BYTES}
    for codec, pages in held.items():
        assert budget // (PAGE * BYTES[codec]) - 1 <= pages <= budget // (PAGE * BYTES[codec])


def test_a_pool_of_64_tokens_is_one_pool_whoever_asks():
    ops = resolve("reference")
    page_bytes = 4 * BYTES["raw"]
    ask = Paged(geometry(), None, ops, page_size=4)
    budget = 16 * page_bytes + page_bytes  # 64 tokens, and the page that padding is written to
    fits = [count for count in range(1, 6) if ask.bytes_for([20] * count) <= budget]
    assert fits == [1, 2, 3]
    assert filled(Paged(geometry(), budget, ops, page_size=4), 20, 4) == 3
