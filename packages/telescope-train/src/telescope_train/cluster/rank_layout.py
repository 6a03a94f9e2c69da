"""`RankLayout`: the role of each trainer rank by its number; a backend declares it.

Ranks are numbered in Megatron's order `tp-cp-ep-dp-pp`: tensor parallelism varies fastest, then
context, then data, and pipeline stages are furthest apart. Experts are dealt to the ranks of a
stage separately, from its first rank on, regardless of their places in the other dimensions.
Imports no torch, so that settings, placement and the plan can read it before any process starts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

Dimension: TypeAlias = Literal["tensor", "context", "data", "pipeline", "expert"]


class Coordinates(NamedTuple):
    """The position of a rank in each dimension, from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The division of a step's work and of the weights among ranks. Sizes are numbers of ranks.

    Raises ValueError for sizes that do not fit together; backends check first, by the names of
    their settings.
    """

    data: int = 1
    """Shards of the rows of a step: each is computed by the ranks that differ in other ways."""
    tensor: int = 1
    """Ranks that divide each matrix; all of them see the whole row."""
    context: int = 1
    """Ranks that divide the tokens of a row."""
    pipeline: int = 1
    """Ranks that divide the layers."""
    expert: int = 1
    """Ranks of a stage that divide the experts of a layer."""
    expert_tensor: int = 1
    """Ranks that divide each matrix of an expert."""
    weight_shards: int = 1
    """Neighbors along context and data, taken together, that keep shards of one copy of their
    weights (FSDP); 1 = each keeps all that its tensor and pipeline place has."""

    def __post_init__(self) -> None:
        """Raise if the sizes do not divide the ranks to which they apply."""
        sizes = (self.data, self.tensor, self.context, self.pipeline, self.expert)
        if min(*sizes, self.expert_tensor, self.weight_shards) < 1:
            raise ValueError(f"every size of a layout must be at least 1, got {self}")
        peers, stage = self.context * self.data, self.num_ranks // self.pipeline
        if peers % self.weight_shards:
            raise ValueError(
                f"weight_shards ({self.weight_shards}) must divide context x data ({peers})"
            )
        experts = self.expert * self.expert_tensor
        if self.expert > 1 and stage % experts:
            raise ValueError(
                f"expert x expert_tensor ({experts}) must divide the {stage} ranks of a stage"
            )

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def num_shards(self) -> int:
        """Number of parts that the rows of a step are packed into."""
        return self.data

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that compute the same rows together."""
        return self.tensor * self.context * self.pipeline

    @property
    def num_copies(self) -> int:
        """Number of copies of every weight outside experts, over all ranks."""
        return self.context * self.data // self.weight_shards

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of `rank`."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        in_stage = rank % (self.num_ranks // self.pipeline)
        expert = in_stage // self.expert_tensor % self.expert
        return Coordinates(tensor, context, data, pipeline, expert)

    def shard_of(self, rank: int) -> int:
        """Return the shard of rows that `rank` computes, alone or with others."""
        return self.coordinates(rank).data

    @cached_property
    def speakers(self) -> tuple[int, ...]:
        """The rank that reports for each shard: the first of those with the last layers.

        Log-probs and losses are known where the last layers are; of ranks that know the same, one
        is counted.
        """
        last = self.pipeline - 1
        return tuple(
            rank
            for rank in range(self.num_ranks)
            if self.coordinates(rank)[:2] == (0, 0) and self.coordinates(rank).pipeline == last
        )

    def groups(self, dimension: Dimension) -> list[list[int]]:
        """Return groups of ranks that differ only in `dimension`, each ascending.

        Those of `expert` are neighbors: each has other experts of the same layers.
        """
        if dimension == "expert":
            return self._expert_groups()
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            place = self.coordinates(rank)._replace(expert=0, **{dimension: 0})
            found.setdefault(tuple(place), []).append(rank)
        return list(found.values())

    def _expert_groups(self) -> list[list[int]]:
        size = self.expert_tensor
        width = self.expert * size
        return [
            list(range(first + offset, first + width, size))
            for first in range(0, self.num_ranks, width)
            for offset in range(size)
        ]


ONE_RANK = RankLayout()
