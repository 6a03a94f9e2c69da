"""Writes a model in Hugging Face format from weights that arrive one at a time."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from telescope_core.records.files import write_json

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
