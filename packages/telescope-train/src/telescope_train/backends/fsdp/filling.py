"""Load the weights of a model that was sharded without memory: each rank reads its own rows.

Beyond its shards, a rank holds the rows of one tensor at a time. Nothing is sent between ranks.
"""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from transformers import PreTrainedModel

from telescope_train.backends.fsdp.sharding import local_part
from telescope_train.models.file_names import file_parts
from telescope_train.models.load import init_buffers
from telescope_train.models.lora import first_adapters
from telescope_train.models.weight_files import WeightFiles


def local_rows(value: Tensor) -> tuple[int, int]:
    """Return the first and the last row, exclusive, of a parameter that are on this rank."""
    num_rows = value.shape[0]
    if not isinstance(value, DTensor):
        return 0, num_rows
    # FSDP cuts along the first dimension into equal parts; the last ones may be short or empty.
    dimension = next(i for i, one in enumerate(value.placements) if isinstance(one, Shard))
    mesh = value.device_mesh
    width = math.ceil(num_rows / mesh.shape[dimension])
    start = min(num_rows, mesh.get_local_rank(dimension) * width)
    stop = min(num_rows, start + width)
    assert len(value.to_local()) == stop - start, "FSDP cuts into parts of ceil(rows / ranks)"
    return start, stop


@torch.no_grad()
def fill(
    policy: torch.nn.Module,
    lm: PreTrainedModel,
    files: WeightFiles,
    device: torch.device,
) -> None:
    """Allocate the shards of `policy` on `device` and read those of `lm`, which is inside it."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    policy.to_empty(device=device)
    # Torch gives tied parameters memory of their own each, where FSDP does not hold them.
    for first, *others in names.values():
        for module_name, _, own_name in (other.rpartition(".") for other in others):
            setattr(policy.get_submodule(module_name), own_name, policy.get_parameter(first))
    init_buffers(lm)
    model_type = lm.config.model_type
    for name, parameter in lm.named_parameters():
        if ".lora_" not in name:
            _read(name.replace(".base_layer.", "."), parameter, files, model_type)


@torch.no_grad()
def fill_adapters(lm: PreTrainedModel, *, seed: int) -> None:
    """Initialize the adapters from `seed`, equally on all ranks."""
    for parameter, first in first_adapters(lm, seed=seed):
        start, stop = local_rows(parameter)
        local_part(parameter).copy_(first[start:stop])


def _read(name: str, parameter: Tensor, files: WeightFiles, model_type: str) -> None:
    local, (start, stop) = local_part(parameter), local_rows(parameter)
    shape = tuple(parameter.shape)
    for part in file_parts(name, shape, model_type):
        if not part.index:
            local.copy_(files.rows(part.name, start, stop, shape))
            continue
        expert, *inner = part.index
        assert isinstance(expert, int), "a file has the matrices of one expert each"
        if start <= expert < stop:
            place = local[expert - start][tuple(inner)]
            place.copy_(files.rows(part.name, 0, len(place), tuple(place.shape)))
