"""`gradient_checkpointing = "auto"`: recompute as few layers of each row as its memory allows.

The memory of a layer is measured, not computed: the last layer is never recomputed, and the tensors
that autograd saves in it are counted for every row. Recomputing gives the same numbers, so the
choice never shows in a gradient. Dims: T tokens of a row.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from telescope_train.algorithms.token_metrics import MetricSum
from telescope_train.models.recomputed_layers import LayerBytes, fewest_recomputed, kept_bytes

GIB = 2**30
TRUSTED = 2
"""A row of at most this many times as many tokens as the longest measured one keeps as much per
token. Before a longer one was measured, all its layers but the last are recomputed."""


class Measured(NamedTuple):
    """The memory that one layer kept for the longest row so far; the largest value counts."""

    num_tokens: int
    num_bytes: int


UNMEASURED = Measured(0, 0)


class _Row(NamedTuple):
    """The choice for one row."""

    num_tokens: int
    input_bytes: int
    """Size of the input of one layer."""
    num_recomputed: int


class AdaptiveCheckpointing:
    """Chooses the recomputed layers of each row that is computed with a gradient."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        """Take over the forward of each of `layers`, those of one model in their order."""
        self._layers = list(layers)
        self._room_bytes = 0.0
        self._agreed = self._found = UNMEASURED
        self._num_recomputed = 0
        self._rows: list[_Row] = []
        for index, layer in enumerate(self._layers):
            layer.forward = partial(self._run, index, layer.forward)

    def limit(self, room_bytes: float) -> None:
        """Limit the memory for the backward pass of a row to `room_bytes`, from the next row on."""
        self._room_bytes = room_bytes

    @property
    def found(self) -> Measured:
        """The measurements of this rank, including those since `agree`."""
        return self._found

    def agree(self, found: Sequence[Measured]) -> None:
        """Use the largest measurement of all ranks.

        Ranks that share rows exchange tokens inside of layers, so they must recompute the same.
        """
        self._agreed = self._found = max(found)

    def take_metrics(self) -> dict[str, MetricSum]:
        """Return the choices since the last call."""
        rows, self._rows = self._rows, []
        num_layers = len(self._layers)
        kept = [kept_bytes(num_layers, self._layer(row), row.num_recomputed) for row in rows]
        return {
            "activations/recomputed_layers": _over([row.num_recomputed for row in rows]),
            "activations/kept_gib": _over([size / GIB for size in kept]),
            "activations/room_gib": _over([self._room_bytes / GIB for _ in rows]),
        }

    def _layer(self, row: "_Row") -> LayerBytes:
        per_token = self._found.num_bytes / max(1, self._found.num_tokens)
        return LayerBytes(whole=round(per_token * row.num_tokens), input=row.input_bytes)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index == 0:
            self._choose(args[0])
        if index < self._num_recomputed:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if index < len(self._layers) - 1:
            return forward(*args, **kwargs)
        return self._measure(forward, *args, **kwargs)

    def _choose(self, hidden: torch.Tensor) -> None:
        num_layers, num_tokens = len(self._layers), hidden.shape[:-1].numel()
        count = max(0, num_layers - 1)
        if num_tokens <= TRUSTED * self._agreed.num_tokens:
            whole = round(self._agreed.num_bytes / self._agreed.num_tokens * num_tokens)
            layer = LayerBytes(whole=whole, input=hidden.nbytes)
            count = fewest_recomputed(num_layers, layer, self._room_bytes)
        self._num_recomputed = count
        self._rows.append(_Row(num_tokens, hidden.nbytes, count))

    def _measure(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Weights are kept anyway, and what all layers are given is kept once.
        given = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, torch.Tensor)]
        common = {
            one.untyped_storage().data_ptr() for one in (*self._layers[-1].parameters(), *given)
        }
        kept: dict[int, int] = {}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in common:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with saved_tensors_hooks(count, lambda tensor: tensor):
            result = forward(*args, **kwargs)
        num_tokens = args[0].shape[:-1].numel()
        self._found = max(self._found, Measured(num_tokens, sum(kept.values())))
        return result


def _over(values: Sequence[float]) -> MetricSum:
    return MetricSum(
        total=float(sum(values)),
        count=float(len(values)),
        lowest=min(values, default=float("inf")),
        highest=max(values, default=float("-inf")),
    )
