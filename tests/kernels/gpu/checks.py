"""What each kernel must get right, as functions of a backend: the tests call them on ours, the mutants' tests on broken ones.

Every check raises AssertionError (or a NumPy warning made an error) when the backend is wrong. Answers come from NumPy in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from harness.conformance.codecs import ROUND_TRIPS
from kernels.api import Ops
from kernels.backend import resolve
from kernels.codec import CODECS, codec_named
from kernels.rows import DenseRows, Mask, PagedRows, RowStore
from tests.kernels.cases import NAMES, Case, assert_as_close_as_reference, attention, batch_of, step_of

SPANS = ((5, 6), (0, 1), (33, 37))  # a decode step, a first token, and a chunk that crosses key tiles
EXACT = 1e-13
GUARD_VALUES = 4096
GUARD_BYTES = 2_300_000_000  # addresses that wrap at 32 bits land here, in memory that holds zeros


def attends_exactly(ops: Ops, case: Case, splits: int = 1) -> None:
    """float64 attention equals the answer to rounding."""
    step = step_of(replace(case, dtype=torch.float64), ops)
    step = replace(step, batch=replace(step.batch, splits=splits))
    wrong = np.abs(step.attend(ops).numpy() - step.exact)
    assert wrong.max() < EXACT, f"off by {wrong.max():.3g}"


def attends_as_closely_as_the_reference(ops: Ops, case: Case, splits: int = 1) -> None:
    """Low precision: no further from float64 than the reference is, within the derived bound."""
    step = step_of(case, ops)
    step = replace(step, batch=replace(step.batch, splits=splits))
    assert_as_close_as_reference(step.attend(ops), step.attend(resolve("reference")), step.exact)


def ignores_rows_it_does_not_own(ops: Ops, case: Case) -> None:
    """Whatever lies in rows that no query may see, the answer keeps its bits."""
    step = step_of(case, ops)
    first = step.attend(ops)
    assert torch.isfinite(first).all()
    foreign = [(tensor, torch.isnan(tensor)) for store in (step.keys, step.values) for tensor in _floats(store)]
    for poison in (0.0, float("inf"), 65504.0):
        for tensor, where in foreign:
            tensor[where] = poison
        assert torch.equal(step.attend(ops), first), f"{poison} in memory that is not its own changed the answer"


def weighs_exactly_the_visible_keys(ops: Ops, mask: Mask, length: int) -> None:
    """Keys of zero weigh all visible positions alike and values of one-hot rows name them: the output row is the attended set."""
    batch = batch_of(((0, length),))
    q = torch.ones(length, 2, length, dtype=torch.float64)
    k = torch.zeros(length, 1, length, dtype=torch.float64)
    v = torch.eye(length, dtype=torch.float64)[:, None, :]
    out = ops.attend_packed(q, k, v, batch, mask, 1.0, None)
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = (j <= i) & (np.ones_like(i - j, bool) if mask.window is None else (i - j < mask.window) | (j < mask.sinks))
    expected = seen / seen.sum(1, keepdims=True)
    assert np.abs(out[:, 1].numpy() - expected).max() < EXACT


def writes_the_reference_codes(ops: Ops, codec: str, dtype: torch.dtype, rows: torch.Tensor) -> None:
    """Codes and scales bit for bit, in the slots named and nowhere else; and they read back as the format says."""
    count, heads, head_dim = rows.shape[0] + 3, rows.shape[1], rows.shape[2]
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: rows.shape[0]]
    stores = []
    for backend in (ops, resolve("reference")):
        store = backend.new_rows(codec_named(codec), count, heads, head_dim, dtype, "cpu", None)
        for tensor in _tensors(store):
            tensor.view(torch.uint8).fill_(0xA5)
        backend.write_rows(store, slots, rows)
        stores.append(store)
    for ours, theirs in zip(_tensors(stores[0]), _tensors(stores[1]), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    expected = torch.from_numpy(ROUND_TRIPS[codec].read(rows.double().numpy(), NAMES[dtype])).to(dtype)
    assert torch.equal(ops.read_rows(stores[0], slots), expected)


def reads_a_page_beyond_two_gigabytes(ops: Ops) -> None:
    """A key and a value planted 2^31 codes into the pool are found there, through pages and through a base row."""
    store, slot = planted(ops)
    q = torch.ones(1, 1, 63)
    page = torch.tensor([[0, slot // 15]], dtype=torch.int32)
    batch = batch_of(((15, 16),))
    paged = ops.attend_paged(q, store, store, PagedRows(page, 15), batch, Mask(window=1), 1.0, None)
    assert torch.equal(paged, torch.full_like(q, 7.0))
    dense = ops.attend_dense(q, store, store, DenseRows(torch.tensor([slot - 15]), (slot - 15,)), batch, Mask(window=1), 1.0, None)
    assert torch.equal(dense, torch.full_like(q, 7.0))
    assert torch.equal(ops.read_rows(store, torch.tensor([slot])), torch.full_like(q, 7.0))


def writes_a_page_beyond_two_gigabytes(ops: Ops) -> None:
    """A row written there is there, and a page copied there arrives."""
    store, slot = planted(ops)
    ops.write_rows(store, torch.tensor([slot]), torch.full((1, 1, 63), 5.0))
    assert int(store.codes[slot, 0, 0]) == 127
    ops.copy_pages([store], torch.tensor([slot // 15]), torch.tensor([slot // 15 - 2]))
    assert int(store.codes[slot - 30, 0, 62]) == 127


def planted(ops: Ops) -> tuple[RowStore, int]:
    """An int8 store whose last pages lie past 2^31 codes, with the value 7 in the first row of its last page.

    A page is an odd number of bytes, so that copies count bytes. Memory that nobody touches takes no room.
    """
    pages = (2**31 + 2**16) // 63 // 15
    rows = pages * 15
    memory = torch.empty(GUARD_BYTES + rows * 63, dtype=torch.int8)
    codes = memory[GUARD_BYTES:].view(rows, 1, 63)
    scales = torch.empty(rows, 1, 1, dtype=torch.float32)
    slot = rows - 15
    codes[slot], scales[slot] = 7, 1.0
    return RowStore(codec_named("int8"), 1, 63, torch.float32, 15, codes, scales), slot


def stores_only_its_own_rows(ops: Ops) -> None:
    """X08: every element of every output is written, split or not, and nothing before or after it. One element alone is no output."""
    for splits in (1, 3):
        step = step_of(Case(spans=((0, 5), (20, 21), (0, 9)), head_dim=24, query_heads=2, kv_heads=1), ops)
        step = replace(step, batch=replace(step.batch, splits=splits))
        with guarded_outputs() as outputs:
            out = step.attend(ops)
        for output, whole in outputs:
            assert output.numel() == 1 or not torch.isnan(output).any(), "an element was not written"
            assert torch.isnan(whole[:GUARD_VALUES]).all() and torch.isnan(whole[-GUARD_VALUES:]).all(), "written outside"
        assert np.abs(out.numpy() - step.exact).max() < 1e-5


@contextmanager
def guarded_outputs() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Every float tensor made by torch.empty meanwhile starts as NaN between guards of NaN. -> (tensor, what holds it), as made."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = math.prod(shape)
        whole = torch.full((count + 2 * GUARD_VALUES,), float("nan"), dtype=dtype, device=device)
        made.append((whole[GUARD_VALUES : GUARD_VALUES + count].view(shape), whole))
        return made[-1][0]

    original, torch.empty = torch.empty, empty
    try:
        yield made
    finally:
        torch.empty = original


def copies_pages(ops: Ops, page_size: int, codec: str) -> None:
    """Pages arrive byte for byte in every store, and nothing else changes."""
    stores = [
        ops.new_rows(codec_named(codec), 9 * page_size, heads, head_dim, torch.float16, "cpu", page_size)
        for heads, head_dim in ((3, 8), (1, 24))
    ]
    random = torch.Generator().manual_seed(2)
    for tensor in (t for store in stores for t in _tensors(store)):
        tensor.view(torch.uint8).copy_(torch.randint(0, 256, tensor.view(torch.uint8).shape, generator=random, dtype=torch.uint8))
    expected = [tensor.view(torch.uint8).clone() for store in stores for tensor in _tensors(store)]
    sources, targets = torch.tensor([5, 0, 5]), torch.tensor([1, 8, 3])
    for tensor in expected:
        pages = tensor.view(9, -1)
        pages[targets] = pages[sources]
    ops.copy_pages(stores, sources, targets)
    for got, want in zip((t for store in stores for t in _tensors(store)), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), want)


def rotates(ops: Ops, dtype: torch.dtype, head_dim: int, rotated: int) -> None:
    """rope of a strided x, whole or in part, within the derived bound."""
    fused = _random(3, 7, head_dim, dtype=dtype)
    x = fused[:, 1:6]
    angle = torch.arange(3)[:, None] * torch.logspace(0, -2, rotated)[None, :] + 1.0
    cos, sin = torch.cos(angle), torch.sin(angle)
    first, second = x[..., :rotated].double(), x[..., rotated : 2 * rotated].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    exact = torch.cat((first * c - second * s, second * c + first * s, x[..., 2 * rotated :].double()), dim=-1).numpy()
    _close(ops.rope(x, cos, sin), resolve("reference").rope(x, cos, sin), exact)


def normalises(ops: Ops, dtype: torch.dtype, features: int, residual: bool) -> None:
    """rms_norm of strided rows: the sum is exactly the reference's, the norm within the derived bound."""
    x = _random(3, 5, features, dtype=dtype)[:, 1:4]
    weight = _random(features, dtype=dtype)
    other = _random(3, 3, features, dtype=dtype) if residual else None
    got, total = ops.rms_norm(x, weight, 1e-5, other)
    expected, expected_total = resolve("reference").rms_norm(x, weight, 1e-5, other)
    assert torch.equal(total, expected_total)
    wide = expected_total.double()
    exact = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    _close(got, expected, exact.numpy())


