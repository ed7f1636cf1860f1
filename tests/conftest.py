"""What every test needs: no network, one thread, no files in the user's home. It knows nothing of what is tested."""

from __future__ import annotations

import os

# Before anything imports the libraries that read these at import. One thread each: tests run side by side and must not depend on cores.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_SILENT="true",
    WANDB_ERROR_REPORTING="false",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",
    TRITON_INTERPRET="1",  # read when triton is first imported, by transformers too; what needs the compiler runs in a process without it
)
for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "HYDRA_FULL_ERROR"):
    os.environ.pop(name, None)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("kvbench", derandomize=True, deadline=None, database=None)
settings.load_profile("kvbench")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests and tests that need a GPU or a browser run only where `-m` asks for them."""
    asked = config.getoption("-m")
    for marker in ("soak", "gpu", "browser"):
        if marker in asked:
            continue
        for item in items:
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"runs with -m {marker}"))
