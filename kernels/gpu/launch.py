"""From the ops' arguments to a launch: which form of a kernel, on what grid, with which tensors.

Everything is checked by `kernels.api` before it comes here. Nothing here reads a tensor's values, so a captured graph may replay it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from kernels.backend import BackendUnavailable
from kernels.gpu.specialisations import LISTED, Spec, Tuning
from kernels.gpu.tiles import INTERPRETED
from kernels.rows import RowStore

ALIGNMENT_BYTES = 16  # what the compile gate promises the kernels about the pointers they read rows through
FP_FUSION = True  # a product and a sum may round once; codes are computed without a product, so they keep their bits
SMALLEST_KEYS = 16  # interpreted, a key tile is as small as a dot allows, so that short tests cross many tiles
MERGE_ROWS_INTERPRETED = 16
interpreted = bool(INTERPRETED)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def on_amd() -> bool:
    return torch.version.hip is not None


def require_listed(spec: Spec, device: torch.device) -> None:
    """BackendUnavailable unless the compile gate has checked this form. The interpreter compiles nothing, so there every form may run."""
    if interpreted:
        return
    if spec not in LISTED:
        raise BackendUnavailable(
            f"the triton kernels have no checked form '{spec.name}': use backend=reference, "
            "or add it to kernels/gpu/specialisations.py and run python -m harness.kernels_card"
        )
    codecs = {getattr(spec, field) for field in ("codec", "codec_k", "codec_v") if hasattr(spec, field)}
    if "fp8" in codecs:
        require_fp8(device)


def require_fp8(device: torch.device) -> None:
    """BackendUnavailable where the hardware has no e4m3 conversion: NVIDIA below sm_89."""
    if on_amd():
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise BackendUnavailable(
            f"codec fp8 needs compute capability 8.9 or above and this GPU has {major}.{minor}: use int8 or q8_0, or backend=reference"
        )


def keys_of(chosen: Tuning) -> int:
    return SMALLEST_KEYS if interpreted else chosen.keys


def register_limit(chosen: Tuning) -> dict[str, int]:
    """The launch option that sets a thread's registers; AMD's compiler knows none."""
    return {} if chosen.registers is None else {"maxnreg": chosen.registers}


def merge_rows() -> int:
    """Rows that one program of the merge handles. One on a GPU, where a decode step has few; more where programs run one by one."""
    return MERGE_ROWS_INTERPRETED if interpreted else 1


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter is one."""
    return 1 if interpreted else torch.cuda.get_device_properties(device).multi_processor_count


def pitched(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x [T, H, D] and its pitch, the heads from one token to the next. Copied if rows lie off whole heads or off 16-byte boundaries."""
    token, head, lane = x.stride()
    width = x.shape[2]
    regular = lane == 1 and (head == width or x.shape[1] == 1) and token % width == 0
    if not regular or x.data_ptr() % ALIGNMENT_BYTES:
        return x.contiguous(), x.shape[1]
    return x, token // width


def as_bytes_of_code(store: RowStore) -> torch.Tensor:
    """The code tensor in the element type that kernels store: e4m3 codes are written as bits."""
    return store.codes.view(torch.uint8) if store.codec.name == "fp8" else store.codes


def ceil_div(a: int, b: int) -> int:
    return triton.cdiv(a, b)
