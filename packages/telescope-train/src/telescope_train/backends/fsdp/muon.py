"""Muon: the matrices of the layers move by orthogonalized momentum, everything else by AdamW.

Paper: arXiv:2502.16982, section 2.2: the scale of an update, and decoupled weight decay.
Deviation: matrices that are fused in one parameter are orthogonalized one by one.

A shard of FSDP is a range of rows, and a product needs whole matrices. So each matrix has a rank
that owns it: it is given the rows of the others, orthogonalizes the matrix, and sends them back.
Dims: K matrices of one shape, R rows and C columns of each.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from telescope_train.backends.fsdp.sharding import decoder_layers, local_part, shard_place
from telescope_train.config.trainer_section import MUON_BATCH_VALUES

T = TypeVar("T")

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: five times, this polynomial brings singular values near 1."""
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
UPDATE_SIZE = 0.2
"""Root mean square of the elements of an update, at a learning rate of 1: as AdamW's."""


def orthogonalize(matrices_KRC: Tensor) -> Tensor:
    """Return about U V^T for each matrix U S V^T, by Newton-Schulz iteration in its own dtype.

    Singular values above a 500th of the Frobenius norm end between 0.68 and 1.21; smaller ones grow
    by up to 485.
    """
    # The product of a matrix with itself is then the smaller one of the two.
    is_tall = matrices_KRC.shape[1] > matrices_KRC.shape[2]
    wide = matrices_KRC.mT if is_tall else matrices_KRC
    # No singular value is larger than the Frobenius norm, which is added up in float32.
    dtype = torch.promote_types(wide.dtype, torch.float32)
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True, dtype=dtype)
    wide = wide / norms.clamp_(min=SMALLEST_NORM).to(wide.dtype)
    first, third, fifth = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = torch.bmm(wide, wide.mT)
        factor = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        wide = torch.baddbmm(wide, factor, wide, beta=first)
    return wide.mT.contiguous() if is_tall else wide


