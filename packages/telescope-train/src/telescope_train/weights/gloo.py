"""`GlooPublisher`: trainer rank 0's side of a weight transfer over gloo."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from telescope_train.weights.buckets import flattened, in_buckets
from telescope_train.weights.gloo_group import GlooGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a receiver must know before a tensor comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class GlooPublisher:
    """Sends every tensor of the model to all servers at once."""

    def __init__(self, *, host: str, port: int, world_size: int) -> None:
        self._group = GlooGroup(host=host, port=port, rank=0, world_size=world_size)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Broadcast `tensors` in order; returns when all receivers have them."""
        for bucket in in_buckets((tensor for _, tensor in tensors), lambda one: one.nbytes):
            self._group.broadcast(flattened(bucket))


def headers(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[TensorHeader]:
    """Describe `tensors` for the receivers."""
    return [
        TensorHeader(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
        )
        for name, tensor in tensors
    ]
