"""Count the work of a rank, which distinguishes a slow rank from a stuck one. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from telescope_train.batches.batch import PackedBatch

Item = TypeVar("Item")


@dataclass(slots=True)
class RankProgress:
    """Counts the work of a rank, which distinguishes a slow rank from a stuck one."""

    count: int = 0
    """Number of batches, tensors and spans so far."""
    activity: str = ""
    """What it does before it is open."""

    def one(self) -> None:
        """Count one item."""
        self.count += 1

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`, and count each one when the next is requested."""
        for item in items:
            yield item
            self.count += 1

    def over(self, batches: Sequence[PackedBatch]) -> "CountedBatches":
        """Return `batches` so that a loop over them counts each one."""
        return CountedBatches(batches, self)


class CountedBatches(Sequence[PackedBatch]):
    """Batches whose use counts as progress."""

    def __init__(self, batches: Sequence[PackedBatch], progress: RankProgress) -> None:
        self._batches = batches
        self._progress = progress

    def __iter__(self) -> Iterator[PackedBatch]:
        return self._progress.each(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]
