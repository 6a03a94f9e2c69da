"""The supervised loss, in the form of an algorithm's loss so that any backend can sum it."""

import torch

from telescope_train.algorithms.terms import Terms, TokenLoss


def negative_log_likelihood(terms: Terms) -> TokenLoss:
    """Return -log p of each trained token, and the mean over them as `nll`."""
    zeros_T = torch.zeros_like(terms.logprobs_T)
    loss_T = torch.where(terms.mask_T, -terms.logprobs_T, zeros_T)
    return TokenLoss(loss_T=loss_T, metrics={"nll": loss_T})
