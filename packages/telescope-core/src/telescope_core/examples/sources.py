"""Ready-made example sources: a finite list, and endless generators with or without splits.

An environment returns one of these from `examples(self, split)`. `DatasetSource`, for tables and
Hugging Face datasets, is in `telescope_core.dataset_source`.
"""

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from typing import cast

from telescope_core.base.code_places import location_of
from telescope_core.base.errors import ConfigError, EnvironmentLoadError
from telescope_core.base.types import Example, Split
from telescope_core.examples.checks import checked_example

_EVAL_SHARE = 0.1
_MAX_MISSES = 5000


class ListSource:
    """A finite split whose examples are all in memory.

    `num_dropped` is the number of rows that were left out of it because they repeat others.
    """

    def __init__(self, examples: Sequence[Example], *, num_dropped: int = 0) -> None:
        self._examples = examples
        self.num_dropped = num_dropped

    @property
    def num_examples(self) -> int | None:
        """Number of examples in the split."""
        return len(self._examples)

    def example(self, index: int) -> Example:
        """Return example `index`; raises IndexError past the end."""
        if not 0 <= index < len(self._examples):
            raise IndexError(f"example {index} of {len(self._examples)}")
        return self._examples[index]


class GeneratedSource:
    """An endless split in which example `index` depends only on `seed` and `index`.

    `make(random, index)` builds the example from a random generator seeded with both, so the same
    index gives the same example in every process. Use `SplitSource` when train and eval examples
    must be disjoint.
    """

    num_examples: int | None = None
    """None: endless."""

    def __init__(self, make: Callable[[random.Random, int], Example], *, seed: int | str) -> None:
        self._make = make
        self._seed = seed

    def example(self, index: int) -> Example:
        """Return example `index`."""
        return self._make(random.Random(f"{self._seed}/{index}"), index)


def split_of(text: str, *, eval_share: float = _EVAL_SHARE) -> Split:
    """Return the split of a problem, chosen by a hash of its `text`.

    `eval_share` is the fraction of all problems, 0 to 1, that belongs to the eval split.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return Split.EVAL if int.from_bytes(digest[:8]) < eval_share * 2**64 else Split.TRAIN


class SplitSource:
    """An endless split of randomly drawn problems; a hash decides the split of each problem.

    `draw` must give equal problems equal ids. Examples with the same `split_key`, which is the id
    by default, are always in the same split. Give two wordings of one problem the same key, so
    that one of them cannot be trained on while the other is held out. `eval_share` is the fraction
    of problems, 0 to 1, in the eval split.

    Examples are distinct until the problems run out, which is assumed after `_MAX_MISSES` draws in
    a row without a new one. After that they repeat in the same order. The order of draws depends
    only on `seed`, so an index gives the same example in every process.
    """

    num_examples: int | None = None
    """None: endless."""

    def __init__(
        self,
        draw: Callable[[random.Random], Example],
        *,
        split: Split,
        seed: int | str,
        split_key: Callable[[Example], str] = lambda example: example.id,
        eval_share: float = _EVAL_SHARE,
    ) -> None:
        self._draw = draw
        self._split_key = split_key
        self._eval_share = eval_share
        self._split = split
        self._seed = seed
        self._found: dict[str, Example] = {}
        self._order: list[str] = []
        self._num_draws = 0
        self._is_exhausted = False
        self._lock = threading.Lock()

    def example(self, index: int) -> Example:
        """Return example `index`; draws problems until it is reached."""
        with self._lock:
            while index >= len(self._order) and not self._is_exhausted:
                self._find_next()
            if not self._order:
                raise ConfigError(
                    f"{_MAX_MISSES} draws gave no problem of the {self._split} split; "
                    "choose settings that allow more problems"
                )
            return self._found[self._order[index % len(self._order)]]

    def _find_next(self) -> None:
        for _ in range(_MAX_MISSES):
            drawn = self._draw(random.Random(f"{self._seed}/{self._num_draws}"))
            example = checked_example(drawn, where=f"what {location_of(self._draw)} returns")
            self._num_draws += 1
            if example.id not in self._found and self._belongs(example):
                self._found[example.id] = example
                self._order.append(example.id)
                return
        self._is_exhausted = True

    def _belongs(self, example: Example) -> bool:
        key = cast(object, self._split_key(example))
        if not isinstance(key, str):
            raise EnvironmentLoadError(
                f"split_key {location_of(self._split_key)} must return text, got {key!r:.80} "
                f"({type(key).__name__})"
            )
        return split_of(key, eval_share=self._eval_share) is self._split
