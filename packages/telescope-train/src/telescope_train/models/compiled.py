"""torch.compile for decoder layers, one by one: they are alike, so one compilation serves all.

Attention is left out: it goes by the lengths of the samples, which differ in every row, and its
kernels are compiled already. Lengths of rows are dynamic.
"""

from collections.abc import Iterable

import torch


def compile_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Compile the forward of each layer when it first runs; names of parameters stay."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
