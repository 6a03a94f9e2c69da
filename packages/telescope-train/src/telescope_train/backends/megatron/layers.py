"""The layers that are Telescope's own, for CPU and GPU.

A norm, attention over packed rows, and experts; the matrices that tensor-parallel ranks divide are
the library's. With `megatron_use_transformer_engine` none of these is used.
Dims: T tokens of a rank, H hidden size, D head size, E experts of a rank, F columns of an expert.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from telescope_train.models.attention.blocks import Sequences
from telescope_train.models.attention.context_parallel import (
    ContextGroup,
    heads_for_tokens,
    heads_of_rank,
)
from telescope_train.models.attention.kinds import AttentionKind
from telescope_train.models.moving import to_device


class Norm(torch.nn.Module):
    """Root-mean-square norm, also for tokens that are divided over ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # The library adds up the gradients of what is marked so over tensor-parallel ranks, each of
        # which sees only its own tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] in and out; sums are in float32 or wider."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(states.dtype)


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a row, of the kind chosen for the run.

    Context-parallel ranks exchange heads for tokens, as in the backend `fsdp`.
    """

    is_causal = True

    def __init__(
        self, config: Any, kind: AttentionKind, softmax_scale: Any = None, **_: Any
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self._kind = kind
        self._scale = softmax_scale or config.kv_channels**-0.5
        group = parallel_state.get_context_parallel_group()
        self._group = ContextGroup(group=group, rank=group.rank(), size=group.size())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any
    ) -> Tensor:
        """Map this rank's tokens: [T, heads, D] to [T, heads * D]."""
        states = [one.transpose(0, 1).unsqueeze(0) for one in (query, key, value)]
        sequences, order = packed_seq_params.sequences, packed_seq_params.order
        if self._group.size == 1:
            return self._attend(states, sequences)[0].flatten(1)
        whole = heads_of_rank(*states, self._group)
        # The library gives each rank pieces of every sequence, which here are put in order.
        output = self._attend([one[:, :, order.row_from_ranks] for one in whole], sequences)
        return heads_for_tokens(output[:, order.ranks_from_row], self._group)[0].flatten(1)

    def _attend(self, states: list[Tensor], sequences: Sequences) -> Tensor:
        """Map [1, heads, T, D], three times, to [1, T, heads, D]."""
        attend = AttentionInterface()[self._kind.implementation]
        output, _ = attend(
            self,
            *states,
            None,
            scaling=self._scale,
            dropout=0.0,
            **self._kind.arguments(sequences),
        )
        return output


class GroupedExperts(torch.nn.Module):
    """The whole experts of a rank in two tensors, with one grouped product for all."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._config = config
        self._groups = pg_collection
        hidden, columns = config.hidden_size, config.moe_ffn_hidden_size
        place = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.fc1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * columns, hidden, **place))
        """[E, 2 F, H] the gate matrix above the up matrix."""
        self.fc2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, columns, **place))
        """[E, H, F]."""
        for weight in (self.fc1, self.fc2):
            # Not summed with the dense parameters, but over the ranks that hold the same experts,
            # which are others even where experts are not divided: tensor-parallel ranks are
            # among them. And each rank counts its own in the gradient norm.
            weight.allreduce = False
            weight.tensor_model_parallel = True

    def forward(
        self, states_TH: Tensor, tokens_per_expert: Tensor, probs_T: Tensor
    ) -> tuple[Tensor, None]:
        """Map tokens that are sorted by expert, each with the weight of its expert."""
        counts_E = torch.as_tensor(tokens_per_expert)
        if counts_E.device.type == "cpu":
            counts_E = to_device(counts_E.numpy(), states_TH.device)
        both = _grouped_product(states_TH, self.fc1, counts_E)
        gate, up = both.chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up * probs_T.unsqueeze(-1)
        return _grouped_product(inner.to(states_TH.dtype), self.fc2, counts_E), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Describe this rank's experts as a part of all experts."""
        from megatron.core.dist_checkpointing import ShardedTensor

        group, first = self._groups.ep, len(sharded_offsets)
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                (first, group.rank(), group.size()),
                replica_id=(0, 0, self._groups.expt_dp.rank()),
                prepend_axis_num=first,
            )
            for name, weight in self.named_parameters()
        }


def _grouped_product(states_TX: Tensor, weight_EYX: Tensor, counts_E: Tensor) -> Tensor:
    """Return [T, Y]: each token times its expert's matrix; tokens are sorted by expert."""
    if states_TX.dtype == torch.float64:
        # torch's grouped product knows no float64, which only tests use.
        pieces = states_TX.split(counts_E.tolist())
        return torch.cat(
            [piece @ weight.T for piece, weight in zip(pieces, weight_EYX, strict=True)]
        )
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return torch.nn.functional.grouped_mm(states_TX, weight_EYX.transpose(1, 2), offs=ends_E)