def hidden_matrices(lm: PreTrainedModel) -> dict[Parameter, tuple[int, ...]]:
    """Return the trained matrices of the decoder layers, and the rows of those fused in each.

    Experts are stacked as [experts, rows, columns]. A projection that is stored with others is a
    matrix of its own, as it is in models that keep it apart: the result should not depend on that.
    """
    found: dict[Parameter, tuple[int, ...]] = {}
    for name, parameter in decoder_layers(lm).named_parameters():
        is_matrix = parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)
        # A bias of each expert has two dimensions as well.
        if not parameter.requires_grad or not is_matrix or name.endswith("bias"):
            continue
        rows = parameter.shape[-2]
        found[parameter] = (rows,)
        if "gate_up_proj" in name or "shared_mlp.input_linear" in name:
            found[parameter] = (rows // 2, rows // 2)
        elif "qkv_proj" in name:
            config = lm.config
            heads = config.num_attention_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // heads
            other = (rows - heads * size) // 2
            found[parameter] = (heads * size, other, other)
    return found


class Matrix(NamedTuple):
    """A matrix whose rows are divided among ranks."""

    parameter: int
    """Number of the parameter that it is in."""
    first: int
    """Its first row there."""
    rows: int
    columns: int
    chunk: int
    """Rows of the parameter that a rank has; the last ranks have fewer, or none."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    def rows_of(self, rank: int) -> range:
        """Return the rows of the parameter that are of this matrix and on `rank`."""
        start = max(self.first, rank * self.chunk)
        return range(start, max(start, min(self.first + self.rows, (rank + 1) * self.chunk)))


class Stack(NamedTuple):
    """Whole matrices of one shape that a rank has in its shard of a parameter."""

    parameter: int
    start: int
    stop: int
    """Experts of the shard, from `start` to before `stop`; a parameter without is one expert."""
    first: int
    """First row of each matrix."""
    shape: tuple[int, int]

    def of(self, local: Tensor) -> Tensor:
        """Return the matrices [K, R, C] in the shard of a parameter, as a view."""
        stacked = local if local.ndim == 3 else local[None]
        return stacked[self.start : self.stop, self.first : self.first + self.shape[0]]


Round = tuple[tuple[Matrix, ...], ...]
"""By rank, the matrices that it orthogonalizes at one time; those of a shape are neighbors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """The order in which a rank orthogonalizes; the rounds are the same on all ranks."""

    batches: tuple[tuple[Stack, ...], ...]
    """Matrices of one shape that are whole on this rank."""
    rounds: tuple[Round, ...]


def make_plan(parameters: Sequence[Tensor], fused: Sequence[tuple[int, ...]]) -> ProductPlan:
    """Return the plan of this rank; `fused`: the rows of the matrices in each parameter."""
    stacks: list[Stack] = []
    divided: list[Matrix] = []
    num_ranks = shard_place(parameters[0]).num_shards
    for number, (parameter, sizes) in enumerate(zip(parameters, fused, strict=True)):
        local, first = local_part(parameter), 0
        for rows in sizes:
            columns = parameter.shape[-1]
            if parameter.ndim == 2 and num_ranks > 1:
                chunk = math.ceil(parameter.shape[0] / num_ranks)
                divided.append(Matrix(number, first, rows, columns, chunk))
            else:
                # FSDP divides a stack by experts, so that each is whole on some rank.
                count = local.shape[0] if local.ndim == 3 else 1
                step = max(1, MUON_BATCH_VALUES // (rows * columns))
                stacks += [
                    Stack(number, start, min(start + step, count), first, (rows, columns))
                    for start in range(0, count, step)
                ]
            first += rows
    stacks.sort(key=lambda stack: stack.shape)
    batches = [
        batch
        for shape, same in groupby(stacks, key=lambda stack: stack.shape)
        for batch in _cut([(one, (one.stop - one.start) * math.prod(shape)) for one in same])
    ]
    return ProductPlan(batches=tuple(batches), rounds=tuple(deal(divided, num_ranks)))


def deal(matrices: Sequence[Matrix], num_ranks: int) -> Iterator[Round]:
    """Give each matrix, the costliest first, to the rank with the least work; yield the rounds."""

    def cost(one: Matrix) -> int:
        narrow, wide = sorted(one.shape)
        return narrow * narrow * (2 * wide + narrow)  # multiplications of one iteration

    owned: list[list[tuple[Matrix, int]]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for one in sorted(matrices, key=lambda one: (-cost(one), one.shape)):
        owner = work.index(min(work))
        work[owner] += cost(one)
        owned[owner].append((one, math.prod(one.shape)))
    # All owners begin with their largest, so that those of one round are about as large.
    yield from zip_longest(*(_cut(one) for one in owned), fillvalue=())


def _cut(sized: Iterable[tuple[T, int]]) -> Iterator[tuple[T, ...]]:
    """Yield rows of neighbors, as long as `MUON_BATCH_VALUES` allows."""
    batch: list[T] = []
    total = 0
    for one, size in sized:
        if batch and total + size > MUON_BATCH_VALUES:
            yield tuple(batch)
            batch, total = [], 0
        batch.append(one)
        total += size
    if batch:
        yield tuple(batch)


class Muon(torch.optim.AdamW):
    """Muon for `matrices`, with the rows of those fused in each; torch's AdamW for the others.

    The gradient of a matrix is overwritten by its momentum and freed. Nothing waits for a GPU, but
    for weights that are kept in CPU memory.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        matrices: Mapping[Parameter, tuple[int, ...]],
        *,
        momentum: float,
        device: torch.device,
        **of_adam: Any,
    ) -> None:
        """`device`: where products are computed, also for weights in CPU memory."""
        super().__init__(params, fused=True, **of_adam)
        self._matrices, self._momentum, self._device = dict(matrices), momentum, device
        self._plans: dict[tuple[int, ...], ProductPlan] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state; AdamW's own method expects a count of steps for every parameter."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; `closure` is not supported."""
        assert closure is None, "gradients are accumulated before the step"
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p in self._matrices and p.grad is not None]
            if chosen:
                self._step_matrices(chosen, rate=group["lr"], decay=group["weight_decay"])
        super().step()

    def _step_matrices(self, parameters: list[Parameter], *, rate: float, decay: float) -> None:
        momenta: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momenta.append(local_part(state["momentum_buffer"]))
            assert parameter.grad is not None
            gradients.append(local_part(parameter.grad))
            # Freed, and nothing is left to do for AdamW.
            parameter.grad = None
        # Elementwise on shards. By Nesterov, the gradient counts once more; it is not needed later.
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        torch._foreach_lerp_(gradients, momenta, self._momentum)
        weights = [local_part(parameter) for parameter in parameters]
        torch._foreach_mul_(weights, 1 - rate * decay)
        key = tuple(map(id, parameters))
        if key not in self._plans:
            self._plans[key] = make_plan(parameters, [self._matrices[p] for p in parameters])
        for batch in self._plans[key].batches:
            taken = [one.of(gradients[one.parameter]) for one in batch]
            done = orthogonalize(self._for_products(torch.cat(taken)))
            moved = [one.of(weights[one.parameter]) for one in batch]
            scales = [_scale(one.shape) for one in batch]
            self._move(moved, done, scales, rate)
        for one in self._plans[key].rounds:
            self._step_round(one, parameters[0], weights, gradients, rate)

    def _step_round(
        self,
        owned: Round,
        sharded: Tensor,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rate: float,
    ) -> None:
        """Send rows to the owners of their matrices and back, with all ranks of `sharded`."""
        assert isinstance(sharded, DTensor)
        ranks = sharded.device_mesh.get_group("shard")
        rank = ranks.rank()
        every, mine = [one for owner in owned for one in owner], owned[rank]

        def rows_here(shards: Sequence[Tensor]) -> list[Tensor]:
            begun = [one.rows_of(rank) for one in every]
            return [
                shards[one.parameter][rows.start - rank * one.chunk : rows.stop - rank * one.chunk]
                for one, rows in zip(every, begun, strict=True)
            ]

        def sizes(owner: Sequence[Matrix], at: int) -> list[int]:
            return [len(one.rows_of(at)) * one.columns for one in owner]

        to_owners = [sum(sizes(owner, rank)) for owner in owned]
        from_ranks = [sum(sizes(mine, at)) for at in range(len(owned))]
        sent = self._for_products(torch.cat([rows.reshape(-1) for rows in rows_here(gradients)]))
        received = sent.new_empty(sum(from_ranks))
        dist.all_to_all_single(received, sent, from_ranks, to_owners, group=ranks)
        pieces = iter(
            received.split([size for at in range(len(owned)) for size in sizes(mine, at)])
        )
        by_matrix = list(zip(*[[next(pieces) for _ in mine] for _ in owned], strict=True))
        done: list[Tensor] = []
        for shape, same in groupby(
            zip(mine, by_matrix, strict=True), key=lambda pair: pair[0].shape
        ):
            rows = [piece for _, parts in same for piece in parts]
            done += orthogonalize(torch.cat(rows).view(-1, *shape)).unbind()
        back = [
            matrix[one.rows_of(at).start - one.first : one.rows_of(at).stop - one.first].reshape(-1)
            for at in range(len(owned))
            for one, matrix in zip(mine, done, strict=True)
        ]
        returned = torch.empty_like(sent)
        # A rank may own none of a round.
        dist.all_to_all_single(
            returned, torch.cat([received[:0], *back]), to_owners, from_ranks, group=ranks
        )
        self._move(rows_here(weights), returned, [_scale(one.shape) for one in every], rate)

    def _for_products(self, values: Tensor) -> Tensor:
        """Return `values` where products are computed: in bfloat16, or on a CPU in float32."""
        is_gpu = self._device.type == "cuda"
        wide = torch.promote_types(values.dtype, torch.float32)
        return values.to(self._device, torch.bfloat16 if is_gpu else wide)

    def _move(self, weights: list[Tensor], done: Tensor, scales: list[float], rate: float) -> None:
        """Move `weights` by updates that lie in `done` one after the other."""
        flat = done.to(weights[0].device, weights[0].dtype).view(-1)
        parts = flat.split([values.numel() for values in weights])
        updates = [part.view(values.shape) for part, values in zip(parts, weights, strict=True)]
        torch._foreach_mul_(updates, scales)
        torch._foreach_add_(weights, updates, alpha=-rate)


def _scale(shape: tuple[int, int]) -> float:
    # Elements of an orthogonal matrix have a root mean square of 1 / sqrt(max(shape)).
    return UPDATE_SIZE * math.sqrt(max(shape))
