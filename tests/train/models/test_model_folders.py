"""A model is what its files say: it is loaded as transformers loads it, or refused by name."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from tests.train.backend_cases import backend_settings
from tests.train.models.model_folders import (
    FAMILIES,
    MUTATIONS,
    Folder,
    Mutation,
    cases,
    copies,
    save_model,
)
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from telescope_core.errors import ConfigError
from telescope_train.backends.fsdp.policy import fill
from telescope_train.backends.megatron.architecture import architecture_of
from telescope_train.backends.megatron.mapping import hugging_face_shapes
from telescope_train.backends.transfer import TensorHeader
from telescope_train.checkpoints.saver import save_model_description
from telescope_train.config.schema import ModelSection
from telescope_train.models.facts import facts_of, read_model_facts
from telescope_train.models.file_names import as_in_files
from telescope_train.models.fit import empty_model
from telescope_train.models.load import load_model, prepare_model
from telescope_train.models.lora import merged_weights
from telescope_train.models.source import read_source, require_tensors

LIBRARIES = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError)


class Theirs(NamedTuple):
    """What transformers makes of a folder."""

    weights: dict[str, torch.Tensor]
    is_whole: bool
    """Whether it found a tensor of the right shape for each parameter, and used each tensor."""


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(level)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")

    def model(family: str, in_shards: bool) -> Path:
        path = folder / f"{family}-{in_shards}"
        return path if path.exists() else save_model(family, path, in_shards=in_shards)

    return model


def by_transformers(folder: Path) -> Theirs | None:
    """Return what transformers loads; None if it raises."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    except LIBRARIES:
        return None
    found = [info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")]
    return Theirs(model.state_dict(), not any(found))


def by_us(folder: Path) -> dict[str, torch.Tensor] | ConfigError:
    """Return the weights that training would begin with, or why it would not begin."""
    try:
        prepared = prepare_model(str(folder))
        if prepared.files is not None:
            fill(prepared.model, prepared.model, prepared.files, torch.device("cpu"))
            prepared.model.tie_weights()
    except ConfigError as error:
        return error
    return prepared.model.state_dict()


def require_loaded_alike_or_refused(folder: Path, mutation: Mutation) -> str | None:
    """Fail unless what is trained is what transformers loads; returns why it was refused."""
    with suppress(ConfigError):  # which the plan reads before all else
        read_model_facts(str(folder))
    ours = by_us(folder)
    if isinstance(ours, ConfigError):
        refusal = str(ours)
        assert not mutation.is_harmless, refusal
        assert folder.name in refusal
        with pytest.raises(ConfigError):
            load_model(str(folder))
        if not mutation.in_weights:
            with pytest.raises(ConfigError):
                read_source(str(folder))
        return refusal
    theirs = by_transformers(folder)
    assert theirs is not None, "transformers refuses what is trained"
    assert theirs.is_whole, "something is trained that no file has"
    assert ours.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        assert torch.equal(ours[name], value), name
    return None


@pytest.mark.parametrize("in_shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_tensor_for_tensor_as_transformers_loads_it(
    family, in_shards, saved
):
    folder = saved(family, in_shards)
    theirs, ours = by_transformers(folder), by_us(folder)
    assert theirs is not None
    assert theirs.is_whole
    assert not isinstance(ours, ConfigError), ours
    assert ours.keys() == theirs.weights.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.weights.items())
    assert len(list(folder.glob("*.safetensors"))) == 1 or in_shards


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "in_shards", "mutation"), cases(), ids=lambda one: getattr(one, "name", str(one))
)
def test_a_folder_that_was_changed_is_loaded_as_transformers_does_or_refused(
    family, in_shards, mutation, saved, tmp_path
):
    folder = copies(saved(family, in_shards), tmp_path / "changed", mutation).path
    require_loaded_alike_or_refused(folder, mutation)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("without down_proj.weight", ["layers.1.mlp.down_proj.weight", "random numbers"]),
        ("a wrapper around it", ["base_model.", "model.embed_tokens.weight", "wrapper"]),
        ("an adapter's matrix", ["lora_A", "merge_and_unload"]),
        ("packed weights", ["weight_scale", "quantized"]),
        ("said to be quantized", ["bitsandbytes", "quantization_config"]),
        ("a bias that the config denies", ["down_proj.bias", "mlp_bias"]),
        ("one layer less in the config", ["num_hidden_layers", "2 layers", "is 1"]),
        ("more rows of the vocabulary", ["108", "vocab_size", "103"]),
        ("a matrix is transposed", ["[48, 32]", "[32, 48]"]),
        ("a matrix of whole numbers", ["I8", "down_proj"]),
        ("cut", [".safetensors", "complete"]),
        ("NaN in a matrix", ["down_proj.weight", "not finite"]),
        ("an adapter beside it", ["adapter_config.json", "some/base", "merge_and_unload"]),
        ("no weights", ["model.safetensors"]),
    ],
)
def test_a_refusal_names_the_tensor_the_reason_and_the_remedy(name, says, saved, tmp_path):
    mutation = next(one for one in MUTATIONS if one.name == name)
    folder = copies(saved("Llama", False), tmp_path / "changed", mutation).path
    reason = require_loaded_alike_or_refused(folder, mutation)
    assert reason is not None
    assert all(part in reason for part in says), reason


