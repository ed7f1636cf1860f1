"""Is a strategy right on a real model? A short script of every kind of step, each attend compared with the dense oracle.

It does not know how rows are stored, nor how the model makes them; `harness.conformance.shadow` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.conformance.shadow import Failure, ShadowCache
from harness.errors import UserError
from strategies.base import KVCache
from strategies.geometry import Geometry


@dataclass(frozen=True)
class VerifyResult:
    """What the shadow saw. `worst` is error over bound, by layer: 1 is the most that rounding explains."""

    worst: tuple[float, ...]
    attends: int
    outputs: int
    codec_seen: float | None
    failure: Failure | None
    skipped: tuple[str, ...]  # what the model, the text or the strategy left no room to check

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """One sentence, or None when everything agreed."""
        if self.failure is not None:
            return self.failure.sentence
        if self.codec_seen is not None and not 0.5 < self.codec_seen < 1.5:
            return (
                f"outputs do not come from rows read through the codec: they moved {self.codec_seen:.2f} of the way, where 1 is all of it"
            )
        return None


LONGEST = 1100  # tokens; a window that needs more than this is reported as not crossed
EXTRA = 24  # tokens fed after the prefill


def verify(
    decoder: Callable[..., torch.Tensor],
    make_cache: Callable[[], KVCache],
    token_stream: Sequence[int],
    geometry: Geometry,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyResult:
    """Run a short script that crosses pages, windows and residuals on a real model; `make_cache` gives a cache with no budget.

    The script: uneven prefill, decode, a fork, both in one batch, an abort, a rewind, a second prompt beside them, close,
    reuse. `progress(done, total)` is called after each of its steps.
    """
    cache = make_cache()
    length, skipped = _length(cache, geometry, len(token_stream))
    script = _Script(decoder, ShadowCache(cache), token_stream, progress, skipped)
    with torch.inference_mode():
        script.run(length)
    shadow = script.shadow
    return VerifyResult(tuple(shadow.worst), shadow.attends, shadow.outputs, shadow.codec_seen, shadow.failure, tuple(script.skipped))


class _Script:
    LATER = 9  # steps after the prefill

    def __init__(
        self,
        decoder: Callable[..., torch.Tensor],
        shadow: ShadowCache,
        tokens: Sequence[int],
        progress: Callable[[int, int], None] | None,
        skipped: list[str],
    ) -> None:
        self.decoder, self.shadow, self.tokens, self.progress, self.skipped = decoder, shadow, tokens, progress, skipped
        self.logs: dict[int, list[int]] = {}
        self.cursor = 0
        self.done = 0
        self.total = 0

    def run(self, length: int) -> None:
        chunks = _uneven(length)
        self.total = len(chunks) + self.LATER
        first = self._open(length + EXTRA)
        for chunk in chunks:
            self._feed({first: chunk})
        self._feed({first: 1})
        self._feed({first: 1})
        second = self._fork(first)
        self._feed({first: 1, second: 3})
        self._feed({second: 1, first: 2}, aborted=True)
        self._feed({second: 1, first: 2})
        self._rewind(second, 3)
        self._feed({second: 2, first: 1})
        third = self._open(20)
        self._feed({third: 7, first: 1})
        self._close(first)
        fourth = self._open(20)
        self._feed({second: 1, fourth: 9, third: 1})
        self._feed({fourth: 1, second: 1, third: 4})
        for sid in (second, third, fourth):
            self._close(sid)

    def _feed(self, counts: dict[int, int], aborted: bool = False) -> None:
        shadow, logs = self.shadow, dict(self.logs)
        for sid, count in counts.items():
            logs[sid] = logs[sid] + self._take(count)
        plan = shadow.plan({sid: len(logs[sid]) for sid in counts})
        ids = [token for sid, start, stop in plan.spans for token in logs[sid][start:stop]]
        self.decoder(torch.tensor(ids, dtype=torch.int64, device=shadow.geometry.device), plan, shadow)
        if aborted:
            shadow.abort(plan)
        else:
            shadow.commit(plan, ids)
            self.logs = logs
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _take(self, count: int) -> list[int]:
        """The next tokens of the stream; it starts over at its end."""
        taken = [self.tokens[(self.cursor + i) % len(self.tokens)] for i in range(count)]
        self.cursor += count
        return taken

    def _open(self, expect: int) -> int:
        sid = self.shadow.open(expect=expect)
        self.logs[sid] = []
        return sid

    def _fork(self, sid: int) -> int:
        child = self.shadow.fork(sid)
        self.logs[child] = list(self.logs[sid])
        return child

    def _rewind(self, sid: int, count: int) -> None:
        count = int(min(count, self.shadow.rewind))
        if count == 0:
            self.skipped.append("rewind: the strategy declares none")
            return
        self.logs[sid] = self.logs[sid][:-count]
        self.shadow.truncate(sid, len(self.logs[sid]))

    def _close(self, sid: int) -> None:
        self.shadow.close(sid)
        del self.logs[sid]


def _length(cache: KVCache, geometry: Geometry, available: int) -> tuple[int, list[str]]:
    """Tokens to prefill so that pages, windows and residuals are crossed, and what does not fit."""
    if available == 0:
        raise UserError("the text holds no token: nothing can be checked on it")
    most = min(LONGEST, geometry.context - EXTRA)
    if most < 1:
        raise UserError(f"a context of {geometry.context} tokens is too short to check a cache: use {EXTRA + 1} or more")
    page = getattr(cache, "page_size", None)
    windows = {mask.window for mask in map(cache.mask, range(len(geometry.layers))) if mask.window is not None}
    wanted = {"two pages": 0 if page is None else 2 * page + 3} | {f"a window of {window}": window + 19 for window in windows}
    wanted["the first token read through the codec"] = next((n + 9 for n in range(1, most) if cache.aged(n - 1) > 0), most + 1)
    skipped = [f"{what}: needs {need} tokens, and {most} fit" for what, need in wanted.items() if need > most]
    return min(most, max(41, *(need for need in wanted.values() if need <= most))), skipped


def _uneven(length: int) -> list[int]:
    """Chunks of a prefill: one token, a few, then three unequal parts of the rest."""
    chunks = [1, min(6, length - 1)]
    rest = length - sum(chunks)
    chunks += [rest // 2, rest // 3, rest - rest // 2 - rest // 3]
    return [chunk for chunk in chunks if chunk]
