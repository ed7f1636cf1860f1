"""The shadow: it lets a right cache pass untouched, and tells of a wrong one where it went wrong."""

from __future__ import annotations

import pytest
import torch

from harness.conformance.shadow import ShadowCache
from harness.conformance.toy import ToyDecoder, geometry, greedy
from harness.errors import UserError
from harness.measure.shadow import verify
from kernels.backend import resolve
from kernels.codec import codec_named
from strategies.contiguous import Contiguous
from strategies.kivi import Kivi
from strategies.none import NoCache
from strategies.paged import Paged

OPS = resolve("cpu")
TEXT = list(range(1, 90))
WINDOWED = (None, 12)


def _verify(make, shape=None):
    shape = geometry((6, 3), 16, WINDOWED, "float32", 512) if shape is None else shape
    return verify(ToyDecoder(shape), lambda: make(shape, None, OPS), TEXT, shape)


class OneKeyShort(Paged):
    """Layer 1 loses its oldest key."""

    def attend(self, layer, q, k, v, plan):
        out = super().attend(layer, q, k, v, plan)
        if layer == 1 and plan.spans[0][2] > 20:
            out[-1, 2] += 0.01
        return out


class OnlyClaims(Paged):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.codec_k = self.codec_v = codec_named("int8")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "make", [NoCache, Contiguous, Paged, lambda *a: Paged(*a, page_size=4, window=9, slack=3, codec_k="q8_0", codec_v="q4_0")]
)
def test_right_caches_pass(make, dtype):
    result = _verify(make, geometry((6, 3), 16, WINDOWED, dtype, 512))
    assert result.ok, result.problem
    assert max(result.worst) < 1
    assert result.attends > 20


def test_kivi_is_checked_past_its_residual():
    result = _verify(lambda *a: Kivi(*a, group=8, residual=20), geometry((6, 3), 16, (None, None), "float32", 512))
    assert result.ok, result.problem
    assert result.codec_seen == pytest.approx(1, abs=0.01)


def test_lossy_rows_are_seen_to_be_lossy():
    assert _verify(lambda *a: Paged(*a, codec_k="int8", codec_v="int8")).codec_seen == pytest.approx(1, abs=0.01)
    assert _verify(Paged).codec_seen is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_codec_that_is_only_claimed_fails(dtype):
    """In bfloat16 the difference hides inside rounding for each single output, and shows in their direction."""
    result = _verify(OnlyClaims, geometry((6, 3), 16, WINDOWED, dtype, 512))
    assert not result.ok
    assert abs(result.codec_seen) < 0.2


def test_a_wrong_answer_is_placed():
    result = _verify(OneKeyShort)
    assert not result.ok
    assert (result.failure.layer, result.failure.head) == (1, 2)
    assert result.failure.error > result.failure.bound
    assert f"position {result.failure.position}" in result.problem
    assert result.worst[1] > 1 > result.worst[0]


def test_the_strategys_own_output_is_passed_on():
    shape = geometry((6, 3), 16, WINDOWED, "float32", 64)
    decoder, prompt = ToyDecoder(shape), [3, 1, 4, 1, 5]
    assert greedy(decoder, ShadowCache(OneKeyShort(shape, None, OPS)), prompt, 40) == greedy(
        decoder, OneKeyShort(shape, None, OPS), prompt, 40
    )


def test_not_a_number_is_never_within_a_bound():
    class Nan(Contiguous):
        def attend(self, layer, q, k, v, plan):
            return super().attend(layer, q, k, v, plan) * float("nan")

    assert not _verify(Nan).ok


def test_every_step_is_announced():
    shape = geometry((6, 3), 16, (None,), "float32", 512)
    seen = []
    verify(ToyDecoder(shape), lambda: Contiguous(shape, None, OPS), TEXT, shape, lambda done, total: seen.append((done, total)))
    assert seen == [(step, len(seen)) for step in range(1, len(seen) + 1)]


def test_what_does_not_fit_is_said():
    shape = geometry((6, 3), 16, (None, 300), "float32", 200)
    result = _verify(Contiguous, shape)
    assert result.ok, result.problem
    assert result.skipped == ("a window of 300: needs 319 tokens, and 176 fit",)


def test_an_adopted_prefix_is_checked_against_what_was_fed():
    shape = geometry((6, 3), 16, (None,), "float64", 64)
    shadow = ShadowCache(Paged(shape, 10**6, OPS, page_size=4, prefix=True))
    decoder, prompt = ToyDecoder(shape), list(range(1, 12))
    for expected in (0, 8):
        sid = shadow.open(prompt)
        assert shadow.held(sid) == expected
        plan = shadow.plan({sid: 11})
        decoder(torch.tensor(prompt[expected:]), plan, shadow)
        shadow.commit(plan, prompt[expected:])
        shadow.close(sid)
    assert shadow.failure is None


def test_too_little_to_check_is_an_error_of_the_user():
    shape = geometry((6, 3), 16, (None,), "float32", 64)
    with pytest.raises(UserError, match="no token"):
        verify(ToyDecoder(shape), lambda: Contiguous(shape, None, OPS), [], shape)
    short = geometry((6, 3), 16, (None,), "float32", 10)
    with pytest.raises(UserError, match="context of 10"):
        verify(ToyDecoder(short), lambda: Contiguous(short, None, OPS), TEXT, short)


def test_keys_before_rope_are_refused_for_now():
    class Plain(Contiguous):
        keys = "plain"

    with pytest.raises(UserError, match="plain"):
        ShadowCache(Plain(geometry(), None, OPS))
