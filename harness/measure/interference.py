"""How much of this machine's processors other processes took, from the system's own counters.

It does not know what was timed, nor what follows from the answer. Linux only: elsewhere the answer is None, not known.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STAT = Path("/proc/stat")
_BUSY = (
    0,
    1,
    2,
    5,
    6,
    7,
)  # user, nice, system, irq, softirq and steal among the numbers of a `cpu` line; the rest is idle or counted twice
SHARE_LIMIT = 0.1  # of one core; a team of threads that loses one of its cores waits for it at every step
RESOLUTION_S = 0.03  # the counters move in steps of 0.01 s on each core: less than this may be nothing


def others_s(stat: Path = _STAT) -> float | None:
    """CPU seconds that anything but this process has used so far on the cores it may run on, the hypervisor included; None: not known."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
    except OSError:
        return None
    busy = sum(
        sum(int(line[1 + field]) for field in _BUSY) for line in lines if cores and line and line[0] in {f"cpu{core}" for core in cores}
    )
    own = resource.getrusage(resource.RUSAGE_SELF)
    return busy / os.sysconf("SC_CLK_TCK") - own.ru_utime - own.ru_stime


def disturbed(before_s: float | None, after_s: float | None, wall_s: float) -> bool:
    """Whether others took more than SHARE_LIMIT of one core between two readings that lie `wall_s` seconds apart."""
    return before_s is not None and after_s is not None and after_s - before_s > max(RESOLUTION_S, SHARE_LIMIT * wall_s)
