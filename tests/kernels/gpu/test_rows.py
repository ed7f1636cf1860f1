"""Rows in the interpreter: codes bit for bit, pages byte for byte, addresses beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from kernels.codec import codec_named
from tests.kernels.cases import NAMES
from tests.kernels.gpu import checks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=NAMES.get)
@pytest.mark.parametrize("codec", checks.ALL_CODECS)
def test_codes_are_the_references_bit_for_bit(ops, codec, dtype):
    for head_dim in (8, 40, 64):
        checks.writes_the_reference_codes(ops, codec, dtype, checks.hard_rows(codec, dtype, head_dim))


def test_an_odd_row_of_nibbles_ends_in_half_a_byte(ops):
    checks.writes_the_reference_codes(ops, "q4_0", torch.float32, checks.hard_rows("q4_0", torch.float32, 37))


def test_every_e4m3_code_is_written_and_read(ops):
    """All 254 numbers of the format survive, and the points half-way between two go to the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    exact = codes.view(torch.float8_e4m3fn).float()
    order = exact.sort().values
    between = (order[1:] + order[:-1]) / 2
    rows = torch.cat((exact, between, torch.tensor([1e-9, -1e-9, 500.0])))
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 64)).view(-1, 1, 64)
    store = ops.new_rows(codec_named("fp8"), len(rows), 1, 64, torch.float32, "cpu", None)
    ops.write_rows(store, torch.arange(len(rows)), rows)
    expected = rows.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(store.codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(ops.read_rows(store, torch.arange(len(rows))), expected.float())


@pytest.mark.parametrize("codec", ["int8", "q8_0", "q4_0"])
def test_a_row_of_zeros_reads_back_as_zeros(ops, codec):
    """N05: nothing is divided by a scale of zero, and the neighbours keep their values."""
    rows = torch.ones(3, 2, 32)
    rows[1] = 0.0
    store = ops.new_rows(codec_named(codec), 3, 2, 32, torch.float32, "cpu", None)
    ops.write_rows(store, torch.arange(3), rows)
    back = ops.read_rows(store, torch.arange(3))
    assert torch.equal(back[1], torch.zeros(2, 32))
    assert (back[::2] - 1).abs().max() < 1e-3


def test_every_element_has_one_address(ops):
    """X: a different integer in every (slot, head, lane) is read back whole, slots in any order, from a strided source."""
    rows = torch.arange(7 * 3 * 24, dtype=torch.float32).view(7, 3, 24)
    fused = torch.full((7, 5, 24), float("nan"))
    fused[:, :3] = rows
    slots = torch.tensor([9, 0, 4, 2, 8, 1, 6])
    store = ops.new_rows(codec_named("raw"), 10, 3, 24, torch.float32, "cpu", None)
    store.codes.fill_(float("nan"))
    ops.write_rows(store, slots, fused[:, :3])
    assert torch.equal(ops.read_rows(store, slots), rows)
    assert torch.isnan(store.codes[[3, 5, 7]]).all()


def test_reading_no_rows_gives_no_rows(ops):
    store = ops.new_rows(codec_named("raw"), 2, 1, 8, torch.float32, "cpu", None)
    assert ops.read_rows(store, torch.empty(0, dtype=torch.int64)).shape == (0, 1, 8)


@pytest.mark.parametrize("codec", ["raw", "q4_0"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_are_copied_byte_for_byte(ops, page_size, codec):
    checks.copies_pages(ops, page_size, codec)


def test_copying_no_pages_does_nothing(ops):
    store = ops.new_rows(codec_named("raw"), 4, 1, 8, torch.float32, "cpu", 2)
    store.codes.fill_(1.0)
    ops.copy_pages([store], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert torch.equal(store.codes, torch.ones(4, 1, 8))


def test_moving_rows_may_overlap(ops):
    store = ops.new_rows(codec_named("int8"), 8, 2, 16, torch.float32, "cpu", None)
    rows = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))
    ops.write_rows(store, torch.arange(8), rows)
    before = ops.read_rows(store, torch.arange(5))
    ops.move_rows([store], 0, 2, 5)
    assert torch.equal(ops.read_rows(store, torch.arange(2, 7)), before)


def test_pages_beyond_two_gigabytes_are_read_where_they_are(ops):
    """X01."""
    checks.reads_a_page_beyond_two_gigabytes(ops)


def test_pages_beyond_two_gigabytes_are_written_where_they_are(ops):
    """X01."""
    checks.writes_a_page_beyond_two_gigabytes(ops)
