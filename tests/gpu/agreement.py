"""Every listed form of every kernel on the device, against NumPy in float64 and the reference's own codes. One line per form.

It does not time anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.api import Ops
from kernels.backend import BackendUnavailable
from kernels.gpu.specialisations import DECODE_ROWS, LISTED, PREFILL_ROWS, Attend, Rows
from kernels.rows import Mask
from tests.kernels.cases import Case
from tests.kernels.gpu import checks


def agreements(ops: Ops, quick: bool) -> list[dict]:
    """[{check, status, message}] of each check; `quick` keeps one form of each kind."""
    return [outcome(name, check) for name, check in every_check(ops, quick)]


def outcome(name: str, check: Callable[[], None]) -> dict:
    """ok, refused (the backend says so by name) or wrong, with what was said."""
    try:
        check()
    except BackendUnavailable as refusal:
        return {"check": name, "status": "refused", "message": str(refusal)}
    except Exception as fault:
        return {"check": name, "status": "wrong", "message": f"{type(fault).__name__}: {fault}"}
    return {"check": name, "status": "ok", "message": ""}


def every_check(ops: Ops, quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    attends = sorted((spec for spec in LISTED if isinstance(spec, Attend) and spec.layout != "packed"), key=lambda spec: spec.name)
    for spec in attends[:: len(attends) // 3] if quick else attends:
        yield spec.name, lambda spec=spec: checks.attends_as_closely_as_the_reference(ops, case_of(spec))
    for splits in (2, 7):
        case = Case(dtype=torch.bfloat16, head_dim=64, spans=((90, 91), (0, 1)), query_heads=2, kv_heads=1)
        yield f"attend split {splits} ways", lambda case=case, splits=splits: checks.attends_as_closely_as_the_reference(ops, case, splits)
    poisoned = Case(
        dtype=torch.bfloat16, codec_k="int8", codec_v="int8", head_dim=64, page_size=8, spans=((20, 21),), kv_heads=1, query_heads=2
    )
    yield "memory of others", lambda: checks.ignores_rows_it_does_not_own(ops, poisoned)
    rows = sorted((spec for spec in LISTED if isinstance(spec, Rows) and spec.op == "write"), key=lambda spec: spec.name)
    for spec in rows[:: len(rows) // 3] if quick else rows:
        dtype = getattr(torch, spec.dtype)
        written = checks.hard_rows(spec.codec, dtype, spec.head_dim)
        yield spec.name, lambda spec=spec, dtype=dtype, x=written: checks.writes_the_reference_codes(ops, spec.codec, dtype, x)
    for page_size in (1, 16):
        yield f"copy_pages of {page_size}", lambda page_size=page_size: checks.copies_pages(ops, page_size, "q4_0")
    yield "rope", lambda: checks.rotates(ops, torch.bfloat16, 64, 32)
    for residual in (False, True):
        yield f"rms_norm residual={residual}", lambda residual=residual: checks.normalises(ops, torch.bfloat16, 1024, residual)
    for activation in ("silu", "gelu_tanh"):
        yield f"gated {activation}", lambda activation=activation: checks.gates(ops, torch.bfloat16, activation)


def case_of(spec: Attend) -> Case:
    """A step that asks for exactly this form: its tile height follows from the query heads and the mean span."""
    spans = {DECODE_ROWS: ((36, 37), (4, 5)), PREFILL_ROWS: ((0, 40), (130, 150))}.get(spec.rows, ((36, 37), (4, 5)))
    heads = (2, 1) if spec.rows in (DECODE_ROWS, PREFILL_ROWS) else (71, 1)
    return Case(
        dtype=getattr(torch, spec.dtype),
        codec_k=spec.codec_k,
        codec_v=spec.codec_v,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_dim=spec.head_dim,
        spans=spans,
        mask=Mask(window=20, sinks=2) if spec.windowed else Mask(),
        softcap=30.0 if spec.softcapped else None,
        page_size=16 if spec.layout == "paged" else None,
    )
