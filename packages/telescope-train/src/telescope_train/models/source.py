"""Read the config of a model, and compare it with its files' headers before anything starts.

Imports neither torch nor transformers before it reads a model, so that a plan that refuses settings
stays fast.
"""

import copy
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_train.models.facts import EXPERT_SETTINGS
from telescope_train.models.file_names import KNOWN_MIXTURES
from telescope_train.models.fit import require_fit
from telescope_train.models.location import first_line, locate_model
from telescope_train.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

QUANTIZATION_SETTINGS = ("quantization_config", "compression_config")
"""Names in configs for the packing of quantized weights."""
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights that transformers reads if there are no safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model whose config and files have been compared."""

    name: str
    location: str
    """Folder or Hub id."""
    config: "PreTrainedConfig"
    """Config with which transformers loads the model: with its own head if the files have one."""
    files: WeightFiles | None
    """None = they are not safetensors, or transformers must find them."""
    has_own_head: bool = False
    """Whether the files have a head of their own, although config.json says that it is tied."""


def read_source(
    name: str,
    *,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    location: str | None = None,
    downloads: bool = True,
) -> ModelSource:
    """Read the config of a model and compare it with the headers of its files.

    `location`: where to read it from, if not from the place that `name` means. Without `downloads`,
    only the headers of the weights are fetched for a model on the Hub. Raises ConfigError for
    models that cannot be trained as they are: quantized weights, experts of an unknown type, and
    files that differ from the config.
    """
    from transformers import AutoConfig

    location = location or locate_model(name)
    with problems_of(f"model {name!r}", location=location):
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        _require_trainable(name, config)
        files = _files_of(name, location, config, downloads=downloads)
        # Code that comes with a model decides by itself what it does with the files.
        if trust_remote_code and getattr(config, "auto_map", None):
            return ModelSource(name=name, location=location, config=config, files=files)
        return _compared(name, location, config, files, dtype=dtype)


def trained_config(
    name: str, *, dtype: str = "float32", trust_remote_code: bool = False
) -> "PreTrainedConfig":
    """Return the config for training: untied if the files have a different head."""
    from transformers import AutoConfig

    location = locate_model(name)
    with problems_of(f"model {name!r}", location=location):
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
    if not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return config
    return read_source(name, dtype=dtype, trust_remote_code=trust_remote_code).config


def served_source(name: str) -> ModelSource | None:
    """Do the same as `read_source` for a folder to be served; None if only the server can read it.

    Those are quantized models, and architectures that transformers does not know.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    location = locate_model(name)
    with problems_of(f"model {name!r}", location=location):
        try:
            config = AutoConfig.from_pretrained(location)
        except (ValueError, KeyError):
            return None  # it has code of its own, or is of a type that the server may know
        is_packed = any(getattr(config, field, None) is not None for field in QUANTIZATION_SETTINGS)
        if is_packed or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return None
        files = _files_of(name, location, config, downloads=True)
        return _compared(name, location, config, files, dtype="float32")


def _files_of(
    name: str, location: str, config: "PreTrainedConfig", *, downloads: bool
) -> WeightFiles | None:
    if getattr(config, "transformers_weights", None) is not None:
        return None  # files of other names, which transformers finds
    is_folder = Path(location).is_dir()
    files = (
        WeightFiles.from_location(location)
        if downloads or is_folder
        else WeightFiles.on_hub(location)
    )
    if files is None and is_folder:
        _require_weights(name, Path(location))
    return files


def _compared(
    name: str,
    location: str,
    config: "PreTrainedConfig",
    files: WeightFiles | None,
    *,
    dtype: str,
) -> ModelSource:
    has_own_head = False
    if files is not None:
        with quiet_transformers():
            has_own_head = require_fit(name, config, files, dtype)
    if has_own_head:
        config = copy.deepcopy(config)
        untie(config)
    return ModelSource(
        name=name, location=location, config=config, files=files, has_own_head=has_own_head
    )


def require_tensors(source: ModelSource, names: Iterable[str]) -> WeightFiles:
    """Return the files of `source`; ConfigError unless their tensors are exactly `names`."""
    if source.files is None:
        raise ConfigError(
            f"model {source.name!r} has no safetensors files, the only ones that train_backend "
            "'megatron' reads; save it again with transformers, or use train_backend = 'fsdp'"
        )
    missing = source.files.missing(names)
    if missing:
        raise ConfigError(
            f"model {source.name!r} calls its tensors otherwise than train_backend 'megatron' "
            f"reads them: {', '.join(missing[:3])} are not there; save it again with transformers, "
            "or use train_backend = 'fsdp'"
        )
    return source.files


@contextmanager
def problems_of(what: str, *, location: str) -> Iterator[None]:
    """Raise any error of a library inside the block as a ConfigError that names `what`.

    `location`: the folder or Hub id that is read; only the second needs the Hub.
    """
    try:
        yield
    except TelescopeError:
        raise
    except Exception as error:
        is_offline = os.environ.get("HF_HUB_OFFLINE") == "1" and not Path(location).is_dir()
        offline = " (HF_HUB_OFFLINE is set)" if is_offline else ""
        raise ConfigError(f"{what} cannot be loaded: {first_line(error)}{offline}") from error


def _require_trainable(name: str, config: "PreTrainedConfig") -> None:
    for field in EXPERT_SETTINGS:
        if getattr(config, field, None) and config.model_type not in KNOWN_MIXTURES:
            raise ConfigError(
                f"model {name!r} is a mixture of experts of type {config.model_type!r}; this "
                f"version trains those of type {', '.join(KNOWN_MIXTURES)}, and dense models"
            )
    for field in QUANTIZATION_SETTINGS:
        given = getattr(config, field, None)
        if given is not None:
            method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
            raise ConfigError(
                f"model {name!r} is quantized (quant_method {str(method)!r} of {field} in its "
                "config.json), and training needs plain weights; take the model that it was made "
                "from"
            )


def _require_weights(name: str, folder: Path) -> None:
    if any((folder / file).exists() for file in _PICKLED):
        return
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        advice = f"make one of it with: telescope model import {gguf[0]} FOLDER"
    else:
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        advice = f"it holds {', '.join(others[:3])}" if others else "download the model again"
    raise ConfigError(
        f"model {name!r} has a config.json and no weights: expected model.safetensors, or "
        f"model.safetensors.index.json and the files that it names; {advice}"
    )


def untie(config: "PreTrainedConfig") -> None:
    """Set in `config` that the output head is a matrix of its own."""
    for one in (config, config.get_text_config()):
        one.tie_word_embeddings = False


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers inside the block."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
