"""What a decode step computes between one attention and the next, as one call: everything but the attention itself.

output projection, norm with residual, gate and up, activation, down, norm with residual, q k v, rotation. Its numbers are those of the ops
called one by one: it runs the same kernels. It does not know what attends, or which sequence a row belongs to.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

import torch

from kernels.chained import ChainModel, Rotation
from kernels.cpu import layers, native_linear, native_rows, team
from kernels.cpu.emit import BLOCK
from kernels.cpu.linear import OUT, SCRATCH, SCRATCH_BYTES, X
from kernels.cpu.native import float_bits
from kernels.cpu.program import Program

LINEAR_COUNTERS, LAYERS_COUNTERS = 2, 1  # leading words that count tasks and threads


def can_chain(model: ChainModel) -> bool:
    """Whether every op of such a step is compiled: bfloat16, matrices that the compiled product takes, torch's threads."""
    if team.fork_address() is None:
        return False
    matrices = [matrix for layer in model.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [model.head]
    norms = [norm for layer in model.layers for norm in (layer.input_norm, layer.mlp_norm)] + [model.final_norm]
    fit = all(m.dtype == torch.bfloat16 and m.shape[1] % BLOCK == 0 and m.stride(1) == 1 for m in matrices)
    return fit and all(norm.dtype == torch.float32 and norm.is_contiguous() for norm in norms)


class Chain:
    """The parts of a decode step of `tokens` rows: `first`, then `between` any two layers' attentions, then `last`.

    The working rows belong to the chain, so that nothing is allocated: one step at a time.
    """

    def __init__(self, model: ChainModel, tokens: int) -> None:
        self._model, self._tokens = model, tokens
        self._heads = model.query_heads + 2 * model.kv_heads
        layer = model.layers[0]
        hidden, inner = layer.output.shape[0], layer.down.shape[1]
        new = {"dtype": torch.bfloat16}
        self.rows = torch.empty(tokens, hidden, **new)  # the embedded tokens go here; later the residual
        self._normed, self._moved = torch.empty(tokens, hidden, **new), torch.empty(tokens, hidden, **new)
        self._gate_up, self._gated = torch.empty(tokens, 2 * inner, **new), torch.empty(tokens, inner, **new)
        self._qkv = torch.empty(tokens, self._heads, model.head_dim, **new)  # stand-ins: each call gets its own
        self._turned = self._qkv[:, : model.query_heads + model.kv_heads].contiguous()
        self.run: Callable[[Program], None] = Program.run
        self._scratch: list[torch.Tensor] = []
        self._lanes = 0
        self._programs: list[Program] = []  # first, between, ..., last
        self._ends: list[tuple[array | None, array | None, array | None]] = []  # of each: the words that read o, write q k v, rotate

    def first(self, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D] of the first layer, from `rows`."""
        return self._to_attention(0, None, rotation)

    def between(self, layer: int, o: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of `layer`, from what the layer before it attended, o [T, Hq, D]."""
        return self._to_attention(layer, o, rotation)

    def last(self, o: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] in the working dtype, from what the last layer attended."""
        program, (reads, writes, _) = self._program(len(self._model.layers))
        o = o.contiguous()
        logits = torch.empty(self._tokens, self._model.head.shape[0], dtype=torch.bfloat16)
        reads[X], writes[OUT] = o.data_ptr(), logits.data_ptr()
        self.run(program)
        return logits

    def calls(self) -> Counter[str]:
        """Ops that one step's chain runs."""
        count = len(self._model.layers)
        return Counter(linear=4 * count + 1, rms_norm=2 * count + 1, gated=count, rope=count)

    def _to_attention(self, layer: int, o: torch.Tensor | None, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cos, sin = rotation
        self._lanes = cos.shape[1]
        program, (reads, writes, rotates) = self._program(layer)
        qkv, turned = torch.empty_like(self._qkv), torch.empty_like(self._turned)
        if reads is not None:
            o = o.contiguous()
            reads[X] = o.data_ptr()
        writes[OUT] = rotates[layers.X] = qkv.data_ptr()
        rotates[layers.OUT], rotates[layers.A], rotates[layers.B] = turned.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self.run(program)
        heads = self._model.query_heads
        return turned[:, :heads], turned[:, heads:], qkv[:, turned.shape[1] :]

    def _program(self, layer: int) -> tuple[Program, tuple[array | None, array | None, array | None]]:
        while len(self._programs) <= layer:
            self._build(len(self._programs))
        return self._programs[layer], self._ends[layer]

    def _build(self, layer: int) -> None:
        """What runs before the attention of `layer`; behind the last one, what makes the logits."""
        model, program, reads, rotates = self._model, Program(), None, None
        count = len(model.layers)
        norm = model.layers[layer].input_norm if layer < count else model.final_norm
        if layer == 0:
            self._norm(program, self.rows, norm, residual=False)
        else:
            before = model.layers[layer - 1]
            o = torch.empty(self._tokens, before.output.shape[1], dtype=torch.bfloat16)
            reads = self._linear(program, o, before.output, before.output_bias, self._moved)
            self._norm(program, self._moved, before.mlp_norm, residual=True)
            self._linear(program, self._normed, before.gate_up, before.gate_up_bias, self._gate_up)
            self._activate(program)
            self._linear(program, self._gated, before.down, before.down_bias, self._moved)
            self._norm(program, self._moved, norm, residual=True)
        if layer < count:
            writes = self._linear(program, self._normed, model.layers[layer].qkv, model.layers[layer].qkv_bias, self._qkv.flatten(1))
            rotates = self._rotate(program)
        else:
            writes = self._linear(
                program, self._normed, model.head, None, torch.empty(self._tokens, model.head.shape[0], dtype=torch.bfloat16)
            )
        self._programs.append(program)
        self._ends.append((reads, writes, rotates))

    def _linear(self, program: Program, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> array:
        address, words, threads = native_linear.call(x, weight, bias, out)
        if words[SCRATCH_BYTES]:  # its own: what is lent between calls may move
            self._scratch.append(torch.empty(words[SCRATCH_BYTES] * threads + 64, dtype=torch.uint8))
            words[SCRATCH] = -(-self._scratch[-1].data_ptr() // 64) * 64
        return program.add("linear", address, words, threads, LINEAR_COUNTERS)

    def _norm(self, program: Program, x: torch.Tensor, weight: torch.Tensor, residual: bool) -> None:
        size, rows = x.shape[1], self.rows.data_ptr()
        at = (rows, size * x.element_size(), 0) if residual else (0, 0, 0)
        extra = (*at, weight.data_ptr(), rows if residual else 0, float_bits(self._model.eps))
        op = layers.NORM_ADD if residual else layers.NORM
        self._add("rms_norm", program, native_rows.call(op, x, self._tokens, 1, size, 0, self._normed, size, extra))

    def _activate(self, program: Program) -> None:
        size = self._gated.shape[1]
        op = native_rows.OPS[self._model.activation]
        self._add("gated", program, native_rows.call(op, self._gate_up, self._tokens, 1, 2 * size, 0, self._gated, size, (0,) * 6))

    def _rotate(self, program: Program) -> array:
        """q and k from qkv."""
        heads, dim = self._model.query_heads + self._model.kv_heads, self._model.head_dim
        extra = (0, 4 * self._lanes, 0, 0, self._lanes, 0)
        found = native_rows.call(layers.ROPE, self._qkv, self._tokens * heads, heads, self._heads * dim, dim, self._turned, dim, extra)
        return self._add("rope", program, found)

    @staticmethod
    def _add(name: str, program: Program, call: tuple[int, array, int]) -> array:
        return program.add(name, *call, LAYERS_COUNTERS)
