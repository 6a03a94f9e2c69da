"""The definition of an algorithm for the trainer, and the lookup of one by name.

Each algorithm's module in this folder states its advantage, its policy-gradient term and how its
tokens are weighted. `objective` adds corrections, KL and entropy to every algorithm. Neither this
module nor a built-in algorithm imports torch, so settings can be checked without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import ConfigError, UnknownNameError, unknown_name
from telescope_train.algorithms.advantages import Advantage

Weighting: TypeAlias = Literal["token", "sequence", "constant"]
"""token: every trained token counts the same. sequence: every rollout counts the same.
constant: every token counts 1 / (rollouts * max_tokens), however long rollouts are."""
Scope: TypeAlias = Literal["group", "batch"]
"""The rollouts of one example, or all of a batch."""

if TYPE_CHECKING:
    from telescope_train.algorithms.terms import Terms, TokenLoss
    from telescope_train.config.algorithm_section import AlgorithmSection

GROUP = "telescope.algorithms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The definition of one algorithm."""

    name: str
    paper: str
    """`arXiv:ID`"""
    advantage: Advantage
    """(rewards_N, groups_N, advantage_norm) -> advantages_N, over the whole batch."""
    loss: "Callable[[Terms, AlgorithmSection], TokenLoss]"
    """Returns the policy-gradient term of each token, [T]. In the settings it receives, the
    defaults of this record have already replaced null."""
    weighting: Weighting
    use_ppo_clip: bool | None = None
    """Used if the config sets none; None = the loss has no clipped form."""
    has_ratio: bool = False
    """Whether the loss contains a ratio to old log-probs even without `use_ppo_clip`."""
    clip_low: float | None = None
    """The lower bound of ratios is 1 - clip_low. Used if the config sets none; None = no bounds."""
    clip_high: float | None = None
    """The upper bound of ratios is 1 + clip_high; likewise."""
    clip_ratio_c: float | None = None
    """The dual clip of a loss of its own, used if the config sets none; None = it has none."""
    reads: frozenset[str] = frozenset()
    """The settings among `OWN_SETTINGS` that it uses."""
    compares: Scope = "batch"
    """Rollouts that the advantage of one depends on: those of its group, or all of the batch. With
    `advantage_norm` "batch" it is always the batch."""
    fixed_norm: Scope | None = None
    """The fixed `advantage_norm` of an algorithm that does not read the setting; else None."""
    min_group_size: int = 2
    """Fewest rollouts of one example from which it can learn."""
    needs_reference: bool = False
    """Whether its loss reads the log-probs of `reference_model`, which has to be given."""
    takes_negative_rewards: bool = True
    """Whether rewards may be negative; if not, settings that could make them so are refused."""

    def __post_init__(self) -> None:
        for field, known in (
            ("weighting", get_args(Weighting)),
            ("compares", get_args(Scope)),
            ("fixed_norm", (None, *get_args(Scope))),
        ):
            if (given := getattr(self, field)) not in known:
                raise ConfigError(
                    f"{field} of algorithm {self.name!r} must be one of "
                    f"{', '.join(map(repr, known))}, got {given!r}"
                )


_OTHERS = {
    "gdpo": 'it is grpo, or another that divides, with advantage_norm = "parts"',
    **dict.fromkeys(("gkd", "minillm", "distillation"), "on-policy distillation is opd"),
    "geo_mean": "it is called gmpo here",
    **dict.fromkeys(("grpo_passk", "pkpo"), "it is rloo or dr_grpo with pass_at_k above 1"),
    **dict.fromkeys(
        ("dppo_tv", "dppo_kl"), 'it is dppo, with dppo_divergence = "tv" (the default) or "kl"'
    ),
    **dict.fromkeys(
        ("gpg", "opo"), "rloo and dr_grpo are the plain policy gradient with the group's baseline"
    ),
    **dict.fromkeys(
        ("clip_cov", "kl_cov"),
        "what keeps the entropy up here is a wide clip_high, as in dapo, or entropy_coef",
    ),
    "lite_ppo": 'it is grpo with advantage_norm = "batch" and use_ppo_clip = true',
    "remax": "rloo compares with the other answers instead of with a greedy one",
    **dict.fromkeys(
        ("ppo", "vapo", "gae"),
        "no critic is trained: grpo with use_ppo_clip = true has the loss of PPO, and the rest of "
        "the group in place of a critic",
    ),
}
"""Algorithms of papers that have no record here -> what to use."""
OWN_SETTINGS = ("advantage_norm", "dppo_divergence", "dppo_threshold")
"""Settings that only some algorithms read. With the others, a value that differs from what holds
there is refused."""


def known_algorithms() -> list[str]:
    """Return the names of all installed algorithms, without importing any."""
    return sorted(entry_points(group=GROUP).names)


def load_algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`: an installed one, or the record at `module:NAME`.

    Raises UnknownNameError with the nearest names, and ConfigError if it names something else.
    """
    return _checked(_imported(name), name) if ":" in name else _installed(name)


@cache
def _installed(name: str) -> Algorithm:
    """Return the installed algorithm; cached, because reading all entry points takes 20 ms."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        if use := _OTHERS.get(name.lower().replace("-", "_")):
            raise UnknownNameError(f"unknown algorithm {name!r}: {use}")
        hint = f"(others are `module:NAME`, or packages with an entry point in {GROUP!r})"
        raise unknown_name("algorithm", name, known_algorithms(), hint)
    return _checked(next(iter(found)).load(), f"entry point {name!r} of {GROUP!r}")


def _imported(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(
            f"algorithm {path!r}: cannot import {module_name!r} ({error}); expected module:NAME of "
            "a module that is installed or on PYTHONPATH"
        ) from error
    except AttributeError as error:
        raise ConfigError(
            f"algorithm {path!r}: module {module_name!r} has no {attribute!r}; "
            "expected module:NAME of an Algorithm"
        ) from error


def _checked(found: object, where: str) -> Algorithm:
    if not isinstance(found, Algorithm):
        raise ConfigError(
            f"{where}: expected an Algorithm, got {type(found).__name__}; "
            "point it at the module's Algorithm record"
        )
    return found
