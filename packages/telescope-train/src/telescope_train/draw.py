"""Which example comes next: a weighted, seeded draw over environments.

Finite splits are visited without replacement, in a new order each epoch; endless ones in order.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One example to play."""

    environment: str
    example_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One environment's share."""

    environment: str
    weight: float
    num_examples: int | None
    """None = endless."""
    held_out: frozenset[int] = frozenset()
    """Indices that are never drawn."""


class ExampleDraw:
    """Draws for ever. `position` counts draws; equal seeds and sources give equal sequences."""

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

    def skip_to(self, position: int) -> None:
        """Draw and drop until `position` draws were made."""
        while self.position < position:
            self.next()

    @property
    def taken(self) -> Mapping[str, int]:
        """How many examples each environment gave so far."""
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
    """Return index number `taken` of those that are not held out."""
    index = taken
    for held in sorted(held_out):
        index += held <= index
    return index
