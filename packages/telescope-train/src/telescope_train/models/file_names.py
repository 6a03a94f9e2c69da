"""Map the tensors in a model's files to its parameters, for loading and for exporting.

For dense models each parameter is one tensor of the same name. transformers keeps the experts of a
layer in one parameter for gate and up [E, 2I, H] and one for down [E, H, I]; files (and servers)
have one matrix per expert: gate and up [I, H], down [H, I]. Imports no torch.
Dims: E experts, I inner size of an expert, H hidden size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Index = tuple[int | slice, ...]


class FilePart(NamedTuple):
    """A tensor in a file, and the part of a parameter that it holds."""

    name: str
    index: Index
    """Index into the parameter; empty = all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertNames:
    """Names of an architecture's files for the mixture of experts in a layer."""

    block: str
    """Name in the files for `mlp`."""
    gate: str
    up: str
    down: str


_QWEN = _ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
EXPERT_NAMES: Mapping[str, _ExpertNames] = {
    "qwen3_moe": _QWEN,
    "mixtral": _ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
}
"""Names by `model_type`."""
KNOWN_MIXTURES = tuple(EXPERT_NAMES)
"""Model types with experts that this version can train."""


def file_parts(name: str, shape: tuple[int, ...], model_type: str) -> Iterator[FilePart]:
    """Yield the tensors in files that form the parameter `name` of `shape`."""
    names = EXPERT_NAMES.get(model_type)
    layer, _, leaf = name.rpartition(".mlp.")
    if names is None or not layer:
        yield FilePart(name, ())
        return
    block = f"{layer}.{names.block}"
    if leaf == "experts.gate_up_proj":
        inner = shape[1] // 2
        for expert in range(shape[0]):
            matrix = f"{block}.experts.{expert}."
            yield FilePart(f"{matrix}{names.gate}.weight", (expert, slice(0, inner)))
            yield FilePart(f"{matrix}{names.up}.weight", (expert, slice(inner, 2 * inner)))
    elif leaf == "experts.down_proj":
        for expert in range(shape[0]):
            yield FilePart(f"{block}.experts.{expert}.{names.down}.weight", (expert,))
    else:
        yield FilePart(f"{block}.{leaf}", ())


def as_in_files(name: str, value: "Tensor", model_type: str) -> "Iterator[tuple[str, Tensor]]":
    """Yield a whole parameter under its names in files; parts are views."""
    for part in file_parts(name, tuple(value.shape), model_type):
        yield part.name, value[part.index] if part.index else value
