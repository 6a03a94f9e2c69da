"""The complete loss of a token: the algorithm's term with corrections, KL and entropy.

    loss_t = w_t * policy_t + kl_penalty_tau * KL_t - entropy_coef * H_t

w is the product of the corrections for sampling under another policy, and carries no gradient. With
l the policy, b the sampler, p the proximal policy and x = p - b where the loss has a ratio to p of
its own, else x = l - b:
    tis_mode truncate     min(exp(x), tis_cap)
    tis_mode icepop       exp(x) if tis_floor <= exp(x) <= tis_cap, else 0
    use_decoupled_loss    exp(p - b) if at most behave_imp_weight_cap, else 0
Deviation: x is first cut to +-20, so that no weight is infinite.
A term whose setting is off is left out. Nothing is reduced here.
Paper: arXiv:2505.24298, section 5.2 (decoupled, after arXiv:2110.00641); arXiv:2510.18855 (IcePop);
Ionides 2008 (truncated importance sampling).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_train.algorithms.policy_gradient import DUAL_CLIP
from telescope_train.algorithms.record import Algorithm, load_algorithm
from telescope_train.algorithms.terms import (
    MAX_LOG_RATIO,
    Terms,
    TokenLoss,
    above,
    all_true,
    below,
    proximal_logprobs,
    sequence_mean,
)

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection


MAX_LOG_WEIGHT = 20.0
"""Nats; the largest absolute value of the log of a weight of `use_tis`."""
Estimator: TypeAlias = Literal["k1", "k2", "k3"]
"""With d = l - f, policy minus reference, in nats, per token:
    k1    d
    k2    d^2 / 2
    k3    exp(-d) - 1 + d
Averaged over the policy's own samples, k1 and k3 equal the KL divergence. In a loss only the
gradient counts. On average the gradient of k2 is that of KL(policy, reference), the gradient of k3
is that of KL(reference, policy), and the gradient of k1 is 0. In a reward the value multiplies the
gradient of the log-prob, and only k1 gives that of KL(policy, reference)."""


class Correction(NamedTuple):
    """A factor of the policy-gradient term; no gradient flows through it."""

    weights_T: "Tensor"
    """[T], 0 or more."""
    metrics: "dict[str, Tensor]"
    """Metric name -> [T] values of the tokens."""


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
    if policy_T.shape != terms.mask_T.shape:
        raise ConfigError(
            f"the loss of algorithm {algorithm.name!r} must return one number per token, shape "
            f"{tuple(terms.mask_T.shape)}; got shape {tuple(policy_T.shape)}; do not reduce it"
        )
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


def tis_weights(terms: Terms, config: "AlgorithmSection", *, has_ratio: bool) -> Correction:
    """Return the weights of `use_tis`; `has_ratio`: the loss has a ratio to p of its own."""
    # A ratio in the loss already covers policy over p, so p over sampler is left to correct.
    # Without one the weights cover the whole way from sampler to policy.
    newer_T = proximal_logprobs(terms, config) if has_ratio else terms.logprobs_T.detach()
    ratios_T = terms.difference(newer_T, terms.behavior_logprobs_T)
    weights_T = ratios_T.clamp_(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp_()
    is_above_T = above(weights_T, config.tis_cap)
    if config.tis_mode == "truncate":
        return Correction(weights_T.clamp_(max=config.tis_cap), {"tis/capped_fraction": is_above_T})
    is_out_T = is_above_T.add_(below(weights_T, config.tis_floor))
    return Correction(weights_T.mul_(1 - is_out_T), {"tis/masked_fraction": is_out_T})


def behavior_weights(terms: Terms, config: "AlgorithmSection") -> Correction:
    """Return the weights of `use_decoupled_loss`."""
    proximal_T = proximal_logprobs(terms, config)
    weights_T = terms.difference(proximal_T, terms.behavior_logprobs_T).exp_()
    is_out_T = above(weights_T, config.behave_imp_weight_cap)
    metrics = {"behave_imp_weight/capped_fraction": is_out_T}
    return Correction(weights_T.mul_(1 - is_out_T), metrics)


def sequence_mask(terms: Terms, config: "AlgorithmSection") -> Correction:
    """Return 0 for the tokens of samples whose probability has changed too much, else 1.

    A sample is kept if exp(mean_t (l - b)) lies within seq_is_mask_range, over its trained tokens.
    Token weights were stamped before the forward pass and do not change, so a masked
    sample still counts in the denominator. Each chain of a rollout is judged by itself.
    """
    ratios_T = sequence_mean(terms.log_ratios_T.detach(), terms).exp_()
    low, high = config.seq_is_mask_range
    is_out_T = below(ratios_T, low).add_(above(ratios_T, high))
    return Correction(1 - is_out_T, {"seq_is_mask/fraction": is_out_T})


def estimator_of(section: "AlgorithmSection") -> Estimator:
    """Return the estimator in the settings; by default one whose gradient is that of the KL."""
    return section.kl_estimator or ("k1" if section.kl_in_reward else "k2")


def kl_estimate(difference_T: "Tensor", estimator: Estimator) -> "Tensor":
    """Return the estimate of each token from `difference_T` = policy minus reference, nats."""
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    if estimator == "k3":
        return (-difference_T).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference_T
    raise unknown_name("kl_estimator", estimator, ("k1", "k2", "k3"))


def reference_kl(terms: Terms, estimator: Estimator) -> "Tensor":
    """Return [T], nats: the estimate against the reference model, differentiable."""
    assert terms.reference_logprobs_T is not None, "the batch lacks the reference's log-probs"
    difference_T = terms.logprobs_T - terms.reference_logprobs_T
    # The columns of a batch hold 0 for a token that is not trained on: no difference to learn from.
    if not all_true(terms.mask_T):
        difference_T = difference_T.masked_fill(~terms.mask_T, 0.0)
    return kl_estimate(difference_T, estimator)
