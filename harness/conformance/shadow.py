"""A cache that checks another: every attend is compared with the dense oracle on the same q, k and v.

The strategy's own output is passed on, so no error of the oracle reaches what runs above. It does not know how rows are
stored, nor who makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harness.conformance.codecs import round_trips
from harness.conformance.oracle import Rows, Rule, answer, exact
from harness.errors import UserError
from kernels.rows import Mask
from strategies.base import KVCache, Plan
from strategies.geometry import Stats


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
        self._retired: list[tuple[list[int], dict[int, Track]]] = []  # what was closed or cut had fed this: a held prefix may come from it
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
        self._retired.append((self._tokens[sid], self._layers_of(sid)))
        self._tokens[sid] = self._tokens[sid][:length]
        self._tracks |= {(sid, layer): track.cut(length) for layer, track in self._layers_of(sid).items()}

    def close(self, sid: int) -> None:
        self.cache.close(sid)
        layers = self._layers_of(sid)
        self._retired.append((self._tokens.pop(sid), layers))
        for layer in layers:
            del self._tracks[sid, layer]

    def reserve_scratch(self) -> None:
        self.cache.reserve_scratch()

    def plan(self, stops: Mapping[int, int], pad_to: int | None = None) -> Plan:
        plan = self.cache.plan(stops, pad_to)
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
        rule = Rule(span[1], aged, mask.window, mask.sinks, geometry.scale, geometry.softcap)
        want = answer(q, track.keys, track.values, rule, geometry.dtype, self.cache.ops.rounds_decoded)
        error = np.abs(got - want.out)
        ratio = np.where(np.isnan(error), np.inf, error / np.maximum(want.bound, np.finfo(float).tiny))
        self.outputs += got.size
        self.worst[layer] = max(self.worst[layer], float(ratio.max()))
        if self.failure is None and not np.all(error <= want.bound):
            at = np.unravel_index(ratio.argmax(), ratio.shape)
            numbers = (float(x[at]) for x in (error, want.bound, got, want.out))
            self.failure = Failure(layer, span, span[1] + int(at[0]), int(at[1]), *numbers)
        self._measure_codec(q, track, rule, got, want.out)

    def _measure_codec(self, q: np.ndarray, track: Track, rule: Rule, got: np.ndarray, want: np.ndarray) -> None:
        """Project the output on the line from the raw answer to the codec's: a codec that is only claimed leaves it at the raw end."""
        if all(trip.lossless for trip in self._round_trips) or not rule.aged.any():
            return
        plain = exact(q, *(Rows(rows.raw, rows.raw) for rows in (track.keys, track.values)), rule)
        line = want - plain
        self._seen += (float(((got - plain) * line).sum()), float((line * line).sum()))


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.float64).numpy()


def _same_pair(rows: Rows, raw: np.ndarray, cut: Callable[[np.ndarray], np.ndarray]) -> Rows:
    return Rows(raw, raw) if rows.read is rows.raw else Rows(raw, cut(rows.read))
