"""`WeightFiles`: the safetensors files of a model, with access to any rows alone.

Imports no torch before it reads.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from telescope_core.base.errors import ConfigError
from telescope_train.models.location import first_line

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "download the model again, or save it again with transformers"


class StoredTensor(NamedTuple):
    """The description of one tensor in the header of a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors, such as "BF16"."""


class WeightFiles:
    """Reads tensors by name; files stay open until it is dropped.

    Reading raises ConfigError for what cannot be read, and for numbers that are not finite.
    """

    def __init__(self, location: str, tensors: dict[str, StoredTensor]) -> None:
        self._location = location
        self.tensors = tensors
        """Name of each tensor in any of the files -> its description."""
        self._open: dict[Path, Any] = {}
        self.on_read: Callable[[], None] = lambda: None
        """Called after each read of a tensor or a part of one."""
        self.is_here = True
        """Whether tensors can be read."""

    @classmethod
    def from_location(cls, location: str) -> "WeightFiles | None":
        """Return those of a folder, or of an id on the Hugging Face Hub, downloading them.

        None if the model has no safetensors files. ConfigError if a file is cut, or an index and
        its files disagree.
        """
        single, index = _found(location, _SINGLE), _found(location, _INDEX)
        if index is None:
            if single is None:
                return None
            return cls(location, _stored(location, single))
        names = _weight_map(location, index)
        if single is not None and set(names.values()) != {_SINGLE}:
            raise ConfigError(
                f"model {location!r} has its weights twice: in {_SINGLE}, and in the files that "
                f"{_INDEX} names; remove one of both"
            )
        found = {name: _found(location, name) for name in sorted(set(names.values()))}
        gone = [name for name, path in found.items() if path is None]
        if gone:
            raise ConfigError(
                f"model {location!r}: {_INDEX} names {', '.join(gone)}, which "
                f"{'is' if len(gone) == 1 else 'are'} not there; download the model again"
            )
        stored = [_stored(location, path) for path in found.values() if path is not None]
        return cls(location, _joined(location, names, stored))

    @classmethod
    def on_hub(cls, name: str) -> "WeightFiles | None":
        """Return the headers of an id on the Hub, without downloading anything else.

        Its tensors cannot be read.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import NotASafetensorsRepoError

        try:
            found = HfApi().get_safetensors_metadata(name)
        except NotASafetensorsRepoError:
            return None
        stored = [
            {
                tensor: StoredTensor(Path(file), tuple(about.shape), about.dtype)
                for tensor, about in header.tensors.items()
            }
            for file, header in sorted(found.files_metadata.items())
        ]
        files = cls(name, _joined(name, found.weight_map, stored))
        files.is_here = False
        return files

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are in no file."""
        return [name for name in names if name not in self.tensors]

    def read(self, name: str) -> "Tensor":
        """Return a whole tensor in CPU memory."""
        if name not in self.tensors:
            raise ConfigError(
                f"model {self._location!r} has no tensor {name!r}, which its config.json asks for; "
                "save it again with transformers, or use another model"
            )
        with self._problems_of(name):
            whole = self._file(name).get_tensor(name)
        return self._checked(name, whole)

    def rows(self, name: str, start: int, stop: int, shape: tuple[int, ...]) -> "Tensor":
        """Return rows `start` to `stop` of a tensor that must have `shape` as a whole."""
        stored = self.tensors[name].shape
        if stored != shape:
            raise ConfigError(
                f"model {self._location!r}: expected {name} to be {list(shape)} as config.json "
                f"says, its file has {list(stored)}; download or export the model again"
            )
        with self._problems_of(name):
            rows = self._file(name).get_slice(name)[start:stop]
        return self._checked(name, rows)

    def _checked(self, name: str, value: "Tensor") -> "Tensor":
        if not value.isfinite().all():
            raise not_finite(self._location, [name])
        self.on_read()
        return value

    @contextmanager
    def _problems_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise _unreadable(self._location, self.tensors[name].path, error) from error

    def _file(self, name: str) -> Any:
        path = self.tensors[name].path
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def not_finite(model: str, names: Sequence[str]) -> ConfigError:
    """Return the error for weights that are NaN or infinite."""
    return ConfigError(
        f"model {model!r} has numbers that are not finite in {', '.join(names[:3])}"
        f"{', ...' if len(names) > 3 else ''}: the training that wrote them went wrong, or the "
        "file is damaged; take an earlier checkpoint, or download the model again"
    )


def _weight_map(location: str, index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model {location!r}: {_INDEX} is no index of tensors and their files: "
            f"{first_line(error)}; {_REMEDY}"
        ) from error


def _joined(
    location: str, names: Mapping[str, str], parts: Iterable[Mapping[str, StoredTensor]]
) -> dict[str, StoredTensor]:
    """Return the tensors of several files, which must be where the index `names` says."""
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, stored in part.items():
            if name in tensors:
                raise ConfigError(
                    f"model {location!r}: {name} is in {tensors[name].path.name} and in "
                    f"{stored.path.name}; {_REMEDY}"
                )
            tensors[name] = stored
    for name, file in names.items():
        if name not in tensors or tensors[name].path.name != Path(file).name:
            raise ConfigError(
                f"model {location!r}: {_INDEX} says that {name} is in {file}, which does not "
                f"have it; {_REMEDY}"
            )
    return tensors


def _stored(location: str, path: Path) -> dict[str, StoredTensor]:
    """Return the header of one file, whose length must match it."""
    try:
        with safe_open(path, framework="numpy") as opened:
            parts = {name: opened.get_slice(name) for name in sorted(opened.keys())}
            return {
                name: StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except (OSError, SafetensorError) as error:
        raise _unreadable(location, path, error) from error


def _unreadable(model: str, path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"model {model!r}: {path.name} cannot be read: {first_line(error)}; is it complete? "
        f"{_REMEDY}"
    )


def _found(location: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    path = cached_file(
        location,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)