def test_a_head_of_its_own_is_trained_though_the_config_says_that_it_is_tied(saved, tmp_path):
    mutation = next(one for one in MUTATIONS if one.name == "said to be tied")
    folder = copies(saved("Llama", False), tmp_path / "changed", mutation).path
    source = read_source(str(folder))
    assert source.has_own_head
    assert source.config.tie_word_embeddings is False
    prepared = prepare_model(str(folder))
    assert prepared.files is not None
    assert prepared.model.get_output_embeddings().weight is not (
        prepared.model.get_input_embeddings().weight
    )
    assert load_model(str(folder)).model.config.tie_word_embeddings is False


def test_an_adapter_alone_is_said_to_be_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ConfigError, match=r"adapter of 'some/base'.*merge"):
        read_source(str(tmp_path))


def test_numbers_that_are_not_finite_are_found_where_all_is_loaded_at_once(saved, tmp_path):
    mutation = next(one for one in MUTATIONS if one.name == "NaN in a norm")
    folder = copies(saved("Llama", False), tmp_path / "changed", mutation).path
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*|norm.*not finite"):
        load_model(str(folder))
    assert Folder(folder).names


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Qwen3Moe", "Mixtral"])
def test_megatron_reads_the_very_tensors_of_the_files(family, saved):
    source = read_source(str(saved(family, True)))
    shapes = hugging_face_shapes(architecture_of(source.config))
    files = require_tensors(source, shapes)
    assert shapes == {name: stored.shape for name, stored in files.tensors.items()}


def test_megatron_refuses_names_that_it_does_not_know(saved, tmp_path):
    mutation = next(one for one in MUTATIONS if one.name == "without the first part of names")
    source = read_source(str(copies(saved("Llama", False), tmp_path / "changed", mutation).path))
    shapes = hugging_face_shapes(architecture_of(source.config))
    with pytest.raises(ConfigError, match=r"changed.*model\.embed_tokens.*fsdp"):
        require_tensors(source, shapes)


@pytest.mark.slow
def test_a_head_of_its_own_goes_to_servers_checkpoints_and_exports(tiny, tmp_path, start):
    mutation = next(one for one in MUTATIONS if one.name == "a head of its own though tied")
    folder = copies(tiny, tmp_path / "changed", mutation).path
    theirs = by_transformers(folder)
    assert theirs is not None
    worker = start(backend_settings(folder))
    sent = dict(worker.export_weights())
    assert sent.keys() == theirs.weights.keys()
    assert all(torch.equal(sent[name], value) for name, value in theirs.weights.items())
    worker.save_pretrained(str(tmp_path / "saved"))
    saved = by_transformers(tmp_path / "saved")
    assert saved is not None
    assert saved.is_whole
    assert all(torch.equal(saved.weights[name], value) for name, value in sent.items())
    save_model_description(tmp_path / "described", ModelSection(model=str(folder)))
    for path in (tmp_path / "saved", tmp_path / "described"):
        assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_is_in_the_files_leaves_the_trainer(family, saved):
    folder = saved(family, False)
    lm = load_model(str(folder)).model
    found = {
        name: value
        for whole_name, whole in merged_weights(lm, torch.Tensor.detach)
        for name, value in as_in_files(whole_name, whole, lm.config.model_type)
    }
    stored = Folder(folder)
    assert sorted(found) == stored.names
    assert all(torch.equal(value, stored.of(name)[name]) for name, value in found.items())


@pytest.mark.slow
def test_scales_that_are_no_weights_go_to_servers_and_exports(saved, tiny, tmp_path, start):
    folder = shutil.copytree(saved("Gemma4Text", False), tmp_path / "model")
    for file in (*tiny.glob("tokenizer*"), *tiny.glob("*.jinja")):
        shutil.copyfile(file, folder / file.name)
    settings = backend_settings(folder)
    mixed = settings.model.model_copy(update={"mixed_precision_dtype": "bfloat16"})
    worker = start(replace(settings, model=mixed))
    kept = {name: one for name, one in worker.export_weights() if name.endswith("layer_scalar")}
    assert len(kept) == 2
    headers = {one.name: one for one in worker.backend.transfer_headers()}
    for name, value in worker.backend.transfer_weights():
        assert headers.pop(name) == TensorHeader.from_tensor(name, value)
        assert torch.equal(value, kept.get(name, value)), "a buffer keeps its dtype"
    assert not headers
    worker.save_pretrained(str(tmp_path / "saved"))
    again = by_transformers(tmp_path / "saved")
    assert again is not None
    assert again.is_whole
    assert all(torch.equal(again.weights[name], value) for name, value in kept.items())


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Qwen2", "Llama"])
def test_a_head_that_is_tied_by_itself_is_counted_once(family):
    config = getattr(transformers, f"{family}Config")(vocab_size=64)
    given = {**config.to_dict(), "tie_word_embeddings": config.tie_word_embeddings}
    unsaid = {name: value for name, value in given.items() if name != "tie_word_embeddings"}
    assert facts_of(unsaid).num_parameters == facts_of(given).num_parameters


def test_a_model_that_sees_is_refused_in_plain_words():
    with pytest.raises(ConfigError, match=r"'qwen2_5_vl' reads pictures.*--base-url"):
        empty_model(transformers.Qwen2_5_VLConfig(), "float32")
