"""Attention over rows with shared prefixes on the CPU: own tokens and prefixes apart, then joined.

Own tokens attend to themselves causally, in padded blocks as in `blocks`. Each piece of a prefix is
attended to by all tokens that begin with it at once, as a slice of the row: nothing is copied per
sample. The parts of a softmax are joined by their normalizers. With the joined result and
normalizer, torch's backward of each part gives its exact share of the gradient.
Paper: arXiv:2205.14135, section 3.1 (softmax in parts).
Dims: T tokens of the row, P padded places, H heads, D head size, Q queries and K keys of a part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from telescope_train.models.attention.blocks import PackedLayout, refuse_options
from telescope_train.models.attention.prefixes import PrefixPart

CASCADE_ATTENTION = "telescope_cascade"
# torch's fused attention on the CPU, with the normalizer that the public function drops.
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CascadeLayout:
    """The tokens to which each token of a row attends."""

    own: PackedLayout
    """The blocks in which pieces attend to themselves."""
    parts: tuple[PrefixPart, ...]
    """The prefixes to which they attend as well."""
    positions_T: NDArray[np.int64]
    """[T] position of each token in its sample, for windows; on the host."""


class _Call(NamedTuple):
    """A part of attention: [H, ...] of several sequences of equal length."""

    queries: Any
    """Positions in the row: a slice, or [Q] indices."""
    keys: slice
    mask: Tensor | None
    """[Q, K] 0 for visible keys and -inf for others; None = all are visible."""


def _calls(layout: CascadeLayout, window: int | None, dtype: torch.dtype) -> Iterator[_Call]:
    """Yield the parts of attention to prefixes, without keys that no query sees."""
    for (first_key, end_key), (first, end) in layout.parts:
        queries_Q = layout.positions_T[first:end]
        keys_K = layout.positions_T[first_key:end_key]
        if window is None or queries_Q.max() - keys_K[0] < window:
            yield _Call(slice(first, end), slice(first_key, end_key), None)
            continue
        # A query that sees no key of a part has no normalizer there, so it is left out.
        seeing = np.flatnonzero(queries_Q - keys_K[-1] < window)
        if not seeing.size:
            continue
        queries_Q = queries_Q[seeing]
        unseen = max(0, int(queries_Q.min() - window + 1 - keys_K[0]))
        is_seen = queries_Q[:, None] - keys_K[None, unseen:] < window
        yield _Call(
            torch.from_numpy(seeing + first),
            slice(first_key + unseen, end_key),
            _mask(torch.from_numpy(is_seen), dtype),
        )


def _own_mask(length: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Return [L, L] the causal mask of a window; None if the window covers a whole piece."""
    if window is None or length <= window:
        return None
    places_L = torch.arange(length)
    distance_LL = places_L[:, None] - places_L[None, :]
    return _mask((distance_LL >= 0) & (distance_LL < window), dtype)


def _mask(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, float("-inf"))


class _CascadeOptions(NamedTuple):
    layout: CascadeLayout
    scale: float | None
    window: int | None


class _CascadeAttention(torch.autograd.Function):
    """[T, H, D] of queries, keys and values in, [T, H, D] out."""

    @staticmethod
    def forward(
        ctx: Any, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, options: _CascadeOptions
    ) -> Tensor:
        states = (query_THD, key_THD, value_THD)
        output_THD, normalizer_TH = _own(states, options)
        for call in _calls(options.layout, options.window, query_THD.dtype):
            part = _attend(
                _heads(query_THD[call.queries]),
                _heads(key_THD[call.keys]),
                _heads(value_THD[call.keys]),
                attn_mask=call.mask,
                scale=options.scale,
            )
            _join(output_THD, normalizer_TH, call.queries, part)
        output_THD = output_THD.to(query_THD.dtype)
        ctx.save_for_backward(*states, output_THD, normalizer_TH)
        ctx.options = options
        return output_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query_THD, key_THD, value_THD, output_THD, normalizer_TH = ctx.saved_tensors
        options: _CascadeOptions = ctx.options
        states = (query_THD, key_THD, value_THD)
        grads = _own_backward(states, grad_THD, output_THD, normalizer_TH, options)
        for call in _calls(options.layout, options.window, query_THD.dtype):
            found = _attend_backward(
                _heads(grad_THD[call.queries]),
                _heads(query_THD[call.queries]),
                _heads(key_THD[call.keys]),
                _heads(value_THD[call.keys]),
                _heads(output_THD[call.queries]),
                normalizer_TH[call.queries].T.unsqueeze(0),
                0.0,
                False,
                attn_mask=call.mask,
                scale=options.scale,
            )
            places = (call.queries, call.keys, call.keys)
            for grad, place, part in zip(grads, places, found, strict=True):
                grad[place] += part[0].transpose(0, 1)
        return *(grad.to(query_THD.dtype) for grad in grads), None


