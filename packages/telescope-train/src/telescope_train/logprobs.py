"""Log-probs of given tokens from hidden states, without ever holding the `[T, V]` logits.

The head is applied to a chunk of tokens at a time, forward and again in backward. Reductions over
the vocabulary are float32 or wider whatever the model's dtype: in bfloat16 the log-softmax of a
large vocabulary is off by a hundredth of a nat on average.
Letters: T tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class TokenLogprobs(NamedTuple):
    """Both `[T]`, in float32 (float64 for a float64 model), nats."""

    logprobs_T: Tensor
    entropy_T: Tensor
    """Of the whole distribution; carries no gradient."""


def chunked_logprobs(
    hidden_TH: Tensor,
    lm_head_weight: Tensor,
    targets_T: Tensor,
    temperatures_T: Tensor,
    *,
    chunk_size: int,
    vocab_size: int | None = None,
) -> TokenLogprobs:
    """Return log softmax(hidden @ weight.T / temperature) at the targets, and the entropy.

    Entry t scores `targets_T[t]` from `hidden_TH[t]`: the caller shifts. Gradients reach the hidden
    states and the head (which has no bias). `vocab_size`: rows of the head beyond it are padding
    and have no probability. Peak memory beyond the inputs: two chunks of `[C, V]`, and in backward
    the gradient of the head.
    """
    weight_VH = lm_head_weight if vocab_size is None else lm_head_weight[:vocab_size]
    logprobs_T, entropy_T = _ChunkedLogprobs.apply(
        hidden_TH, weight_VH, targets_T.long(), temperatures_T, chunk_size
    )
    return TokenLogprobs(logprobs_T, entropy_T)


def _chunks(num_tokens: int, chunk_size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, chunk_size):
        yield slice(start, min(start + chunk_size, num_tokens))


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperatures_C: Tensor) -> Tensor:
    """The product is taken in the model's dtype, as the engine does; all after it is wide."""
    logits_CV = hidden_CH @ weight_VH.T
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return logits_CV.to(wide).div_(temperatures_C.to(wide).unsqueeze(1))


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        temperatures_T: Tensor,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        logprobs_T = hidden_TH.new_empty(len(hidden_TH), dtype=wide)
        entropy_T, normaliser_T = torch.empty_like(logprobs_T), torch.empty_like(logprobs_T)
        for chunk in _chunks(len(hidden_TH), chunk_size):
            logits_CV = _logits(hidden_TH[chunk], weight_VH, temperatures_T[chunk])
            normaliser_C = logits_CV.logsumexp(1)
            target_C = logits_CV.gather(1, targets_T[chunk].unsqueeze(1)).squeeze(1)
            probs_CV = (logits_CV - normaliser_C.unsqueeze(1)).exp_()
            normaliser_T[chunk] = normaliser_C
            logprobs_T[chunk] = target_C - normaliser_C
            entropy_T[chunk] = normaliser_C - probs_CV.mul_(logits_CV).sum(1)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, temperatures_T, normaliser_T)
        ctx.chunk_size = chunk_size
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, temperatures_T, normaliser_T = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if for_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=grad_T.dtype) if for_weight else None
        for chunk in _chunks(len(hidden_TH), ctx.chunk_size):
            temperatures_C = temperatures_T[chunk].to(grad_T.dtype)
            scale_C1 = (grad_T[chunk] / temperatures_C).unsqueeze(1)
            logits_CV = _logits(hidden_TH[chunk], weight_VH, temperatures_T[chunk])
            grad_CV = logits_CV.sub_(normaliser_T[chunk].unsqueeze(1)).exp_().mul_(-scale_C1)
            grad_CV.scatter_add_(1, targets_T[chunk].unsqueeze(1), scale_C1)
            narrow_CV = grad_CV.to(hidden_TH.dtype)
            if grad_hidden_TH is not None:
                grad_hidden_TH[chunk] = narrow_CV @ weight_VH
            if grad_weight_VH is not None:
                _accumulate(grad_weight_VH, narrow_CV.T, hidden_TH[chunk])
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None


def _accumulate(sum_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """Add `left @ right` to a sum that may be wider than its parts."""
    if sum_VH.dtype == left_VC.dtype:
        sum_VH.addmm_(left_VC, right_CH)
    else:
        sum_VH += left_VC @ right_CH
