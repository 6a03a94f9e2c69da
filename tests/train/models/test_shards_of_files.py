"""Which tensors of files make up a parameter, and reading rows of them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from telescope_core.errors import ConfigError
from telescope_train.models.facts import read_model_facts
from telescope_train.models.file_names import as_in_files, file_parts
from telescope_train.models.load import prepare_model
from telescope_train.models.weight_files import WeightFiles

sys.path.insert(0, str(Path(__file__).parents[1]))
from backend_cases import backend_settings, make_mixture

KINDS = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return {kind: make_mixture(folder / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_in_parts_are_what_transformers_writes(mixtures, kind):
    model = AutoModelForCausalLM.from_pretrained(mixtures[kind])
    found = {
        name: value
        for parameter, whole in model.state_dict().items()
        for name, value in as_in_files(parameter, whole, kind)
    }
    written = load_file(mixtures[kind] / "model.safetensors")
    assert set(found) == set(written)
    assert all(torch.equal(found[name], written[name]) for name in written)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_mixtures_are_counted_from_their_config(mixtures, kind):
    model = AutoModelForCausalLM.from_pretrained(mixtures[kind])
    facts = read_model_facts(str(mixtures[kind]))
    assert facts.num_parameters == model.num_parameters()
    outside = {"model.embed_tokens.weight", "lm_head.weight"}
    chosen = model.config.num_experts_per_tok
    met = 0
    for name, value in model.named_parameters():
        share = chosen / value.shape[0] if ".experts." in name else 1
        met += 0 if name in outside else round(value.numel() * share)
    assert facts.num_body_parameters == met


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_servers_get_the_experts_of_a_mixture_one_by_one(mixtures, kind, start):
    worker = start(backend_settings(mixtures[kind]))
    written = load_file(mixtures[kind] / "model.safetensors")
    for weights in (worker.export_weights(), worker.backend.transfer_weights()):
        found = dict(weights)
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], written[name]) for name in written)
    headers = {one.name: one.shape for one in worker.backend.transfer_headers()}
    assert headers == {name: tuple(value.shape) for name, value in written.items()}


def test_a_dense_parameter_is_one_tensor_of_its_name():
    name = "model.layers.0.mlp.up_proj.weight"
    assert list(file_parts(name, (4, 2), "qwen3")) == [(name, ())]


def test_a_model_without_memory_has_the_names_and_sizes_of_the_real_one(tiny):
    prepared = prepare_model(str(tiny))
    assert prepared.files is not None
    real = AutoModelForCausalLM.from_pretrained(tiny)
    sizes = {name: value.shape for name, value in prepared.model.named_parameters()}
    assert sizes == {name: value.shape for name, value in real.named_parameters()}
    assert all(value.is_meta for value in prepared.model.parameters())
    assert prepared.model.generation_config.eos_token_id == real.generation_config.eos_token_id


def test_rows_are_read_without_the_rest(tmp_path):
    save_file({"a": torch.arange(12.0).reshape(6, 2)}, tmp_path / "model.safetensors")
    files = WeightFiles.from_location(str(tmp_path))
    assert files is not None
    assert files.rows("a", 2, 4, (6, 2)).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert files.rows("a", 3, 3, (6, 2)).shape == (0, 2)
    assert files.missing(["a", "b"]) == ["b"]
    with pytest.raises(ConfigError, match=r"expected a to be \[5, 2\] .* its file has \[6, 2\]"):
        files.rows("a", 0, 1, (5, 2))


def test_a_file_that_the_index_names_and_that_is_gone_is_said(tmp_path):
    name = "model-1.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=name):
        WeightFiles.from_location(str(tmp_path))
    save_file({"a": torch.zeros(2)}, tmp_path / name)
    files = WeightFiles.from_location(str(tmp_path))
    assert files is not None
    assert files.missing(["a"]) == []


def test_other_files_are_loaded_whole(tiny, tmp_path, caplog):
    """A tensor by another name: transformers may know it, and then loads the model as before."""
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    shorter = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(shorter, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prepared = prepare_model(str(tmp_path))
    assert prepared.files is None
    assert "every rank loads all of it" in caplog.text
    found = prepared.model.get_input_embeddings().weight
    assert torch.equal(found, weights["model.embed_tokens.weight"])
