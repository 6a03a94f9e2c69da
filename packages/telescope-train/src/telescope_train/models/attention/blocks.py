"""Causal attention over packed rows: each sequence attends to itself, without a dense mask.

Sequences of a row are gathered into right-padded blocks of similar length and go through torch's
causal SDPA. Padding comes after the real tokens, so causality alone hides it and no [T, T] mask
exists. Used on the CPU, and on CUDA if no faster kind works.
Dims: T tokens of the row, P padded tokens over all blocks, S sequences, L block length, H heads,
D head size, B one block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from telescope_train.models.attention.prefixes import SharedRow
from telescope_train.models.moving import to_device

PACKED_ATTENTION = "telescope_packed"
_MIN_FILL = 0.75
"""Share of a block's longest sequence below which a shorter one starts a new block."""
_SMALL_BLOCK_TOKENS = 512
"""Tokens of a block that takes shorter sequences too, because a call costs more than padding.

Padding of a long sequence costs more than a call: what it attends to grows with the square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """The positions of a row's tokens in padded blocks, and the way back."""

    gather_P: torch.Tensor
    """[P] int64, the token at each padded position; padding repeats its sequence's first token."""
    place_T: torch.Tensor
    """[T] int64, the padded position of each token."""
    padding: torch.Tensor
    """[P - T] int64, the padded positions that hold padding."""
    blocks: tuple[tuple[int, int], ...]
    """(S, L) of each block, in the order of the padded positions."""


def packed_layout(lengths_S: NDArray[np.int64], device: torch.device) -> PackedLayout:
    """Plan the blocks of a row of sequences of `lengths_S` [S] tokens, each at least 1."""
    # On the host in numpy: one plan serves all layers, and sizes that were computed on a GPU would
    # make the host wait for it.
    starts_S = np.cumsum(lengths_S) - lengths_S
    num_tokens = int(lengths_S.sum())
    order_S = np.argsort(-lengths_S, kind="stable")
    blocks = _blocks(lengths_S[order_S])
    gather, place_T, padding, first, base = [], np.empty(num_tokens, np.int64), [], 0, 0
    for num_sequences, length in blocks:
        chosen = order_S[first : first + num_sequences]
        offsets_L = np.arange(length)
        is_real_SL = offsets_L < lengths_S[chosen, None]
        # Padding needs some valid index, and the sequence's first token will do: no real token
        # attends to padding, and the outputs of padding are dropped.
        token_SL = np.where(is_real_SL, starts_S[chosen, None] + offsets_L, starts_S[chosen, None])
        place_SL = base + np.arange(num_sequences * length).reshape(num_sequences, length)
        place_T[token_SL[is_real_SL]] = place_SL[is_real_SL]
        gather.append(token_SL.ravel())
        padding.append(place_SL[~is_real_SL])
        first, base = first + num_sequences, base + num_sequences * length
    return PackedLayout(
        gather_P=to_device(np.concatenate(gather), device),
        place_T=to_device(place_T, device),
        padding=to_device(np.concatenate(padding), device),
        blocks=tuple(blocks),
    )


