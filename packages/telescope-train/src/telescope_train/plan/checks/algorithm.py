"""Check the settings of `[algorithm]`: which fit together, and which have no effect."""

from collections.abc import Iterator

from telescope_core.base.errors import ConfigError
from telescope_train.algorithms.corrections import (
    algorithm_in_use,
    has_ratio,
    has_ratio_to_sampler,
)
from telescope_train.algorithms.objective import resolved
from telescope_train.algorithms.record import (
    OWN_SETTINGS,
    Algorithm,
    known_algorithms,
    load_algorithm,
)
from telescope_train.config.algorithm_section import AlgorithmSection
from telescope_train.config.fields import unused, was_set
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.accept import BUILT_IN

TWICE = "which would count the ratio to the sampler twice"


def algorithm_problems(config: TrainConfig) -> Iterator[str]:
    """Yield a message for each problem in `[algorithm]`."""
    try:
        algorithm = load_algorithm(config.algorithm.algorithm)
    except ConfigError as error:
        yield str(error)
        return
    section = algorithm_in_use(config)
    yield from _group_size_problems(config, algorithm)
    yield from _pass_at_k_problems(section, algorithm)
    yield from _reference_problems(config, algorithm)
    yield from _conflicts(section, algorithm)
    yield from _quantization_problems(config, section, algorithm)
    holding = _holding(section, algorithm)
    for fields, effect in _effects(section, algorithm):
        if effect is not None:
            for field in fields:
                why, holds = f"{effect}, or remove {field}", holding.get(field)
                yield from unused(section, f"algorithm.{field}", why, holds=holds)


def _holding(section: AlgorithmSection, algorithm: Algorithm) -> dict[str, tuple[object, ...]]:
    """Return the values that apply where a setting has no effect, except defaults."""
    own = resolved(AlgorithmSection(algorithm=section.algorithm), algorithm)
    decoupled = section.use_decoupled_loss
    return {
        **({"advantage_norm": (algorithm.fixed_norm,)} if algorithm.fixed_norm else {}),
        # A loss of its own clips as it does, which is not this clip.
        "use_ppo_clip": (False,),
        **{name: (getattr(own, name),) for name in ("clip_low", "clip_high", "clip_ratio_c")},
        "ppo_clip_ref_logprobs": ("batch",) if decoupled else ("rollout",),
        # Nothing is recomputed while nothing reads it.
        "recompute_logprob": (True, False),
    }


