"""Compiling one form of a kernel for a GPU that is not here: what a launch would ask the compiler for, said in full.

It must ask exactly what `attention`, `storage` and `layers` ask at run time, with the same tuning and the same promises about
alignment; the test of that compares the two. It does not judge what comes out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gpu.attend import attend_kernel, merge_kernel
from kernels.gpu.attention import MERGE_SPLITS
from kernels.gpu.copy_pages import copy_kernel
from kernels.gpu.launch import ALIGNMENT_BYTES, FP_FUSION
from kernels.gpu.layers import GATED_BLOCK, norm_rows, norm_warps, rope_rows
from kernels.gpu.pointwise import gated_kernel, rms_norm_kernel, rope_kernel
from kernels.gpu.rows import read_kernel, write_kernel
from kernels.gpu.specialisations import Attend, Copy, Merge, Pointwise, Rows, Spec, block_dim, row_block, tuning
from kernels.gpu.storage import COPY_BLOCK

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
CODES = {"int8": "*i8", "q8_0": "*i8", "q4_0": "*u8", "fp8": "*fp8e4nv"}
SCALES = {"raw": None, "fp8": None, "int8": "*fp32", "q8_0": "*fp16", "q4_0": "*fp16"}


@dataclass(frozen=True)
class Request:
    """One compilation: argument types by name (None for an absent tensor), constants, and the options of a launch."""

    kernel: Any
    types: dict[str, str | None]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3  # Triton's default, which launches that name none get
    registers: int | None = None

    def digest(self, target: str) -> str:
        """Names the compilation: the kernel's source with all it calls, and everything that is asked of the compiler."""
        constants = {name: str(value) for name, value in sorted(self.constants.items())}
        limit = () if self.registers is None else (self.registers,)
        asked = (self.kernel.cache_key, sorted(self.types.items(), key=str), constants, self.warps, self.stages, target, *limit)
        return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]

    def threads(self, target: str) -> int:
        return self.warps * TARGETS[target].warp_size

    def options(self) -> dict[str, int | bool]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": FP_FUSION} | limit

    def source(self) -> ASTSource:
        names = self.kernel.arg_names
        constants = self.constants | {name: None for name, kind in self.types.items() if kind is None}
        signature = {name: "constexpr" if name in constants else self.types[name] for name in names}
        aligned = [name for name in names if signature[name].startswith("*")]
        return ASTSource(
            self.kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", ALIGNMENT_BYTES]] for name in aligned},
        )


def supported(spec: Spec, target: str) -> bool:
    """False where the form is refused at run time: e4m3 below sm_89."""
    codecs = {getattr(spec, field, None) for field in ("codec", "codec_k", "codec_v")}
    return not ("fp8" in codecs and target == "sm_80" and not (isinstance(spec, Rows) and spec.op == "write"))


def request(spec: Spec, target: str) -> Request:
    """What a launch of `spec` on `target` compiles."""
    if isinstance(spec, Attend):
        return _attend(spec, TARGETS[target].backend == "hip")
    if isinstance(spec, Merge):
        types = {"parts": "*fp32", "lse": "*fp32", "out": POINTERS[spec.dtype], "rows": "i32", "splits": "i32"}
        return Request(
            merge_kernel, types, {"D": spec.head_dim, "BLOCK_D": block_dim(spec.head_dim), "BLOCK_R": 1, "BLOCK_S": MERGE_SPLITS}
        )
    if isinstance(spec, Rows):
        return _rows(spec)
    if isinstance(spec, Copy):
        types = {"bases": "*i64", "words": "*i64", "sources": "*i64", "targets": "*i64"}
        return Request(copy_kernel, types, {"WORD": {1: tl.uint8, 8: tl.int64}[spec.word], "BLOCK": COPY_BLOCK})
    return _pointwise(spec)


def compile_for(spec: Spec, target: str):
    """The compiled kernel: `asm` by stage and `metadata`, from Triton's own cache where it has them."""
    wanted = request(spec, target)
    return triton.compile(wanted.source(), target=TARGETS[target], options=wanted.options())


def code_type(codec: str, dtype: str) -> str:
    return POINTERS[dtype] if codec == "raw" else CODES[codec]


def _attend(spec: Attend, amd: bool) -> Request:
    chosen = tuning(spec, amd)
    types: dict[str, str | None] = {
        "q": POINTERS[spec.dtype],
        "k_codes": code_type(spec.codec_k, spec.dtype),
        "k_scales": SCALES[spec.codec_k],
        "v_codes": code_type(spec.codec_v, spec.dtype),
        "v_scales": SCALES[spec.codec_v],
        "out": POINTERS[spec.dtype],
        "parts": "*fp32",
        "lse": "*fp32",
        "where": "*i64" if spec.layout == "dense" else "*i32",
        "cu_seqlens": "*i32",
        "starts": "*i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    integers = ("spans", "q_pitch", "k_pitch", "v_pitch", "group", "tile_queries", "table_width", "page_size", "window", "sinks")
    types |= dict.fromkeys(integers, "i32")
    constants = {
        "D": spec.head_dim,
        "BLOCK_D": block_dim(spec.head_dim),
        "BLOCK_M": spec.rows,
        "BLOCK_N": chosen.keys,
        "CODEC_K": spec.codec_k,
        "CODEC_V": spec.codec_v,
        "PAGED": spec.layout == "paged",
        "WINDOWED": spec.windowed,
        "SOFTCAPPED": spec.softcapped,
    }
    return Request(attend_kernel, types, constants, chosen.warps, chosen.stages, chosen.registers)


def _rows(spec: Rows) -> Request:
    constants = {"D": spec.head_dim, "BLOCK_D": block_dim(spec.head_dim), "BLOCK_R": row_block(spec.head_dim), "CODEC": spec.codec}
    codes = code_type(spec.codec, spec.dtype)
    types: dict[str, str | None] = {"slots": "*i64", "scales": SCALES[spec.codec], "count": "i32", "heads": "i32"}
    if spec.op == "read":
        return Request(read_kernel, types | {"codes": codes, "out": POINTERS[spec.dtype]}, constants)
    written = "*u8" if spec.codec == "fp8" else codes
    return Request(write_kernel, types | {"rows": POINTERS[spec.dtype], "codes": written, "pitch": "i32"}, constants)


def _pointwise(spec: Pointwise) -> Request:
    tensor = POINTERS[spec.dtype]
    if spec.op == "rope":
        types = {"x": tensor, "cos": "*fp32", "sin": "*fp32", "out": tensor}
        types |= dict.fromkeys(("count", "heads", "head_dim", "rotated", "token_stride", "head_stride"), "i32")
        return Request(rope_kernel, types, {"BLOCK_D": spec.block, "BLOCK_R": rope_rows(spec.block)})
    if spec.op.startswith("gated"):
        types = {"gate_up": tensor, "out": tensor, "features": "i32", "token_stride": "i32"}
        return Request(gated_kernel, types, {"ACTIVATION": spec.op.removeprefix("gated "), "BLOCK": GATED_BLOCK})
    extra = tensor if spec.op == "rms_norm residual" else None
    types = {"x": tensor, "residual": extra, "weight": tensor, "out": tensor, "total": extra, "eps": "fp32"}
    types |= dict.fromkeys(("rows", "features", "inner", "outer_stride", "inner_stride"), "i32")
    return Request(rms_norm_kernel, types, {"BLOCK_F": spec.block, "BLOCK_R": norm_rows(spec.block)}, norm_warps(spec.block))