def _blocks(descending_lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return (sequences, length) of each block over sequences that are sorted by length."""
    blocks: list[tuple[int, int]] = []
    first = 0
    while first < len(descending_lengths):
        longest = int(descending_lengths[first])
        least_padded = max(0, longest**2 - _SMALL_BLOCK_TOKENS**2) ** 0.5
        shortest = max(_MIN_FILL * longest, least_padded)
        # searchsorted wants ascending values, hence the minus signs.
        last = int(np.searchsorted(-descending_lengths, -shortest, side="right"))
        last = max(last, min(len(descending_lengths), first + _SMALL_BLOCK_TOKENS // longest))
        blocks.append((last - first, longest))
        first = last
    return blocks


class _ToBlocks(torch.autograd.Function):
    """[T, ...] -> [P, ...]. Padding gets no gradient: causality keeps it out of every loss.

    autograd's own backward of index_select adds with index_add, which on a GPU sums in no fixed
    order. Each token has one place, so here it is a gather: faster, and the same bits every time.
    """

    @staticmethod
    def forward(ctx, values_T, layout):
        ctx.layout = layout
        return values_T.index_select(0, layout.gather_P)

    @staticmethod
    def backward(ctx, grad_P):
        return grad_P.index_select(0, ctx.layout.place_T), None


class _FromBlocks(torch.autograd.Function):
    """[P, ...] -> [T, ...]. Padding is dropped, so its gradient is zero."""

    @staticmethod
    def forward(ctx, values_P, layout):
        ctx.layout = layout
        return values_P.index_select(0, layout.place_T)

    @staticmethod
    def backward(ctx, grad_T):
        # The gather leaves copies of the first token's gradient on padding. Padding attends to real
        # tokens, so without zeros there it would add to the gradients of their keys and values.
        grad_P = grad_T.index_select(0, ctx.layout.gather_P)
        return grad_P.index_fill_(0, ctx.layout.padding, 0.0), None


_BEYOND = {
    "softcap": "soft caps of attention scores",
    "s_aux": "attention sinks",
    "position_bias": "biases of positions",
}
"""Option of attention in some models' layers -> its name for people."""


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise ValueError for options of a layer other than a scale and a window.

    The kernels would ignore it without a word.
    """
    for name, meaning in _BEYOND.items():
        if options.get(name) is not None:
            raise ValueError(f"does not support {meaning}")


# Not compiled: number and sizes of blocks change from row to row, and each would compile anew.
@torch.compiler.disable
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence; [1, H, T, D] in, [1, T, H, D] out, as transformers expects.

    Raises ValueError for a layer with a window or a soft cap.
    """
    refuse_options(options)
    # Blocks attend with is_causal alone; a window would need a mask. The layers know best whether
    # they have one: configs tell it in a different way for each family of models.
    if options.get("sliding_window") is not None:
        raise ValueError("does not support sliding windows")
    padded = [
        _ToBlocks.apply(states[0].transpose(0, 1), packed_layout) for states in (query, key, value)
    ]
    outputs, base = [], 0
    for num_sequences, length in packed_layout.blocks:
        end = base + num_sequences * length
        query_B, key_B, value_B = (
            states[base:end].unflatten(0, (num_sequences, length)).transpose(1, 2)
            for states in padded
        )
        # is_causal instead of a mask lets torch use its fused kernels. enable_gqa accepts fewer
        # heads of keys and values than of queries.
        output_B = F.scaled_dot_product_attention(
            query_B, key_B, value_B, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(output_B.transpose(1, 2).flatten(0, 1))
        base = end
    together_P = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _FromBlocks.apply(together_P, packed_layout).unsqueeze(0), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The borders of the sequences of a row; each attention uses the fields that it needs."""

    positions_T: torch.Tensor
    """[T] int64, restarting at 0 for every sequence."""
    layout: PackedLayout
    """Layout for attention in blocks."""
    starts: torch.Tensor
    """[S + 1] int32 cumulative lengths in tokens, for varlen kernels."""
    host_starts: torch.Tensor
    """The same in the memory of the host, for code that reads them: on a GPU it would wait."""
    longest: int
    """Tokens of the longest sequence; a plain int, so that no layer has to wait for a GPU."""
    shared: SharedRow | None = None
    """Shared prefixes, if some positions continue those of another sequence. Each sequence then
    holds the part of a sample that is stored in the row."""


def find_sequences(positions_T: NDArray[np.integer], device: torch.device) -> Sequences:
    """Describe a row whose positions restart at 0 for every sequence."""
    # Computed in numpy and moved once: on a GPU, finding zeros would make the host wait.
    starts_S = np.flatnonzero(positions_T == 0)
    return _sequences(positions_T, np.diff(np.append(starts_S, len(positions_T))), device, None)


def find_shared_sequences(shared: SharedRow, device: torch.device) -> Sequences:
    """Describe a row of samples in which shared tokens are stored once."""
    own_S, first_S = shared.own_S, shared.shared_S
    positions_T = np.arange(own_S.sum()) + np.repeat(first_S - shared.starts_S, own_S)
    return _sequences(positions_T, own_S[own_S > 0], device, shared)


def _sequences(
    positions_T: NDArray[np.integer],
    lengths_S: NDArray[np.int64],
    device: torch.device,
    shared: SharedRow | None,
) -> Sequences:
    return Sequences(
        positions_T=to_device(positions_T, device, torch.long),
        layout=packed_layout(lengths_S, device),
        starts=cumulative(lengths_S, device),
        host_starts=cumulative(lengths_S, torch.device("cpu")),
        longest=int(lengths_S.max()),
        shared=shared,
    )


def cumulative(lengths_S: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return [S + 1] int32 the sums of the first 0, 1, 2 ... of `lengths_S`."""
    sums = np.append(0, np.cumsum(lengths_S)).astype(np.int32)
    return to_device(sums, device)
