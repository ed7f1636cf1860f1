"""A decode step's work between attentions as one call: bit for bit what the ops say one by one, whatever the threads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

import kernels.cpu
import kernels.reference
from kernels.api import Ops
from kernels.chained import ChainModel

pytestmark = pytest.mark.skipif(not kernels.cpu.COMPILED, reason="needs the compiled kernels")
HIDDEN, INNER, QUERY_HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 96, 160, 4, 2, 32, 301, 3


@dataclass(frozen=True, eq=False)
class Layer:
    """Random weights of one layer."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def random_model(biased: bool = False, activation: str = "silu") -> ChainModel:
    seed = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=seed) / 8).bfloat16()

    def norm() -> torch.Tensor:
        return 1 + torch.randn(HIDDEN, generator=seed) / 4

    def layer() -> Layer:
        shapes = (((QUERY_HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, QUERY_HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        (qkv, a), (output, b), (gate_up, c), (down, d) = ((matrix(*shape), matrix(shape[0]) if biased else None) for shape in shapes)
        return Layer(norm(), qkv, a, output, b, norm(), gate_up, c, down, d)

    layers = [layer() for _ in range(LAYERS)]
    return ChainModel(layers, norm(), matrix(VOCAB, HIDDEN), 1e-5, activation, QUERY_HEADS, KV_HEADS, DIM)


def one_by_one(ops: Ops, m: ChainModel, x: torch.Tensor, attended: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor):
    """(q, k, v) of every layer, and the logits, through the separate ops."""
    residual, found = None, []
    for layer, o in zip(m.layers, attended, strict=True):
        x, residual = ops.rms_norm(x, layer.input_norm, m.eps, residual)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, DIM)
        turned = ops.rope(qkv[:, : QUERY_HEADS + KV_HEADS], cos, sin)
        found.append((turned[:, :QUERY_HEADS], turned[:, QUERY_HEADS:], qkv[:, QUERY_HEADS + KV_HEADS :]))
        x = ops.linear(o.flatten(1), layer.output, layer.output_bias)
        x, residual = ops.rms_norm(x, layer.mlp_norm, m.eps, residual)
        x = ops.linear(ops.gated(ops.linear(x, layer.gate_up, layer.gate_up_bias), m.activation), layer.down, layer.down_bias)
    x, _ = ops.rms_norm(x, m.final_norm, m.eps, residual)
    return found, ops.linear(x, m.head, None)


def inputs(tokens: int):
    seed = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=seed).bfloat16()
    attended = [torch.randn(tokens, QUERY_HEADS, DIM, generator=seed).bfloat16() for _ in range(LAYERS)]
    angles = torch.rand(tokens, DIM // 2, generator=seed)
    return x, attended, angles.cos(), angles.sin()


def run(chain, x, attended, cos, sin):
    chain.rows.copy_(x)
    found = [chain.first((cos, sin))]
    found += [chain.between(layer, attended[layer - 1], (cos, sin)) for layer in range(1, LAYERS)]
    return found, chain.last(attended[-1])


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("biased", "activation"), [(False, "silu"), (True, "gelu_tanh")])
def test_a_chain_is_its_ops_bit_for_bit(tokens: int, biased: bool, activation: str) -> None:
    ops, model, given = Ops("cpu", kernels.cpu), random_model(biased, activation), inputs(tokens)
    wanted, wanted_logits = one_by_one(ops, model, *given)
    chain = ops.chained(model, tokens)
    for _ in range(2):  # the second time over its own used rows
        found, logits = run(chain, *given)
        assert all(torch.equal(a, b) for got, want in zip(found, wanted, strict=True) for a, b in zip(got, want, strict=True))
        assert torch.equal(logits, wanted_logits)


def test_a_chain_says_which_ops_it_ran_and_how_long_each_took() -> None:
    ops, model, given = Ops("cpu", kernels.cpu), random_model(), inputs(2)
    one_by_one(ops, model, *given)
    chain, programs = ops.chained(model, 2), []
    chain.run = lambda program: (program.run(), programs.append(program))
    run(chain, *given)
    assert chain.calls() == ops.calls == sum((Counter(program.names) for program in programs), Counter())
    for program in programs:
        took = program.ticks()
        assert set(took) == set(program.names)
        assert all(stamps > 0 for stamps in took.values())
        assert not any(program.ticks().values())  # asked for once, they start anew


def test_threads_that_are_not_torchs_run_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu import team

    monkeypatch.setattr(team, "fork_address", lambda: None)
    assert Ops("cpu", kernels.cpu).chained(random_model(), 1) is None


def test_what_cannot_be_chained_is_not() -> None:
    ops, model = Ops("cpu", kernels.cpu), random_model()
    assert ops.chained(model, 1) is not None
    assert ops.chained(model, 1000) is None  # the product for few rows does not serve so many
    assert ops.chained(replace(model, head=model.head.float()), 1) is None
    assert ops.chained(replace(model, final_norm=model.final_norm.bfloat16()), 1) is None
    assert Ops("reference", kernels.reference).chained(model, 1) is None
