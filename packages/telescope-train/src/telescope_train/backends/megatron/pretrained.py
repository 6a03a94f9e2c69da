"""Weights of a model in Hugging Face format, one at a time: write them, or read a checkpoint's.

A checkpoint is read in one process, without ranks and without megatron-core: the library's files
are a distributed checkpoint of torch, independent of the layout that wrote them.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from telescope_core.base.errors import ConfigError
from telescope_core.records.files import write_json
from telescope_train.backends.distributed_checkpoint import reading
from telescope_train.backends.megatron.architecture import Architecture
from telescope_train.backends.megatron.mapping import parts_of, take_apart
from telescope_train.backends.megatron.weights import canonical_name

MAX_SHARD = "5GB"
"""Largest weights file."""


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_size: str = MAX_SHARD,
) -> int:
    """Write `weights` as safetensors files, in `dtype`; returns the number of files.

    `shapes` holds the shapes of all tensors. At most the tensors of one file are in memory.
    """
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    file_of = {name: file for file, names in plan.filename_to_tensors.items() for name in names}
    left = {file: len(names) for file, names in plan.filename_to_tensors.items()}
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in left}
    for name, value in weights:
        file = file_of[name]
        # A clone: what arrives may be a part of a larger tensor, which would be kept whole.
        waiting[file][name] = value.detach().to("cpu", dtype, copy=True).contiguous()
        left[file] -= 1
        if not left[file]:
            save_file(waiting.pop(file), folder / file, metadata={"format": "pt"})
    assert not waiting, f"tensors are missing: {sorted(waiting)}"
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return len(left)


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
