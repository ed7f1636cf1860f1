"""CPU row writes, copies and pointwise ops: the same codes as the reference, and as close to float64."""

from __future__ import annotations

import pytest
import torch

from kernels.api import Ops
from kernels.backend import resolve
from kernels.codec import CODECS, codec_named
from tests.kernels.cases import NAMES, assert_as_close_as_reference

REFERENCE = resolve("reference")


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("head_dim", [8, 36, 64, 96])
@pytest.mark.parametrize("name", CODECS)
def test_the_same_codes_as_the_reference(ops: Ops, name: str, head_dim: int, dtype: torch.dtype) -> None:
    rows = (torch.randn(40, 3, head_dim, generator=seeded(1)) * torch.logspace(-6, 6, 40)[:, None, None]).to(dtype)
    rows[3], rows[7], rows[9, :, ::2] = 0, 1e-30, 0
    rows[11] = torch.arange(head_dim) - 3.5
    rows[12, :, 1], rows[12, :, 5] = -3e4, 3e4
    slots = torch.randperm(64, generator=seeded(2))[:40]
    got, want = (backend.new_rows(codec_named(name), 64, 3, head_dim, dtype, "cpu", 8) for backend in (ops, REFERENCE))
    ops.write_rows(got, slots, rows)
    REFERENCE.write_rows(want, slots, rows)
    decoded = REFERENCE.read_rows(want, slots)
    assert torch.equal(ops.read_rows(got, slots), decoded)
    assert got.nbytes == want.nbytes == 64 * 3 * codec_named(name).row_bytes(head_dim, NAMES[dtype])


@pytest.mark.parametrize("name", CODECS)
def test_writing_some_rows_leaves_the_others(ops: Ops, name: str) -> None:
    store = ops.new_rows(codec_named(name), 24, 3, 64, torch.float32, "cpu", 8)
    ops.write_rows(store, torch.arange(24), torch.randn(24, 3, 64, generator=seeded(3)))
    before = ops.read_rows(store, torch.arange(24))
    ops.write_rows(store, torch.tensor([20, 3]), torch.randn(2, 3, 64, generator=seeded(4)))
    others = torch.tensor([slot for slot in range(24) if slot not in (3, 20)])
    assert torch.equal(ops.read_rows(store, others), before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=NAMES.get)
@pytest.mark.parametrize("name", CODECS)
def test_rows_may_be_a_view_of_wider_ones(ops: Ops, name: str, dtype: torch.dtype) -> None:
    wide = torch.randn(9, 8, 64, generator=seeded(5)).to(dtype)
    views, copies = (ops.new_rows(codec_named(name), 9, 3, 64, dtype, "cpu", None) for _ in range(2))
    ops.write_rows(views, torch.arange(9), wide[:, 4:7])
    ops.write_rows(copies, torch.arange(9), wide[:, 4:7].clone())
    assert torch.equal(ops.read_rows(views, torch.arange(9)), ops.read_rows(copies, torch.arange(9)))


@pytest.mark.parametrize("name", CODECS)
def test_copied_pages_are_the_same_bytes_in_every_store(ops: Ops, name: str) -> None:
    stores = [ops.new_rows(codec_named(name), 40, 3, 40, torch.float32, "cpu", 5) for _ in range(4)]
    for number, store in enumerate(stores):
        ops.write_rows(store, torch.arange(40), torch.randn(40, 3, 40, generator=seeded(number)))
    before = [ops.read_rows(store, torch.arange(40)).view(8, 5, 3, 40) for store in stores]
    ops.copy_pages(stores, torch.tensor([1, 4, 7]), torch.tensor([5, 0, 2]))
    for store, old in zip(stores, before, strict=True):
        assert torch.equal(ops.read_rows(store, torch.arange(40)).view(8, 5, 3, 40), old[[4, 1, 7, 3, 4, 1, 6, 7]])


def test_copying_no_pages_changes_nothing(ops: Ops) -> None:
    store = ops.new_rows(codec_named("raw"), 8, 1, 8, torch.float32, "cpu", 4)
    store.codes.fill_(3)
    ops.copy_pages([store], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert torch.all(store.codes == 3)


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("lanes", [64, 48, 10])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_rope(ops: Ops, dtype: torch.dtype, lanes: int, tokens: int) -> None:
    x = torch.randn(tokens, 5, 64, generator=seeded(6)).to(dtype)[:, 1:4]
    angles = torch.randn(tokens, lanes // 2, generator=seeded(7))
    cos, sin = angles.cos(), angles.sin()
    exact = REFERENCE.rope(x.double(), cos.double(), sin.double()).numpy()
    assert_as_close_as_reference(ops.rope(x, cos, sin), REFERENCE.rope(x, cos, sin), exact)


@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=["float32 weight", "weight like x"])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("shape", [(1, 576), (3, 50), (300, 96), (7, 3, 64)])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_rms_norm(ops: Ops, dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool, weight_dtype: torch.dtype | None) -> None:
    x, r = (torch.randn(shape, generator=seeded(n)).to(dtype) for n in (8, 9))
    weight = torch.randn(shape[-1], generator=seeded(10)).to(dtype if weight_dtype is None else weight_dtype)
    before = x.clone(), r.clone()
    y, total = ops.rms_norm(x, weight, 1e-5, r if with_residual else None)
    reference, sums = REFERENCE.rms_norm(x, weight, 1e-5, r if with_residual else None)
    assert torch.equal(total, sums)
    assert torch.equal(x, before[0])
    assert torch.equal(r, before[1])
    exact, _ = REFERENCE.rms_norm(sums.double(), weight.double(), 1e-5, None)
    assert_as_close_as_reference(y, reference, exact.numpy())


def test_rms_norm_of_a_view(ops: Ops) -> None:
    wide = torch.randn(4, 5, 64, generator=seeded(11))
    weight = torch.ones(64)
    y, _ = ops.rms_norm(wide[:, 1:3], weight, 1e-5, None)
    copied, _ = ops.rms_norm(wide[:, 1:3].clone(), weight, 1e-5, None)
    assert torch.equal(y, copied)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 3072), (3, 34), (300, 128)])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_gated(ops: Ops, dtype: torch.dtype, shape: tuple[int, int], activation: str) -> None:
    x = (4 * torch.randn(shape, generator=seeded(12))).to(dtype)
    x[0, :3] = torch.tensor([-120.0, 120.0, 0.0])
    exact = REFERENCE.gated(x.double(), activation).numpy()
    assert_as_close_as_reference(ops.gated(x, activation), REFERENCE.gated(x, activation), exact)


def test_nan_shows_in_every_pointwise_op(ops: Ops) -> None:
    x = torch.randn(2, 64, generator=seeded(13))
    x[1, 40] = float("nan")
    y, _ = ops.rms_norm(x, torch.ones(64), 1e-5, None)
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[0]).all()
    assert torch.isnan(ops.gated(x, "silu")[1, 8])
