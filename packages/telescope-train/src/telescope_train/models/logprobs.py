"""Log-probs and entropies of given tokens from hidden states, without the `[T, V]` logits.

Logits exist for one block of tokens and vocabulary at a time, in forward and again in backward,
small enough for a CPU's cache. Forward folds each block into a running maximum and two sums per
token. Reductions are float32 or wider in any case, and so are logits with `wide_logits`: a rounding
to bfloat16 costs a log-prob a hundredth of a nat. A model's scale and cap come before temperatures.
On a GPU `gpu_kernels` do all that comes between the products; here it is in torch, for a CPU.
Letters: T tokens, C tokens of a block, H hidden size, V vocabulary, W vocabulary of a block.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from telescope_train.models.cpu_kernels import product
from telescope_train.models.fused_layers import gpu_kernels
from telescope_train.models.head import PLAIN, HeadRule
from telescope_train.models.row import require_known_tokens

CPU_BLOCK = 2**20
"""Logits in a block on the CPU: 4 MiB of float32 stay in cache, and the product is fast."""
DEVICE_BLOCK = 2**25
"""Logits in a block on other devices: few kernels, each long enough to keep them busy."""
_DEVICE_WIDTH = 2**10
"""Least vocabulary of a block elsewhere. Blocks have as many tokens as that allows: one that has
all of them finishes the gradient of its part of the head, and nothing has to be added up."""


class Head(NamedTuple):
    """The output head, or this rank's part of it; other ranks of the group have the rest."""

    weight_VH: Tensor
    """Rows for consecutive token ids, without padding, which would get a probability."""
    first: int
    """Token id of the first row."""
    vocab_size: int
    """Tokens in the whole vocabulary."""
    group: dist.ProcessGroup | None
    """The ranks with the other parts; None = this rank has all of it."""
    bias_V: Tensor | None = None
    """Bias of the same token ids; None = the head has none."""
    rule: HeadRule = PLAIN
    """The arithmetic after the product."""


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
    with `entropy_grad`. A block has at most `chunk_size` tokens on a CPU. `wide_logits` keeps
    logits in float32 where the model is narrower; without it they are rounded to the model's dtype
    first, as in an engine that does so. Peak memory beyond inputs and outputs: two blocks, with a
    cap three, and in backward `[T, H]` and `[W, H]` in float32.

    If each rank of a group has a part of the vocabulary, all of them call this with the same tokens
    and get the same results. The gradient of the hidden states is then only this rank's part, and
    the caller adds up the parts of all ranks.
    """
    if isinstance(head, Tensor):
        head = Head(head, 0, len(head), None)
    # A target outside would be in no block, and its logit would silently stay 0. Whoever moves
    # targets to a GPU looks before that.
    if targets_T.device.type == "cpu":
        require_known_tokens(targets_T.numpy(), head.vocab_size)
    logprobs_T, entropy_T = _ChunkedLogprobs.apply(
        hidden_TH,
        head.weight_VH,
        head.bias_V,
        targets_T.long() - head.first,
        temperatures_T.contiguous(),  # kernels read number after number
        _Options(chunk_size, entropy_grad, wide_logits, head.group, head.rule),
    )
    return TokenLogprobs(logprobs_T, entropy_T)


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


class _Blocks(NamedTuple):
    """The division of tokens and vocabulary into blocks."""

    num_tokens: int
    width: int

    @classmethod
    def from_hidden(cls, hidden_TH: Tensor, chunk_size: int) -> "_Blocks":
        """Return the blocks for `hidden_TH`, of at most `chunk_size` tokens on a CPU."""
        is_device = _kernels(hidden_TH) is not None
        size = DEVICE_BLOCK if is_device else CPU_BLOCK
        most = size // _DEVICE_WIDTH if is_device else chunk_size
        num_tokens = max(1, min(most, len(hidden_TH)))
        return cls(num_tokens, max(1, size // num_tokens))


def _kernels(hidden_TH: Tensor) -> Any:
    """Return `gpu_kernels` if they can be used."""
    is_used = hidden_TH.device.type != "cpu" and hidden_TH.dtype != torch.float64
    return gpu_kernels() if is_used else None


class _Options(NamedTuple):
    chunk_size: int
    entropy_grad: bool
    wide_logits: bool
    group: dist.ProcessGroup | None
    """The ranks that have the rest of the vocabulary."""
    rule: HeadRule


class LogitsUpstream(NamedTuple):
    """Everything that the gradient of a block of logits depends on besides the logits, each [C]."""

    targets_C: Tensor
    """Target ids, counted from the block's first column."""
    temperatures_C: Tensor
    normaliser_C: Tensor
    """Log of the sum of exp(logit) over the whole vocabulary."""
    entropy_C: Tensor
    grad_C: Tensor
    """Gradient of each token's log-prob."""
    grad_entropy_C: Tensor | None
    """Gradient of each token's entropy; None = there is none."""


