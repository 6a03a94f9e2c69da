"""The tensors of a Hugging Face model on disk, read one at a time."""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from telescope_core.errors import ConfigError
from telescope_train.models.location import first_line, locate_model

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class ModelFiles:
    """Where each tensor of a model is; nothing is read before it is asked for."""

    def __init__(self, model: str) -> None:
        """Find the files of `model`, a folder or an id; ConfigError if there are none."""
        self._model = model
        self._folder = _folder_of(model)
        self._file_of = _files_of(self._folder, model)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor `name` in CPU memory; ConfigError if the model has none."""
        if name not in self._file_of:
            raise ConfigError(
                f"model {self._model!r} has no tensor {name!r}, which its config.json asks for; "
                "save it again with transformers, or use another model"
            )
        try:
            with safe_open(self._folder / self._file_of[name], "pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"model {self._model!r} cannot be read: {first_line(error)}"
            ) from error


def _folder_of(model: str) -> Path:
    located = locate_model(model)
    if Path(located).is_dir():
        return Path(located)
    try:
        return Path(snapshot_download(located, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r} cannot be loaded: {first_line(error)}") from error


def _files_of(folder: Path, model: str) -> dict[str, str]:
    if (folder / _INDEX).is_file():
        return json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    if not (folder / _SINGLE).is_file():
        raise ConfigError(
            f"model {model!r} has no {_SINGLE}, the only format that this backend reads; save it "
            "again with transformers"
        )
    with safe_open(folder / _SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), _SINGLE)
