"""A row in which samples share prefixes, as attention sees it: pieces and their keys.

A shared token stands once in a row. So a sample's own tokens are one piece of it, and its beginning
is in pieces of samples before it. Everything here is planned on the host, once for all layers.
Dims: T tokens of the row, S samples, K keys that all pieces attend to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenRange(NamedTuple):
    """Consecutive tokens of a row."""

    start: int
    end: int


class PrefixPart(NamedTuple):
    """Tokens of a row that attend to all tokens of an earlier range."""

    keys: TokenRange
    queries: TokenRange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedRow:
    """Samples of a row in order, each without the tokens that an earlier sample has stored."""

    lengths_S: NDArray[np.int64]
    """[S] tokens of each sample, including shared ones."""
    shared_S: NDArray[np.int64]
    """[S] tokens at the start of each sample that equal those of the sample before it."""

    @property
    def own_S(self) -> NDArray[np.int64]:
        """[S] tokens that are stored for each sample; 0 if all are shared."""
        return self.lengths_S - self.shared_S

    @property
    def starts_S(self) -> NDArray[np.int64]:
        """[S] position in the row of the first own token of each sample."""
        return np.cumsum(self.own_S) - self.own_S

    def places(self) -> NDArray[np.int64]:
        """Return the position in the row of each token, one sample after the other."""
        begins_S = np.cumsum(self.lengths_S) - self.lengths_S
        positions = np.arange(self.lengths_S.sum()) - np.repeat(begins_S, self.lengths_S)
        places = positions + np.repeat(self.starts_S - self.shared_S, self.lengths_S)
        # In order, because what the sample before shares in its turn must be found already.
        begins, shared = begins_S.tolist(), self.shared_S.tolist()
        for sample in np.flatnonzero(self.shared_S).tolist():
            here, before = begins[sample], begins[sample - 1]
            places[here : here + shared[sample]] = places[before : before + shared[sample]]
        return places

    def prefixes(self) -> list[list[TokenRange]]:
        """Return the positions of the tokens that each sample shares, in order."""
        found: list[list[TokenRange]] = []
        path: list[TokenRange] = []
        rows = (self.shared_S.tolist(), self.own_S.tolist(), self.starts_S.tolist())
        for shared, own, start in zip(*rows, strict=True):
            path = _first_tokens(path, shared)
            found.append(path)
            path = [*path, TokenRange(start, start + own)] if own else path
        return found

    def parts(self) -> list[PrefixPart]:
        """Return the shared pieces of keys, each with all queries that attend to it.

        Samples that attend to the same tokens are neighbors, so their own tokens are one range.
        """
        parts: list[PrefixPart] = []
        opened: list[tuple[TokenRange, int]] = []
        starts = [*self.starts_S.tolist(), int(self.own_S.sum())]
        for prefix, start in zip([*self.prefixes(), []], starts, strict=True):
            same = 0
            while same < min(len(opened), len(prefix)) and opened[same][0] == prefix[same]:
                same += 1
            parts += [
                PrefixPart(keys, TokenRange(first, start))
                for keys, first in opened[same:]
                if first < start
            ]
            opened = opened[:same] + [(keys, start) for keys in prefix[same:]]
        return parts

    def keys(self) -> NDArray[np.int64]:
        """Return [K] the positions of all tokens that each sample attends to, in order.

        Samples without own tokens have none.
        """
        kept = np.repeat(self.own_S > 0, self.lengths_S)
        return self.places()[kept]


def _first_tokens(path: Sequence[TokenRange], number: int) -> list[TokenRange]:
    kept: list[TokenRange] = []
    for start, end in path:
        if number <= 0:
            break
        kept.append(TokenRange(start, min(end, start + number)))
        number -= end - start
    return kept
