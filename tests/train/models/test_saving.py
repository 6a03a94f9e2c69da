"""Models are saved with whatever generation config they came with."""

import json

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from telescope_train.models.load import load_model
from telescope_train.models.saving import save_generation_config, save_model
from telescope_train.models.tiny import make_tiny_model

SAMPLING = {"temperature": 0.9, "top_p": 0.6, "num_beams": 2}
"""transformers loads these without `do_sample`, and refuses to save them."""


@pytest.fixture
def folder(tmp_path):
    folder = make_tiny_model(tmp_path / "model", seed=0)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SAMPLING))
    return folder


def config_in(folder):
    return json.loads((folder / "generation_config.json").read_text())


def test_a_generation_config_that_transformers_refuses_to_save_loses_no_model(folder, tmp_path):
    lm = load_model(str(folder), dtype="float32", trust_remote_code=False).model
    before = lm.generation_config
    save_model(lm, tmp_path / "saved", max_shard_size="1KB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file()
    assert config_in(tmp_path / "saved") == config_in(folder)
    assert lm.generation_config is before


class Plain(PreTrainedModel):
    """As the code that comes with a model may be: transformers gives it no generation config."""

    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = torch.nn.Linear(4, 8)
        self.post_init()


def test_a_model_that_cannot_generate_is_saved_without_such_a_config(tmp_path):
    model = Plain(PretrainedConfig())
    assert not model.can_generate()
    save_model(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / "generation_config.json").exists()


def test_the_generation_config_of_a_model_is_saved_by_itself(folder, tmp_path):
    save_generation_config(str(folder), tmp_path)
    assert config_in(tmp_path) == config_in(folder)
    (folder / "generation_config.json").unlink()
    (tmp_path / "none").mkdir()
    save_generation_config(str(folder), tmp_path / "none")
    assert list((tmp_path / "none").iterdir()) == []
