"""What keeps our package `kernels` from being taken for Hugging Face's; transformers beside it is tested with the models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def test_our_versions_stay_below_every_version_that_transformers_accepts():
    import kernels

    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    (version,) = [line.split('"')[1] for line in lines if line.startswith("version = ")]
    assert Version(version) < Version("0.9")
    assert Version(kernels.__version__) < Version("0.9")


def test_importing_kernels_loads_nothing_heavy_and_cannot_fail():
    program = "import sys, kernels; print(sorted({'torch', 'triton', 'numba', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
