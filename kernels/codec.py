"""How one row (a token's K or V of one head) becomes bytes: names, code widths, scales and their byte counts.

Formats only: no torch here, so that planners and byte audits can ask without loading it. `reference.py` holds the
arithmetic; every backend must produce the same codes.

Rounding, for every format: arithmetic is float32 (float64 for float64 rows), ties to even, and codes are computed from the
*stored* scale. float16 scales and e4m3 codes are rounded by way of float32, for float64 rows too.

=====  ======================  =======================================  ==========================
name   codes                   scale                                    decoded value
=====  ======================  =======================================  ==========================
raw    the working dtype       none                                     the code
int8   [-127, 127]             float32, amax / 127, one per row         code * scale
q8_0   [-127, 127]             float16, amax / 127, one per 32 values   code * scale
q4_0   nibble 0..15            float16, m / -8, one per 32 values       (code - 8) * scale
fp8    e4m3fn, clamped to 448  none                                     the code
=====  ======================  =======================================  ==========================

amax is the largest magnitude of the group, m the signed value that has it (the first one, on a tie). A group whose
scale rounds to zero is stored as zeros. q8_0 and q4_0 are the block formats of ggml, with the rounding stated above;
their last group of a row may be short, and no group crosses a head. Two q4_0 nibbles share a byte: value i of a row
in the low nibble of byte i // 2 when i is even, in the high one when i is odd.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Codec:
    """One row format. `code_bits` is None for raw: the working dtype decides."""

    name: str
    code_bits: int | None
    group: int | None  # values per scale; None with a scale_bytes above 0 means one scale for the whole row
    scale_bytes: int

    def scales_per_row(self, head_dim: int) -> int:
        """Scales stored for one head's row of `head_dim` values."""
        if self.scale_bytes == 0:
            return 0
        return 1 if self.group is None else -(-head_dim // self.group)

    def codes_per_row(self, head_dim: int) -> int:
        """Elements of the code tensor for one head's row (bytes for q4_0: two values each)."""
        return -(-head_dim // 2) if self.code_bits == 4 else head_dim

    def row_bytes(self, head_dim: int, dtype: str) -> int:
        """Bytes stored for one head's row; `dtype` is the working dtype's name."""
        width = DTYPE_BYTES[dtype] if self.code_bits is None else 1
        return self.codes_per_row(head_dim) * width + self.scales_per_row(head_dim) * self.scale_bytes


CODECS = {
    codec.name: codec
    for codec in (
        Codec("raw", None, None, 0),
        Codec("int8", 8, None, 4),
        Codec("q8_0", 8, 32, 2),
        Codec("q4_0", 4, 32, 2),
        Codec("fp8", 8, None, 0),
    )
}


def codec_named(name: str) -> Codec:
    """The codec called `name`; ValueError lists the names there are."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: choose one of {', '.join(CODECS)}")
    return CODECS[name]
