"""Compiled kernels run one after another from one call, so that nothing of Python lies between them. It does not know what they do.

Each entry counts the time stamps that it took, so that a profile can say what a call was made of. It needs a pool of threads that
compiled code can call (`team.fork_address`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu import team
from kernels.cpu.compiled import kernel
from kernels.cpu.emit import I8, I32, I64
from kernels.cpu.scalars import store_i64, word

COUNT, FORK, ENTRIES = 0, 1, 2
KERNEL, ARGS, THREADS, COUNTERS, TICKS = range(5)  # COUNTERS: leading words of ARGS to set to zero first
ENTRY_WORDS = 5

_int, _nothing = types.int64, types.void


@intrinsic
def call_kernel(typingctx, address, args):
    """The kernel at `address` on this thread."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return _nothing(_int, _int), codegen


@intrinsic
def fork_kernel(typingctx, fork, address, args, threads):
    """The kernel at `address` on `threads` threads of the pool behind `fork` (GOMP_parallel)."""

    def codegen(context, builder, signature, args):
        fork, address, call, threads = args
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, I32, I32])
        given = [builder.inttoptr(address, pointer), builder.inttoptr(call, pointer), builder.trunc(threads, I32), I32(0)]
        builder.call(builder.inttoptr(fork, kind.as_pointer()), given)
        return context.get_dummy_value()

    return _nothing(_int, _int, _int, _int), codegen


@intrinsic
def ticks(typingctx):
    """The processor's time stamp."""

    def codegen(context, builder, signature, args):
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), "llvm.readcyclecounter"), [])

    return _int(), codegen


@cache
def _runner():
    @kernel
    def program(args):
        began = ticks()
        for number in range(word(args, COUNT)):
            entry = args + 8 * (ENTRIES + ENTRY_WORDS * number)
            call = word(entry, ARGS)
            for counter in range(word(entry, COUNTERS)):
                store_i64(call + 8 * counter, 0)
            if word(entry, THREADS) == 1:
                call_kernel(word(entry, KERNEL), call)
            else:
                fork_kernel(word(args, FORK), word(entry, KERNEL), call, word(entry, THREADS))
            ended = ticks()
            store_i64(entry + 8 * TICKS, word(entry, TICKS) + ended - began)
            began = ended

    return program


class Program:
    """Kernels in order. The words of each entry stay its owner's to change between runs."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._entries: list[tuple[int, array, int, int]] = []
        self._words = array("q")

    def add(self, name: str, address: int, words: array, threads: int, counters: int) -> array:
        """One more kernel; `counters` leading words are set to zero before it runs. Gives back `words`."""
        self.names.append(name)
        self._entries.append((address, words, threads, counters))
        flat = [value for kernel, args, team_size, zeros in self._entries for value in (kernel, args.buffer_info()[0], team_size, zeros, 0)]
        self._words = array("q", (len(self._entries), team.fork_address(), *flat))
        return words

    def run(self) -> None:
        """All of them, on torch's own threads."""
        team.run(_runner().address, self._words.buffer_info()[0], 1)

    def ticks(self) -> Counter[str]:
        """Time stamps since the last time this was asked, by name."""
        found: Counter[str] = Counter()
        for number, name in enumerate(self.names):
            at = ENTRIES + ENTRY_WORDS * number + TICKS
            found[name] += self._words[at]
            self._words[at] = 0
        return found
