"""The kit's own row formats: checked by hand and by their definition, then against every kernel that can run here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.conformance.codecs import ROUND_TRIPS, kivi_keys, kivi_values, round_trips
from harness.errors import UserError
from kernels.backend import resolve
from kernels.codec import CODECS, codec_named

DTYPES = ("float64", "float32", "bfloat16", "float16")


def _rows(head_dim: int, dtype: str) -> np.ndarray:
    """Rows of very different sizes, with zeros, constants and ties, that `dtype` holds exactly."""
    rng = np.random.default_rng(head_dim)
    rows = rng.normal(size=(60, 2, head_dim)) * np.exp(rng.normal(size=(60, 1, 1)) * 3)
    rows[0], rows[1], rows[2] = 0.0, 5.25, np.sign(rows[2])
    rows[3] *= 1e-8
    rows[4] = np.round(rows[4] * 4) / 8
    exact = torch.from_numpy(rows).to(getattr(torch, dtype)).double().numpy()
    return np.where(np.isfinite(exact), exact, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_kernels_store_what_the_written_format_says(name, dtype, backend):
    if backend == "triton" and dtype == "float64":
        pytest.skip("the Triton kernels compute in float32")
    ops = resolve(backend)
    for head_dim in (8, 24, 32, 80):
        rows = _rows(head_dim, dtype)
        store = ops.new_rows(codec_named(name), 60, 2, head_dim, getattr(torch, dtype), "cpu", None)
        ops.write_rows(store, torch.arange(60), torch.from_numpy(rows).to(store.dtype))
        got = ops.read_rows(store, torch.arange(60)).double()
        want = torch.from_numpy(ROUND_TRIPS[name].read(rows, dtype)).to(store.dtype).double()
        wrong = (got - want).abs() > want.abs() * 2.0**-22  # one rounding of code times scale in float32
        assert not wrong.any(), f"head_dim {head_dim}: {got[wrong][:3].tolist()} should be {want[wrong][:3].tolist()}"


@pytest.mark.parametrize("name", ["int8", "q8_0", "q4_0"])
def test_errors_stay_within_half_a_step_of_the_rows_own_group(name):
    rows = np.random.default_rng(1).uniform(-6, 6, size=(200, 1, 40))
    read = ROUND_TRIPS[name].read(rows, "float32")
    size, levels = (40, 127) if name == "int8" else (32, 127 if name == "q8_0" else 8)
    for at in range(0, 40, size):
        part, back = rows[..., at : at + size], read[..., at : at + size]
        step = np.abs(part).max(-1, keepdims=True) / levels
        inside = np.abs(part) < (levels - 1) * step  # q4_0 clips the far end of the side without m
        assert (
            np.abs(part - back)[inside] <= (step * 0.5 * (1 + 2e-3) + step * levels * 2.0**-11).repeat(part.shape[-1], -1)[inside]
        ).all()


def test_q4_0_takes_the_first_value_of_largest_magnitude_for_its_scale():
    assert ROUND_TRIPS["q4_0"].read(np.array([[[-8.0, 8.0, 1.0]]]), "float32").tolist() == [[[-8.0, 7.0, 1.0]]]
    assert ROUND_TRIPS["q4_0"].read(np.array([[[8.0, -8.0, 1.0]]]), "float32").tolist() == [[[8.0, -7.0, 1.0]]]


def test_ties_go_to_even():
    rows = np.array([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]])
    assert ROUND_TRIPS["int8"].read(rows, "float64").tolist() == [[[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]]


def test_zero_rows_and_scales_that_round_to_zero_read_back_as_zero():
    for name in ("int8", "q8_0", "q4_0", "fp8"):
        assert not ROUND_TRIPS[name].read(np.zeros((2, 1, 40)), "float32").any()
    assert not ROUND_TRIPS["q8_0"].read(np.full((1, 1, 8), 1e-7), "float32").any()


def test_a_short_last_group_has_a_scale_of_its_own():
    rows = np.concatenate((np.full(32, 100.0), np.full(8, 0.01))).reshape(1, 1, 40)
    assert abs(ROUND_TRIPS["q8_0"].read(rows, "float32")[..., -1] - 0.01) < 1e-5


def test_fp8_values_are_those_of_torch():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    finite = every[every.isfinite()].numpy()
    between = np.concatenate((finite, (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2, [500.0, -1e6, 2.0**-10, 3 * 2.0**-10]))
    want = torch.from_numpy(between).clamp(-448, 448).to(torch.float8_e4m3fn).double().numpy()
    assert np.array_equal(ROUND_TRIPS["fp8"].read(between.reshape(1, 1, -1), "float64").ravel(), want)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("low", [5.0, -6.0, -0.5, 95.0])
def test_kivi_keeps_channels_far_from_zero(bits, low):
    """Half a step, plus what a float16 zero and scale round: a clamped zero point would be off by the offset itself."""
    rows = np.random.default_rng(bits).uniform(low, low + 1, size=(16, 2, 24))
    for read, axis in ((kivi_keys(bits, 16).read, 0), (kivi_values(bits, 16, 24).read, -1)):
        error = np.abs(read(rows, "float64") - rows)
        step = (rows.max(axis, keepdims=True) - rows.min(axis, keepdims=True)) / (2**bits - 1)
        assert (error <= step / 2 + 2.0**-10 * (np.abs(rows).max() + step)).all()


def test_kivi_keys_share_a_scale_along_tokens_and_values_along_channels():
    rows = np.random.default_rng(0).normal(size=(8, 1, 6))
    louder = rows.copy()
    louder[:, :, 2] *= 100
    keys, values = kivi_keys(4, 4).read, kivi_values(4, 4, 3).read
    others = [0, 1, 3, 4, 5]
    assert np.array_equal(keys(rows, "float32")[..., others], keys(louder, "float32")[..., others])
    assert np.array_equal(values(rows, "float32")[..., 3:], values(louder, "float32")[..., 3:])
    assert not np.array_equal(values(rows, "float32")[..., :2], values(louder, "float32")[..., :2])


def test_an_unknown_format_is_asked_for_by_name():
    class Odd:
        class codec_k:
            name = "odd"

        codec_v = codec_k

    with pytest.raises(UserError, match="'odd'.*ROUND_TRIPS"):
        round_trips(Odd())
