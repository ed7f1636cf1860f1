"""From a plain configuration to objects: each fault is one sentence, and what a storage refuses is passed on in its own words."""

from __future__ import annotations

import copy

import pytest

from harness.build import make_cache, make_ops, parse, pick_device, storage_class
from harness.errors import UserError
from strategies.geometry import Geometry, HeadSharing, LayerShape

TOY = Geometry(layers=(LayerShape(3, 16),) * 2, query_heads=6, scale=0.25, softcap=None, dtype="float32", device="cpu", context=64)


@pytest.fixture(scope="module")
def composed():
    """The default configuration with strategy=paged; read-only."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from harness.cli import CONFIG_FOLDER

    with initialize_config_dir(CONFIG_FOLDER, version_base="1.3"):
        return OmegaConf.to_container(compose("config", ["strategy=paged"]), resolve=True)


@pytest.fixture
def plain(composed):
    """The same, for the test to change."""
    return copy.deepcopy(composed)


def test_settings_hold_typed_sections_and_the_storage_with_its_parameters(plain):
    plain["strategy"]["heads"] = {"kv_heads": 1, "init": "first"}
    settings = parse(plain)
    assert settings.workload.batch == 1
    assert settings.general.seed == 0
    assert settings.strategy.storage_class is storage_class("paged")
    assert settings.strategy.parameters == {"page_size": 16, "heads": HeadSharing(1, "first")}
    assert settings.strategy.heads == HeadSharing(1, "first")
    assert settings.reference.heads is None


FAULTS = [
    ("strategy.page_size", 1.5, "strategy.page_size=1.5 is a number: use a whole number"),
    ("strategy.page_size", None, "strategy.page_size is null: use a whole number"),
    ("strategy.heads", 3, "strategy.heads=3 is a whole number: use keys kv_heads, init or null"),
    ("strategy.heads", {"kv_heads": 1, "unit": "mean"}, "unknown key strategy.heads.unit: strategy.heads takes kv_heads, init"),
    ("strategy.storage", "pagde", "did you mean paged?"),
    ("strategy.storage", "nowhere:Cache", "cannot be imported"),
    ("strategy.storage", ":Cache", "cannot be imported"),
    ("strategy.storage", "json:Cache", "module 'json' has no class 'Cache'"),
    ("reference.page_size", 8, "(reference is 'contiguous', stored by 'contiguous')"),
    ("workload.bach", 3, "did you mean workload.batch?"),
    ("workload.batch", 0, "workload.batch=0: use 1 or more"),
    ("workload.kind", "steadily", "workload.kind='steadily' is unknown: choose one of steady"),
    ("workload.temperature", -1.0, "workload.temperature=-1.0: use 0"),
    ("quality.context", 2, "quality.context=2: use 4 or more"),
    ("measure.pairs", 4, "measure.pairs=4: use 5 or more"),
    ("measure.threads", 0, "measure.threads=0: use 1 or more"),
    ("tracking.mode", "maybe", "tracking.mode='maybe' is text: use one of offline, online, disabled"),
    ("backend", "trition", "backend='trition' is text: use one of auto, reference, cpu, triton"),
    ("graphs", "on", "graphs='on' is text: use one of auto, off"),
    ("compile", "yes", "compile='yes'"),
    ("dtype", "float8", "dtype='float8' is text: use one of auto, float64"),
    ("seed", -1, "seed=-1: use 0 or more"),
    ("seed", True, "seed=True is true or false: use a whole number"),
    ("budget_bytes", 0, "budget_bytes=0: use 1 or more"),
    ("model", 3, "model=3 is not a group of keys"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), FAULTS, ids=[f"{key}={value}" for key, value, _ in FAULTS])
def test_each_fault_is_one_sentence_that_names_the_key_and_what_is_allowed(plain, key, value, sentence):
    *groups, last = key.split(".")
    target = plain
    for group in groups:
        target = target[group]
    target[last] = value
    with pytest.raises(UserError) as refused:
        parse(plain)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_page_of_no_tokens_is_refused_in_the_storages_own_words(plain):
    plain["strategy"]["page_size"] = 0
    with pytest.raises(UserError, match="strategy 'paged' is refused: page_size=0: a page holds 1 token or more"):
        make_cache(parse(plain).strategy, TOY, None, make_ops("reference", "cpu"))


def test_a_budget_that_holds_no_token_is_refused(plain):
    with pytest.raises(UserError, match="'paged' is refused: .*budget"):
        make_cache(parse(plain).strategy, TOY, 8, make_ops("reference", "cpu"))


def test_a_cache_is_built_with_its_parameters(plain):
    plain["strategy"]["page_size"] = 4
    cache = make_cache(parse(plain).strategy, TOY, None, make_ops("reference", "cpu"))
    assert cache.bytes_for([5]) > cache.bytes_for([4])


def test_triton_without_a_gpu_says_what_to_use_instead(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="backend=triton needs a GPU.*use backend=cpu or auto"):
        make_ops("triton", "cpu")


@pytest.mark.parametrize("device", ["gpu", "cpu:1", "cuda:x", "mps"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(UserError, match="use auto, cpu, cuda or cuda:N"):
        pick_device(device)


def test_the_automatic_device_is_one_that_is_here():
    import torch

    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a GPU that torch can use"):
        pick_device("cuda")
