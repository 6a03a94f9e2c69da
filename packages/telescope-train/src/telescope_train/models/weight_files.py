"""`WeightFiles`: the safetensors files of a model, of which any rows are read without the rest."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from telescope_core.errors import ConfigError
from telescope_train.models.location import first_line, locate_model

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """Reads tensors by name; files stay open until it is dropped."""

    def __init__(self, location: str, paths: dict[str, Path]) -> None:
        self._location = location
        self._paths = paths
        self._open: dict[Path, Any] = {}
        self.on_read: Callable[[], None] = lambda: None
        """Is called after each tensor or part of one that was read."""

    @classmethod
    def of(cls, location: str) -> "WeightFiles | None":
        """Return those of a folder, or of an id on the Hugging Face Hub, downloading them.

        None if the model has no safetensors files.
        """
        index = _found(location, _INDEX)
        if index is not None:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            found = {name: _found(location, name) for name in set(files.values())}
            missing = sorted(name for name, path in found.items() if path is None)
            if missing:
                raise ConfigError(
                    f"model {location!r}: {_INDEX} names {', '.join(missing)}, which "
                    f"{'is' if len(missing) == 1 else 'are'} not there; download the model again"
                )
            paths = {name: path for name, path in found.items() if path is not None}
            return cls(location, {name: paths[file] for name, file in files.items()})
        single = _found(location, _SINGLE)
        if single is None:
            return None
        with safe_open(single, framework="pt") as opened:
            return cls(location, dict.fromkeys(opened.keys(), single))

    @classmethod
    def required(cls, model: str) -> "WeightFiles":
        """Like `of` a model by any name of it; ConfigError if there are none or they are broken."""
        location = locate_model(model)
        try:
            files = cls.of(location)
        except (OSError, SafetensorError, ValueError) as error:
            raise _unreadable(model, error) from error
        if files is None:
            raise ConfigError(
                f"model {model!r} has no {_SINGLE}, the only format that this backend reads; save "
                "it again with transformers"
            )
        return files

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that no file has."""
        return [name for name in names if name not in self._paths]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor in CPU memory; ConfigError if there is none."""
        if name not in self._paths:
            raise ConfigError(
                f"model {self._location!r} has no tensor {name!r}, which its config.json asks for; "
                "save it again with transformers, or use another model"
            )
        try:
            whole = self._file(self._paths[name]).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self._location, error) from error
        self.on_read()
        return whole

    def rows(self, name: str, start: int, stop: int, shape: tuple[int, ...]) -> Tensor:
        """Return rows `start` to `stop` of a tensor that must have `shape` as a whole."""
        part = self._file(self._paths[name]).get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ConfigError(
                f"model {self._location!r}: expected {name} to be {list(shape)} as config.json "
                f"says, its file has {part.get_shape()}; download or export the model again"
            )
        rows = part[start:stop] if start < stop else torch.empty(0, *shape[1:])
        self.on_read()
        return rows

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def _unreadable(model: str, error: Exception) -> ConfigError:
    return ConfigError(f"model {model!r} cannot be read: {first_line(error)}")


def _found(location: str, name: str) -> Path | None:
    path = cached_file(
        location,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)
