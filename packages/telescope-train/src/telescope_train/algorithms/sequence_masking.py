"""Sequence masking: leave out samples that the policy would write with another probability.

The policy-gradient term of a sample is multiplied by
    1 if seq_is_mask_low <= exp(mean_t (l - b)) <= seq_is_mask_high, else 0
with l the policy, b the sampler and the mean over the sample's trained tokens. The weights of the
other tokens stay as they were stamped before the forward pass: a masked sample keeps its place in
the denominator. The chains of one rollout are judged one by one.
"""

from typing import TYPE_CHECKING

from telescope_train.algorithms.importance_sampling import Correction
from telescope_train.algorithms.ratios import sequence_mean
from telescope_train.algorithms.terms import Terms

if TYPE_CHECKING:
    from telescope_train.config.algorithm_section import AlgorithmSection


def sequence_mask(terms: Terms, config: "AlgorithmSection") -> Correction:
    """Return 0 for the tokens of masked samples, else 1."""
    ratios_T = sequence_mean(terms.log_ratios_T.detach(), terms).exp()
    is_out_T = (ratios_T < config.seq_is_mask_low) | (ratios_T > config.seq_is_mask_high)
    return Correction((~is_out_T).to(ratios_T.dtype), {"seq_is_mask/fraction": is_out_T})
