"""The one decoder: packed token ids, a plan and a cache in; logits out. What it computes is read from the architecture's facts.

It does not know which strategy holds K and V, whether a step is a prefill or a decode, or how a token is chosen.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from harness.model.architecture import Architecture
from harness.model.rope import RopeTable
from harness.model.weights import LayerWeights, Weights
from kernels.api import Ops
from kernels.chained import Chain, ChainModel, Rotation
from strategies.base import KVCache, Plan


class Decoder:
    """A decoder-only transformer (pre-norm, rotary, gated MLP) over any `KVCache`."""

    compiled = False  # whether torch.compile made any of it

    def __init__(self, architecture: Architecture, weights: Weights, ops: Ops) -> None:
        self.architecture = architecture
        self.weights = weights
        self.ops = ops
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        ropes = list(dict.fromkeys(layer.rope for layer in architecture.layers))
        self._tables = [RopeTable(rope, architecture.context, str(self.device)) for rope in ropes]
        self._table_of = [ropes.index(layer.rope) for layer in architecture.layers]
        scale = architecture.embedding_scale
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=self.dtype, device=self.device)
        self._chains: dict[tuple[int, int], Chain | None] = {}  # by rows of a step and threads

    def settle(self) -> None:
        """Make the tables of every position of the context now: later steps may be replayed, and must find them where they are."""
        for table in self._tables:
            table.rows(torch.zeros(1, dtype=torch.int64, device=self.device), self.architecture.context)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, plan: Plan, cache: KVCache, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] of packed `rows` [R] int64 (None: the last row of each span), float32, or float64 in a float64 model.

        ids [T] int64 are the tokens of `plan`, in its order. Stores K and V of every token through `cache.attend`.
        """
        stop = min(plan.batch.longest, self.architecture.context)
        rotations = [table.rows(plan.positions, stop) for table in self._tables]
        chain = (
            self._chain(plan.batch.tokens) if rows is None and plan.batch.tokens == len(plan.spans) and cache.keys == "rotated" else None
        )
        if chain is not None:
            return self._by_chain(chain, ids, rotations, plan, cache)
        x = embedding(ids, self.weights.embedding)  # [T, E]
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        residual = None
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            x, residual = self._attention(index, layer, x, residual, rotations[self._table_of[index]], plan, cache)
            if index == last:  # only these rows' logits were asked for: the rest of the model need not see the others
                x, residual = self._wanted(x, residual, plan, rows)
            x, residual = self._mlp(layer, x, residual)
        x, _ = self.ops.rms_norm(x, self.weights.final_norm, self.architecture.norm_eps, residual)
        return self._logits(x)

    def _chain(self, tokens: int) -> Chain | None:
        """What runs all that lies between two attentions of a decode step as one call, where the backend and these layers allow it."""
        key = tokens, torch.get_num_threads()
        if key not in self._chains:
            a = self.architecture
            model = ChainModel(
                *(self.weights.layers, self.weights.final_norm, self.weights.head),
                *(a.norm_eps, a.activation, a.query_heads, a.kv_heads, a.head_dim),
            )
            self._chains[key] = None if a.qk_norm or a.post_norms else self.ops.chained(model, tokens)
        return self._chains[key]

    def _by_chain(self, chain: Chain, ids: torch.Tensor, rotations: list[Rotation], plan: Plan, cache: KVCache) -> torch.Tensor:
        """The same as op by op, in the same kernels."""
        torch.index_select(self.weights.embedding, 0, ids, out=chain.rows)
        if self._embedding_scale is not None:
            chain.rows.mul_(self._embedding_scale)
        q, k, v = chain.first(rotations[self._table_of[0]])
        for index in range(1, len(self._table_of)):
            q, k, v = chain.between(index, cache.attend(index - 1, q, k, v, plan), rotations[self._table_of[index]])
        logits = chain.last(cache.attend(len(self._table_of) - 1, q, k, v, plan))
        self.ops.calls.update(chain.calls())
        return self._capped(logits)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        plan: Plan,
        cache: KVCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, residual = self._project(layer, x, residual, rotation, cache.keys == "rotated")
        o = cache.attend(index, q, k, v, plan)  # [T, Hq, D]
        return o.flatten(1), residual

    def _project(
        self, layer: LayerWeights, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, rotate_keys: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k and v [T, Hkv, D] of one layer, and the residual stream [T, E]."""
        a, ops = self.architecture, self.ops
        x, residual = ops.rms_norm(x, layer.input_norm, a.norm_eps, residual)
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, a.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k = self._rotated(layer, qkv, rotation, rotate_keys)
        return q, k, qkv[:, a.query_heads + a.kv_heads :], residual

    def _rotated(self, layer: LayerWeights, qkv: torch.Tensor, rotation: Rotation, rotate_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, Hq, D] and k [T, Hkv, D], normed where the architecture says so; keys are rotated only for caches that want them so."""
        a, ops, (cos, sin) = self.architecture, self.ops, rotation
        if layer.q_norm is None and rotate_keys:
            both = ops.rope(qkv[:, : a.query_heads + a.kv_heads], cos, sin)
            return both[:, : a.query_heads], both[:, a.query_heads :]
        q, k = qkv[:, : a.query_heads], qkv[:, a.query_heads : a.query_heads + a.kv_heads]
        if layer.q_norm is not None:
            q, _ = ops.rms_norm(q, layer.q_norm, a.norm_eps, None)
            k, _ = ops.rms_norm(k, layer.k_norm, a.norm_eps, None)
        return ops.rope(q, cos, sin), ops.rope(k, cos, sin) if rotate_keys else k

    def _wanted(self, o: torch.Tensor, residual: torch.Tensor, plan: Plan, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if rows is None and plan.batch.tokens == len(plan.batch.spans):
            return o, residual
        rows = plan.logit_rows if rows is None else rows
        return o.index_select(0, rows), residual.index_select(0, rows)

    def _mlp(self, layer: LayerWeights, o: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, ops = self.architecture, self.ops
        x = ops.linear(o, layer.output, layer.output_bias)
        if layer.post_attention_norm is not None:
            x, _ = ops.rms_norm(x, layer.post_attention_norm, a.norm_eps, None)
        x, residual = ops.rms_norm(x, layer.mlp_norm, a.norm_eps, residual)
        x = ops.gated(ops.linear(x, layer.gate_up, layer.gate_up_bias), a.activation)  # [T, F]
        x = ops.linear(x, layer.down, layer.down_bias)
        if layer.post_mlp_norm is not None:
            x, _ = ops.rms_norm(x, layer.post_mlp_norm, a.norm_eps, None)
        return x, residual

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._capped(self.ops.linear(x, self.weights.head, None))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.dtype == torch.float64 else logits.float()
        cap = self.architecture.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
