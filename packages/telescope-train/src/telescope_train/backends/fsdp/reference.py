"""The reference model of a run: a frozen copy of the policy, or the policy without its adapters.

It begins as the initial model of the run. A checkpoint contains it only after an update.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from telescope_train.backends.distributed_checkpoint import load_state, saved_keys
from telescope_train.backends.fsdp.sharding import local_part, reshard
from telescope_train.backends.fsdp.state import set_weights, weights_of
from telescope_train.models.lora import adapters_off
from telescope_train.models.packed import PackedPolicy

_KEY = "reference"


class Reference(Protocol):
    """The model to whose log-probs those of the policy are compared."""

    @property
    def has_moved(self) -> bool:
        """Whether it was updated, so that it is no longer the initial model."""
        ...

    @contextmanager
    def ready(self) -> Iterator[PackedPolicy]:
        """Yield the model, which is the reference and may compute, inside the block only."""
        ...

    def update(self) -> None:
        """Copy the weights of the trained policy."""
        ...

    def state(self) -> dict[str, Any]:
        """Return its sharded weights."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Load the weights that `state` returned."""
        ...


def load_moved(folder: str | Path, reference: Reference) -> None:
    """Read the reference from a checkpoint, if the checkpoint contains one."""
    if any(key.startswith(f"{_KEY}.") for key in saved_keys(folder)):
        # torch reads into existing tensors, so the reference's own state serves as the destination.
        state = {_KEY: reference.state()}
        load_state(folder, state)
        reference.set_state(state[_KEY])


class FrozenCopy:
    """A second model, sharded like the policy."""

    def __init__(self, policy: PackedPolicy, copy: PackedPolicy) -> None:
        self._policy, self._copy = policy, copy
        self.has_moved = False

    @contextmanager
    def ready(self) -> Iterator[PackedPolicy]:
        """Yield the copy, which is always ready."""
        yield self._copy

    def update(self) -> None:
        """Copy this rank's shards."""
        # Both are sharded alike, so nothing is gathered; copy_ rounds master weights to the dtype
        # of the layers. Resharded first, because writes to whole parameters would be lost.
        reshard(self._copy)
        reshard(self._policy)
        pairs = zip(self._copy.parameters(), self._policy.parameters(), strict=True)
        for frozen, current in pairs:
            local_part(frozen).copy_(local_part(current))
        self.has_moved = True

    def state(self) -> dict[str, Any]:
        """Return its sharded weights."""
        reshard(self._copy)
        return weights_of(self._copy)

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over the weights that `state` returned."""
        reshard(self._copy)
        set_weights(self._copy, state)
        self.has_moved = True


class AdaptersAside:
    """With LoRA: the policy itself with its adapters off, or as they were at the last update."""

    def __init__(
        self, policy: PackedPolicy, computing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`computing`: context in which the policy may compute."""
        self._policy, self._computing = policy, computing
        self._kept: dict[str, torch.Tensor] | None = None

    @property
    def has_moved(self) -> bool:
        """Whether it has adapters of its own, those of the last update."""
        return self._kept is not None

    @contextmanager
    def ready(self) -> Iterator[PackedPolicy]:
        """Yield the policy, with other adapters or none inside the block."""
        if self._kept is None:
            with adapters_off(self._policy.lm), self._computing():
                yield self._policy
            return
        # Put back even after an error, or the policy would go on with the reference's adapters.
        current = self._adapters()
        self._put(self._kept)
        try:
            with self._computing():
                yield self._policy
        finally:
            self._put(current)

    def update(self) -> None:
        """Copy the present adapters."""
        # The frozen weights below them never change, so adapters are all that a copy needs.
        self._kept = self._adapters()

    def state(self) -> dict[str, Any]:
        """Return the sharded adapters."""
        return self._adapters() if self._kept is None else dict(self._kept)

    def set_state(self, state: dict[str, Any]) -> None:
        """Load the adapters that `state` returned."""
        self._kept = state

    def _adapters(self) -> dict[str, torch.Tensor]:
        # Clones, because the optimizer changes the parameters in place.
        reshard(self._policy)
        return {
            name: parameter.detach().clone()
            for name, parameter in self._policy.named_parameters()
            if parameter.requires_grad
        }

    def _put(self, values: dict[str, torch.Tensor]) -> None:
        reshard(self._policy)
        for name, parameter in self._policy.named_parameters():
            if name in values:
                parameter.detach().copy_(values[name])
