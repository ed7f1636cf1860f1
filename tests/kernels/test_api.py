"""The public ops refuse bad input in one sentence that names both sides, count what ran, and resolve to what was asked for."""

from __future__ import annotations

import pytest
import torch

from kernels.api import Ops
from kernels.backend import BackendUnavailable, resolve
from kernels.codec import CODECS, codec_named
from kernels.rows import DenseRows, Mask, PagedRows, RowStore
from tests.kernels.cases import batch_of


@pytest.fixture
def ops() -> Ops:
    return resolve("reference")


def store_of(
    ops: Ops, heads: int = 2, head_dim: int = 8, count: int = 8, dtype: torch.dtype = torch.float32, page_size: int | None = None
) -> RowStore:
    return ops.new_rows(codec_named("raw"), count, heads, head_dim, dtype, "cpu", page_size)


def attend(ops: Ops, q: torch.Tensor, keys: RowStore, values: RowStore, spans=((3, 4),)) -> torch.Tensor:
    where = DenseRows(torch.zeros(len(spans), dtype=torch.int64), (0,) * len(spans))
    return ops.attend_dense(q, keys, values, where, batch_of(spans), Mask(), 1.0, None)


def test_rows_of_another_shape_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"rows \(3, 2, 8\) does not match its slots and store \(4, 2, 8\)"):
        ops.write_rows(store_of(ops), torch.arange(4), torch.zeros(3, 2, 8))


def test_rows_of_another_dtype_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"rows dtype torch.float64 does not match the store's working dtype torch.float32"):
        ops.write_rows(store_of(ops), torch.arange(4), torch.zeros(4, 2, 8, dtype=torch.float64))


def test_queries_that_the_batch_does_not_have_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"q \(2, 8\) does not match \[tokens, head_dim\] of the batch and store \(1, 8\)"):
        attend(ops, torch.zeros(2, 2, 8), store_of(ops), store_of(ops))


def test_key_and_value_stores_must_agree(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"the key store \(2, 8, 8\) does not match the value store \(4, 8, 8\)"):
        attend(ops, torch.zeros(1, 4, 8), store_of(ops), store_of(ops, heads=4))


def test_queries_of_another_dtype_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match=r"q dtype torch.float16 does not match the store's working dtype torch.float32"):
        attend(ops, torch.zeros(1, 2, 8, dtype=torch.float16), store_of(ops), store_of(ops))


def test_heads_that_do_not_divide_are_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads evenly"):
        attend(ops, torch.zeros(1, 3, 8), store_of(ops), store_of(ops))


def test_a_table_of_another_page_size_is_refused(ops: Ops) -> None:
    store, where = store_of(ops, page_size=4), PagedRows(torch.ones(1, 2, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="the table's page_size 2 does not match the store's 4"):
        ops.attend_paged(torch.zeros(1, 2, 8), store, store, where, batch_of(((3, 4),)), Mask(), 1.0, None)


def test_packed_spans_must_start_at_zero(ops: Ops) -> None:
    k = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match=r"each span must start at 0; got spans \(\(3, 4\),\)"):
        ops.attend_packed(k, k, k, batch_of(((3, 4),)), Mask(), 1.0, None)


def test_pages_are_copied_between_paged_stores_only(ops: Ops) -> None:
    pages = torch.tensor([1])
    with pytest.raises(ValueError, match="one of these is addressed by row"):
        ops.copy_pages([store_of(ops)], pages, pages + 1)
    with pytest.raises(ValueError, match=r"sources \(1,\) does not match targets \(2,\)"):
        ops.copy_pages([store_of(ops, page_size=4)], pages, torch.tensor([1, 0]))


def test_rope_angles_must_fit(ops: Ops) -> None:
    x = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"need cos \[T, R\] with T = 3 and 2R <= 8"):
        ops.rope(x, torch.zeros(3, 5), torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"cos \(3, 4\) does not match sin \(3, 3\)"):
        ops.rope(x, torch.zeros(3, 4), torch.zeros(3, 3))


def test_norm_weights_must_fit(ops: Ops) -> None:
    with pytest.raises(ValueError, match="weight 6 does not match the last axis of x 8"):
        ops.rms_norm(torch.zeros(2, 8), torch.zeros(6), 1e-5, None)


def test_a_product_is_torchs_own_unless_the_backend_has_one(ops: Ops) -> None:
    x, weight = torch.ones(2, 32), torch.ones(3, 32)
    assert torch.equal(ops.linear(x, weight, None), torch.full((2, 3), 32.0))
    assert not ops.calls
    cpu = resolve("cpu")
    assert torch.equal(cpu.linear(x, weight, torch.ones(3)), torch.full((2, 3), 33.0))
    assert dict(cpu.calls) == {"linear": 1}
    with pytest.raises(ValueError, match="x 32 does not match the weight's columns 16"):
        cpu.linear(x, torch.ones(3, 16), None)


def test_an_unknown_activation_lists_the_known_ones(ops: Ops) -> None:
    with pytest.raises(ValueError, match="unknown activation 'relu': choose one of silu, gelu_tanh"):
        ops.gated(torch.zeros(2, 8), "relu")


def test_a_mask_that_sees_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 0 sees nothing"):
        Mask(window=0)
    with pytest.raises(ValueError, match="sinks=-1 is negative"):
        Mask(window=4, sinks=-1)
    with pytest.raises(ValueError, match="sinks=2 without a window changes nothing"):
        Mask(sinks=2)


def test_what_ran_is_counted(ops: Ops) -> None:
    store = store_of(ops)
    ops.write_rows(store, torch.arange(4), torch.zeros(4, 2, 8))
    attend(ops, torch.zeros(1, 2, 8), store, store)
    attend(ops, torch.zeros(1, 2, 8), store, store)
    assert dict(ops.calls) == {"write_rows": 1, "attend_dense": 2}


def test_auto_is_the_cpu_backend_on_a_cpu() -> None:
    assert resolve("auto").name == "cpu"
    assert resolve("cpu").name == "cpu"


def test_a_backend_that_cannot_run_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="needs a GPU and this run is on the CPU"):
        resolve("triton", "cpu")
    with pytest.raises(BackendUnavailable, match="cannot read tensors on a GPU"):
        resolve("cpu", "cuda:0")
    with pytest.raises(ValueError, match="unknown backend 'numba': choose one of auto, reference, cpu, triton"):
        resolve("numba")


def test_an_unknown_codec_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"unknown codec 'int3': choose one of {', '.join(CODECS)}"):
        codec_named("int3")


@pytest.mark.parametrize(
    ("name", "head_dim", "expected"), [("raw", 64, 256), ("int8", 64, 68), ("q8_0", 40, 44), ("q4_0", 40, 24), ("fp8", 7, 7)]
)
def test_row_bytes_count_codes_and_scales(name: str, head_dim: int, expected: int) -> None:
    assert codec_named(name).row_bytes(head_dim, "float32") == expected