def _heads(states_QHD: Tensor) -> Tensor:
    """[Q, H, D] -> [1, H, Q, D]."""
    return states_QHD.transpose(0, 1).unsqueeze(0)


def _join(
    output_THD: Tensor, normalizer_TH: Tensor, queries: Any, part: tuple[Tensor, Tensor]
) -> None:
    """Add a part of a softmax to the previous sum, in place."""
    found_QHD, log_sum_QH = part[0][0].transpose(0, 1), part[1][0].T
    before_QH = normalizer_TH[queries]
    joined_QH = torch.logaddexp(before_QH, log_sum_QH)
    kept = (before_QH - joined_QH).exp().unsqueeze(-1)
    added = (log_sum_QH - joined_QH).exp().unsqueeze(-1)
    output_THD[queries] = output_THD[queries] * kept + found_QHD * added
    normalizer_TH[queries] = joined_QH


def _blocks(layout: PackedLayout) -> Iterator[tuple[slice, tuple[int, int]]]:
    base = 0
    for num_pieces, length in layout.blocks:
        yield slice(base, base + num_pieces * length), (num_pieces, length)
        base += num_pieces * length


def _own(states: tuple[Tensor, Tensor, Tensor], options: _CascadeOptions) -> tuple[Tensor, Tensor]:
    """Return [T, H, D] each piece's attention to itself, and its normalizers [T, H]; wide."""
    own = options.layout.own
    padded = [one.index_select(0, own.gather_P) for one in states]
    outputs, normalizers = [], []
    for places, shape in _blocks(own):
        mask = _own_mask(shape[1], options.window, states[0].dtype)
        output, log_sum = _attend(
            *(one[places].unflatten(0, shape).transpose(1, 2) for one in padded),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=options.scale,
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        normalizers.append(log_sum.transpose(1, 2).flatten(0, 1))
    output_THD = torch.cat(outputs).index_select(0, own.place_T)
    normalizer_TH = torch.cat(normalizers).index_select(0, own.place_T)
    return output_THD.to(normalizer_TH.dtype), normalizer_TH


def _own_backward(
    states: tuple[Tensor, Tensor, Tensor],
    grad_THD: Tensor,
    output_THD: Tensor,
    normalizer_TH: Tensor,
    options: _CascadeOptions,
) -> list[Tensor]:
    """Return the gradients [T, H, D] of queries, keys and values through own tokens; wide."""
    own = options.layout.own
    # Padding repeats a real token, so without zeros there it would add to gradients of its keys.
    grad_P = grad_THD.index_select(0, own.gather_P).index_fill_(0, own.padding, 0.0)
    padded = [one.index_select(0, own.gather_P) for one in (*states, output_THD)]
    # Its scores may be far above the normalizer of the token it repeats, and inf * 0 is NaN.
    largest = torch.finfo(normalizer_TH.dtype).max
    normalizer_P = normalizer_TH.index_select(0, own.gather_P).index_fill_(0, own.padding, largest)
    found: list[tuple[Tensor, ...]] = []
    for places, shape in _blocks(own):
        mask = _own_mask(shape[1], options.window, states[0].dtype)
        grads = _attend_backward(
            *(
                one[places].unflatten(0, shape).transpose(1, 2)
                for one in (grad_P, *padded, normalizer_P)
            ),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=options.scale,
        )
        found.append(tuple(one.transpose(1, 2).flatten(0, 1) for one in grads))
    # Each token has one place: a gather, where several pieces would need a sum.
    return [
        torch.cat(parts).index_select(0, own.place_T).to(normalizer_TH.dtype)
        for parts in zip(*found, strict=True)
    ]


# Not compiled: number and sizes of parts change from row to row, and each would compile anew.
@torch.compiler.disable
def cascade_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cascade_layout: CascadeLayout,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as the row says; [1, H, T, D] in, [1, T, H, D] out, as transformers expects."""
    refuse_options(options)
    states = [one[0].transpose(0, 1) for one in (query, key, value)]
    chosen = _CascadeOptions(cascade_layout, scaling, options.get("sliding_window"))
    return _CascadeAttention.apply(*states, chosen).unsqueeze(0), None
