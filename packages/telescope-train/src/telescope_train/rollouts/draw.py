"""Which example comes next: a weighted, seeded draw over environments.

Finite splits are visited without replacement, in a new order in each epoch, and endless splits in
order. The replacement of a rejected group is not drawn from that sequence. When a group is rejected
depends on the clock, which must change neither the sequence nor the choice of replacements.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BEYOND_ANY_RUN = (2**31, 2**32)
"""Range of indices of an endless split that no run reaches in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One example to play."""

    environment: str
    example_index: int
    """Index in the training split of the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One environment to draw from."""

    environment: str
    weight: float
    """Share of the draws, relative to the other environments."""
    num_examples: int | None
    """Size of the split; None = endless."""
    held_out: frozenset[int] = frozenset()
    """Indices of examples that are never drawn."""


class ExampleDraw:
    """Draws without end. `position` counts draws; equal seeds and sources give equal sequences."""

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        self._sources = {source.environment: source for source in sources}
        self._seed = seed
        self._random = random.Random(f"draw/{seed}")
        self._taken: dict[str, int] = dict.fromkeys(self._sources, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}
        self.position = 0

    def next(self) -> Drawn:
        """Return the next example."""
        names = list(self._sources)
        weights = [self._sources[name].weight for name in names]
        name = self._random.choices(names, weights)[0]
        taken = self._taken[name]
        self._taken[name] += 1
        self.position += 1
        return Drawn(environment=name, example_index=self._index(name, taken))

    def replacement(self, rejected: Drawn, group_id: str) -> Drawn:
        """Return the example that is played as `group_id`, in the place of `rejected`.

        It follows from the seed, `group_id` and `rejected` alone, and is a different example
        unless there is only one.
        """
        chance = random.Random(f"replacement/{self._seed}/{group_id}")
        names = list(self._sources)
        name = chance.choices(names, [self._sources[name].weight for name in names])[0]
        size = self._sources[name].num_examples
        if size is None:
            return Drawn(environment=name, example_index=chance.randrange(*_BEYOND_ANY_RUN))
        if name != rejected.environment or size == 1:
            return Drawn(environment=name, example_index=chance.randrange(size))
        index = chance.randrange(size - 1)
        return Drawn(environment=name, example_index=index + (index >= rejected.example_index))

    def skip_to(self, position: int) -> None:
        """Draw and discard examples until `position` draws were made."""
        while self.position < position:
            self.next()

    @property
    def taken(self) -> Mapping[str, int]:
        """How many examples were drawn from each environment so far."""
        return dict(self._taken)

    def _index(self, name: str, taken: int) -> int:
        source = self._sources[name]
        if source.num_examples is None:
            return _skipping(taken, source.held_out)
        size = source.num_examples - len(source.held_out)
        epoch, offset = divmod(taken, size)
        known = self._orders.get(name)
        if known is None or known[0] != epoch:
            order = [i for i in range(source.num_examples) if i not in source.held_out]
            random.Random(f"order/{self._seed}/{name}/{epoch}").shuffle(order)
            known = self._orders[name] = (epoch, order)
        return known[1][offset]


def _skipping(taken: int, held_out: frozenset[int]) -> int:
    """Return the index at position `taken` among the indices that are not held out."""
    index = taken
    for held in sorted(held_out):
        index += held <= index
    return index
