"""Vector IR for compiled kernels: memory at plain addresses, rows decoded in registers, exp, and calls through an address.

Everything is generic LLVM IR on vectors of `LANES` floats, which LLVM lowers to what the host has. It does not know about
attention; `micro.py` builds that from these. Formats are numbered by `FORMATS`; their meaning is `kernels/codec.py`'s.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "q8_0": 4, "q4_0": 5, "fp8": 6}
BLOCK = 32  # values decoded at a time: the scale group of q8_0 and q4_0


def host_lanes() -> int:
    """Floats of one register: 16 where AVX-512 is, otherwise 8 (two registers where the host's are shorter)."""
    return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8


def host_converts_float16() -> bool:
    """Whether float16 conversions compile to instructions: without them LLVM calls a library that is not there."""
    on_x86 = llvm.get_process_triple().split("-")[0] in ("x86_64", "i386", "i686")
    return not on_x86 or llvm.get_host_cpu_features().get("f16c", False)


LANES = host_lanes()
# Formats whose blocks come out with the even values of each 2 * LANES before the odd ones: one load gives both halves.
EVENS_FIRST = (FORMATS["bfloat16"], FORMATS["q4_0"])
SCALED_ROWS = (FORMATS["int8"],)  # one float32 scale a row: applied to scores and weights, not to codes
SCALED_BLOCKS = (FORMATS["q8_0"], FORMATS["q4_0"])

I8, I16, I32, I64, F16, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
VF, VI = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


def at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """The i64 `address` as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    return builder.load(at(builder, address, kind), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int = 1) -> None:
    builder.store(value, at(builder, address, value.type), align=align)


def offset(builder: ir.IRBuilder, address: ir.Value, count: int) -> ir.Value:
    return address if count == 0 else builder.add(address, I64(count))


def splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def constant(value: float, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    name = "llvm.fma.f32" if a.type == F32 else f"llvm.fma.v{a.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name), [a, b, c])


def prefetch(builder: ir.IRBuilder, address: ir.Value, locality: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [at(builder, address, I8), I32(0), I32(locality), I32(1)])


def halves(builder: ir.IRBuilder, vector: ir.Value) -> tuple[ir.Value, ir.Value]:
    half = vector.type.count // 2
    kind = ir.VectorType(I32, half)
    low, high = ([*range(first, first + half)] for first in (0, half))
    return tuple(builder.shuffle_vector(vector, vector, ir.Constant(kind, lanes)) for lanes in (low, high))


def summed(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of the lanes of a float vector, pairwise: the order never changes."""
    while vector.type.count > 1:
        low, high = halves(builder, vector)
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, I32(0))


