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


def answer(
    q: np.ndarray,
    keys: Rows,
    values: Rows,
    start: int,
    aged: np.ndarray,
    window: int | None,
    sinks: int,
    scale: float,
    softcap: float | None,
    dtype: str,
) -> Answer:
    """Attention of q [t, Hq, D] at positions start.. over keys.raw.shape[0] tokens; query i reads tokens below aged[i] through the codec."""
    queries, tokens = start + np.arange(q.shape[0]), np.arange(keys.raw.shape[0])
    seen = visible(queries, tokens, window, sinks)  # [t, n]
    old = tokens[None, :] < aged[:, None]  # [t, n]
    heads = keys.raw.shape[1]
    out, bound = np.empty(q.shape), np.empty(q.shape)
    for head in range(q.shape[1]):
        shared = head // (q.shape[1] // heads)
        one_head = (Rows(rows.raw[:, shared], rows.read[:, shared] if rows.read is not rows.raw else rows.raw[:, shared]) for rows in (keys, values))
        out[:, head], bound[:, head] = _one_head(q[:, head], *one_head, seen, old, scale, softcap, dtype)
    return Answer(out, bound)


def _one_head(
    q: np.ndarray, keys: Rows, values: Rows, seen: np.ndarray, old: np.ndarray, scale: float, softcap: float | None, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    u = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    scores = scale * _dots(q, keys, old)  # [t, n]
    wrong = (_roundings(q.shape[1]) + 4) * u * abs(scale) * _dots(np.abs(q), _magnitudes(keys), old)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        wrong = wrong + 8 * u * np.abs(scores)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True)
    sizes = np.where(seen, np.abs(scores), 0.0)
    wrong = np.where(seen, wrong + 3 * u * (sizes + np.abs(top)) + 8 * u, 0.0)
    out = _sums(weights, values, old)  # [t, D]
    return out, _bound(out, weights, wrong, _magnitudes(values), seen, old, u, dtype)


def _bound(
    out: np.ndarray, weights: np.ndarray, wrong: np.ndarray, sizes: Rows, seen: np.ndarray, old: np.ndarray, u: float, dtype: str
) -> np.ndarray:
    mass = _sums(weights, sizes, old)  # [t, D], sum_j w_j |v_jd|
    if dtype == "float64":
        return FLOAT64_PROMISE * np.maximum(1.0, mass)
    most = 2 * wrong.max(-1, keepdims=True)
    moved = weights * wrong * (np.expm1(most) / most)
    total = _sums(moved, sizes, old) + np.abs(out) * moved.sum(-1, keepdims=True)
    total += 2 * (_roundings(weights.shape[1]) + 8) * u * mass
    unit, underflow = UNIT_ROUNDOFF[dtype], HALF_SUBNORMAL[dtype]
    if unit > u:
        total += unit * mass + underflow * _sums(seen.astype(float), sizes, old)
    return total + unit * (np.abs(out) + total) + underflow


def _roundings(terms: int) -> float:
    return min(terms, DEVIATIONS * terms**0.5)


def _magnitudes(rows: Rows) -> Rows:
    size = np.abs(rows.raw)
    return Rows(size, size if rows.read is rows.raw else np.abs(rows.read))


def _dots(q: np.ndarray, keys: Rows, old: np.ndarray) -> np.ndarray:
    """q . k [t, n], each key as its query reads it."""
    if keys.read is keys.raw:
        return q @ keys.raw.T
    return np.where(old, q @ keys.read.T, q @ keys.raw.T)


def _sums(weights: np.ndarray, values: Rows, old: np.ndarray) -> np.ndarray:
    """sum_j w_j v_j [t, D], each value as its query reads it."""
    if values.read is values.raw:
        return weights @ values.raw
    return (weights * old) @ values.read + (weights * ~old) @ values.raw
