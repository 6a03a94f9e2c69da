"""Reads the weights out of a checkpoint in one process, without ranks and without megatron-core.

The library's files are a distributed checkpoint of torch, independent of the layout that wrote
them.
"""

import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from telescope_core.base.errors import ConfigError
from telescope_train.backends.distributed_checkpoint import reading
from telescope_train.backends.megatron.architecture import Architecture
from telescope_train.backends.megatron.mapping import parts_of, take_apart
from telescope_train.backends.megatron.weights import canonical_name

_OF_ENGINE = ".experts.experts.linear_fc"
"""Names of Transformer Engine's experts in a checkpoint, in place of `.experts.fc`."""


def read_weights(folder: Path, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) one at a time; ConfigError if one is missing."""
    reader = FileSystemReader(folder)
    entries = {
        _name_of(key): (key, entry)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(("embedding.", "decoder.", "output_layer."))
        and isinstance(entry, TensorStorageMetadata)
    }

    # The experts of a layer are one tensor, and their parts follow each other.
    @lru_cache(maxsize=2)
    def read(name: str) -> Tensor:
        if name not in entries:
            raise ConfigError(
                f"the checkpoint in {str(folder)!r} has no {name!r}, so it is not of the model "
                "that it describes; use another checkpoint"
            )
        key, entry = entries[name]
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings(), reading(folder):
            warnings.filterwarnings("ignore", message=".*load in a single process")  # what is meant
            dcp.load(state, storage_reader=reader, no_dist=True)
        return state[key]

    for part in parts_of(architecture):
        whole = read(part.name)
        value = whole if part.expert is None else whole[part.expert]
        yield from zip(part.sources, take_apart(part, value, architecture), strict=True)


def _name_of(key: str) -> str:
    """Return the name of a parameter from the library's key for it."""
    if _OF_ENGINE in key:
        return key.replace(_OF_ENGINE, ".experts.fc").removesuffix(".weight")
    return canonical_name(key)
