"""Seeds of requests: they follow from the seed of an eval or a run and the place of the request."""

import hashlib
from dataclasses import replace

from telescope_core.base.types import Sampling

ENDPOINT_BITS = 31
"""Bits of a seed that every endpoint takes; some read it as a signed number of 32 bits."""


def derived_seed(seed: int, *names: str | int, num_bits: int = 62) -> int:
    """Return a seed of `num_bits` bits, at most 62, which depends only on `seed` and `names`."""
    key = "/".join(str(part) for part in (seed, *names))
    # Two bits less than the digest, because servers take the seed as a signed number.
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - num_bits)


class TurnSeeds:
    """Gives each request of a rollout a seed of its own.

    With one seed for all of them, every turn would draw the same chances again.
    """

    def __init__(self, seed: int | None, *, num_bits: int = 62) -> None:
        self.seed = seed
        """Seed of the rollout; None = it has none."""
        self._num_bits = num_bits
        self._num_asked = 0

    def next(self, seed: int | None) -> int | None:
        """Return the seed of the next request, in place of `seed`; one that is not ours stays."""
        if self.seed is None or seed != self.seed:
            return seed
        number, self._num_asked = self._num_asked, self._num_asked + 1
        return derived_seed(self.seed, number, num_bits=self._num_bits)

    def seeded(self, sampling: Sampling) -> Sampling:
        """Return `sampling` with the seed of the next request."""
        return replace(sampling, seed=self.next(sampling.seed))