def _products(
    hidden_CH: Tensor, weight_WH: Tensor, bias_W: Tensor | None, *, wide_logits: bool
) -> Tensor:
    """Return hidden @ weight.T + bias [C, W]; with `wide_logits` in float32 or wider."""
    wide = torch.promote_types(hidden_CH.dtype, torch.float32)
    if not wide_logits or hidden_CH.dtype == wide:
        products_CW = product(hidden_CH, weight_WH)
    else:
        products_CW = _wide_product(hidden_CH, weight_WH.T, wide)
    if bias_W is not None:
        products_CW += bias_W.to(products_CW.dtype)
    return products_CW


def _wide_product(left_XY: Tensor, right_YZ: Tensor, wide: torch.dtype) -> Tensor:
    """Return left @ right, accumulated in `wide` and not rounded."""
    if left_XY.device.type != "cpu":
        # The tensor cores multiply bfloat16 exactly and add up in float32 anyway.
        return torch.mm(left_XY, right_YZ, out_dtype=wide)
    return product(left_XY.to(wide), right_YZ.T.to(wide))


class _Logits(NamedTuple):
    values_CW: Tensor
    """In float32 or wider, divided by the temperatures."""
    slope_CW: Tensor | None
    """Derivative of the cap; None = there is none, and it is 1."""


def _logits(products_CW: Tensor, temperatures_C: Tensor, rule: HeadRule) -> _Logits:
    """Return the logits [C, W] of a block of products, which is overwritten."""
    wide = torch.promote_types(products_CW.dtype, torch.float32)
    temperatures_C1 = temperatures_C.to(wide).unsqueeze(1)
    if rule.cap is None:
        # Widened before the division by the temperature, as in vLLM's sampler. A scale of 1 leaves
        # the temperatures as they are, to the bit.
        return _Logits(products_CW.to(wide).div_(temperatures_C1 / rule.scale), None)
    shares_CW = products_CW.mul_(rule.scale / rule.cap).tanh_().to(wide)
    return _Logits(shares_CW.mul(rule.cap / temperatures_C1), shares_CW.square_().neg_().add_(1.0))


