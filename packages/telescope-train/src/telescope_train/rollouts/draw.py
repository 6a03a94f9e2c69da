"""Choose the next example: a weighted, seeded draw over environments.

Finite splits are visited without replacement, in a new order in each epoch, and endless splits in
order. The replacement of a rejected group is not drawn from that sequence. When a group is rejected
depends on the clock, which must change neither the sequence nor the choice of replacements.

`held_out.TrainingExamples` decides which draws may be played.
"""

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Split

_SPARES = 64
"""Number of examples of an endless split from which the first replacement is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One example to play."""

    environment: str
    example_index: int
    """Index in `split` of the environment."""
    number: int = 0
    """Number of earlier draws; a replacement has the number of the replaced draw."""
    split: Split = Split.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One environment to draw from."""

    environment: str
    weight: float
    """Share of the draws, relative to the other environments."""
    num_examples: int | None
    """Size of the split; None = endless."""
    held_out: frozenset[int] = frozenset()
    """Indices of examples that are never drawn, not even as replacements."""
    split: Split = Split.TRAIN

    def __post_init__(self) -> None:
        """Raise if no example of the split is left."""
        if self.num_left == 0:
            raise ConfigError(
                f"evals hold out all {self.num_examples} examples of {self.environment!r}, and "
                "nothing is left to train on; lower num_samples, or turn separate_eval_samples off"
            )

    @property
    def num_left(self) -> int | None:
        """Number of examples that may be drawn; None = endless."""
        if self.num_examples is None:
            return None
        return self.num_examples - sum(0 <= i < self.num_examples for i in self.held_out)

    def index(self, place: int) -> int:
        """Return the index at `place` among those that may be drawn, in order."""
        index = place
        for held in sorted(self.held_out):
            index += held <= index
        return index

    def place(self, index: int) -> int:
        """Return the place of `index`, which may be drawn; the inverse of `index`."""
        return index - sum(held < index for held in self.held_out)


class ExampleDraw:
    """An endless draw. `position` counts draws; equal seeds and sources give equal sequences."""

    def __init__(self, sources: Sequence[Source], *, seed: int, keeps_spares: bool = True) -> None:
        """`keeps_spares`: reserve every second example of endless splits for replacements."""
        self._keeps_spares = keeps_spares
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
        index = self._index(name, self._taken[name])
        self._taken[name] += 1
        self.position += 1
        return Drawn(
            environment=name,
            example_index=index,
            number=self.position - 1,
            split=self._sources[name].split,
        )

    def replacement(self, rejected: Drawn, group_id: str) -> Drawn:
        """Return the example for `group_id`, which replaces `rejected`.

        It follows from the seed, `group_id` and `rejected` alone, and is a different example
        unless there is only one.
        """
        chance = random.Random(f"replacement/{self._seed}/{group_id}")
        names = list(self._sources)
        name = chance.choices(names, [self._sources[name].weight for name in names])[0]
        source = self._sources[name]
        is_same = name == rejected.environment
        if source.num_left is None:
            place = _spare(rejected, chance)
            if is_same and source.index(place) == rejected.example_index:
                place += 2
        elif is_same and source.num_left > 1:
            place = chance.randrange(source.num_left - 1)
            place += place >= source.place(rejected.example_index)
        else:
            place = chance.randrange(source.num_left)
        return Drawn(
            environment=name,
            example_index=source.index(place),
            number=rejected.number,
            split=source.split,
        )

    def skip_to(self, position: int) -> None:
        """Draw and discard examples until `position` draws were made."""
        while self.position < position:
            self.next()

    def numbered(self, numbers: Set[int]) -> dict[int, Drawn]:
        """Return the draws with these numbers, whether or not they were made before."""
        if not numbers:
            return {}
        again = ExampleDraw(
            list(self._sources.values()), seed=self._seed, keeps_spares=self._keeps_spares
        )
        draws = (again.next() for _ in range(max(numbers) + 1))
        return {drawn.number: drawn for drawn in draws if drawn.number in numbers}

    @property
    def taken(self) -> Mapping[str, int]:
        """Number of examples drawn from each environment so far."""
        return dict(self._taken)

    def _index(self, name: str, taken: int) -> int:
        source = self._sources[name]
        if source.num_left is None:
            return source.index(2 * taken if self._keeps_spares else taken)
        epoch, offset = divmod(taken, source.num_left)
        known = self._orders.get(name)
        if known is None or known[0] != epoch:
            order = [i for i in range(source.num_examples or 0) if i not in source.held_out]
            random.Random(f"order/{self._seed}/{name}/{epoch}").shuffle(order)
            known = self._orders[name] = (epoch, order)
        return known[1][offset]


def _spare(rejected: Drawn, chance: random.Random) -> int:
    """Return the place of a spare example of an endless split: an odd one.

    The choice grows with the run and not beyond it: to make example n, an environment may have to
    make all those before it.
    """
    return 2 * chance.randrange(rejected.number + _SPARES) + 1
