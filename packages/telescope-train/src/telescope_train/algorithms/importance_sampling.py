"""Weights that correct for sampling under another policy: TIS, IcePop and decoupled PPO.

Paper: arXiv:2505.24298, section 5.2 (decoupled, after arXiv:2110.00641); arXiv:2510.18855 (IcePop);
Ionides 2008 (truncated importance sampling). With l the policy, b the sampler, p the proximal
policy and x = p - b where the loss has a ratio to p of its own, else x = l - b:
    tis_mode truncate     min(exp(x), tis_cap)
    tis_mode icepop       exp(x) if tis_floor <= exp(x) <= tis_cap, else 0
    use_decoupled_loss    exp(p - b) if at most behave_imp_weight_cap, else 0
Deviation: x is first cut to +-20, so that no weight is infinite.
"""

from typing import TYPE_CHECKING, NamedTuple

from telescope_train.algorithms.ratios import proximal_logprobs, sequence_mean
from telescope_train.algorithms.terms import Terms, above, below

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection

if TYPE_CHECKING:
    from torch import Tensor

    from telescope_train.config.algorithm_section import AlgorithmSection


MAX_LOG_WEIGHT = 20.0
"""Nats; the largest absolute value of the log of a weight of `use_tis`."""


class Correction(NamedTuple):
    """A factor of the policy-gradient term; no gradient flows through it."""

    weights_T: "Tensor"
    """[T], 0 or more."""
    metrics: "dict[str, Tensor]"
    """Metric name -> [T] values of the tokens."""


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
