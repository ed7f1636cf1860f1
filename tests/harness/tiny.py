"""A model of a few thousand random weights and a workload of a few tokens: whole runs in a fraction of a second."""

from __future__ import annotations

MODEL = (
    *("model=random", "model.layers=2", "model.hidden=64", "model.intermediate=96", "model.query_heads=4", "model.kv_heads=2"),
    *("model.head_dim=16", "model.context=256", "dtype=float32"),
)
LIMITS = ("measure.seconds=0", "quality.context=64", "quality.windows=1", "tracking=disabled")
WORK = ("workload.prompt_tokens=20", "workload.new_tokens=4")
RUN = (*MODEL, *LIMITS, *WORK)
