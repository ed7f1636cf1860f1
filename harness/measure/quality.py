"""What a cache costs in answers: teacher-forced text, read through the cache, next to a reference in lock-step.

It does not know which strategy it measures. In each window of `context` tokens the first half is fed and not scored; the
second half is fed `chunk` tokens a step, and the prediction made at each of its positions except the last, for which the
window holds no answer, is scored: context - context // 2 - 1 tokens a window, the same for every chunk size, with and
without BOS (it replaces a window's first token, which is never scored). Text is forced, so both sides always see the same
words; logits live for one step only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import torch

from harness.errors import UserError
from harness.measure.compare import detectable
from harness.measure.metrics import bits_per_byte, perplexity_per_token, quantile
from harness.measure.reading import Reader, Reads, Side, reading
from strategies.base import KVCache

ROWS_AT_ONCE = 64  # rows of logits that are widened to float64 together: [64, V] float64 is 25 MB at V = 49,152
BINS = 16  # of the per-position curve


@dataclass(frozen=True)
class Protocol:
    """How quality is measured. windows=None takes all whole windows of the text. bos_id=None: windows begin with text."""

    context: int = 1024
    windows: int | None = 1
    chunk: int = 16
    bos_id: int | None = None

    def __post_init__(self) -> None:
        if self.context < 4:
            raise UserError(f"quality.context={self.context}: use 4 or more tokens")
        if self.windows is not None and self.windows < 1:
            raise UserError(f"quality.windows={self.windows}: use 1 or more, or null for the whole text")
        if self.chunk < 1:
            raise UserError(f"quality.chunk={self.chunk}: use 1 or more")

    @property
    def half(self) -> int:
        """Tokens of a window that are fed and not scored."""
        return self.context // 2

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The scored steps of a window: positions first..stop-1 are fed, and each predicts the token after it."""
        last = self.context - 1
        return [(first, min(first + self.chunk, last)) for first in range(self.half, last, self.chunk)]

    def cut(self, tokens: Sequence[int]) -> list[list[int]]:
        """The windows of a text, one after another. UserError if it has too few."""
        whole = len(tokens) // self.context
        wanted = max(1, whole) if self.windows is None else self.windows
        if whole < wanted:
            raise UserError(
                f"the text has {len(tokens)} tokens, and {wanted} window{'s' * (wanted > 1)} of {self.context} tokens "
                f"need{'s' * (wanted == 1)} {wanted * self.context}: use a longer text, fewer windows or a smaller quality.context"
            )
        windows = [list(tokens[i * self.context : (i + 1) * self.context]) for i in range(wanted)]
        if self.bos_id is not None:
            for window in windows:
                window[0] = self.bos_id
        return windows


@dataclass
class Scores:
    """Per scored token: nll on both sides (nats), KL(reference || strategy) (nats), whether the first choices agree, and its place."""

    nll: list[float] = field(default_factory=list)
    reference_nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # in its window, of the token predicted

    def add(self, logits: torch.Tensor, reference: torch.Tensor, targets: Sequence[int], first: int) -> None:
        """Score logits [n, V] against reference [n, V]; targets [n] are the tokens at positions first, first + 1, ..."""
        answers = torch.tensor(targets, device=logits.device).unsqueeze(1)  # [n, 1] int64
        for part in range(0, len(targets), ROWS_AT_ONCE):
            rows = slice(part, part + ROWS_AT_ONCE)
            ours, theirs = (torch.log_softmax(x[rows].double(), -1) for x in (logits, reference.to(logits.device)))  # [r, V]
            weights = theirs.exp()
            self.nll += (-ours.gather(1, answers[rows])).flatten().tolist()
            self.reference_nll += (-theirs.gather(1, answers[rows])).flatten().tolist()
            self.kl += torch.where(weights > 0, weights * (theirs - ours), 0.0).sum(-1).tolist()
            self.agree += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
        self.positions += range(first, first + len(targets))


