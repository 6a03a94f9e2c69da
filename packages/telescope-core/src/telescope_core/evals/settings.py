"""`EvalSettings`: how many examples of an environment an eval plays, and how."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real

from telescope_core.base.errors import ConfigError
from telescope_core.base.types import EnvironmentDescription, Sampling, Split

MAX_FAILURES_IN_A_ROW = 64
"""Failed rollouts in a row after which an eval stops, unless its settings say otherwise."""
_SHARES = ("top_p", "min_p")
"""Settings of sampling that are shares of the probability."""
UNSENT = {
    one.name: one.default
    for one in fields(Sampling)
    if one.name in ("top_p", "top_k", "min_p", "repetition_penalty")
}
"""Settings of sampling that an eval may leave to the endpoint -> the value that is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """An eval plays some examples of a split, `rollouts` times each."""

    num_examples: int
    """Number of examples that are played."""
    rollouts: int
    """Rollouts per example."""
    ks: tuple[int, ...] = (1,)
    """The values of k for pass@k and pass^k; none may exceed `rollouts`."""
    sampling: Sampling
    """Sampling settings of the policy. With a seed, every rollout gets its own seed, which depends
    only on its example and its number."""
    concurrency: int = 64
    """Most rollouts at the same time."""
    deadline_s: float = 300.0
    """Seconds that one rollout may take, including its rewards."""
    split: Split = Split.EVAL
    max_retries: int = 1
    """Further attempts at a rollout that failed; one that reached a limit is never played again."""
    max_failures_in_a_row: int | None = MAX_FAILURES_IN_A_ROW
    """The eval stops after this many failed rollouts in a row; None = it never does."""
    positions: tuple[int, ...] = ()
    """Positions in the split of the examples that are played; empty = from the first one on."""

    @property
    def example_indices(self) -> Sequence[int]:
        """The positions in the split of all examples that are played, in their order."""
        return self.positions or range(self.num_examples)

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.positions and len(set(self.positions)) != self.num_examples:
            raise ConfigError(
                f"expected {self.num_examples} different positions of examples, "
                f"got {len(set(self.positions))}"
            )
        if not self.ks or not all(isinstance(k, Integral) and k >= 1 for k in self.ks):
            raise ConfigError(
                f"k must be one or more whole numbers that are at least 1, got {list(self.ks)}"
            )
        if max(self.ks) > self.rollouts:
            raise ConfigError(
                f"k must not exceed the number of rollouts per example: got k {max(self.ks)} with "
                f"rollouts {self.rollouts}; use at least {max(self.ks)} rollouts, or a smaller k"
            )

    def _check_numbers(self) -> None:
        most_failures = self.max_failures_in_a_row
        limits = {
            "max_failures_in_a_row": 1 if most_failures is None else most_failures,
            "examples": self.num_examples,
            "rollouts": self.rollouts,
            "concurrency": self.concurrency,
            "max_tokens": self.sampling.max_tokens,
        }
        for name, value in limits.items():
            _require_count(name, value)
        sampling = as_played(self.sampling)
        sampled = {one.name: getattr(sampling, one.name) for one in fields(sampling)}
        temperature = 0.0 if self.sampling.temperature is None else self.sampling.temperature
        numbers = {**sampled, "deadline_s": self.deadline_s, "temperature": temperature}
        for name in ("deadline_s", "temperature", *_SHARES):
            if isinstance(numbers[name], bool) or not isinstance(numbers[name], Real):
                raise ConfigError(f"{name} must be a number, got {numbers[name]!r}")
        for name, value in numbers.items():
            # JSON has no such numbers, so the result could not be read again.
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{name} must be a finite number, got {value}")
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s must be above 0 seconds, got {self.deadline_s:g}")
        if temperature < 0:
            raise ConfigError(f"temperature must be 0 or more, got {temperature:g}; 0 = greedy")
        for name in _SHARES:
            if not 0 <= sampled[name] <= 1 or (name == "top_p" and sampled[name] == 0):
                raise ConfigError(f"{name} must be a share, from 0 to 1, got {sampled[name]:g}")


def as_played(sampling: Sampling) -> Sampling:
    """Return `sampling` as rollouts get it: what is not set has the value that is not sent."""
    unset = {name: value for name, value in UNSENT.items() if getattr(sampling, name) is None}
    return replace(sampling, **unset)


def _require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def check_split(settings: EvalSettings, description: EnvironmentDescription) -> None:
    """Raise ConfigError when the environment lacks the split or has too few examples in it."""
    sizes = description.num_examples
    if settings.split not in sizes:
        raise ConfigError(
            f"{description.name} has no {settings.split} split; "
            f"it has: {', '.join(sizes) or 'none'}"
        )
    size = sizes[settings.split]
    if size == 0:
        raise ConfigError(
            f"{description.name} has no examples in its {settings.split} split; see what "
            "examples() or its data gives there"
        )
    last = max(settings.positions, default=settings.num_examples - 1)
    if size is not None and last >= size:
        got = (
            f"position {last}; use positions below {size}"
            if settings.positions
            else f"examples {settings.num_examples}; use at most {size}, or --examples all"
        )
        raise ConfigError(
            f"{description.name} has {size} examples in its {settings.split} split, got {got}"
            f"{_of_others(settings.split, sizes)}"
        )


def _of_others(split: Split, sizes: Mapping[Split, int | None]) -> str:
    """Return a hint about what the other split holds, and how to play it."""
    for other, size in sizes.items():
        if other is not split and size:
            return (
                f". Its {other} split has {size} more, which --split {other} plays; to declare a "
                "set for evals alone, give the environment data = {'train': ..., 'eval': ...}"
            )
    return ""