def _effects(
    section: AlgorithmSection, algorithm: Algorithm
) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield settings, each with why it has no effect and what to do; None if it has one."""
    name = algorithm.name
    is_clipped = bool(resolved(section, algorithm).use_ppo_clip)
    for field in OWN_SETTINGS:
        if field not in algorithm.reads and was_set(section, field):
            yield (field,), f"with {name}, which does not read it: use {_readers(field)}"
    if algorithm.use_ppo_clip is None:
        yield ("use_ppo_clip",), f"with {name}, which has a loss of its own: use grpo or dapo"
        has_bounds = algorithm.clip_low is not None
        missing = f"with {name}, which clips nothing: use grpo with use_ppo_clip = true"
        if "dppo_threshold" in algorithm.reads:
            missing = f"with {name}, which bounds the divergence: set dppo_threshold"
        yield ("clip_low", "clip_high"), None if has_bounds else missing
        dual = f"with {name}: a dual clip belongs to use_ppo_clip; use grpo with it"
        yield ("clip_ratio_c",), None if algorithm.clip_ratio_c is not None else dual
    elif not is_clipped:
        yield ("clip_low", "clip_high", "clip_ratio_c"), _unless("use_ppo_clip")
    yield from _ratio_effects(section, has_ratio(section, algorithm))
    yield (
        ("tis_cap", "tis_mode"),
        None if section.use_tis else _unless("use_tis"),
    )
    is_icepop = section.use_tis and section.tis_mode == "icepop"
    yield ("tis_floor",), None if is_icepop else 'unless tis_mode is "icepop": set it with use_tis'
    bounds = None if section.seq_is_masking else _unless("seq_is_masking")
    yield ("seq_is_mask_range",), bounds
    is_penalised = section.kl_penalty_tau > 0
    without = None if is_penalised else "without kl_penalty_tau: set it above 0"
    if section.kl_in_loss and section.kl_estimator == "k1":
        without = "as k1 in a loss, whose gradient is 0 on average: use k2, or set kl_in_reward"
    yield ("kl_estimator",), without


def _ratio_effects(
    section: AlgorithmSection, has_ratio: bool
) -> Iterator[tuple[tuple[str, ...], str | None]]:
    if not has_ratio:
        reason = "without a ratio to old log-probs: set use_ppo_clip = true"
        yield ("ppo_clip_ref_logprobs",), reason
    elif section.use_decoupled_loss:
        yield (
            ("ppo_clip_ref_logprobs",),
            (
                "with use_decoupled_loss, which always uses the ratio to recomputed log-probs: "
                "set use_decoupled_loss = false"
            ),
        )
    if section.use_decoupled_loss and not section.recompute_logprob:
        yield (
            ("use_decoupled_loss",),
            "with recompute_logprob = false, where the sampler's log-probs take the place of "
            "recomputed ones and every weight is 1: set recompute_logprob = true",
        )
    without_weight = "without a weight to cap: set use_decoupled_loss = true"
    yield ("behave_imp_weight_cap",), None if section.use_decoupled_loss else without_weight
    is_read = section.use_decoupled_loss or section.ppo_clip_ref_logprobs == "batch"
    yield (
        ("recompute_logprob",),
        (
            None
            if is_read
            else "while nothing reads recomputed log-probs: set use_decoupled_loss = true or "
            'ppo_clip_ref_logprobs = "batch"'
        ),
    )


def _conflicts(section: AlgorithmSection, algorithm: Algorithm) -> Iterator[str]:
    if section.kl_in_reward and section.kl_estimator in ("k2", "k3"):
        yield (
            f"algorithm.kl_estimator = {section.kl_estimator!r} with kl_in_reward does not lower "
            "the KL divergence: in a reward only k1 has its gradient; remove kl_estimator, or set "
            "kl_in_reward = false"
        )
    with_ratio = has_ratio(section, algorithm)
    settings = resolved(section, algorithm)
    loss = "use_ppo_clip" if settings.use_ppo_clip else f"the loss of {algorithm.name}"
    if section.use_tis and section.use_decoupled_loss:
        yield (
            "algorithm: use_tis and use_decoupled_loss both weight a token by its ratio to the "
            f"sampler, {TWICE}; turn one of them off"
        )
    elif section.use_tis and with_ratio and not section.needs_proximal:
        yield (
            f"algorithm: use_tis and {loss} both weight a token by its ratio to the sampler, "
            f'{TWICE}; turn use_tis off, or set ppo_clip_ref_logprobs = "batch" '
            "(with recompute_logprob)"
        )
    if section.use_decoupled_loss and not with_ratio:
        yield (
            "algorithm: use_decoupled_loss needs a ratio to old log-probs, which "
            f"{algorithm.name} has only with use_ppo_clip; set use_ppo_clip = true"
        )
    has_own = algorithm.use_ppo_clip is None
    is_bounded = algorithm.clip_low not in (None, 1) if has_own else settings.use_ppo_clip
    if settings.clip_low == 1 and is_bounded:
        yield (
            "algorithm.clip_low must be below 1, got 1: a ratio never falls below 0, so the lower "
            "bound would never apply; use the algorithm's own, or a value such as 0.2"
        )
    if settings.clip_low == settings.clip_high == 0 and is_bounded:
        yield (
            "algorithm.clip_low and clip_high are both 0, which stops the gradient of every token "
            "that has moved at all in the right direction; use the algorithm's own, or values such "
            "as 0.2"
        )
    threshold = section.dppo_threshold
    if threshold is not None and threshold >= 1 and section.dppo_divergence == "tv":
        yield (
            f"algorithm.dppo_threshold must be below 1 with the divergence tv, got {threshold:g}: "
            "two probabilities never differ by more than 1, so no token would be left out; use a "
            "value such as 0.15"
        )
    is_icepop = section.use_tis and section.tis_mode == "icepop"
    if is_icepop and section.tis_floor >= section.tis_cap:
        yield (
            f"algorithm.tis_floor ({section.tis_floor:g}) must be below tis_cap "
            f"({section.tis_cap:g}): no weight lies between them; lower tis_floor"
        )
    if not algorithm.takes_negative_rewards:
        yield from (
            f"algorithm.{penalty} would push rewards below 0, which {algorithm.name} cannot take; "
            f"remove {penalty}, or use grpo"
            for penalty in ("kl_in_reward", "overlong_penalty_factor")
            if getattr(section, penalty)
        )


def _group_size_problems(config: TrainConfig, algorithm: Algorithm) -> Iterator[str]:
    sizes = {"rollout": config.rollout.group_size}
    for index, entry in enumerate(config.environments):
        if entry.group_size is not None:
            sizes[f"environments[{index}] ({entry.name})"] = entry.group_size
    k = config.algorithm.pass_at_k
    for where, size in sizes.items():
        if 1 < k >= size:
            yield (
                f"{where}: group_size must be above pass_at_k ({k}), got {size}: every choice of "
                f"{k} rollouts would be the same one, with nothing to compare it with; "
                "raise it, or lower pass_at_k"
            )
        if size < algorithm.min_group_size:
            yield (
                f"{where}: group_size must be at least {algorithm.min_group_size} for "
                f"{algorithm.name}, got {size}: a rollout is judged against the others of its "
                "group; raise it, or use reinforce_pp, which needs no group"
            )


def _pass_at_k_problems(section: AlgorithmSection, algorithm: Algorithm) -> Iterator[str]:
    k = section.pass_at_k
    if k == 1:
        return
    if "advantage_norm" in algorithm.reads and section.advantage_norm != "batch":
        why = (
            "compares rewards as a whole, and advantage_norm = 'parts' each part by itself"
            if section.advantage_norm == "parts"
            else "changes nothing where rewards are right or wrong, if advantages are divided by "
            f"the deviation of the group, as with {algorithm.name}"
        )
        yield (
            f"algorithm.pass_at_k = {k} {why}; set advantage_norm = 'batch', or use rloo or dr_grpo"
        )
    if not algorithm.takes_negative_rewards:
        yield (
            f"algorithm.pass_at_k = {k} with {algorithm.name}, which divides by the mean of the "
            "group: examples that are rarely solved would count more twice; use rloo or dr_grpo"
        )


def _reference_problems(config: TrainConfig, algorithm: Algorithm) -> Iterator[str]:
    section = config.algorithm
    other = section.reference_model
    if algorithm.needs_reference and other is None:
        yield (
            f"algorithm.{algorithm.name} learns from a teacher: set algorithm.reference_model to "
            "the folder or the Hub id of one whose tokens are those of the model"
        )
    if algorithm.needs_reference and section.kl_penalty_tau:
        yield (
            f"algorithm.kl_penalty_tau beside {algorithm.name} counts the divergence from "
            "reference_model twice: remove it, or use grpo with it, which learns from rewards too"
        )
    if algorithm.needs_reference:
        why = f"with {algorithm.name}, which does not learn from rewards; remove it"
        yield from unused(section, "algorithm.overlong_penalty_factor", why)
        if config.rollout.should_accept_fn in BUILT_IN:
            yield (
                f"rollout.should_accept_fn = {config.rollout.should_accept_fn!r} with "
                f"{algorithm.name} rejects groups of equal rewards, from which it learns as well "
                "as from others; remove it"
            )
    if other is None:
        return
    if not algorithm.needs_reference and not section.kl_penalty_tau:
        yield (
            f"algorithm.reference_model has no effect with {algorithm.name} without "
            "kl_penalty_tau: set kl_penalty_tau above 0, use opd, or remove reference_model"
        )


def _readers(field: str) -> str:
    names = [name for name in known_algorithms() if field in load_algorithm(name).reads]
    return " or ".join(names)


def _unless(switch: str) -> str:
    return f"without {switch}: set {switch} = true"


def _quantization_problems(
    config: TrainConfig, section: AlgorithmSection, algorithm: Algorithm
) -> Iterator[str]:
    """Yield why a run whose servers compute in fewer bits than its trainer would learn wrong."""
    kind = config.inference.inference_quantization
    if kind == "none":
        return
    is_corrected = section.use_tis or section.seq_is_masking
    if not is_corrected and not has_ratio_to_sampler(section, algorithm):
        yield (
            f"inference.inference_quantization = {kind!r} samples from weights that are rounded to "
            "8 bits, and nothing corrects for it; remove use_tis = false, or set seq_is_masking"
        )
    if config.model.mixed_precision_dtype == "float32":
        yield (
            f"inference.inference_quantization = {kind!r} needs layers in bfloat16; remove "
            "mixed_precision_dtype = 'float32'"
        )