class _Running:
    """Sums over the vocabulary so far, relative to the largest logit so far."""

    def __init__(self, num_tokens: int, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        # The lowest finite value instead of -inf: the first block multiplies a sum of 0 by the
        # distance from it, and 0 * -inf is NaN.
        self.largest_T = like.new_full((num_tokens,), torch.finfo(wide).min, dtype=wide)
        self.sum_T = torch.zeros_like(self.largest_T)
        """Sum of exp(logit - largest)."""
        self.weighted_T = torch.zeros_like(self.largest_T)
        """Sum of exp(logit - largest) * (logit - largest). Sums of p * logit instead would be large
        numbers that cancel in the entropy."""
        self.target_T = torch.zeros_like(self.largest_T)
        """The logit of each target."""

    def of(self, chunk: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums of some tokens, which share memory with these."""
        sums = (self.largest_T, self.sum_T, self.weighted_T, self.target_T)
        return tuple(sum_T[chunk] for sum_T in sums)

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
        """Add the sums of the other ranks of `group`."""
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
        ctx.options = options
        blocks = ctx.blocks = _Blocks.from_hidden(hidden_TH, options.chunk_size)
        kernels, wide_logits = _kernels(hidden_TH), options.wide_logits
        # Vocabulary outside, tokens inside: a slice of the weight serves all tokens before the next
        # one, and backward can finish the slice's gradient with a sum of only [W, H].
        running = _Running(len(hidden_TH), hidden_TH)
        for words in _slices(len(weight_VH), blocks.width):
            bias_W = None if bias_V is None else bias_V[words]
            for chunk in _slices(len(hidden_TH), blocks.num_tokens):
                products_CW = _products(
                    hidden_TH[chunk], weight_VH[words], bias_W, wide_logits=wide_logits
                )
                targets_C, temperatures_C = targets_T[chunk] - words.start, temperatures_T[chunk]
                if kernels is not None:
                    sums = running.of(chunk)
                    kernels.fold_logits(
                        products_CW, targets_C, temperatures_C.float(), sums, options.rule
                    )
                    continue
                logits_CW, _ = _logits(products_CW, temperatures_C, options.rule)
                running.add(chunk, logits_CW, targets_C)
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
        blocks: _Blocks = ctx.blocks
        # The gradient of a plain sum is one number under all tokens, which kernels cannot read.
        grad_T, grad_entropy_T = grad_T.contiguous(), grad_entropy_T.contiguous()
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        kernels, wide = _kernels(hidden_TH), grad_T.dtype
        # Wide, because each token's gradient is a sum over all blocks of the vocabulary. The weight
        # needs a wide sum for one slice at a time, which is rounded once when it is complete.
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=wide) if for_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if for_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if for_bias else None
        # One product may write a slice of the weight only if there is exactly one block of tokens:
        # without tokens, nothing would.
        is_summed = kernels is None or blocks.num_tokens != len(hidden_TH)
        for words in _slices(len(weight_VH), blocks.width):
            weight_WH = weight_VH[words]
            bias_W = None if bias_V is None else bias_V[words]
            sum_WH = None
            if grad_weight_VH is not None and is_summed:
                sum_WH = torch.zeros_like(weight_WH, dtype=wide)
            for chunk in _slices(len(hidden_TH), blocks.num_tokens):
                products_CW = _products(
                    hidden_TH[chunk], weight_WH, bias_W, wide_logits=options.wide_logits
                )
                upstream = LogitsUpstream(
                    targets_C=targets_T[chunk] - words.start,
                    temperatures_C=temperatures_T[chunk].to(wide),
                    normaliser_C=normaliser_T[chunk],
                    entropy_C=entropy_T[chunk],
                    grad_C=grad_T[chunk],
                    grad_entropy_C=grad_entropy_T[chunk] if options.entropy_grad else None,
                )
                if kernels is None:
                    grad_CW = _gradient(products_CW, upstream, options.rule)
                else:
                    dtype = wide if for_bias else hidden_TH.dtype
                    grad_CW = kernels.logits_gradient(products_CW, upstream, options.rule, dtype)
                if grad_bias_V is not None:
                    grad_bias_V[words] += grad_CW.sum(0)
                # Products in the model's dtype: on a GPU wide ones would miss the tensor cores.
                narrow_CW = grad_CW.to(hidden_TH.dtype)
                if grad_hidden_TH is not None:
                    _accumulate(grad_hidden_TH[chunk], narrow_CW, weight_WH)
                if sum_WH is not None:
                    _accumulate(sum_WH, narrow_CW.T, hidden_TH[chunk])
                elif grad_weight_VH is not None:
                    torch.mm(narrow_CW.T, hidden_TH, out=grad_weight_VH[words])
            if grad_weight_VH is not None and sum_WH is not None:
                grad_weight_VH[words] = sum_WH
        narrowed = (_rounded(grad_hidden_TH, hidden_TH), grad_weight_VH)
        return *narrowed, _rounded(grad_bias_V, bias_V), None, None, None


def _rounded(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)


def _gradient(products_CW: Tensor, upstream: LogitsUpstream, rule: HeadRule) -> Tensor:
    """Return the gradient [C, W] of a block of products, which is overwritten."""
    logits_CW, slope_CW = _logits(products_CW, upstream.temperatures_C, rule)
    # The normalizer from forward gives log p without a pass over the whole vocabulary.
    log_CW = logits_CW.sub_(upstream.normaliser_C.unsqueeze(1))
    grad_C1 = upstream.grad_C.unsqueeze(1)
    if upstream.grad_entropy_C is None:
        grad_CW = log_CW.exp_().mul_(-grad_C1)
    else:
        # -p (q + e (log p + H)), q and e the gradients of log-prob and entropy.
        probs_CW = log_CW.exp()
        log_CW.add_(upstream.entropy_C.unsqueeze(1)).mul_(upstream.grad_entropy_C.unsqueeze(1))
        grad_CW = log_CW.add_(grad_C1).mul_(probs_CW).neg_()
    _add_at_targets(grad_CW, upstream.grad_C, upstream.targets_C)
    # As in `_logits`, in reverse.
    grad_CW.div_(upstream.temperatures_C.unsqueeze(1) / rule.scale)
    return grad_CW if slope_CW is None else grad_CW.mul_(slope_CW)


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
    elif sum_XH.device.type != "cpu":
        sum_XH += _wide_product(left_XY, right_YH, sum_XH.dtype)
    else:
        sum_XH += left_XY @ right_YH
