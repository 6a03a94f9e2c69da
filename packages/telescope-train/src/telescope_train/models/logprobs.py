"""Log-probs and entropies of given tokens from hidden states, without the `[T, V]` logits.

Logits exist for one block of tokens and vocabulary at a time, in forward and again in backward,
small enough for the cache of a CPU. Forward folds each block into a running maximum and two sums
per token. Reductions are float32 or wider whatever the model's dtype, and so are the logits with
`wide_logits`: one rounding to bfloat16 costs a log-prob a hundredth of a nat on average.
A model's own scale and cap of logits come before the temperature, as in transformers and vLLM.
Letters: T tokens, C tokens of a block, H hidden size, V vocabulary, W vocabulary of a block.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from telescope_train.models.cpu_kernels import product
from telescope_train.models.head import PLAIN, HeadRule

CPU_BLOCK = 2**20
"""Logits in one block on the CPU: 4 MiB of float32 stay in cache, and the product is fast."""
DEVICE_BLOCK = 2**25
"""Logits in one block elsewhere: few kernels, each long enough to keep the device busy."""


class Head(NamedTuple):
    """The output head, or the part of it that this rank has; others of the group have the rest."""

    weight_VH: Tensor
    """Rows for consecutive token ids, without those of padding, which would get a probability."""
    first: int
    """Token id of the first row."""
    vocab_size: int
    """Tokens in the whole vocabulary."""
    group: dist.ProcessGroup | None
    """None = this rank has all of it."""
    bias_V: Tensor | None = None
    """Of the same token ids; None = the head has none."""
    rule: HeadRule = PLAIN
    """What the model does with the product."""


class TokenLogprobs(NamedTuple):
    """Both `[T]`, in float32 (float64 for a float64 model), nats."""

    logprobs_T: Tensor
    entropy_T: Tensor
    """Entropy of the whole distribution at each token."""


def chunked_logprobs(
    hidden_TH: Tensor,
    head: Head | Tensor,
    targets_T: Tensor,
    temperatures_T: Tensor,
    *,
    chunk_size: int,
    entropy_grad: bool = False,
    wide_logits: bool = True,
) -> TokenLogprobs:
    """Return log softmax(logits / temperature) at the targets, and the entropy.

    Entry t scores `targets_T[t]` from `hidden_TH[t]`: the caller shifts. Logits are hidden @
    weight.T + bias, scaled and capped by the head's rule; a head that is only a matrix [V, H] may
    be given as one. Gradients reach it, its bias and the hidden states; the entropy has one only
    with `entropy_grad`. A block has at most `chunk_size` tokens. `wide_logits` keeps logits in
    float32 where the model is narrower; without it they are rounded to the model's dtype first, as
    in an engine that does so. Peak memory beyond inputs and outputs: two blocks, with a cap three,
    and in backward `[T, H]` and `[W, H]` in float32.

    Where each rank of a group has a part of the vocabulary, all of them call this with the same
    tokens and get the same results. The gradient of the hidden states is this rank's part of it:
    the caller adds up those of all ranks.
    """
    if isinstance(head, Tensor):
        head = Head(head, 0, len(head), None)
    # A target outside would be in no block, and its logit would silently stay 0.
    if bool((~_is_inside(targets_T, head.vocab_size)).any()):
        raise ValueError(
            f"expected token ids from 0 to {head.vocab_size - 1}, got {int(targets_T.min())} to "
            f"{int(targets_T.max())}; the samples come from a model with a larger vocabulary"
        )
    logprobs_T, entropy_T = _ChunkedLogprobs.apply(
        hidden_TH,
        head.weight_VH,
        head.bias_V,
        targets_T.long() - head.first,
        temperatures_T,
        _Options(chunk_size, entropy_grad, wide_logits, head.group, head.rule),
    )
    return TokenLogprobs(logprobs_T, entropy_T)


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _block_width(chunk_size: int, num_tokens: int, device: torch.device) -> int:
    """Return W, the number of vocabulary entries in a block."""
    block = CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK
    return max(1, block // max(1, min(chunk_size, num_tokens)))


class _Options(NamedTuple):
    chunk_size: int
    entropy_grad: bool
    wide_logits: bool
    group: dist.ProcessGroup | None
    """The ranks that have the rest of the vocabulary."""
    rule: HeadRule


class _Logits(NamedTuple):
    values_CW: Tensor
    """In float32 or wider, divided by the temperatures."""
    slope_CW: Tensor | None
    """Derivative of the cap; None = there is none, and it is 1."""


def _logits(
    hidden_CH: Tensor,
    weight_WH: Tensor,
    bias_W: Tensor | None,
    temperatures_C: Tensor,
    options: _Options,
) -> _Logits:
    """Return the logits [C, W] of a block."""
    wide = torch.promote_types(hidden_CH.dtype, torch.float32)
    rule = options.rule
    if not options.wide_logits or hidden_CH.dtype == wide:
        logits_CW = product(hidden_CH, weight_WH)
    elif hidden_CH.is_cuda:
        # The tensor cores multiply bfloat16 exactly and add up in float32 anyway.
        logits_CW = torch.mm(hidden_CH, weight_WH.T, out_dtype=wide)
    else:
        logits_CW = product(hidden_CH.to(wide), weight_WH.to(wide))
    if bias_W is not None:
        logits_CW += bias_W.to(logits_CW.dtype)
    temperatures_C1 = temperatures_C.to(wide).unsqueeze(1)
    if rule.cap is None:
        # Widened before the division by the temperature, as in vLLM's sampler. A scale of 1 leaves
        # the temperatures as they are, to the bit.
        return _Logits(logits_CW.to(wide).div_(temperatures_C1 / rule.scale), None)
    shares_CW = logits_CW.mul_(rule.scale / rule.cap).tanh_().to(wide)
    return _Logits(shares_CW.mul(rule.cap / temperatures_C1), shares_CW.square_().neg_().add_(1.0))


class _Running:
    """Sums over the vocabulary seen so far, relative to the largest logit so far."""

    def __init__(self, num_tokens: int, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        # The lowest finite value instead of -inf: the first block multiplies a sum of 0 by the
        # distance from it, and 0 * -inf is NaN.
        self.largest_T = like.new_full((num_tokens,), torch.finfo(wide).min, dtype=wide)
        self.sum_T = torch.zeros_like(self.largest_T)
        """Of exp(logit - largest)."""
        self.weighted_T = torch.zeros_like(self.largest_T)
        """Of exp(logit - largest) * (logit - largest). Sums of p * logit instead would be large
        numbers that cancel in the entropy."""
        self.target_T = torch.zeros_like(self.largest_T)
        """The logit of each target."""

    def add(self, chunk: slice, logits_CW: Tensor, targets_C: Tensor) -> None:
        """Add one block, which is overwritten; `targets_C` count from its first entry."""
        width = logits_CW.shape[1]
        found_C = logits_CW.gather(1, targets_C.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
        # Each target is in exactly one block of the vocabulary; the others add 0.
        self.target_T[chunk] += found_C.where(_is_inside(targets_C, width), 0.0)
        largest_C = torch.maximum(self.largest_T[chunk], logits_CW.amax(1))
        # When the maximum moves by d <= 0, earlier terms e^x and x e^x become e^(x+d) = e^d e^x and
        # (x+d) e^(x+d) = e^d (x e^x + d e^x). No exponent is above 0, so nothing overflows.
        moved_C = self.largest_T[chunk] - largest_C
        sum_C, weighted_C = self.sum_T[chunk], self.weighted_T[chunk]
        shifted_CW = logits_CW.sub_(largest_C.unsqueeze(1))
        exp_CW = shifted_CW.exp()
        scale_C = moved_C.exp()
        # The weighted sum first, because it needs the other one as it was.
        weighted_C.addcmul_(sum_C, moved_C).mul_(scale_C)
        sum_C.mul_(scale_C).add_(exp_CW.sum(1))
        weighted_C.add_(exp_CW.mul_(shifted_CW).sum(1))
        self.largest_T[chunk] = largest_C

    def add_ranks(self, group: dist.ProcessGroup) -> None:
        """Add what the other ranks of `group` have seen."""
        own_T = self.largest_T.clone()
        dist.all_reduce(self.largest_T, op=dist.ReduceOp.MAX, group=group)
        # As in `add`, where the maximum moves.
        moved_T = own_T - self.largest_T
        scale_T = moved_T.exp()
        self.weighted_T.addcmul_(self.sum_T, moved_T).mul_(scale_T)
        self.sum_T.mul_(scale_T)
        sums_3T = torch.stack([self.sum_T, self.weighted_T, self.target_T])
        dist.all_reduce(sums_3T, group=group)
        self.sum_T, self.weighted_T, self.target_T = sums_3T


def _is_inside(targets_C: Tensor, width: int) -> Tensor:
    return (targets_C >= 0) & (targets_C < width)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperatures_T: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, chunk_size = len(hidden_TH), options.chunk_size
        ctx.options = options
        ctx.width = _block_width(chunk_size, num_tokens, hidden_TH.device)
        # Vocabulary outside, tokens inside: a slice of the weight serves all tokens before the next
        # one, and backward can finish the slice's gradient with a sum of only [W, H].
        running = _Running(num_tokens, hidden_TH)
        for words in _slices(len(weight_VH), ctx.width):
            bias_W = None if bias_V is None else bias_V[words]
            for chunk in _slices(num_tokens, chunk_size):
                logits_CW, _ = _logits(
                    hidden_TH[chunk], weight_VH[words], bias_W, temperatures_T[chunk], options
                )
                running.add(chunk, logits_CW, targets_T[chunk] - words.start)
        if options.group is not None:
            running.add_ranks(options.group)
        log_sum_T = running.sum_T.log()
        normaliser_T = running.largest_T + log_sum_T
        entropy_T = log_sum_T - running.weighted_T / running.sum_T
        # [T] numbers and the inputs are all that backward needs to form any block again.
        ctx.save_for_backward(
            hidden_TH, weight_VH, bias_V, targets_T, temperatures_T, normaliser_T, entropy_T
        )
        if not options.entropy_grad:
            # backward ignores the gradient of the entropy then, so it must not claim to have one.
            ctx.mark_non_differentiable(entropy_T)
        return running.target_T - normaliser_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, temperatures_T, normaliser_T, entropy_T = (
            ctx.saved_tensors
        )
        options: _Options = ctx.options
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        scale, wide = options.rule.scale, grad_T.dtype
        # Wide, because each token's gradient is a sum over all blocks of the vocabulary. The weight
        # needs a wide sum for one slice at a time, which is rounded once when it is complete.
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=wide) if for_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if for_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if for_bias else None
        for words in _slices(len(weight_VH), ctx.width):
            weight_WH = weight_VH[words]
            bias_W = None if bias_V is None else bias_V[words]
            sum_WH = torch.zeros_like(weight_WH, dtype=wide) if for_weight else None
            for chunk in _slices(len(hidden_TH), options.chunk_size):
                logits_CW, slope_CW = _logits(
                    hidden_TH[chunk], weight_WH, bias_W, temperatures_T[chunk], options
                )
                # The normalizer from forward gives log p without a pass over the whole vocabulary.
                log_CW = logits_CW.sub_(normaliser_T[chunk].unsqueeze(1))
                if options.entropy_grad:
                    grad_CW = _grad_with_entropy(
                        log_CW, entropy_T[chunk], grad_T[chunk], grad_entropy_T[chunk]
                    )
                else:
                    grad_CW = log_CW.exp_().mul_(-grad_T[chunk].unsqueeze(1))
                _add_at_targets(grad_CW, grad_T[chunk], targets_T[chunk] - words.start)
                # As in `_logits`, in reverse.
                grad_CW.div_(temperatures_T[chunk].to(wide).unsqueeze(1) / scale)
                if slope_CW is not None:
                    grad_CW.mul_(slope_CW)
                if grad_bias_V is not None:
                    grad_bias_V[words] += grad_CW.sum(0)
                # Products in the model's dtype: on a GPU wide ones would miss the tensor cores.
                narrow_CW = grad_CW.to(hidden_TH.dtype)
                if grad_hidden_TH is not None:
                    _accumulate(grad_hidden_TH[chunk], narrow_CW, weight_WH)
                if sum_WH is not None:
                    _accumulate(sum_WH, narrow_CW.T, hidden_TH[chunk])
            if grad_weight_VH is not None:
                grad_weight_VH[words] = sum_WH
        narrowed = (_rounded(grad_hidden_TH, hidden_TH), grad_weight_VH)
        return *narrowed, _rounded(grad_bias_V, bias_V), None, None, None


def _rounded(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


def _grad_with_entropy(
    log_CW: Tensor, entropy_C: Tensor, grad_C: Tensor, grad_entropy_C: Tensor
) -> Tensor:
    """Return [C, W] -p (q + e (log p + H)), q and e the upstream gradients. Overwrites log p."""
    probs_CW = log_CW.exp()
    log_CW.add_(entropy_C.unsqueeze(1)).mul_(grad_entropy_C.unsqueeze(1))
    return log_CW.add_(grad_C.unsqueeze(1)).mul_(probs_CW).neg_()


def _add_at_targets(grad_CW: Tensor, grad_C: Tensor, targets_C: Tensor) -> None:
    """Add each token's gradient at its target, if the block contains it."""
    # Targets elsewhere add 0 at a clamped index: choosing rows by a mask would wait for the GPU.
    width = grad_CW.shape[1]
    inside_C1 = grad_C.where(_is_inside(targets_C, width), 0.0).unsqueeze(1)
    grad_CW.scatter_add_(1, targets_C.clamp(0, width - 1).unsqueeze(1), inside_C1)


def _accumulate(sum_XH: Tensor, left_XY: Tensor, right_YH: Tensor) -> None:
    """Add `left @ right` to a sum that may be wider than its parts."""
    # Into the weight, a sum over tokens, oneDNN is no faster; into the hidden states it is.
    is_row_major = left_XY.is_contiguous()
    if is_row_major and sum_XH.device.type == "cpu" and sum_XH.dtype == left_XY.dtype:
        sum_XH += product(left_XY, right_YH.T)
    # addmm_ needs one dtype, and then spares the product a tensor of its own.
    elif sum_XH.dtype == left_XY.dtype:
        sum_XH.addmm_(left_XY, right_YH)
    else:
        sum_XH += left_XY @ right_YH
