"""Where the samples of a packed row begin and end, in the form that each attention needs."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from telescope_train.models.attention.blocks import PackedLayout, packed_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where the sequences of a row begin and end; each attention uses the fields it needs."""

    positions_T: torch.Tensor
    """[T] int64, restarting at 0 for every sequence."""
    layout: PackedLayout
    """For attention in blocks."""
    starts: torch.Tensor
    """[S + 1] int32 cumulative lengths in tokens, as varlen kernels take them."""
    longest: int
    """Tokens of the longest sequence; a plain int, so that no layer has to wait for a GPU."""


def find_sequences(positions_T: NDArray[np.integer], device: torch.device) -> Sequences:
    """Describe a row whose positions restart at 0 for every sequence."""
    # Computed in numpy and moved once: on a GPU, finding zeros would make the host wait.
    starts = np.append(np.flatnonzero(positions_T == 0), len(positions_T))
    return Sequences(
        positions_T=torch.tensor(positions_T, dtype=torch.long).to(device),
        layout=packed_layout(positions_T, device),
        starts=torch.from_numpy(starts.astype(np.int32)).to(device),
        longest=int(np.diff(starts).max()),
    )
