"""What attention must answer, in float64 and dense, with a bound on how far a working dtype may honestly be from it.

Shares no code with the kernels or the strategies, and knows no torch: positions, raw rows and read-back rows in, answers
and bounds out. Letters: t queries, n keys, Hq query heads, Hkv KV heads, D head_dim.

Where the bound comes from, per output o_d = sum_j w_j v_jd with w = softmax(s) and s_j = scale * q . k_j:

1. Score error. Each s_j is a sum of D products, rounded in the arithmetic dtype of unit roundoff u:
   |ds_j| <= (c(D) + 4) u scale (|q| . |k_j|), where c(m) = min(m, 6 sqrt(m)). sqrt(m) in place of m is the probabilistic
   bound of Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4; six standard deviations. The 4 covers the product
   with the scale, the product with a codec's scale, and q times the scale. A softcap has slope <= 1 and adds 8u of itself.
2. Weight error. A shared shift of the scores cancels. The subtraction, the change to base 2 and exp itself add
   3u (|s_j| + |max s|) + 8u, so w_j moves by at most w_j d_j to first order, d_j the sum; expm1(2d) / (2d) covers the rest.
3. Output error. sum_j w_j d_j |v_jd - o_d| <= sum_j w_j d_j |v_jd| + |o_d| sum_j w_j d_j, then the rounding of both sums
   over n keys: 2 (c(n) + 8) u sum_j w_j |v_jd|.
4. Working dtype of unit roundoff U > u: weights may be rounded to it once, U sum_j w_j |v_jd|, plus what underflows; the
   answer is rounded once, U |o_d|.
5. Where the kernels say so, what a codec reads back is rounded once to the working dtype before it is multiplied: each k_jd and
   v_jd moves by at most U |.| and what underflows, which joins the score error and the output error.

In float64 the promise is sharper and needs no derivation: 1e-9 of max(1, sum_j w_j |v_jd|).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
HALF_SUBNORMAL = {"float64": 0.0, "float32": 0.0, "bfloat16": 0.0, "float16": 2.0**-25}
FLOAT64_PROMISE = 1e-9
DEVIATIONS = 6.0


@dataclass(frozen=True)
class Rows:
    """K or V of one sequence from position 0: as they came, and as the codec reads them back (the same array when lossless)."""

    raw: np.ndarray  # [n, Hkv, D] float64
    read: np.ndarray  # [n, Hkv, D] float64; only rows below `aged` are looked at


@dataclass(frozen=True)
class Answer:
    """What the queries of one span must give."""

    out: np.ndarray  # [t, Hq, D] float64
    bound: np.ndarray  # [t, Hq, D] float64, the largest honest distance from `out`


def visible(queries: np.ndarray, keys: np.ndarray, window: int | None, sinks: int) -> np.ndarray:
    """[t, n] bool: key j of query i when j <= i and (i - j < window or j < sinks)."""
    distance = queries[:, None] - keys[None, :]
    near = np.ones_like(distance, dtype=bool) if window is None else (distance < window) | (keys < sinks)[None, :]
    return (distance >= 0) & near


@dataclass(frozen=True)
class Rule:
    """Which tokens the queries of one span may see, and how scores become weights."""

    start: int  # position of the first query
    aged: np.ndarray  # [t]: query i reads tokens below aged[i] through the codec, the rest raw
    window: int | None
    sinks: int
    scale: float
    softcap: float | None


def answer(q: np.ndarray, keys: Rows, values: Rows, rule: Rule, dtype: str, rounds_decoded: bool = False) -> Answer:
    """Attention of q [t, Hq, D] at positions rule.start.. over the rows of keys and values, and its bound in `dtype`.

    rounds_decoded: the kernels round what a codec reads back to `dtype` (see 5 above).
    """
    parts = _Parts(q, keys, values, rule)
    out = parts.sums(parts.weights(), parts.values)  # [Hkv, g * t, D]
    return Answer(parts.unpacked(out), parts.unpacked(_bound(parts, out, dtype, rounds_decoded)))


def exact(q: np.ndarray, keys: Rows, values: Rows, rule: Rule) -> np.ndarray:
    """The answer [t, Hq, D] alone."""
    parts = _Parts(q, keys, values, rule)
    return parts.unpacked(parts.sums(parts.weights(), parts.values))


class _Parts:
    """One span, with the g query heads that share a KV head packed as rows: r = g * t."""

    def __init__(self, q: np.ndarray, keys: Rows, values: Rows, rule: Rule) -> None:
        self.shape, self.rule = q.shape, rule
        count, query_heads, _ = q.shape
        kv_heads = keys.raw.shape[1]
        self.group = query_heads // kv_heads  # query head h reads KV head h // group
        queries, tokens = rule.start + np.arange(count), np.arange(keys.raw.shape[0])
        self.seen = np.tile(visible(queries, tokens, rule.window, rule.sinks), (self.group, 1))  # [r, n]
        self.old = np.tile(tokens[None, :] < rule.aged[:, None], (self.group, 1))  # [r, n]
        self.q = q.transpose(1, 0, 2).reshape(kv_heads, self.group * count, -1)  # [Hkv, r, D]
        self.keys, self.values = (_by_head(rows) for rows in (keys, values))

    def unpacked(self, rows: np.ndarray) -> np.ndarray:
        """[Hkv, r, D] -> [t, Hq, D]."""
        return rows.reshape(self.shape[1], self.shape[0], -1).transpose(1, 0, 2)

    def scores(self) -> np.ndarray:
        """[Hkv, r, n] before masking."""
        scores = self.rule.scale * self.dots(self.q, self.keys)
        cap = self.rule.softcap
        return scores if cap is None else cap * np.tanh(scores / cap)

    def weights(self) -> np.ndarray:
        """[Hkv, r, n], each row of them adding up to 1."""
        scores = np.where(self.seen, self.scores(), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def dots(self, q: np.ndarray, keys: Rows) -> np.ndarray:
        """q . k [Hkv, r, n], each key as its query reads it."""
        raw = q @ keys.raw.swapaxes(-1, -2)
        return raw if keys.read is keys.raw else np.where(self.old, q @ keys.read.swapaxes(-1, -2), raw)

    def sums(self, weights: np.ndarray, values: Rows) -> np.ndarray:
        """sum_j w_j v_j [Hkv, r, D], each value as its query reads it."""
        if values.read is values.raw:
            return weights @ values.raw
        return (weights * self.old) @ values.read + (weights * ~self.old) @ values.raw


def _bound(parts: _Parts, out: np.ndarray, dtype: str, rounds_decoded: bool) -> np.ndarray:
    weights, sizes = parts.weights(), _magnitudes(parts.values)
    mass = parts.sums(weights, sizes)  # sum_j w_j |v_jd|
    if dtype == "float64":
        return FLOAT64_PROMISE * np.maximum(1.0, mass)
    u, unit, underflow = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[dtype], HALF_SUBNORMAL[dtype]
    rounded = rounds_decoded and unit > u
    wrong = _score_error(parts, u, _rounding(parts.keys, unit, underflow) if rounded else None)
    most = 2 * wrong.max(-1, keepdims=True)
    moved = weights * wrong * (np.expm1(most) / most)
    total = parts.sums(moved, sizes) + np.abs(out) * moved.sum(-1, keepdims=True)
    total += 2 * (_roundings(weights.shape[-1]) + 8) * u * mass
    if rounded:
        total += parts.sums(weights, _rounding(parts.values, unit, underflow))
    if unit > u:
        total += unit * mass + underflow * parts.sums(parts.seen.astype(float)[None], sizes)
    return total + unit * (np.abs(out) + total) + underflow


def _score_error(parts: _Parts, u: float, rounded: Rows | None) -> np.ndarray:
    """[Hkv, r, n]: d_j, how far the logarithm of each unnormalised weight may be off; 0 where nothing is seen.

    rounded: how far each value of the keys may have moved before it was multiplied (None: not at all).
    """
    scores = parts.scores()
    wrong = (_roundings(parts.q.shape[-1]) + 4) * u * abs(parts.rule.scale) * parts.dots(np.abs(parts.q), _magnitudes(parts.keys))
    if rounded is not None:
        wrong = wrong + abs(parts.rule.scale) * parts.dots(np.abs(parts.q), rounded)
    if parts.rule.softcap is not None:
        wrong = wrong + 8 * u * np.abs(scores)
    top = np.where(parts.seen, scores, -np.inf).max(-1, keepdims=True)
    return np.where(parts.seen, wrong + 3 * u * (np.abs(scores) + np.abs(top)) + 8 * u, 0.0)


def _rounding(rows: Rows, unit: float, underflow: float) -> Rows:
    """How far each value moves when what a codec read back is rounded; raw rows are in the working dtype already."""
    if rows.read is rows.raw:
        nothing = np.zeros_like(rows.raw)
        return Rows(nothing, nothing)
    return Rows(np.zeros_like(rows.raw), unit * np.abs(rows.read) + underflow)


def _roundings(terms: int) -> float:
    return min(terms, DEVIATIONS * terms**0.5)


def _by_head(rows: Rows) -> Rows:
    raw = rows.raw.swapaxes(0, 1)
    return Rows(raw, raw if rows.read is rows.raw else rows.read.swapaxes(0, 1))


def _magnitudes(rows: Rows) -> Rows:
    size = np.abs(rows.raw)
    return Rows(size, size if rows.read is rows.raw else np.abs(rows.read))
