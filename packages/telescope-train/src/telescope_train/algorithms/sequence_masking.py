"""Sequence masking: leave out samples whose probability under the policy has moved too far.

The policy-gradient term of a sample is multiplied by
    1 if seq_is_mask_low <= exp(mean_t (l - b)) <= seq_is_mask_high, else 0
with l the policy, b the sampler and the mean over the sample's trained tokens. Token weights were
stamped before the forward pass and do not change, so a masked sample still counts in the
denominator. Each chain of a rollout is judged by itself.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.importance_sampling import Correction
from telescope_train.algorithms.ratios import sequence_mean
from telescope_train.algorithms.terms import Terms, above, below

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def sequence_mask(terms: Terms, config: "AlgorithmSection") -> Correction:
    """Return 0 for the tokens of masked samples, else 1."""
    ratios_T = sequence_mean(terms.log_ratios_T.detach(), terms).exp_()
    low, high = config.seq_is_mask_low, config.seq_is_mask_high
    is_out_T = below(ratios_T, low).add_(above(ratios_T, high))
    return Correction(1 - is_out_T, {"seq_is_mask/fraction": is_out_T})
