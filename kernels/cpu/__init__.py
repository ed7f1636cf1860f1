"""The ops on a CPU through torch: same layout as the reference, no work on rows that no query may see.

It does not know which sequence a row belongs to. `FLAVOUR` says in words what runs, for records.
"""

from kernels.cpu.plain import (
    attend_dense,
    attend_packed,
    attend_paged,
    copy_pages,
    gated,
    move_rows,
    new_rows,
    read_rows,
    rms_norm,
    rope,
    write_rows,
)

COMPILED = False
FLAVOUR = "torch"

__all__ = [
    "attend_dense",
    "attend_packed",
    "attend_paged",
    "copy_pages",
    "gated",
    "move_rows",
    "new_rows",
    "read_rows",
    "rms_norm",
    "rope",
    "write_rows",
]
