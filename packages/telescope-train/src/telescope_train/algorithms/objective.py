"""The complete loss of a token: the algorithm's term with corrections, KL and entropy.

    loss_t = w_t * policy_t + kl_penalty_tau * KL_t - entropy_coef * H_t

w is the product of the corrections and carries no gradient. A term whose setting is off is left
out. Nothing is reduced here.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from telescope_train.algorithms.importance_sampling import (
    Correction,
    behavior_weights,
    sequence_mask,
    tis_weights,
)
from telescope_train.algorithms.kl import estimator_of, reference_kl
from telescope_train.algorithms.policy_gradient import DUAL_CLIP
from telescope_train.algorithms.record import Algorithm, load_algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss, all_true

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def loss_function(section: "AlgorithmSection") -> Callable[[Terms], TokenLoss]:
    """Return the loss that `section` describes."""
    algorithm = load_algorithm(section.algorithm)
    return partial(objective, algorithm=algorithm, config=resolved(section, algorithm))


def resolved(section: "AlgorithmSection", algorithm: Algorithm) -> "AlgorithmSection":
    """Return `section` with the algorithm's own defaults where it has null."""
    defaults = {
        name: getattr(algorithm, name)
        for name in ("use_ppo_clip", "clip_low", "clip_high", "clip_ratio_c")
        if getattr(section, name) is None
    }
    found = section.model_copy(update=defaults)
    if found.use_ppo_clip and found.clip_ratio_c is None:
        return found.model_copy(update={"clip_ratio_c": DUAL_CLIP})
    return found


def objective(terms: Terms, *, algorithm: Algorithm, config: "AlgorithmSection") -> TokenLoss:
    """Return the loss of each token; `config` comes from `resolved`."""
    policy = algorithm.loss(terms, config)
    policy_T, values = policy.loss_T, {}
    for correction in _corrections(terms, config, algorithm):
        policy_T = correction.weights_T * policy_T
        values |= correction.metrics
    loss_T = policy_T
    values["loss/policy"] = policy_T
    if config.kl_in_loss:
        penalty_T = config.kl_penalty_tau * reference_kl(terms, estimator_of(config))
        loss_T, values["loss/kl"] = loss_T + penalty_T, penalty_T
    if config.entropy_coef:
        bonus_T = config.entropy_coef * terms.entropy_T
        loss_T, values["loss/entropy"] = loss_T - bonus_T, -bonus_T
    # The backend multiplies by weights of 0, which would leave NaN and infinity of masked tokens.
    return TokenLoss(
        loss_T=loss_T if all_true(terms.mask_T) else loss_T.masked_fill(~terms.mask_T, 0.0),
        metrics={**policy.metrics, **values},
    )


def _corrections(
    terms: Terms, config: "AlgorithmSection", algorithm: Algorithm
) -> list[Correction]:
    corrections: list[Correction] = []
    if config.use_tis:
        has_ratio = algorithm.has_ratio or bool(config.use_ppo_clip)
        corrections.append(tis_weights(terms, config, has_ratio=has_ratio))
    if config.use_decoupled_loss:
        corrections.append(behavior_weights(terms, config))
    if config.seq_is_masking:
        corrections.append(sequence_mask(terms, config))
    return corrections
