"""Every form of a kernel that may run on a GPU: named, listed, tuned. Plain data: no torch, no triton, no device.

A kernel is compiled once per combination of the fields below. `LISTED` holds the combinations that the compile gate has
checked (registers, spills, wide loads); a run that asks for another one on a GPU is refused by name. The tuning of each form
is a rule stated here, so that nothing is searched for while a clock is running.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

DECODE_ROWS = 16  # the smallest tile of query rows that matrix instructions take
PREFILL_ROWS = 64
WIDEST_ROWS = 128
MOST_SPLITS = 32
MOST_REGISTERS = 255  # of an NVIDIA thread
# Left alone, NVIDIA's assembler spills a few registers of these to fit more programs on a processor; told the most, it spills none.
PRESSED = {("paged", "raw", 64, DECODE_ROWS), ("paged", "raw", 128, PREFILL_ROWS)}
SPLIT_KEYS = 256  # fewer keys than this are not worth a program of their own


@dataclass(frozen=True)
class Attend:
    """One form of the attention kernel."""

    layout: str  # dense | paged | packed (dense over this step's own k and v)
    codec_k: str
    codec_v: str
    dtype: str
    head_dim: int
    rows: int  # query rows of a tile
    windowed: bool = False
    softcapped: bool = False

    @property
    def name(self) -> str:
        codecs = self.codec_k if self.codec_k == self.codec_v else f"{self.codec_k}/{self.codec_v}"
        flags = "".join(f" {flag}" for flag in ("windowed", "softcapped") if getattr(self, flag))
        return f"attend {self.layout} {codecs} {self.dtype} head_dim={self.head_dim} rows={self.rows}{flags}"


@dataclass(frozen=True)
class Merge:
    """The merge of split attention."""

    dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        return f"merge {self.dtype} head_dim={self.head_dim}"


@dataclass(frozen=True)
class Rows:
    """write_rows or read_rows."""

    op: str  # write | read
    codec: str
    dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.op}_rows {self.codec} {self.dtype} head_dim={self.head_dim}"


@dataclass(frozen=True)
class Copy:
    """copy_pages in words of `word` bytes."""

    word: int

    @property
    def name(self) -> str:
        return f"copy_pages word={self.word}"


@dataclass(frozen=True)
class Pointwise:
    """rope, rms_norm, rms_norm with residual, gated silu or gated gelu_tanh; `block` is the power of two that holds a row."""

    op: str
    dtype: str
    block: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype} block={self.block}"


Spec = Attend | Merge | Rows | Copy | Pointwise


@dataclass(frozen=True)
class Tuning:
    """How attention is launched: keys of a tile, warps, loads in flight, and the registers of a thread (None: the compiler's choice)."""

    keys: int
    warps: int
    stages: int
    registers: int | None


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def block_dim(head_dim: int) -> int:
    """Lanes of a tile for `head_dim` values: a power of two, and at least what a dot's inner side needs."""
    return max(16, power_of_two(head_dim))


def row_block(head_dim: int) -> int:
    """Rows (one head of one token) that one program of write_rows and read_rows handles: about 2,048 values."""
    return max(1, 2048 // block_dim(head_dim))


def query_rows(group: int, tokens: int, spans: int, dtype: str) -> int:
    """Rows of a query tile, from constants of the plan: the query heads of a KV head times the mean span.

    float32 has no matrix instruction of full precision, so its tiles stay as small as the group allows: larger ones spill.
    """
    wanted = group * -(-tokens // spans)
    if group > WIDEST_ROWS:
        raise ValueError(
            f"{group} query heads share a KV head: the triton kernels pack at most {WIDEST_ROWS} into a tile; use backend=reference"
        )
    if dtype == "float32":
        return max(DECODE_ROWS, power_of_two(group))
    if wanted <= DECODE_ROWS:
        return DECODE_ROWS
    return PREFILL_ROWS if group <= PREFILL_ROWS else WIDEST_ROWS


def key_splits(planned: int, programs: int, longest: int, processors: int) -> int:
    """Programs that share the keys of one span: the plan's number if it names one, else enough to fill the device twice.

    `programs` run without splitting, `longest` bounds every span's stop. Always a power of two, at least SPLIT_KEYS keys each.
    """
    if planned > 1:
        return planned
    wanted = min(2 * processors // max(1, programs), longest // SPLIT_KEYS, MOST_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


def tuning(spec: Attend, amd: bool) -> Tuning:
    """64 keys to a tile, 32 where more would spill; paged decode has a stage for the page numbers, except in AMD's 64 KiB of LDS."""
    lanes = block_dim(spec.head_dim)
    tall = spec.rows > DECODE_ROWS and lanes >= 128
    narrow = tall and (amd or lanes > spec.head_dim)  # split over eight warps, these spill too
    few_keys = narrow or lanes > 128 or spec.dtype == "float32" or "fp8" in (spec.codec_k, spec.codec_v)
    warps = 8 if spec.dtype == "float32" or spec.rows == WIDEST_ROWS or (tall and not narrow) else 4
    stages = 3 if spec.layout == "paged" and spec.rows == DECODE_ROWS and not amd else 2
    pressed = (spec.layout, spec.codec_k, spec.head_dim, spec.rows) in PRESSED or (spec.layout == "dense" and spec.dtype == "float32")
    return Tuning(32 if few_keys else 64, warps, stages, MOST_REGISTERS if pressed and not amd else None)


CODEC_NAMES = ("raw", "int8", "q8_0", "q4_0", "fp8")
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")


def _attention() -> frozenset[Attend]:
    rows, yes_no, stored = (DECODE_ROWS, PREFILL_ROWS), (False, True), ("dense", "paged")
    forms = {
        Attend(layout, c, c, "bfloat16", d, m) for layout, c, d, m in product(stored, ("raw", "int8", "q8_0", "q4_0"), (64, 128), rows)
    }
    forms |= {Attend("paged", "fp8", "fp8", "bfloat16", d, m) for d, m in product((64, 128), rows)}
    forms |= {Attend("paged", "q8_0", "q4_0", "bfloat16", 64, m) for m in rows}
    forms |= {Attend("paged", "raw", "raw", "bfloat16", d, m, True) for d, m in product((64, 128), rows)}
    forms |= {Attend("paged", "int8", "int8", "bfloat16", 64, m, True) for m in rows}
    forms |= {Attend("dense", "raw", "raw", "bfloat16", 64, m, True) for m in rows}
    forms |= {Attend(layout, "raw", "raw", "bfloat16", d, m) for layout, d, m in product(stored, (80, 96, 256), rows)}
    # Gemma: wide heads, windows on some layers, and in the second generation a softcap.
    forms |= {Attend("paged", "raw", "raw", "bfloat16", 256, m, w, s) for m, w, s in product(rows, yes_no, yes_no)}
    forms |= {Attend("paged", "raw", "raw", "float16", d, m) for d, m in product((64, 128), rows)}
    forms |= {Attend(layout, "raw", "raw", "float32", 64, DECODE_ROWS) for layout in ("dense", "paged", "packed")}
    forms |= {Attend("packed", "raw", "raw", "bfloat16", d, PREFILL_ROWS) for d in HEAD_DIMS}
    forms |= {Attend("packed", "raw", "raw", "bfloat16", d, DECODE_ROWS) for d in (64, 128)}
    forms |= {Attend("packed", "raw", "raw", "bfloat16", d, PREFILL_ROWS, True) for d in (64, 128)}
    # Multi-query models with more than 64 query heads.
    forms |= {Attend("paged", "raw", "raw", "bfloat16", 64, WIDEST_ROWS)}
    return frozenset(forms)


def _others() -> frozenset[Spec]:
    ops = ("write", "read")
    forms: set[Spec] = {Merge("bfloat16", d) for d in HEAD_DIMS} | {Merge("float16", d) for d in (64, 128)} | {Merge("float32", 64)}
    forms |= {Rows(op, c, "bfloat16", d) for op, c, d in product(ops, CODEC_NAMES, (64, 128))}
    forms |= {Rows(op, "raw", "bfloat16", d) for op, d in product(ops, HEAD_DIMS)}
    forms |= {Rows(op, "raw", "float16", d) for op, d in product(ops, (64, 128))} | {Rows(op, "raw", "float32", 64) for op in ops}
    forms |= {Copy(word) for word in (1, 8)}
    forms |= {Pointwise("rope", dtype, block) for dtype, block in product(DTYPES, (64, 128, 256))}
    forms |= {Pointwise(op, "bfloat16", 2**n) for op, n in product(("rms_norm", "rms_norm residual"), range(6, 14))}
    forms |= {Pointwise(op, dtype, 1024) for op, dtype in product(("rms_norm", "rms_norm residual"), ("float16", "float32"))}
    forms |= {Pointwise(op, dtype, 1024) for op, dtype in product(("gated silu", "gated gelu_tanh"), DTYPES)}
    return frozenset(forms)


LISTED: frozenset[Spec] = _attention() | _others()

# Compiled again by every test run: each codec, layout, dtype, tile and flag of attention once, and one form of every other kernel.
SAMPLE: frozenset[Spec] = frozenset(
    {
        Attend("paged", "raw", "raw", "bfloat16", 128, DECODE_ROWS),
        Attend("paged", "int8", "int8", "bfloat16", 64, DECODE_ROWS),
        Attend("dense", "q8_0", "q8_0", "bfloat16", 64, DECODE_ROWS),
        Attend("paged", "q4_0", "q4_0", "bfloat16", 64, DECODE_ROWS),
        Attend("paged", "fp8", "fp8", "bfloat16", 128, DECODE_ROWS),
        Attend("dense", "raw", "raw", "float32", 64, DECODE_ROWS),
        Attend("paged", "raw", "raw", "bfloat16", 256, DECODE_ROWS, True, True),
        Attend("paged", "raw", "raw", "float16", 64, PREFILL_ROWS),
        Attend("packed", "raw", "raw", "bfloat16", 80, PREFILL_ROWS),
        Merge("bfloat16", 128),
        Rows("write", "q4_0", "bfloat16", 64),
        Rows("read", "q8_0", "bfloat16", 64),
        Copy(8),
        Pointwise("rope", "bfloat16", 64),
        Pointwise("rms_norm residual", "bfloat16", 1024),
        Pointwise("gated silu", "bfloat16", 1024),
    }
)