@dataclass(frozen=True)
class Quality:
    """The `quality` section of a record. Means are over scored tokens; `*_error` are standard errors; nll and KL are in nats."""

    perplexity: float
    perplexity_error: float
    bits_per_byte: float | None
    scored_tokens: int
    scored_bytes: int | None
    cached_read_ratio: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    reference_perplexity: float
    nll_difference_mean: float  # strategy - reference, token by token
    nll_difference_error: float
    perplexity_detectable: float  # 0.01 = 1 %: the smallest change of perplexity that these tokens show 8 times in 10
    noise_kl_mean: float | None  # the reference against itself, fed in other chunks: less than this means nothing
    noise_top1_agreement: float | None
    context: int
    windows: int
    chunk: int
    bos: bool
    curve: list[dict[str, float | int]]  # by position in the window: from_position, to_position, nll_mean, reference_nll_mean, kl_mean

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_quality(
    strategy: Side,
    reference: Side,
    noise: Side | None,
    tokens: Sequence[int],
    decode: Callable[[Sequence[int]], str] | None,
    protocol: Protocol,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Run `strategy` and `reference` in lock-step over the windows of `tokens`.

    noise: the reference once more with a cache of its own, fed in steps half as long over the first window (None: not
    measured). decode: the text of some tokens, for bits per byte (None: not measured). progress(done, total) counts steps.
    UserError if the text is too short, a window is longer than the model's context, or a cache's budget cannot hold one.
    """
    windows = protocol.cut(tokens)
    for side in (strategy, reference) if noise is None else (strategy, reference, noise):
        check_room(side.cache, protocol.context)
    scores, twin, reads = Scores(), Scores(), Reads()
    total = len(windows) * (len(protocol.spans) + 1)
    for number, window in enumerate(windows):
        with ExitStack() as stack:
            ours = stack.enter_context(reading(strategy, window))
            theirs = stack.enter_context(reading(reference, window))
            again = None if noise is None or number else stack.enter_context(reading(noise, window, parts=2))
            ours.reads = reads
            done = number * (len(protocol.spans) + 1)
            _read_window(ours, theirs, again, protocol, scores, twin, lambda step, done=done: progress(done + step, total))
    scored_bytes = None if decode is None else sum(_text_bytes(decode, window, protocol.half + 1) for window in windows)
    return summary(scores, None if noise is None else twin, reads, scored_bytes, protocol, len(windows))


def _read_window(
    ours: Reader, theirs: Reader, again: Reader | None, protocol: Protocol, scores: Scores, twin: Scores, stepped: Callable[[int], None]
) -> None:
    for reader in (ours, theirs) if again is None else (ours, theirs, again):
        reader.feed(0, protocol.half)
    stepped(1)
    for step, (first, stop) in enumerate(protocol.spans, 2):
        targets = ours.tokens[first + 1 : stop + 1]
        logits, expected = ours.read(first, stop), theirs.read(first, stop)  # [stop - first, V] each
        scores.add(logits, expected, targets, first + 1)
        if again is not None:
            twin.add(again.read(first, stop), expected, targets, first + 1)
        stepped(step)


def summary(scores: Scores, twin: Scores | None, reads: Reads, scored_bytes: int | None, protocol: Protocol, windows: int) -> Quality:
    """Everything a record says of these scores."""
    n = len(scores.nll)
    total = math.fsum(scores.nll)
    perplexity = perplexity_per_token(total, n)
    differences = [a - b for a, b in zip(scores.nll, scores.reference_nll, strict=True)]
    return Quality(
        perplexity=perplexity,
        perplexity_error=perplexity * _standard_error(scores.nll),
        bits_per_byte=None if scored_bytes is None else bits_per_byte(total, scored_bytes),
        scored_tokens=n,
        scored_bytes=scored_bytes,
        cached_read_ratio=reads.ratio,
        kl_mean=math.fsum(scores.kl) / n,
        kl_p99=quantile(scores.kl, 0.99),
        kl_max=max(scores.kl),
        top1_agreement=sum(scores.agree) / n,
        reference_perplexity=perplexity_per_token(math.fsum(scores.reference_nll), n),
        nll_difference_mean=math.fsum(differences) / n,
        nll_difference_error=_standard_error(differences),
        perplexity_detectable=detectable(_standard_error(differences), max(2, n)),
        noise_kl_mean=None if twin is None else math.fsum(twin.kl) / len(twin.kl),
        noise_top1_agreement=None if twin is None else sum(twin.agree) / len(twin.agree),
        context=protocol.context,
        windows=windows,
        chunk=protocol.chunk,
        bos=protocol.bos_id is not None,
        curve=_curve(scores, protocol),
    )


def _curve(scores: Scores, protocol: Protocol) -> list[dict[str, float | int]]:
    """Means by position in the window, in at most BINS bins of equal width."""
    first, last = protocol.half + 1, protocol.context - 1
    width = max(1, math.ceil((last - first + 1) / BINS))
    curve = []
    for low in range(first, last + 1, width):
        at = [i for i, position in enumerate(scores.positions) if low <= position < low + width]
        means = {
            name: math.fsum(values[i] for i in at) / len(at)
            for name, values in (("nll_mean", scores.nll), ("reference_nll_mean", scores.reference_nll), ("kl_mean", scores.kl))
        }
        curve.append({"from_position": low, "to_position": min(low + width - 1, last), **means})
    return curve


def _standard_error(values: Sequence[float]) -> float:
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1) / n)


def _text_bytes(decode: Callable[[Sequence[int]], str], window: Sequence[int], first: int) -> int:
    """UTF-8 bytes that the tokens from `first` on add to the text of their window."""
    return len(decode(window).encode()) - len(decode(window[:first]).encode())


def check_room(cache: KVCache, context: int) -> None:
    """UserError when a window of `context` tokens is longer than the model's context or larger than the cache's budget."""
    if context > cache.geometry.context:
        raise UserError(
            f"quality.context={context} is longer than the model's context of {cache.geometry.context} tokens: use at most that"
        )
    if cache.budget_bytes is None:
        return
    needed = cache.bytes_for([context - 1], chunk=context)
    if needed > cache.budget_bytes:
        raise UserError(
            f"a quality window of {context} tokens needs {needed} bytes of KV and the budget is {cache.budget_bytes}: "
            "raise budget_bytes or lower quality.context"
        )