def gates(ops: Ops, dtype: torch.dtype, activation: str) -> None:
    """act(gate) * up within the derived bound, at large magnitudes too."""
    x = _random(3, 2 * 37, dtype=dtype) * 4
    x[0, :2] = torch.tensor([300.0, -300.0], dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    _close(ops.gated(x, activation), resolve("reference").gated(x, activation), (act * up).numpy())


def packs(ops: Ops, mask: Mask) -> None:
    """Attention over this step's own k and v, read in place from the fused projection."""
    batch = batch_of(((0, 5), (0, 1), (0, 19)))
    fused = _random(batch.tokens, 8, 24, dtype=torch.float64)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    out = ops.attend_packed(q, k, v, batch, mask, 0.3, None)
    for low, stop in ((0, 5), (5, 6), (6, 25)):
        exact = attention(*(x[low:stop].numpy() for x in (q, k, v)), 0, mask, 0.3, None)
        assert np.abs(out[low:stop].numpy() - exact).max() < EXACT


def hard_rows(codec: str, dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """Rows [9, 3, head_dim] that rounding gets wrong: zeros, ties, ties for the largest, constants, tiny and huge values, offsets."""
    x = _random(9, 3, head_dim, dtype=torch.float64)
    top = 200.0 if codec == "fp8" else 60000.0
    x[1] = 0.0
    x[2] = torch.arange(head_dim).double() / 2 - head_dim / 4  # ties
    x[2, :, 0] = 127.0
    x[3, :, ::2], x[3, :, 1::2] = 3.0, -3.0  # equal magnitudes of both signs: q4_0 takes the first
    x[4] = 5.5
    x[5] *= 1e-7
    x[6] *= top / x[6].abs().max()
    x[7] += 100.0
    x[8, :, -1] = -40.0  # the last lane holds the largest
    return x.to(dtype)


def _close(got: torch.Tensor, reference: torch.Tensor, exact: np.ndarray) -> None:
    """The derived bound; in float64, where the yardstick is no finer than what it measures, a few of its own roundings."""
    if got.dtype == torch.float64:
        assert np.all(np.abs(got.numpy() - exact) <= 1e-14 * np.maximum(np.abs(exact), 1))
    else:
        assert_as_close_as_reference(got, reference, exact)


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)


def _tensors(store: RowStore) -> list[torch.Tensor]:
    return [tensor for tensor in (store.codes, store.scales) if tensor is not None]


def _floats(store: RowStore) -> list[torch.Tensor]:
    """The tensors that can hold NaN: raw rows, or the scales of coded ones."""
    return [tensor for tensor in _tensors(store) if tensor.is_floating_point() and tensor.dtype.itemsize > 1]


ALL_CODECS = tuple(CODECS)
