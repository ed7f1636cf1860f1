"""The reference ops against NumPy in float64: they are the specification, so nothing of theirs is used to check them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.conformance.codecs import ROUND_TRIPS
from kernels.backend import resolve
from kernels.codec import CODECS, codec_named
from kernels.rows import Mask
from tests.kernels.cases import NAMES, Case, attention, batch_of, decoded, one_rounding, step_of

OPS = resolve("reference")
MASKS = (Mask(), Mask(window=1), Mask(window=7), Mask(window=7, sinks=2), Mask(window=100, sinks=50))
CODED = [name for name in CODECS if name != "raw"]


@pytest.mark.parametrize("page_size", [None, 1, 4, 16])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_in_float64_is_exact(mask: Mask, page_size: int | None) -> None:
    step = step_of(Case(torch.float64, mask=mask, page_size=page_size), OPS)
    assert np.abs(step.attend(OPS).numpy() - step.exact).max() < 1e-13


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(6, 3), (8, 2), (9, 3), (4, 1), (3, 3)])
def test_query_heads_share_kv_heads_in_order(query_heads: int, kv_heads: int) -> None:
    step = step_of(Case(torch.float64, query_heads=query_heads, kv_heads=kv_heads), OPS)
    assert np.abs(step.attend(OPS).numpy() - step.exact).max() < 1e-13


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_bends_scores(softcap: float) -> None:
    step = step_of(Case(torch.float64, softcap=softcap), OPS)
    assert np.abs(step.attend(OPS).numpy() - step.exact).max() < 1e-13


@pytest.mark.parametrize("codec_v", CODECS)
@pytest.mark.parametrize("codec_k", CODECS)
def test_attention_reads_every_pair_of_codecs(codec_k: str, codec_v: str) -> None:
    step = step_of(Case(torch.float64, codec_k, codec_v, head_dim=40), OPS)
    assert np.abs(step.attend(OPS).numpy() - step.exact).max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=NAMES.get)
def test_attention_rounds_its_answer_once(dtype: torch.dtype) -> None:
    step = step_of(Case(dtype), OPS)
    out = step.attend(OPS)
    assert out.dtype == dtype
    assert np.all(np.abs(out.double().numpy() - step.exact) <= 1.01 * one_rounding(step.exact, dtype) + 2e-6)


def test_packed_attention_needs_no_store() -> None:
    batch = batch_of(((0, 5), (0, 1), (0, 9)))
    q, k, v = (torch.randn(batch.tokens, heads, 8, dtype=torch.float64, generator=_seed(heads)) for heads in (4, 2, 2))
    out = OPS.attend_packed(q, k, v, batch, Mask(window=4, sinks=1), 0.3, None)
    for low, stop in ((0, 5), (5, 6), (6, 15)):
        exact = attention(*(x[low:stop].numpy() for x in (q, k, v)), 0, Mask(window=4, sinks=1), 0.3, None)
        assert np.abs(out[low:stop].numpy() - exact).max() < 1e-13


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("name", CODECS)
def test_written_rows_read_back_as_the_format_says(name: str, dtype: torch.dtype) -> None:
    rows = (torch.randn(64, 3, 72, generator=_seed(1)) * torch.logspace(-3, 3, 64)[:, None, None]).to(dtype)
    store = OPS.new_rows(codec_named(name), 100, 3, 72, dtype, "cpu", None)
    slots = torch.randperm(100, generator=_seed(2))[:64]
    OPS.write_rows(store, slots, rows)
    expected = torch.from_numpy(decoded(rows, name)).to(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)
    assert torch.equal(OPS.read_rows(store, slots), expected)


@pytest.mark.parametrize("name", CODED)
def test_corner_rows_read_back_as_the_format_says(name: str) -> None:
    rows = torch.zeros(7, 1, 64)
    rows[1] = 1e-30  # the scale underflows in float16
    rows[2] = 3e38
    rows[3, 0, :4] = torch.tensor([-2.0, 2.0, 0.5, -0.5])  # a tie for the largest magnitude
    rows[4, 0, :4] = torch.tensor([2.0, -2.0, 1.0, 3.0 / 127])
    rows[5] = torch.linspace(-127, 127, 64) + 0.5  # ties between codes
    rows[6] = 449.0
    store = OPS.new_rows(codec_named(name), 7, 1, 64, torch.float32, "cpu", None)
    OPS.write_rows(store, torch.arange(7), rows)
    assert np.array_equal(OPS.read_rows(store, torch.arange(7)).numpy(), decoded(rows, name).astype(np.float32))


@pytest.mark.parametrize("name", CODECS)
def test_a_store_takes_the_bytes_that_its_format_says(name: str) -> None:
    for dtype in NAMES:
        store = OPS.new_rows(codec_named(name), 12, 3, 40, dtype, "cpu", 4)
        assert store.nbytes == 12 * 3 * codec_named(name).row_bytes(40, NAMES[dtype])
        assert store.count == 12


@pytest.mark.parametrize("name", CODECS)
def test_copied_pages_are_the_same_bytes(name: str) -> None:
    store = OPS.new_rows(codec_named(name), 24, 2, 32, torch.float32, "cpu", 4)
    OPS.write_rows(store, torch.arange(24), torch.randn(24, 2, 32, generator=_seed(3)))
    before = OPS.read_rows(store, torch.arange(24))
    OPS.copy_pages([store], torch.tensor([1, 4]), torch.tensor([5, 0]))
    after = OPS.read_rows(store, torch.arange(24)).view(6, 4, 2, 32)
    expected = before.view(6, 4, 2, 32)[[4, 1, 2, 3, 4, 1]]
    assert torch.equal(after, expected)


@pytest.mark.parametrize(("source", "target"), [(0, 6), (2, 4), (4, 2)])
def test_moved_rows_may_overlap(source: int, target: int) -> None:
    store = OPS.new_rows(codec_named("q8_0"), 12, 1, 32, torch.float32, "cpu", None)
    OPS.write_rows(store, torch.arange(12), torch.randn(12, 1, 32, generator=_seed(4)))
    before = OPS.read_rows(store, torch.arange(12))
    OPS.move_rows([store], source, target, 5)
    expected = before.clone()
    expected[target : target + 5] = before[source : source + 5]
    assert torch.equal(OPS.read_rows(store, torch.arange(12)), expected)


@pytest.mark.parametrize("lanes", [8, 6, 4])
def test_rope_turns_pairs_of_lanes(lanes: int) -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, generator=_seed(5))
    angles = torch.randn(5, lanes // 2, dtype=torch.float64, generator=_seed(6))
    out = OPS.rope(x, angles.cos(), angles.sin()).numpy()
    half = lanes // 2
    turned = (x.numpy()[..., :half] + 1j * x.numpy()[..., half:lanes]) * np.exp(1j * angles.numpy())[:, None]
    expected = np.concatenate((turned.real, turned.imag, x.numpy()[..., lanes:]), axis=-1)
    assert np.abs(out - expected).max() < 1e-14


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
def test_rms_norm_adds_the_residual_in_the_working_dtype(dtype: torch.dtype) -> None:
    x, r = (torch.randn(4, 48, generator=_seed(n)).to(dtype) for n in (7, 8))
    weight = torch.randn(48, generator=_seed(9)).to(dtype)
    y, total = OPS.rms_norm(x, weight, 1e-5, r)
    assert torch.equal(total, x + r)
    wide = total.double().numpy()
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert np.all(np.abs(y.double().numpy() - exact) <= one_rounding(exact, dtype) + 1e-6 * np.abs(exact))
    alone, same = OPS.rms_norm(total, weight, 1e-5, None)
    assert torch.equal(alone, y)
    assert torch.equal(same, total)


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_comes_first(activation: str, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(4, 20, generator=_seed(10))).to(dtype)
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    if activation == "silu":
        exact = gate / (1 + np.exp(-gate)) * up
    else:
        exact = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    out = OPS.gated(x, activation)
    assert out.dtype == dtype
    assert np.all(np.abs(out.double().numpy() - exact) <= one_rounding(exact, dtype) + 1e-6 * np.abs(gate * up))


def test_inputs_are_never_changed() -> None:
    step = step_of(Case(codec_k="int8", codec_v="q4_0", mask=Mask(window=9, sinks=2)), OPS)
    tensors = [step.q, step.keys.codes, step.keys.scales, step.values.codes, step.values.scales, step.where.pages]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    step.attend(OPS)
    OPS.read_rows(step.keys, torch.arange(8))
    assert all(torch.equal(tensor.view(torch.uint8), old) for tensor, old in zip(tensors, before, strict=True))
    x, weight, cos = torch.randn(3, 16), torch.randn(16), torch.randn(3, 8)
    copies = x.clone(), weight.clone(), cos.clone()
    OPS.rms_norm(x, weight, 1e-5, x)
    OPS.gated(x, "silu")
    OPS.rope(x.unsqueeze(1), cos, cos)
    assert all(torch.equal(a, b) for a, b in zip((x, weight, cos), copies, strict=True))


def test_every_codec_has_an_independent_description() -> None:
    assert set(ROUND_TRIPS) == set(CODECS)


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)
