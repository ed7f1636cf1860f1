"""Every op in plain torch: the specification that the other backends are held to. Slow on purpose, never mutates its inputs.

Stores change under `write_rows`, `copy_pages` and `move_rows`, which is what those are for. Other backends may reuse the
layout (`new_rows`) and nothing else of this file.
"""

from __future__ import annotations

import torch

from kernels.codec import Codec
from kernels.rows import Batch, DenseRows, Mask, PagedRows, RowStore

FP8_MAX = 448.0
SCALE_DTYPES = {4: torch.float32, 2: torch.float16}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic on `dtype` rows runs in: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def code_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """The element type of the code tensor for rows of working dtype `dtype`."""
    return {"raw": dtype, "int8": torch.int8, "q8_0": torch.int8, "q4_0": torch.uint8, "fp8": torch.float8_e4m3fn}[codec.name]


def new_rows(
    codec: Codec, count: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str, page_size: int | None
) -> RowStore:
    codes = torch.empty(count, heads, codec.codes_per_row(head_dim), dtype=code_dtype(codec, dtype), device=device)
    scales = None
    if codec.scale_bytes:
        scales = torch.empty(count, heads, codec.scales_per_row(head_dim), dtype=SCALE_DTYPES[codec.scale_bytes], device=device)
    return RowStore(codec, heads, head_dim, dtype, page_size, codes, scales)


def encode(codec: Codec, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """rows [..., D] -> codes [..., codes_per_row], scales [..., scales_per_row] or None, as `kernels/codec.py` defines them."""
    x = rows.to(compute_dtype(rows.dtype))
    if codec.name == "raw":
        return rows.clone(), None
    if codec.name == "fp8":
        return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float32).to(torch.float8_e4m3fn), None
    grouped = _grouped(x, codec)  # [..., S, G], short last group padded with zeros: zeros change neither amax nor the codes kept
    if codec.name == "q4_0":
        at = grouped.abs().argmax(-1, keepdim=True)
        scale = grouped.gather(-1, at) / -8.0
    else:
        scale = grouped.abs().amax(-1, keepdim=True) / 127.0
    stored = _to_scale(scale, codec)
    step = stored.to(x.dtype)
    codes = torch.where(step == 0, 0.0, torch.round(grouped / torch.where(step == 0, 1.0, step)))
    codes = codes.flatten(-2)[..., : rows.shape[-1]]
    if codec.name == "q4_0":
        return _pack_nibbles((codes + 8).clamp(0, 15)), stored.squeeze(-1)
    return codes.clamp(-127, 127).to(torch.int8), stored.squeeze(-1)


