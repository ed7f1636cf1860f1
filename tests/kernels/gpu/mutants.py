"""The kernels broken on purpose: what is replaced, where, and the check that must notice. Data for the mutants' tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.api import Ops
from kernels.rows import Mask
from tests.kernels.cases import Case
from tests.kernels.gpu import checks

TINY = Case(dtype=torch.float32, head_dim=24, query_heads=2, kv_heads=1, spans=((20, 21), (0, 9)), page_size=3)


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in `file`, and `check` must notice."""

    name: str
    file: str
    old: str
    new: str
    check: Callable[[Ops], None]


def exact(splits: int = 1, **_changes) -> Callable[[Ops], None]:
    return lambda ops: checks.attends_exactly(ops, Case(**(vars(TINY) | _changes)), splits)


def poison(**_changes) -> Callable[[Ops], None]:
    return lambda ops: checks.ignores_rows_it_does_not_own(ops, Case(**(vars(TINY) | _changes)))


def codes(codec: str, head_dim: int = 40) -> Callable[[Ops], None]:
    return lambda ops: checks.writes_the_reference_codes(ops, codec, torch.float32, checks.hard_rows(codec, torch.float32, head_dim))


WINDOW = {"mask": Mask(window=4, sinks=2)}
MUTANTS = (
    Mutant("mask: a query sees the next key", "tiles.py", "seen = j <= i\n", "seen = j <= i + 1\n", exact()),
    Mutant("mask: the window is one key short", "tiles.py", "(i - j < window)", "(i - j < window - 1)", exact(**WINDOW)),
    Mutant("mask: sinks are forgotten", "tiles.py", " | (j < sinks)", "", exact(**WINDOW)),
    Mutant(
        "mask: the last tile is left out",
        "attend.py",
        "last_query // BLOCK_N + 1",
        "(last_query + BLOCK_N - 1) // BLOCK_N",
        exact(spans=((16, 17),)),
    ),
    Mutant(
        "mask: sink tiles are skipped",
        "attend.py",
        "(sinks + BLOCK_N - 1) // BLOCK_N",
        "sinks // BLOCK_N",
        exact(mask=Mask(4, 2), spans=((40, 41),)),
    ),
    Mutant("mask: rows past the span are loaded", "attend.py", "live = key <= last_query", "live = key >= 0", poison(page_size=8)),
    Mutant(
        "mask: a row that saw nothing is not anchored",
        "tiles.py",
        'new_top == float("-inf")',
        "new_top != new_top",
        exact(mask=Mask(4), spans=((31, 38),)),
    ),
    Mutant(
        "heads: dealt out in turn",
        "attend.py",
        "head * group + row % group",
        "head + row % group * tl.num_programs(1)",
        exact(query_heads=6, kv_heads=3),
    ),
    Mutant(
        "offset: pages multiplied in 32 bits",
        "attend.py",
        "page.to(tl.int64) * page_size",
        "page * page_size",
        checks.reads_a_page_beyond_two_gigabytes,
    ),
    Mutant(
        "offset: base row in 32 bits",
        "attend.py",
        "tl.load(where + span).to(tl.int64)",
        "tl.load(where + span).to(tl.int32)",
        checks.reads_a_page_beyond_two_gigabytes,
    ),
    Mutant(
        "offset: slots in 32 bits",
        "rows.py",
        "other=0).to(tl.int64) * heads + head  #",
        "other=0).to(tl.int32) * heads + head.to(tl.int32)  #",
        checks.writes_a_page_beyond_two_gigabytes,
    ),
    Mutant(
        "offset: pages copied in 32 bits",
        "copy_pages.py",
        "tl.load(targets + pair).to(tl.int64) * length",
        "tl.load(targets + pair).to(tl.int32) * length.to(tl.int32)",
        checks.writes_a_page_beyond_two_gigabytes,
    ),
    Mutant(
        "scale: keys keep their codes",
        "attend.py",
        "scores * load_row_scales(k_scales, k_rows, live).to(WIDE)[None, :]",
        "scores",
        exact(codec_k="int8"),
    ),
    Mutant(
        "scale: values are scaled by the keys' scales",
        "attend.py",
        "load_operand(v_codes, v_scales,",
        "load_operand(v_codes, k_scales,",
        exact(codec_k="int8", codec_v="int8"),
    ),
    Mutant(
        "scale: groups share the first scale",
        "tiles.py",
        "PER_ROW + group[None, :]",
        "PER_ROW + group[None, :] * 0",
        exact(codec_k="q8_0", codec_v="q8_0", head_dim=64),
    ),
    Mutant(
        "scale: nibbles swapped",
        "tiles.py",
        "(pairs & 15).to(tl.float32), (pairs >> 4)",
        "(pairs >> 4).to(tl.float32), (pairs & 15)",
        exact(codec_k="q4_0", codec_v="q4_0"),
    ),
    Mutant("scale: softmax scale forgotten", "attend.py", "scores = scores * scale\n", "scores = scores * 1.0\n", exact()),
    Mutant("scale: softcap forgotten", "attend.py", "softcap * tanh(scores / softcap)", "scores", exact(softcap=0.5)),
    Mutant(
        "fill: masked codes read as garbage",
        "tiles.py",
        "(lane < D)[None, :], other=0.0)",
        "(lane < D)[None, :], other=float('nan'))",
        exact(),
    ),
    Mutant(
        "fill: masked query lanes read as one",
        "attend.py",
        "* D + lane[None, :], mask=kept, other=0.0",
        "* D + lane[None, :], mask=kept, other=float('nan')",
        exact(),
    ),
    Mutant("merge: sums are not rescaled", "tiles.py", "total * rescale + ", "total + ", exact()),
    Mutant("merge: what was mixed is not rescaled", "attend.py", "values, mixed * rescale[:, None]", "values, mixed", exact()),
    Mutant(
        "merge: splits weigh the same",
        "attend.py",
        "top + tl.log2(tl.where(total == 0, 1.0, total))",
        "total * 0",
        exact(splits=3, spans=((40, 41),)),
    ),
    Mutant(
        "merge: the last split is dropped",
        "attend.py",
        "(steps + splits - 1) // splits",
        "tl.maximum(steps // splits, 1)",
        exact(splits=2, spans=((40, 41),)),
    ),
    Mutant(
        "tail: lanes past the row are stored",
        "attend.py",
        "kept = owned[:, None] & (lane < D)[None, :]",
        "kept = owned[:, None] & (lane < BLOCK_D)[None, :]",
        checks.stores_only_its_own_rows,
    ),
    Mutant("tail: rows past the span are stored", "attend.py", " & (query < count)", "", checks.stores_only_its_own_rows),
    Mutant(
        "tail: the last pages of a copy are cut",
        "copy_pages.py",
        "for first in range(0, length, BLOCK)",
        "for first in range(0, length - BLOCK + 1, BLOCK)",
        lambda ops: checks.copies_pages(ops, 1, "raw"),
    ),
    Mutant("write: rounds down", "tiles.py", "return (x + 12582912.0) - 12582912.0", "return tl.floor(x)", codes("int8")),
    Mutant("write: rounds ties away", "tiles.py", "return (x + 12582912.0) - 12582912.0", "return tl.floor(x + 0.5)", codes("int8")),
    Mutant("write: divides by zero", "rows.py", "zero = steps == 0", "zero = steps != steps", codes("q8_0")),
    Mutant("write: scales by the unstored step", "rows.py", ").to(tl.float32).to(tl.float16)", ").to(tl.float32)", codes("q8_0")),
    Mutant(
        "write: takes the last of equal magnitudes",
        "rows.py",
        "tl.min(tl.where(size == tl.max(size, axis=2)[:, :, None], lane, WIDTH), axis=2)",
        "tl.max(tl.where(size == tl.max(size, axis=2)[:, :, None], lane, 0), axis=2)",
        codes("q4_0"),
    ),
    Mutant(
        "write: pads nibbles with eights",
        "rows.py",
        "tl.where(kept, tl.minimum(tl.maximum(code + 8.0, 0.0), 15.0), 0.0)",
        "tl.minimum(tl.maximum(code + 8.0, 0.0), 15.0)",
        codes("q4_0", 37),
    ),
    Mutant("write: small numbers lose a bit", "rows.py", "- 127, -6)", "- 127, -5)", codes("fp8")),
    Mutant(
        "rope: turns backwards",
        "pointwise.py",
        "first * c - second * s",
        "first * c + second * s",
        lambda ops: checks.rotates(ops, torch.float32, 24, 12),
    ),
    Mutant(
        "rope: drops the rest",
        "pointwise.py",
        "if 2 * rotated < head_dim:",
        "if 2 * rotated > head_dim:",
        lambda ops: checks.rotates(ops, torch.float32, 40, 5),
    ),
    Mutant(
        "merge: rows past the last are stored",
        "attend.py",
        "mask=(row < rows)[:, None] & (lane < D)[None, :])\n",
        "mask=(row < rows + 9)[:, None] & (lane < D)[None, :])\n",
        checks.stores_only_its_own_rows,
    ),
    Mutant(
        "rms_norm: divides by the padded width",
        "pointwise.py",
        "/ features\n",
        "/ BLOCK_F\n",
        lambda ops: checks.normalises(ops, torch.float32, 40, True),
    ),
    Mutant(
        "rms_norm: norms the unrounded sum",
        "pointwise.py",
        "wide = widen(summed)",
        "wide = wide",
        lambda ops: checks.normalises(ops, torch.bfloat16, 40, True),
    ),
    Mutant(
        "gated: activates the wrong half", "pointwise.py", "act * up", "act * gate", lambda ops: checks.gates(ops, torch.float32, "silu")
    ),
    Mutant(
        "gated: forgets the cube",
        "pointwise.py",
        " + 0.044715 * gate * gate * gate",
        "",
        lambda ops: checks.gates(ops, torch.float32, "gelu_tanh"),
    ),
)
