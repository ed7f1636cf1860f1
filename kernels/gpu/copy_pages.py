"""Whole pages from one place to another as bytes, in every store at once. It knows addresses and byte counts, not what a page holds."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    bases,  # [tensors] int64, the address of each tensor
    words,  # [tensors] int64, words of one of its pages
    sources,  # [pairs] int64
    targets,  # [pairs] int64
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0)
    tensor = tl.program_id(1)
    base = tl.load(bases + tensor).to(tl.pointer_type(WORD))
    length = tl.load(words + tensor)
    source = base + tl.load(sources + pair).to(tl.int64) * length
    target = base + tl.load(targets + pair).to(tl.int64) * length
    for first in range(0, length, BLOCK):
        word = first + tl.arange(0, BLOCK)
        tl.store(target + word, tl.load(source + word, mask=word < length, other=0), mask=word < length)
