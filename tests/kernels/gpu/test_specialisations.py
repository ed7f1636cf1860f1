"""Which form of a kernel runs, and how it is tuned: rules of plain numbers, checked without compiling anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.gpu.specialisations import (
    DECODE_ROWS,
    LISTED,
    PREFILL_ROWS,
    SAMPLE,
    Attend,
    block_dim,
    key_splits,
    query_rows,
    tuning,
)


@pytest.mark.parametrize(
    ("group", "tokens", "spans", "rows"),
    [(1, 4, 4, 16), (3, 5, 1, 16), (3, 6, 1, 64), (16, 1, 1, 16), (32, 1, 1, 64), (71, 1, 1, 128), (1, 512, 1, 64)],
)
def test_a_tile_holds_the_mean_span_of_a_kv_head(group, tokens, spans, rows):
    assert query_rows(group, tokens, spans, "bfloat16") == rows


def test_float32_tiles_stay_small():
    assert query_rows(3, 512, 1, "float32") == DECODE_ROWS


def test_more_heads_than_a_tile_are_refused_by_name():
    with pytest.raises(ValueError, match="129 query heads share a KV head: .* at most 128"):
        query_rows(129, 1, 1, "bfloat16")


def test_the_plan_decides_the_splits():
    assert key_splits(5, 1000, 64, 132) == 5


def test_few_programs_over_many_keys_are_split_to_fill_the_device():
    assert key_splits(1, 8, 32768, 132) == 32
    assert key_splits(1, 8, 1024, 132) == 4
    assert key_splits(1, 500, 32768, 132) == 1
    assert key_splits(1, 1, 100, 132) == 1


@pytest.mark.parametrize("amd", [False, True])
def test_every_dot_has_at_least_sixteen_on_each_side(amd):
    for spec in LISTED:
        if isinstance(spec, Attend):
            assert min(spec.rows, tuning(spec, amd).keys, block_dim(spec.head_dim)) >= 16


def test_the_sample_is_listed_and_covers_every_value():
    assert SAMPLE <= LISTED
    listed, sample = ([spec for spec in specs if isinstance(spec, Attend)] for specs in (LISTED, SAMPLE))
    for field in ("layout", "codec_k", "codec_v", "dtype", "windowed", "softcapped"):
        assert {getattr(spec, field) for spec in sample} == {getattr(spec, field) for spec in listed}, field
    assert {spec.rows for spec in sample} >= {DECODE_ROWS, PREFILL_ROWS}


def test_names_tell_forms_apart():
    assert len({spec.name for spec in LISTED}) == len(LISTED)


def test_a_form_that_is_not_listed_is_refused_on_a_gpu(monkeypatch):
    import torch

    from kernels.backend import BackendUnavailable
    from kernels.gpu import launch

    listed = Attend("paged", "raw", "raw", "bfloat16", 128, 16)
    monkeypatch.setattr(launch, "interpreted", False)
    launch.require_listed(listed, torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="no checked form 'attend paged raw bfloat16 head_dim=72 rows=16': use backend=reference"):
        launch.require_listed(replace(listed, head_dim=72), torch.device("cpu"))


def test_fp8_is_refused_below_compute_capability_8_9(monkeypatch):
    import torch

    from kernels.backend import BackendUnavailable
    from kernels.gpu import launch

    form = Attend("paged", "fp8", "fp8", "bfloat16", 128, 16)
    monkeypatch.setattr(launch, "interpreted", False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    launch.require_listed(form, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BackendUnavailable, match="fp8 needs compute capability 8.9 or above and this GPU has 8.0"):
        launch.require_listed(form, torch.device("cpu"))
