"""Are the bytes what the formula says, and did the kernels that were asked for really run? Two short passes, neither of them timed.

It does not know records or what is printed. First pass: sequences that share nothing, all live at once, whose bytes must equal
the bill to the byte. Second pass: the workload itself, for peaks and for what ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.engine.events import EventLog
from harness.measure.allocation import TensorBytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engine.request import Request
    from harness.sides import Contender
    from strategies.base import KVCache

SEQUENCES = 3
LONGEST = 200  # tokens of one of them
HOMES = {"reference": "kernels.reference", "cpu": "kernels.cpu", "triton": "kernels.gpu"}


@dataclass(frozen=True)
class Audit:
    """Bytes: billed by the formula, said to be reserved by the cache, and really stored in its tensors, for the same sequences;
    then the peaks over one pass of the workload with no budget. `transient_peak_bytes`: the most that tensors held beyond the cache.

    ran: {op: {calls, source}} of the pass; attends: how many the decoder's layers and steps make.
    """

    lengths: tuple[int, ...]
    billed_bytes: int
    reserved_bytes: int
    stored_bytes: int
    reserved_peak_bytes: int
    in_use_peak_bytes: int
    live_peak_bytes: int
    transient_peak_bytes: int
    attends: int
    ran: dict[str, dict[str, Any]]
    dtype_bytes: dict[str, int]  # stored, by dtype
    problem: str | None  # one sentence

    def as_dict(self) -> dict[str, Any]:
        """The form a record stores."""
        found = asdict(self)
        del found["problem"]
        return found


def audit(
    side: Contender, requests: Sequence[Request], step_tokens: int, tokens: Sequence[int], served: Callable[[Any], EventLog]
) -> Audit:
    """Both passes. served(cache): one pass of the workload on this cache."""
    longest = min(LONGEST, max(request.stored_tokens for request in requests))
    lengths = tuple(max(1, longest - 7 * number) for number in range(SEQUENCES))  # uneven, so that pages end at different places
    billed, reserved, stored, by_dtype = _billed(side, lengths, min(step_tokens, max(lengths)), tokens)
    before = Counter(side.ops.calls)
    cache = side.unbounded_cache()
    with TensorBytes() as seen:
        log = served(cache)
    ran = {op: {"calls": calls, "source": side.ops.source(op)} for op, calls in sorted((side.ops.calls - before).items())}
    peaks = {name: max((getattr(step, f"kv_{name}_bytes") for step in log.steps), default=0) for name in ("reserved", "in_use", "live")}
    found = Audit(
        *(lengths, billed, reserved, stored, peaks["reserved"], peaks["in_use"], peaks["live"]),
        transient_peak_bytes=max(0, seen.peak_bytes - _bytes(cache)),
        attends=len(log.steps) * len(side.model.geometry.layers),
        ran=ran,
        dtype_bytes=by_dtype,
        problem=None,
    )
    return Audit(**{**found.__dict__, "problem": _problem(found, side.ops.name, cache)})


def _billed(side: Contender, lengths: tuple[int, ...], chunk: int, tokens: Sequence[int]) -> tuple[int, int, int, dict[str, int]]:
    """(billed, reserved, stored bytes, stored bytes by dtype) with sequences of these lengths all live, fed `chunk` tokens a step each."""
    cache = side.unbounded_cache()
    billed = cache.bytes_for(lengths, chunk)
    sids = [cache.open(expect=length) for length in lengths]
    with torch.no_grad():
        for first in range(0, max(lengths), chunk):
            stops = {sid: min(first + chunk, length) for sid, length in zip(sids, lengths, strict=True) if first < length}
            plan = cache.plan(stops)
            # Each sequence reads the text from a place of its own, so that none of them can share rows with another.
            ids = [tokens[(at + 1 + 31 * sids.index(sid)) % len(tokens)] for sid, start, stop in plan.spans for at in range(start, stop)]
            side.decoder(torch.tensor(ids, device=plan.positions.device), plan, cache)
            cache.commit(plan, ids)
    by_dtype: Counter[str] = Counter()
    for tensor in cache.tensors():
        by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return billed, cache.stats().reserved_bytes, _bytes(cache), dict(sorted(by_dtype.items()))


def _problem(found: Audit, backend: str, cache: KVCache) -> str | None:
    if found.billed_bytes != found.stored_bytes:
        return f"the byte formula bills {found.billed_bytes} bytes and the cache holds {found.stored_bytes}"
    if found.reserved_bytes != found.stored_bytes:
        return f"the cache says that it reserved {found.reserved_bytes} bytes and holds {found.stored_bytes}"
    if not found.live_peak_bytes <= found.in_use_peak_bytes <= found.reserved_peak_bytes:
        return (
            f"bytes live ({found.live_peak_bytes}), in use ({found.in_use_peak_bytes}) and reserved ({found.reserved_peak_bytes}) "
            "cannot be right: each is part of the next"
        )
    attends = {op: facts for op, facts in found.ran.items() if op.startswith("attend")}
    counted = sum(facts["calls"] for facts in attends.values())
    if counted != found.attends:
        return (
            f"{found.attends} attends were due and {counted} ran as kernels: something else answered in their place "
            "(a storage with an attention of its own counts it in ops.calls)"
        )
    strays = [op for op, facts in attends.items() if facts["source"] is not None and not facts["source"].startswith(HOMES[backend])]
    if strays:
        return f"{strays[0]} of backend {backend!r} ran in {found.ran[strays[0]]['source']}: a silent fallback"
    return _wide_rows(found, cache)


def _wide_rows(found: Audit, cache: KVCache) -> str | None:
    """A cache of codes of at most 8 bits keeps most of its bytes in one-byte elements; a raw one keeps all of them in the working dtype.

    Wider codes (a 12-bit codec of somebody's own) may lie in elements of any width: only the bill speaks about those.
    """
    total = found.stored_bytes
    raw = [codec.name == "raw" for codec in (cache.codec_k, cache.codec_v)]
    working = str(cache.dtype).removeprefix("torch.")
    if all(raw) and found.dtype_bytes.get(working, 0) != total:
        return f"rows are to be stored as {working}, and these dtypes hold them: {', '.join(found.dtype_bytes)}"
    bits = [getattr(codec, "code_bits", None) for codec in (cache.codec_k, cache.codec_v)]
    if not any(raw) and total and all(width is not None and width <= 8 for width in bits):
        narrow = sum(size for dtype, size in found.dtype_bytes.items() if torch.empty(0, dtype=getattr(torch, dtype)).element_size() == 1)
        if 2 * narrow <= total:
            return f"rows are to be stored as {cache.codec_k.name} codes, and these dtypes hold them: {', '.join(found.dtype_bytes)}"
    return None


def _bytes(cache: KVCache) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors())
