"""Which settings of `[algorithm]` fit together, and which would have no effect."""

from collections.abc import Iterator

from telescope_train.config.schema import TrainConfig
from telescope_train.config.was_set import was_set


def algorithm_problems(config: TrainConfig) -> Iterator[str]:
    """Yield what does not fit in `[algorithm]`."""
    section = config.algorithm
    if section.use_tis and section.use_ppo_clip:
        yield (
            "algorithm: use_tis and use_ppo_clip both weight a token by its ratio to the sampler, "
            "which would count it twice; turn one of them off"
        )
    for field, switch in (
        ("clip_low", "use_ppo_clip"),
        ("clip_high", "use_ppo_clip"),
        ("tis_cap", "use_tis"),
    ):
        if was_set(section, field) and not getattr(section, switch):
            yield (
                f"algorithm.{field} has no effect without {switch}; "
                f"set {switch} = true, or remove {field}"
            )
