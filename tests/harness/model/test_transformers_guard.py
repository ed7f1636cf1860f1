"""Our package `kernels` is never taken for Hugging Face's package of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TINY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
model(torch.tensor([[1, 2, 3]]))
print(is_kernels_available())
"""
GUARDED = """
import kernels
kernels.__version__ = "0.18.2"  # a version that transformers would take for the hub's package, and then import from
from harness.model.transformers_guard import protect_kernels_name
protect_kernels_name()
"""


@pytest.mark.parametrize("before", ["", GUARDED], ids=["as we are", "with a version that invites it"])
def test_transformers_models_run_beside_our_kernels(before):
    done = subprocess.run([sys.executable, "-c", before + TINY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
