"""Context parallelism: several ranks share one packed row, each with a slice of its tokens.

All layers work on the slice. Attention needs whole sequences, so there the ranks exchange heads for
tokens: each gets all tokens of its share of the heads and afterwards returns the result.
Paper: arXiv:2309.14509, section 3.1. Deviation: key and value heads are repeated if there are fewer
of them than ranks.
Dims: T tokens of the row, C tokens of a slice, R ranks, H heads, D head size, M trained tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from telescope_train.cluster.rank_layout import RankLayout
from telescope_train.models.group_wait import group_wait

CONTEXT_ATTENTION = "telescope_context"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """The ranks that share rows, from the point of view of one of them."""

    group: dist.ProcessGroup
    rank: int
    """Position in the group; slices are in this order."""
    size: int
    """Number of ranks in the group."""

    def slice_of(self, num_tokens: int) -> slice:
        """Return this rank's part of a row of `num_tokens`, a multiple of `size`."""
        width = num_tokens // self.size
        return slice(self.rank * width, (self.rank + 1) * width)


def join_context(layout: RankLayout) -> ContextGroup | None:
    """Create the groups of ranks that share rows; None if there are none. Collective."""
    if layout.context == 1:
        return None
    # torch requires every rank to create every group in the same order, even groups that it is not
    # in. Otherwise the ranks wait for each other until they time out.
    rank, mine = dist.get_rank(), None
    for members in layout.groups("context"):
        group = dist.new_group(members, timeout=group_wait())
        if rank in members:
            mine = group
    assert isinstance(mine, dist.ProcessGroup), "every rank of a layout is in one group"
    place = layout.coordinates(rank).context
    return ContextGroup(group=mine, rank=place, size=layout.context)


def register_context_attention() -> None:
    """Make `attn_implementation = CONTEXT_ATTENTION` known to transformers. Idempotent."""
    AttentionInterface.register(CONTEXT_ATTENTION, _context_attention)


# Not compiled, like the kinds of attention that it hands over to.
@torch.compiler.disable
def _context_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: tuple[str, ContextGroup | None],
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, H, C, D] of the slice in, [1, C, H, D] out; `context` is (inner attention, group)."""
    inner, group = context
    attend = AttentionInterface()[inner]
    if group is None:
        return attend(module, query, key, value, attention_mask, **options)
    whole = heads_of_rank(query, key, value, group)
    output, _ = attend(module, *whole, attention_mask, **options)
    return heads_for_tokens(output, group), None


def heads_of_rank(query: Tensor, key: Tensor, value: Tensor, group: ContextGroup) -> list[Tensor]:
    """Exchange slices for heads: each [1, H, C, D] -> [1, H / R, T, D], slices in rank order."""
    # Each rank needs a key and value head. Repeated side by side, they stay aligned with the query
    # heads of the same rank, and autograd adds up the gradients of the copies.
    times = max(1, group.size // key.shape[1])
    states = [query, *(states.repeat_interleave(times, dim=1) for states in (key, value))]
    return [_tokens_for_heads(one, group) for one in states]


def _tokens_for_heads(states: Tensor, group: ContextGroup) -> Tensor:
    """[1, H, C, D] -> [1, H / R, T, D]."""
    # Chunk r holds the heads of rank r. What comes back is ordered by the sender, and the slices
    # follow each other in the order of ranks, so flattening restores the order of the row.
    chunks_RHCD = states[0].unflatten(0, (group.size, -1))
    mine_RHCD = _AllToAll.apply(chunks_RHCD, group.group)
    return mine_RHCD.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def heads_for_tokens(output: Tensor, group: ContextGroup) -> Tensor:
    """Exchange heads for slices, the inverse: [1, T, H / R, D] -> [1, C, H, D]."""
    chunks_RCHD = output[0].unflatten(0, (group.size, -1))
    mine_RCHD = _AllToAll.apply(chunks_RCHD, group.group)
    return mine_RCHD.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _AllToAll(torch.autograd.Function):
    """Chunk j goes to rank j, and chunk i comes from rank i.

    Exchanging twice restores the input, so backward is the same exchange of gradients.
    """

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(chunks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The collective sends memory as it lies and splits it evenly along the first dimension.
    chunks = chunks.contiguous()
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=group)
    return received


class GatherTokens(torch.autograd.Function):
    """Gather the values of all ranks on every rank, in the order of the row.

    Every rank of the group computes the same loss from all values. Each therefore takes only the
    gradient of its own values: adding the others' would count every token once per rank.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, size: int, group: Any) -> Tensor:
        """`places`: the indices of `values` among all `size` values of the row."""
        ctx.save_for_backward(places)
        everything_M = values.new_zeros(size)
        # Each place is filled by one rank and 0 elsewhere, so the sum is exact. Unlike a gather it
        # needs no equal counts: slices hold different numbers of trained tokens.
        everything_M[places] = values
        dist.all_reduce(everything_M, group=group)
        return everything_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of this rank's values."""
        (places,) = ctx.saved_tensors
        return grad_M[places], None, None, None
