"""The machine, the software and the commit that a run belongs to. The only file that runs git or nvidia-smi.

It does not know what was measured. It records nothing that names a person, a host or a folder.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

PACKAGES = (
    *("kvbench", "torch", "triton", "transformers", "tokenizers", "numpy", "numba", "gguf", "safetensors"),
    *("hydra-core", "wandb", "datasets", "rich"),
)
SIMD = (
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "neon",
    "asimd",
    "sve",
)
_CHECKOUT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 10


def fingerprint(device: str, threads: int, seed: int) -> dict[str, object]:
    """The `environment` section of a record: hardware, system, versions, commit, and what the run was told."""
    cpu = _cpu()
    gpu = _gpu(device)
    return {
        "machine": machine_class(cpu, gpu),
        "device": device,
        "cpu": cpu,
        "gpu": gpu,
        "os": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "python": platform.python_version(),
        "packages": versions(),
        "threads": threads,
        "seed": seed,
        **commit(),
    }


def machine_class(cpu: Mapping[str, object], gpu: Mapping[str, object] | None) -> str:
    """The name under which results may be compared: same GPU, or same CPU model with the same number of usable cores.

    The generation is part of it where the system tells it: a virtual machine may call every CPU of a maker by one name.
    """
    if gpu is not None:
        return _slug(f"{gpu['name']}")
    generation = f"g{cpu['generation']} " if cpu.get("generation") else ""
    return _slug(f"{platform.machine()} {cpu['model']} {generation}{cpu['usable_cores']}c")


def versions() -> dict[str, str | None]:
    """Installed version of each package that can change a number, without importing any; None = not installed."""
    return {name: _version(name) for name in PACKAGES}


def commit(folder: Path = _CHECKOUT) -> dict[str, str | bool | None]:
    """{commit, dirty} of the checkout this code runs from; both None outside one (an installed wheel)."""
    top = _output(["git", "-C", str(folder), "rev-parse", "--show-toplevel"])
    if top is None or Path(top.strip()).resolve() != folder.resolve():
        return {"commit": None, "dirty": None}
    head = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    status = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return {"commit": None if head is None else head.strip(), "dirty": None if status is None else bool(status.strip())}


def _cpu() -> dict[str, object]:
    facts = _cpuinfo()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "model": facts.get("model name") or _darwin_cpu() or platform.processor() or platform.machine(),
        "generation": _generation(facts),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "simd": [flag for flag in SIMD if flag in flags],
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _generation(facts: Mapping[str, str]) -> str | None:
    """Family and model numbers of an x86 CPU, such as 25-17; None where the system does not tell."""
    numbers = [facts.get("cpu family"), facts.get("model")]
    return "-".join(numbers) if all(numbers) else None


def _darwin_cpu() -> str | None:
    if platform.system() != "Darwin":
        return None
    name = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return None if name is None else name.strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpu(device: str) -> dict[str, object] | None:
    """Name, memory, capability and driver of a GPU; None on a CPU."""
    if device.split(":")[0] != "cuda":
        return None
    import torch

    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "memory_bytes": facts.total_memory,
        "capability": f"{facts.major}.{facts.minor}",
        "runtime": torch.version.cuda or torch.version.hip,
        "driver": _driver(),
    }


def device_used_bytes(device: str) -> int | None:
    """Memory in use on the whole GPU now, as NVML says: the context, graphs and other processes included. None where NVML says nothing."""
    if device.split(":")[0] != "cuda":
        return None
    import torch

    index = torch.device(device).index
    chosen = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid
    answer = _output(["nvidia-smi", f"--id=GPU-{chosen}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    return None if not answer or not answer.strip().isdigit() else int(answer) * 2**20  # it counts in MiB


def _driver() -> str | None:
    answer = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return None if not answer else answer.splitlines()[0].strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def output_of(command: list[str]) -> str:
    """What a tool prints. RuntimeError with its own complaint if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _output(command: list[str]) -> str | None:
    """What `command` printed, or None if it is missing, failed or hung."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _slug(text: str) -> str:
    """Lower case letters and digits joined by dashes: fit for a folder name."""
    plain = re.sub(r"\((?:r|tm)\)", "", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-")