def decode(codec: Codec, codes: torch.Tensor, scales: torch.Tensor | None, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The values that `codes` and `scales` stand for, [..., head_dim] in `dtype` (a compute dtype: no rounding is added)."""
    if codec.name in ("raw", "fp8"):
        return codes.to(dtype)
    if codec.name == "q4_0":
        values = _unpack_nibbles(codes)[..., :head_dim].to(dtype) - 8
    else:
        values = codes.to(dtype)
    group = codec.group if codec.group is not None else head_dim
    per_value = scales.to(dtype).repeat_interleave(group, dim=-1)[..., :head_dim]
    return values * per_value


def write_rows(store: RowStore, slots: torch.Tensor, rows: torch.Tensor) -> None:
    codes, scales = encode(store.codec, rows)
    store.codes[slots] = codes
    if scales is not None:
        store.scales[slots] = scales


def read_rows(store: RowStore, slots: torch.Tensor) -> torch.Tensor:
    return _decoded(store, slots).to(store.dtype)


def copy_pages(stores: list[RowStore], sources: torch.Tensor, targets: torch.Tensor) -> None:
    for store in stores:
        for tensor in (store.codes, store.scales):
            if tensor is not None:
                pages = tensor.view(-1, store.page_size, *tensor.shape[1:])
                pages[targets] = pages[sources]


def move_rows(stores: list[RowStore], source: int, target: int, count: int) -> None:
    for store in stores:
        for tensor in (store.codes, store.scales):
            if tensor is not None:
                tensor[target : target + count] = tensor[source : source + count].clone()


def attend_dense(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: DenseRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    return _attend_stored(q, keys, values, lambda b, positions: where.bases[b] + positions, batch, mask, scale, softcap)


def attend_paged(
    q: torch.Tensor, keys: RowStore, values: RowStore, where: PagedRows, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    def slots(b: int, positions: torch.Tensor) -> torch.Tensor:
        return where.pages[b].long()[positions // where.page_size] * where.page_size + positions % where.page_size

    return _attend_stored(q, keys, values, slots, batch, mask, scale, softcap)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, mask: Mask, scale: float, softcap: float | None
) -> torch.Tensor:
    out = torch.empty_like(q)
    for b, (_, stop) in enumerate(batch.spans):
        rows = slice(int(batch.cu_seqlens[b]), int(batch.cu_seqlens[b + 1]))
        positions = torch.arange(stop, device=q.device)
        out[rows] = attend_one(q[rows], k[rows], v[rows], positions, positions, mask, scale, softcap)
    return out


def attend_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    mask: Mask,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """One span: q [t, Hq, D] at query_positions [t] over k, v [n, Hkv, D] at key_positions [n] -> [t, Hq, D] in q's dtype."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))  # [n, Hq, D]: query head h reads KV head h // group
    scores = torch.einsum("thd,nhd->htn", q.to(dtype), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(query_positions, key_positions, mask)  # [t, n]
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return torch.einsum("htn,nhd->thd", weights, v).to(q.dtype)


def visible(query_positions: torch.Tensor, key_positions: torch.Tensor, mask: Mask) -> torch.Tensor:
    """[t, n] bool: which keys each query may see under `mask`."""
    i, j = query_positions[:, None], key_positions[None, :]
    seen = j <= i
    if mask.window is not None:
        seen = seen & ((i - j < mask.window) | (j < mask.sinks))
    return seen


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dtype, half = compute_dtype(x.dtype), cos.shape[1]
    cos, sin = cos.to(dtype)[:, None, :], sin.to(dtype)[:, None, :]
    first, second, rest = x[..., :half].to(dtype), x[..., half : 2 * half].to(dtype), x[..., 2 * half :]
    return torch.cat(((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if residual is None else x + residual
    wide = total.to(compute_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype), total


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return (act * up).to(gate_up.dtype)


def _attend_stored(q, keys, values, slots_of, batch, mask, scale, softcap):
    out = torch.empty_like(q)
    for b, (start, stop) in enumerate(batch.spans):
        rows = slice(int(batch.cu_seqlens[b]), int(batch.cu_seqlens[b + 1]))
        queries = torch.arange(start, stop, device=q.device)
        positions = _reachable(start, stop, mask, q.device)
        slots = slots_of(b, positions)
        out[rows] = attend_one(q[rows], _decoded(keys, slots), _decoded(values, slots), queries, positions, mask, scale, softcap)
    return out


def _reachable(start: int, stop: int, mask: Mask, device: torch.device) -> torch.Tensor:
    """Positions that at least one query of start..stop-1 may see: memory outside them is never read."""
    first = mask.first_visible(start)
    sinks = torch.arange(min(mask.sinks, first), device=device)
    return torch.cat((sinks, torch.arange(first, stop, device=device)))


def _decoded(store: RowStore, slots: torch.Tensor) -> torch.Tensor:
    scales = None if store.scales is None else store.scales[slots]
    return decode(store.codec, store.codes[slots], scales, store.head_dim, compute_dtype(store.dtype))


def _grouped(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    group = codec.group if codec.group is not None else x.shape[-1]
    short = -x.shape[-1] % group
    return torch.nn.functional.pad(x, (0, short)).unflatten(-1, (-1, group))


def _to_scale(scale: torch.Tensor, codec: Codec) -> torch.Tensor:
    dtype = SCALE_DTYPES[codec.scale_bytes]
    top = torch.finfo(dtype).max
    return scale.clamp(-top, top).to(torch.float32).to(dtype)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2)).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4)


def _unpack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
