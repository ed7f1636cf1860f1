"""Is a strategy right on a real model? Every attend is compared with the dense oracle on the same q, k and v.

The strategy's own output is passed on, so the model runs as it would without the shadow and no error of the oracle reaches
it. It does not know how rows are stored, nor how the model makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harness.conformance.codecs import round_trips
from harness.conformance.oracle import Rows, answer
from harness.errors import UserError
from kernels.rows import Mask
from strategies.base import KVCache, Plan
from strategies.geometry import Geometry, Stats


@dataclass(frozen=True)
class Failure:
    """The first answer that no honest rounding explains."""

    layer: int
    span: tuple[int, int, int]  # (sid, start, stop)
    position: int
    head: int
    error: float
    bound: float
    got: float
    want: float

    @property
    def sentence(self) -> str:
        sid, start, stop = self.span
        return (
            f"layer {self.layer}, sequence {sid} fed {start}..{stop - 1}, query at position {self.position}, head {self.head}: "
            f"got {self.got:.6g}, the oracle says {self.want:.6g}; off by {self.error:.3g} where rounding explains {self.bound:.3g}"
        )


@dataclass(frozen=True)
class Track:
    """What one sequence fed to one layer so far, from position 0, raw and as its codec reads it back: [n, Hkv, D] float64."""

    keys: Rows
    values: Rows

    def cut(self, length: int) -> Track:
        return Track(*(_same_pair(rows, rows.raw[:length], lambda read: read[:length]) for rows in (self.keys, self.values)))


class ShadowCache:
    """A KV cache that hands everything to `cache` and checks each attend. Same methods, same answers."""

    def __init__(self, cache: KVCache) -> None:
        if cache.keys != "rotated":
            raise UserError(
                f"the oracle reads keys that arrive after rope, and this cache wants them {cache.keys}: it cannot be checked yet"
            )
        self.cache = cache
        self.geometry = cache.geometry
        self.keys, self.heads, self.rewind, self.capturable = cache.keys, cache.heads, cache.rewind, cache.capturable
        self.codec_k, self.codec_v = cache.codec_k, cache.codec_v
        self._round_trips = round_trips(cache)
        self._tracks: dict[tuple[int, int], Track] = {}  # (sid, layer)
        self._pending: dict[tuple[int, int], Track] = {}
        self._tokens: dict[int, list[int]] = {}
        self._retired: list[tuple[list[int], dict[int, Track]]] = []  # what closed sequences had fed: a held prefix comes from one of them
        self.attends = 0
        self.outputs = 0
        self.worst = [0.0] * len(cache.geometry.layers)  # error / bound of each layer
        self.failure: Failure | None = None
        self._seen = np.zeros(2)  # how far the output moved from the raw answer along the codec's direction, and how far it should

    @property
    def codec_seen(self) -> float | None:
        """1 when outputs come from rows read through the codec, 0 when from raw rows; None for lossless codecs or nothing aged."""
        return float(self._seen[0] / self._seen[1]) if self._seen[1] > 0 else None

    def mask(self, layer: int) -> Mask:
        return self.cache.mask(layer)

    def aged(self, position: int) -> int:
        return self.cache.aged(position)

    def held(self, sid: int) -> int:
        return self.cache.held(sid)

    def stats(self) -> Stats:
        return self.cache.stats()

    def bytes_for(self, lengths: Sequence[int], chunk: int = 1) -> int:
        return self.cache.bytes_for(lengths, chunk)

    def tensors(self) -> list[torch.Tensor]:
        return self.cache.tensors()

    def open(self, prompt: Sequence[int] = (), expect: int | None = None) -> int:
        sid = self.cache.open(prompt, expect)
        held = self.cache.held(sid)
        self._tokens[sid] = list(prompt[:held])
        for layer, track in self._adopted(list(prompt[:held])).items():
            self._tracks[sid, layer] = track.cut(held)
        return sid

    def fork(self, sid: int) -> int:
        child = self.cache.fork(sid)
        self._tokens[child] = list(self._tokens[sid])
        self._tracks |= {(child, layer): track for layer, track in self._layers_of(sid).items()}
        return child

    def truncate(self, sid: int, length: int) -> None:
        self.cache.truncate(sid, length)
        self._tokens[sid] = self._tokens[sid][:length]
        self._tracks |= {(sid, layer): track.cut(length) for layer, track in self._layers_of(sid).items()}

    def close(self, sid: int) -> None:
        self.cache.close(sid)
        layers = self._layers_of(sid)
        self._retired.append((self._tokens.pop(sid), layers))
        for layer in layers:
            del self._tracks[sid, layer]

    def plan(self, stops: Mapping[int, int]) -> Plan:
        plan = self.cache.plan(stops)
        self._pending = {}
        return plan

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> torch.Tensor:
        inputs = [_array(x) for x in (q, k, v)]
        out = self.cache.attend(layer, q, k, v, plan)
        got, row = _array(out), 0
        for sid, start, stop in plan.spans:
            rows = slice(row, row + stop - start)
            row = rows.stop
            track = self._extended(sid, layer, start, inputs[1][rows], inputs[2][rows])
            self._pending[sid, layer] = track
            self._compare(layer, (sid, start, stop), inputs[0][rows], track, got[rows])
        self.attends += 1
        return out

    def commit(self, plan: Plan, token_ids: Sequence[int]) -> None:
        self.cache.commit(plan, token_ids)
        self._tracks |= self._pending
        row = 0
        for sid, start, stop in plan.spans:
            self._tokens[sid] = self._tokens[sid][:start] + list(token_ids[row : row + stop - start])
            row += stop - start

    def abort(self, plan: Plan) -> None:
        self.cache.abort(plan)
        self._pending = {}

    def track(self, sid: int, layer: int) -> Track:
        """What `sid` has fed to `layer` and committed."""
        return self._tracks[sid, layer]

    def _layers_of(self, sid: int) -> dict[int, Track]:
        return {layer: track for (owner, layer), track in self._tracks.items() if owner == sid}

    def _adopted(self, prefix: list[int]) -> dict[int, Track]:
        if not prefix:
            return {}
        living = [(tokens, self._layers_of(sid)) for sid, tokens in self._tokens.items() if sid in {owner for owner, _ in self._tracks}]
        for tokens, layers in [*living, *self._retired]:
            if tokens[: len(prefix)] == prefix:
                return layers
        raise AssertionError(f"a prefix of {len(prefix)} tokens was adopted that no sequence ever fed")

    def _extended(self, sid: int, layer: int, start: int, k: np.ndarray, v: np.ndarray) -> Track:
        dtype, old = self.geometry.dtype, self._tracks.get((sid, layer))
        pairs = []
        for new, rows, trip in zip((k, v), (old and old.keys, old and old.values), self._round_trips, strict=True):
            raw = new if start == 0 else np.concatenate((rows.raw[:start], new))
            if trip.lossless:
                pairs.append(Rows(raw, raw))
                continue
            first, full = start - start % trip.tokens, raw.shape[0] - raw.shape[0] % trip.tokens
            kept = raw[:0] if start == 0 else rows.read[:first]
            pairs.append(Rows(raw, np.concatenate((kept, trip.read(raw[first:full], dtype), raw[max(first, full) :]))))
        return Track(*pairs)

    def _compare(self, layer: int, span: tuple[int, int, int], q: np.ndarray, track: Track, got: np.ndarray) -> None:
        geometry, mask = self.geometry, self.cache.mask(layer)
        aged = np.array([self.cache.aged(position) for position in range(span[1], span[2])])
        rule = (span[1], aged, mask.window, mask.sinks, geometry.scale, geometry.softcap, geometry.dtype)
        want = answer(q, track.keys, track.values, *rule)
        error = np.abs(got - want.out)
        ratio = np.where(np.isnan(error), np.inf, error / np.maximum(want.bound, np.finfo(float).tiny))
        self.outputs += got.size
        self.worst[layer] = max(self.worst[layer], float(ratio.max()))
        if self.failure is None and not np.all(error <= want.bound):
            at = np.unravel_index(ratio.argmax(), ratio.shape)
            numbers = (float(x[at]) for x in (error, want.bound, got, want.out))
            self.failure = Failure(layer, span, span[1] + int(at[0]), int(at[1]), *numbers)
        self._measure_codec(q, track, rule, got, want.out)

    def _measure_codec(self, q: np.ndarray, track: Track, rule: tuple, got: np.ndarray, want: np.ndarray) -> None:
        """Project the output on the line from the raw answer to the codec's: a codec that is only claimed leaves it at the raw end."""
        if all(trip.lossless for trip in self._round_trips) or not rule[1].any():
            return
        plain = answer(q, *(Rows(rows.raw, rows.raw) for rows in (track.keys, track.values)), *rule).out
        line = want - plain
        self._seen += (float(((got - plain) * line).sum()), float((line * line).sum()))


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
    STEPS = 17

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

    def run(self, length: int) -> None:
        first = self._open(length + EXTRA)
        for chunk in _uneven(length):
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
            self.progress(self.done, self.STEPS)

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


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.float64).numpy()


def _same_pair(rows: Rows, raw: np.ndarray, cut: Callable[[np.ndarray], np.ndarray]) -> Rows:
    return Rows(raw, raw) if rows.read is rows.raw else Rows(raw, cut(rows.read))
