"""The kernels' card in one readable table: families of forms by target, each figure as its range over the family's forms.

It does not compile or judge anything; `kernels_card.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
NOTE = """Each cell: registers of a thread / spills / shared memory in KiB / bytes of the widest load of K and V in the loop / matrix
instructions; a range where the forms of a row differ. "decode": tiles of 16 query rows, "prefill": of 64 or 128. float32 has no matrix
instruction of full precision. A spill is 4 bytes on NVIDIA, a vector register on AMD; none is allowed up to head_dim 128. Kernels
without attention have no loop over K and V."""


def family_of(name: str) -> str:
    """The row that a form belongs to."""
    words = name.split()
    if words[0] != "attend":
        return (
            words[0]
            if words[0] in ("merge", "read_rows", "write_rows", "copy_pages", "rope")
            else name.split(" block=")[0].rsplit(" ", 1)[0]
        )
    rows, head_dim = (int(re.search(rf"{key}=(\d+)", name).group(1)) for key in ("rows", "head_dim"))
    dtype = ", float32" if "float32" in words else ""
    wide = ", head_dim 256" if head_dim > 128 else ""
    return f"attend {words[1]}, {'decode' if rows == 16 else 'prefill'}{dtype}{wide}"


def markdown(card: dict) -> str:
    """The card's kernels as a Markdown document."""
    families: dict[str, dict[str, list[dict]]] = {}
    for entry in card["kernels"]:
        families.setdefault(family_of(entry["name"]), {}).setdefault(entry["target"], []).append(entry)
    forms = {family: len({entry["name"] for entries in targets.values() for entry in entries}) for family, targets in families.items()}
    lines = [
        "# What the compiler makes of the kernels",
        "",
        f"{len(card['kernels'])} compilations of {sum(forms.values())} forms by triton {card['triton']}, on no GPU: registers, memory and",
        "instructions are read from the binaries. `python -m harness.kernels_card` makes this file and `card.json`, which has every form.",
        "",
        NOTE,
        "",
        f"| kernel | forms | {' | '.join(TARGETS)} |",
        "|---|---:|" + "---|" * len(TARGETS),
    ]
    for family in sorted(families):
        cells = " | ".join(_cell(families[family].get(target, [])) for target in TARGETS)
        lines.append(f"| {family} | {forms[family]} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(entries: list[dict]) -> str:
    if not entries:
        return "refused"
    kibibytes = [-(-entry["shared_bytes"] // 1024) for entry in entries]
    figures = [_range(entry["registers"] for entry in entries), _range(entry["spills"] for entry in entries), _range(kibibytes)]
    figures += [_range(entry[key] for entry in entries) for key in ("loop_widest_load_bytes", "matrix_instructions")]
    return " / ".join(figures)


def _range(values: Iterable[int]) -> str:
    low, *_, high = sorted([*(kept := list(values)), kept[0]])
    return str(low) if low == high else f"{low}–{high}"
