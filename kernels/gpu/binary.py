"""What a compiled kernel costs, read from its own machine code: registers, spills, memory, load widths, matrix instructions.

Text in, numbers out. It knows the two vendors' assembly listings and nothing about what a kernel computes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Counts are of instructions in the text; loop figures are of the loop that holds the most matrix instructions.

    loop_load_bytes: bytes that all threads of a program ask for in one pass of that loop, through loads of at least 8 bytes.
    loop_exponentials: exponentials of one thread in one pass; a compiler may unroll key tiles into a pass, and these count them.
    """

    registers: int
    spills: int  # vector registers on AMD, bytes on NVIDIA: both go through memory
    scalar_spills: int  # AMD's scalar registers: these go to lanes of vector registers
    local_bytes: int
    shared_bytes: int
    widest_load_bytes: int
    matrix_instructions: int
    loop_load_bytes: int
    loop_widest_load_bytes: int
    loop_exponentials: int


def nvidia(usage: str, listing: str, shared: int, threads: int) -> Facts:
    """Facts from `cuobjdump --dump-resource-usage` and `nvdisasm` of one kernel with `threads` to a program."""
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    lines = [_Line.of_nvidia(text) for text in listing.splitlines()]
    spilled = sum(4 for line in lines if line.opcode.startswith("STL"))
    return _summed(lines, threads, numbers["REG"], spilled, 0, numbers["LOCAL"] + numbers["STACK"], shared)


def amd(text: str, shared: int, threads: int) -> Facts:
    """Facts from the assembly of one kernel."""

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", text).group(1))

    lines = [_Line.of_amd(row) for row in text.splitlines()]
    spills, scalar_spills = number("vgpr_spill_count"), number("sgpr_spill_count")
    return _summed(lines, threads, number("vgpr_count"), spills, scalar_spills, number("private_segment_fixed_size"), shared)


@dataclass(frozen=True)
class _Line:
    """One line of a listing: its label, opcode, branch target, bytes loaded by one thread, and whether it multiplies matrices."""

    label: str = ""
    opcode: str = ""
    target: str = ""
    load_bytes: int = 0
    matrix: bool = False

    @staticmethod
    def of_nvidia(text: str) -> _Line:
        label = re.match(r"\s*(\.L_x_\d+):", text)
        if label is not None:
            return _Line(label=label.group(1))
        found = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_.]+)(.*)", text)
        if found is None:
            return _Line()
        opcode, rest = found.groups()
        target = re.search(r"`\((\.L_x_\d+)\)", rest) if opcode.startswith("BRA") else None
        matrix = opcode.startswith(("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "UTCMMA", "OMMA", "QMMA", "IMMA", "DMMA"))
        return _Line("", opcode, "" if target is None else target.group(1), _nvidia_load_bytes(opcode), matrix)

    @staticmethod
    def of_amd(text: str) -> _Line:
        label = re.match(r"(\.LBB\d+_\d+):", text)
        if label is not None:
            return _Line(label=label.group(1))
        found = re.match(r"\s+([a-z][a-z0-9_]+)\s*(.*)", text)
        if found is None:
            return _Line()
        opcode, rest = found.groups()
        target = re.search(r"(\.LBB\d+_\d+)", rest) if opcode.startswith(("s_cbranch", "s_branch")) else None
        width = re.match(r"(?:global|buffer|flat)_load_(?:dword(x\d)?|u?byte|u?short|b\d+)", opcode)
        size = 0 if width is None else 4 * int((width.group(1) or "x1")[1:])
        return _Line("", opcode, "" if target is None else target.group(1), size, opcode.startswith("v_mfma"))


def _nvidia_load_bytes(opcode: str) -> int:
    """Bytes one thread loads from global memory with this instruction; 0 for anything else."""
    parts = opcode.split(".")
    if parts[0] not in ("LDG", "LDGSTS"):
        return 0
    sizes = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
    return next((sizes[part] for part in parts if part in sizes), 4)


def _summed(lines: list[_Line], threads: int, registers: int, spills: int, scalar_spills: int, local: int, shared: int) -> Facts:
    loop = _matrix_loop(lines)
    wide = [line.load_bytes for line in loop if line.load_bytes >= 8]
    return Facts(
        registers=registers,
        spills=spills,
        scalar_spills=scalar_spills,
        local_bytes=local,
        shared_bytes=shared,
        widest_load_bytes=max((line.load_bytes for line in lines), default=0),
        matrix_instructions=sum(line.matrix for line in lines),
        loop_load_bytes=sum(wide) * threads,
        loop_widest_load_bytes=max(wide, default=0),
        loop_exponentials=sum(line.opcode.startswith(("MUFU.EX2", "v_exp_f32")) for line in loop),
    )


def _matrix_loop(lines: list[_Line]) -> list[_Line]:
    """The innermost loop with the most matrix instructions, else with the most loads: a label up to a branch back to it."""
    where = {line.label: at for at, line in enumerate(lines) if line.label}
    loops = [lines[where[line.target] : at] for at, line in enumerate(lines) if line.target in where and where[line.target] < at]
    return max(loops, key=lambda body: (sum(x.matrix for x in body), sum(x.load_bytes for x in body), -len(body)), default=[])