def summed_each(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Two or four vectors -> one short vector of their sums. Transposing within quarters of a register is cheaper than reducing each."""
    kind = vectors[0].type

    def together(a: ir.Value, b: ir.Value, width: int) -> ir.Value:
        """In each quarter the low part of a beside that of b, plus the high parts."""
        low = [
            q + at + side + i
            for q in range(0, kind.count, 4)
            for at in range(0, 2, width)
            for side in (0, kind.count)
            for i in range(width)
        ]
        lanes = ir.VectorType(I32, kind.count)
        return builder.fadd(*(builder.shuffle_vector(a, b, ir.Constant(lanes, [lane + half for lane in low])) for half in (0, 2)))

    short = [together(a, b, 1) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]  # a0+a2, b0+b2, a1+a3, b1+b3
    total = together(*short, 2) if len(short) == 2 else short[0]
    while total.type.count > len(vectors):
        total = builder.fadd(*halves(builder, total))
    return total


def exp_below(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp of a float vector whose values are at most about 80; below -87.3 the answer is zero, NaN stays NaN.

    Range reduction of Cody & Waite 1980, then the Taylor polynomial of degree 7 on |r| <= ln 2 / 2: about one unit in the last place.
    """
    kind = x.type
    shift = constant(12582912.0, kind)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
    shifted = fma(builder, x, constant(1.4426950408889634, kind), shift)
    n = builder.fsub(shifted, shift)
    r = fma(builder, n, constant(-0.693145751953125, kind), x)
    r = fma(builder, n, constant(-1.428606765330187e-06, kind), r)
    total = constant(1.0 / 5040, kind)
    for term in (1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        total = fma(builder, total, r, constant(_float32(term), kind))
    ints = ir.VectorType(I32, kind.count)
    power = builder.shl(
        builder.add(builder.bitcast(shifted, ints), ir.Constant(ints, [127] * kind.count)), ir.Constant(ints, [23] * kind.count)
    )
    result = builder.fmul(total, builder.bitcast(power, kind))
    return builder.select(builder.fcmp_ordered("<", x, constant(-87.3, kind)), constant(0.0, kind), result)


def decoded_block(builder: ir.IRBuilder, form: int, codes: ir.Value, scales: ir.Value | None) -> list[ir.Value]:
    """The 32 values at address `codes` as float vectors; `scales` is the address of the block's own scale, None to leave it out."""
    if form in (FORMATS["bfloat16"], FORMATS["q4_0"]):
        vectors = _evens_first(builder, form, codes)
    else:
        width = {0: 4, 2: 2}.get(form, 1) * LANES
        vectors = [_in_order(builder, form, offset(builder, codes, part * width)) for part in range(BLOCK // LANES)]
    if form in SCALED_BLOCKS and scales is not None:
        scale = block_scale(builder, scales)
        vectors = [builder.fmul(vector, scale) for vector in vectors]
    return vectors


def block_scale(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """A block's own scale in every lane."""
    return builder.fpext(splat(builder, load(builder, address, F16), ir.VectorType(F16, LANES)), VF)


def block_bytes(form: int) -> int:
    """Bytes of 32 codes."""
    return {0: 128, 1: 64, 2: 64, 5: 16}.get(form, 32)


def _evens_first(builder: ir.IRBuilder, form: int, codes: ir.Value) -> list[ir.Value]:
    vectors = []
    for part in range(BLOCK // (2 * LANES)):
        if form == FORMATS["bfloat16"]:
            pairs = load(builder, offset(builder, codes, part * 4 * LANES), VI)
            both = builder.shl(pairs, constant(16, VI)), builder.and_(pairs, constant(-65536, VI))
            vectors += [builder.bitcast(bits, VF) for bits in both]
            continue
        pairs = builder.zext(load(builder, offset(builder, codes, part * LANES), ir.VectorType(I8, LANES)), VI)
        if LANES == 16:  # a table of the sixteen values, in a register; bits above the lowest four are ignored
            table = ir.Constant(VF, [float(code - 8) for code in range(16)])
            kind = ir.FunctionType(VF, [VF, VI])
            look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
            vectors += [builder.call(look_up, [table, numbers]) for numbers in (pairs, builder.lshr(pairs, constant(4, VI)))]
            continue
        for nibbles in (builder.and_(pairs, constant(15, VI)), builder.lshr(pairs, constant(4, VI))):
            vectors.append(builder.sitofp(builder.sub(nibbles, constant(8, VI)), VF))
    return vectors


def _in_order(builder: ir.IRBuilder, form: int, address: ir.Value) -> ir.Value:
    if form == FORMATS["float32"]:
        return load(builder, address, VF)
    if form == FORMATS["float16"]:
        return builder.fpext(load(builder, address, ir.VectorType(F16, LANES)), VF)
    codes = load(builder, address, ir.VectorType(I8, LANES))
    if form != FORMATS["fp8"]:
        return builder.sitofp(builder.sext(codes, VI), VF)
    # e4m3fn: the exponent and mantissa of a float16 that is 2**8 too small, subnormals included (a float32 that small would be
    # subnormal itself, and slow); 0x7f is NaN.
    wide = builder.zext(codes, ir.VectorType(I16, LANES))
    size = builder.and_(wide, constant(0x7F, wide.type))
    sign = builder.shl(builder.and_(wide, constant(0x80, wide.type)), constant(8, wide.type))
    halves = builder.bitcast(builder.or_(builder.shl(size, constant(7, wide.type)), sign), ir.VectorType(F16, LANES))
    value = builder.fmul(builder.fpext(halves, VF), constant(256.0, VF))
    return builder.select(builder.icmp_signed("==", size, constant(0x7F, wide.type)), constant(float("nan"), VF), value)


def _float32(value: float) -> float:
    """The float32 nearest to `value`: llvmlite refuses constants that float32 cannot hold."""
    import struct

    return struct.unpack("f", struct.pack("f", value))[0]
