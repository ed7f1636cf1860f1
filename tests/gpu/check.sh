#!/usr/bin/env bash
# What only a GPU can show: the kernels against their references on the device, decode steps replayed from captured graphs against
# launched ones, a memory checker over a small run, attention against torch's own in GB/s, and a short sweep end to end. One table on
# the screen, one JSON file.
#
#   bash tests/gpu/check.sh                    on a machine with a GPU, in under ten minutes (torch 2.11 or later, triton 3.6 or later)
#   bash tests/gpu/check.sh --dry-run          the same steps on the CPU in Triton's interpreter, with tiny shapes: proves the script, not the kernels
#   bash tests/gpu/check.sh --out FILE         where the JSON goes (default results/gpu/check.json; a dry run writes nothing unless asked)
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m tests.gpu.check "$@"
