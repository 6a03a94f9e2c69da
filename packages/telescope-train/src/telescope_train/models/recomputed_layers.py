"""Choose how many decoder layers to recompute in the backward pass so that a row fits. No torch.

The first layers are: backward begins with the last ones, whose activations are gone by the time
that the first are computed again. Recomputing the last layer as well would save next to nothing,
because its backward pass comes right after its forward pass.
"""

from typing import NamedTuple


class LayerBytes(NamedTuple):
    """Memory of one decoder layer for a row's backward pass, in bytes."""

    whole: int
    """With nothing recomputed."""
    input: int
    """Its input alone, from which everything else is recomputed."""


def fewest_recomputed(num_layers: int, layer: LayerBytes, room_bytes: float) -> int:
    """Return the fewest layers to recompute for at most `room_bytes`; never the last one."""
    most = max(0, num_layers - 1)
    return next(
        (count for count in range(most) if kept_bytes(num_layers, layer, count) <= room_bytes),
        most,
    )


def kept_bytes(num_layers: int, layer: LayerBytes, num_recomputed: int) -> int:
    """Return the memory of all layers when the first `num_recomputed` are recomputed."""
    return (num_layers - num_recomputed) * layer.whole + num_recomputed * layer.input
