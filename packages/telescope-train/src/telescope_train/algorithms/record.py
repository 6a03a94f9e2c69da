"""What an algorithm is to the trainer, and how one is found by name."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import ConfigError, unknown_name
from telescope_train.weighting import Weighting

if TYPE_CHECKING:
    from telescope_train.algorithms.terms import Terms, TokenLoss

GROUP = "telescope.algorithms"


class LossSettings(Protocol):
    """What losses read of the section `algorithm`."""

    @property
    def use_ppo_clip(self) -> bool:
        """Clip the ratio to the sampler, instead of the plain policy gradient."""
        ...

    @property
    def clip_low(self) -> float | None:
        """How far below 1 the ratio may fall; None = the algorithm's own."""
        ...

    @property
    def clip_high(self) -> float | None:
        """How far above 1 the ratio may rise; None = the algorithm's own."""
        ...

    @property
    def use_tis(self) -> bool:
        """Weigh tokens by the ratio to the sampler, cut at `tis_cap`."""
        ...

    @property
    def tis_cap(self) -> float:
        """Largest weight of a token under `use_tis`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of the table of algorithms."""

    name: str
    paper: str
    """`arXiv:ID`"""
    advantage: Callable[[NDArray[np.float64], NDArray[np.int64], str], NDArray[np.float64]]
    """(rewards_N, groups_N, advantage_norm) -> advantages_N, over the whole batch."""
    loss: "Callable[[Terms, LossSettings], TokenLoss]"
    weighting: Weighting
    clip_low: float
    """Used where the config does not set its own."""
    clip_high: float
    min_group_size: int
    """Fewest rollouts of one example that it can learn from."""


def known_algorithms() -> list[str]:
    """Return the names of all installed algorithms, without importing any."""
    return sorted(entry_points(group=GROUP).names)


def load_algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`; raises UnknownNameError with the nearest names."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        hint = f"(others are packages with an entry point in {GROUP!r})"
        raise unknown_name("algorithm", name, known_algorithms(), hint)
    algorithm = next(iter(found)).load()
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"entry point {name!r} of {GROUP!r}: expected an Algorithm, "
            f"got {type(algorithm).__name__}; point it at the module's Algorithm record"
        )
    return algorithm
