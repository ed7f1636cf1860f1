"""Peak memory of the process and of the device, restarted for each run so that one run does not inherit another's peak.

It does not know what the memory holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def restart_peaks(device: str) -> bool:
    """Start both peaks from what is held now -> whether the host's could be restarted.

    Only Linux can restart the host's (proc(5), clear_refs 5); elsewhere it stays the peak since the process began.
    """
    if device.split(":")[0] == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def host_peak_rss_bytes() -> int | None:
    """The most resident memory since the last restart (see `restart_peaks`); None where the system does not tell."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return _rusage_peak_bytes()
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024  # the kernel counts in kB of 1024 bytes
    return _rusage_peak_bytes()


def device_peak_bytes(device: str) -> int | None:
    """The most memory that tensors held on a GPU since the last restart; None on a CPU."""
    if device.split(":")[0] != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(device)


def device_reserved_peak_bytes(device: str) -> int | None:
    """The most memory that torch's allocator took from a GPU since the last restart, tensors and gaps between them; None on a CPU."""
    if device.split(":")[0] != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_reserved(device)


def _rusage_peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, kB elsewhere
