"""Every row format in NumPy, written from its description alone: what a stored row reads back as.

Shares no code with the kernels or the strategies, and knows no torch. Rows come as float64 arrays that hold values of the
working dtype exactly; what comes back is the decoded value in float64, with no rounding after `code * scale`.

Where the descriptions leave room, this is the reading: arithmetic runs in float32, or in float64 for float64 rows; float16
scales and e4m3 codes are rounded by way of float32; ties go to even; codes are computed from the stored scale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.errors import UserError

FLOAT16_MAX = 65504.0
FLOAT32_MAX = float(np.finfo(np.float32).max)
E4M3_MAX = 448.0


@dataclass(frozen=True)
class RoundTrip:
    """What rows read back as. `read` takes [n, H, D] float64 and the working dtype's name, where n is a multiple of `tokens`.

    `tokens` is how many neighbouring tokens share a scale: 1 for row formats. `lossless` formats hand back what they got.
    """

    read: Callable[[np.ndarray, str], np.ndarray]
    tokens: int = 1
    lossless: bool = False


def arithmetic(dtype: str) -> type:
    """The NumPy type that arithmetic on rows of `dtype` runs in."""
    return np.float64 if dtype == "float64" else np.float32


def raw(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The rows themselves."""
    return rows


def int8(rows: np.ndarray, dtype: str) -> np.ndarray:
    """[-127, 127] times a float32 scale of amax / 127 for the whole row."""
    return _symmetric(rows, dtype, rows.shape[-1], _to_float32)


def q8_0(rows: np.ndarray, dtype: str) -> np.ndarray:
    """[-127, 127] times a float16 scale of amax / 127 for each 32 values; the last group may be short."""
    return _symmetric(rows, dtype, 32, _to_float16)


def q4_0(rows: np.ndarray, dtype: str) -> np.ndarray:
    """(nibble - 8) times a float16 scale of m / -8 for each 32 values, m being the first value of largest magnitude."""

    def group(x: np.ndarray) -> np.ndarray:
        first = np.abs(x).argmax(-1, keepdims=True)
        stored = _to_float16(np.take_along_axis(x, first, -1) / x.dtype.type(-8))
        return (np.clip(_divided(x, stored) + 8, 0, 15) - 8) * stored.astype(np.float64)

    return _by_group(rows, dtype, 32, group)


def fp8(rows: np.ndarray, dtype: str) -> np.ndarray:
    """e4m3fn: 3 mantissa bits, exponents 2**-6 to 2**8, multiples of 2**-9 below that, clamped to +-448."""
    x = np.clip(rows, -E4M3_MAX, E4M3_MAX).astype(np.float32).astype(np.float64)
    _, exponent = np.frexp(x)  # x = m * 2**exponent with 0.5 <= |m| < 1
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    return np.clip(np.rint(x / step) * step, -E4M3_MAX, E4M3_MAX)


def kivi_keys(bits: int, group: int) -> RoundTrip:
    """Asymmetric codes over `group` tokens of one head and channel; float16 scale and zero."""
    return RoundTrip(lambda rows, dtype: _by_tokens(rows, dtype, group, bits), tokens=group)


def kivi_values(bits: int, group: int, value_group: int) -> RoundTrip:
    """Asymmetric codes over up to `value_group` neighbouring channels of one token; coded when their group of tokens is."""

    def read(rows: np.ndarray, dtype: str) -> np.ndarray:
        return _by_group(rows, dtype, value_group, lambda x: _asymmetric(x, bits, -1))

    return RoundTrip(read, tokens=group)


ROUND_TRIPS: dict[str, RoundTrip] = {
    "raw": RoundTrip(raw, lossless=True),
    "int8": RoundTrip(int8),
    "q8_0": RoundTrip(q8_0),
    "q4_0": RoundTrip(q4_0),
    "fp8": RoundTrip(fp8),
}


def round_trips(cache: object) -> tuple[RoundTrip, RoundTrip]:
    """How the keys and the values of `cache` read back, by the names of its codecs.

    A cache with formats of its own says how they read back in a `ROUND_TRIPS` of its own module: {codec name: RoundTrip}.
    """
    known = ROUND_TRIPS | _kivi_formats(cache) | getattr(sys.modules[type(cache).__module__], "ROUND_TRIPS", {})
    for codec in (cache.codec_k, cache.codec_v):
        if codec.name not in known:
            raise UserError(
                f"no independent description of the codec {codec.name!r}: the known ones are {', '.join(known)}; "
                f"say how it reads back in {type(cache).__module__}.ROUND_TRIPS = {{{codec.name!r}: RoundTrip(read)}}"
            )
    return known[cache.codec_k.name], known[cache.codec_v.name]


def _kivi_formats(cache: object) -> dict[str, RoundTrip]:
    """KIVI's formats with the sizes that `cache` was built with; nothing for caches of another kind."""
    if not cache.codec_k.name.startswith("kivi"):
        return {}
    bits, group = cache.bits, cache.group
    return {f"kivi{bits}_channel": kivi_keys(bits, group), f"kivi{bits}_token": kivi_values(bits, group, cache.value_group)}


def _by_tokens(rows: np.ndarray, dtype: str, group: int, bits: int) -> np.ndarray:
    """[n, H, D] with n a multiple of `group`: each run of `group` tokens of one head and channel is a group."""
    runs = rows.astype(arithmetic(dtype)).reshape(-1, group, *rows.shape[1:])
    return _asymmetric(runs, bits, 1).reshape(rows.shape)


def _asymmetric(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """What codes of (hi - lo) / (2**bits - 1) and lo, both stored as float16, read back as; each group along `axis`."""
    top = 2**bits - 1
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = _to_float16((high - low) / x.dtype.type(top)), _to_float16(low)
    codes = np.clip(_divided(x - zero.astype(x.dtype), scale), 0, top)
    return codes * scale.astype(np.float64) + zero.astype(np.float64)


def _symmetric(rows: np.ndarray, dtype: str, size: int, to_stored: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    def group(x: np.ndarray) -> np.ndarray:
        stored = to_stored(np.abs(x).max(-1, keepdims=True) / x.dtype.type(127))
        return np.clip(_divided(x, stored), -127, 127) * stored.astype(np.float64)

    return _by_group(rows, dtype, size, group)


def _by_group(rows: np.ndarray, dtype: str, size: int, group: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`group` on each run of `size` values along the last axis; a short last run is a group of its own."""
    x = rows.astype(arithmetic(dtype))
    return np.concatenate([group(x[..., at : at + size]).astype(np.float64) for at in range(0, rows.shape[-1], size)], axis=-1)


def _divided(x: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """x / stored to the nearest integer, ties to even; a stored scale of zero means zero."""
    step = stored.astype(x.dtype)
    return np.where(step == 0, 0, np.rint(x / np.where(step == 0, 1, step))).astype(np.float64)


def _to_float32(scale: np.ndarray) -> np.ndarray:
    return np.clip(scale, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def _to_float16(scale: np.ndarray) -> np.ndarray:
    return np.clip(scale, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float32).astype(np.float16)
