"""Triton kernels for the work between the products of a step: norms, rotations, gates, logits.

Each reads its inputs once and writes its outputs once, and computes in float32 whatever the dtypes.
Functions take tensors on the GPU and leave autograd to their callers. Every kernel also runs in
Triton's interpreter on a CPU, where tests compare it with float64. Letters: R rows, N width of a
row, T tokens, D size of an attention head, C tokens of a block of logits, W vocabulary of a block.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from telescope_train.models.head import HeadRule

if TYPE_CHECKING:
    from telescope_train.models.logprobs import LogitsUpstream

Activation = Literal["silu", "gelu_tanh"]

_ROW_PART = 4096
"""Values of a tensor in the registers of one program at a time."""
_MAX_WARPS = 32
"""Of a program, as many as a GPU takes; and so many of a backward pass fit on a processor."""
_FALLBACK_PROGRAMS = 8
"""Number of programs if there is no GPU to ask, as in the interpreter."""


class Normed(NamedTuple):
    """The output of a norm, and the values for its backward pass."""

    values_RN: Tensor
    scales_R: Tensor
    """float32: 1 / sqrt(mean(x^2) + epsilon) of each row."""


@triton.jit
def _tanh(x):
    # With an exponential that cannot overflow: Triton has no tanh of its own on every backend.
    power = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit
def _sigmoid(x):
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1.0 + power)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    num_rows,
    width,
    epsilon,
    offset,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows[:, None] * width + columns[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + epsilon)
    normed = x * scale[:, None]
    if ROUNDS:
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = normed * weight[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)


@triton.jit
def _rms_norm_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    grad_x_ptr,
    partial_ptr,
    num_rows,
    width,
    offset,
    ROUNDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
    summed = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
        places = rows[:, None] * width + columns[None, :]
        x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)
        normed = x * scale[:, None]
        weighted = grad * weight[None, :]
        mean = tl.sum(weighted * normed, 1) / width
        grad_x = (weighted - normed * mean[:, None]) * scale[:, None]
        tl.store(grad_x_ptr + places, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if ROUNDS:
            normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        summed += tl.sum(grad * normed, 0)
    tl.store(partial_ptr + program * width + columns, summed, mask=columns < width)


def rms_norm(
    x_RN: Tensor, weight_N: Tensor, *, epsilon: float, offset: float, rounds: bool
) -> Normed:
    """Return x / rms(x) * (weight + offset); `rounds` = x / rms(x) is rounded to the dtype of x."""
    num_rows, width = x_RN.shape
    y_RN, scales_R = torch.empty_like(x_RN), x_RN.new_empty(num_rows, dtype=torch.float32)
    rows, padded = _row_block(width)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        *(x_RN, weight_N, y_RN, scales_R, num_rows, width, epsilon, offset),
        ROUNDS=rounds,
        ROWS=rows,
        WIDTH=padded,
        num_warps=_num_warps(rows * padded),
    )
    return Normed(y_RN, scales_R)


def rms_norm_backward(
    grad_RN: Tensor,
    x_RN: Tensor,
    weight_N: Tensor,
    scales_R: Tensor,
    *,
    offset: float,
    rounds: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    num_rows, width = x_RN.shape
    # Half of what a program of the forward pass holds, with half as much for each thread: twice as
    # many programs then find their registers on a processor, and one computes while another waits.
    rows, padded = _row_block(width, _ROW_PART // 2)
    # Each program adds up the weight's gradient over its rows; a sum over programs is the rest.
    num_warps = min(_MAX_WARPS, 2 * _num_warps(rows * padded))
    num_programs = min(triton.cdiv(num_rows, rows), _num_programs(x_RN.device, num_warps))
    grad_x_RN = torch.empty_like(x_RN)
    partial_PN = x_RN.new_empty(num_programs, width, dtype=torch.float32)
    _rms_norm_backward_kernel[(num_programs,)](
        *(grad_RN, x_RN, weight_N, scales_R, grad_x_RN, partial_PN, num_rows, width, offset),
        ROUNDS=rounds,
        ROWS=rows,
        WIDTH=padded,
        num_warps=num_warps,
    )
    return grad_x_RN, partial_PN.sum(0).to(weight_N.dtype)


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    token_stride,
    head_stride,
    num_heads,
    half,
    IS_BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # In 64 bits, as its product with a stride of long rows must be.
    heads = tl.arange(0, HEADS).to(tl.int64)
    columns = tl.arange(0, HALF)
    is_column = columns < half
    inside = (heads < num_heads)[:, None] & is_column[None, :]
    first = token * token_stride + heads[:, None] * head_stride + columns[None, :]
    x_first = tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    x_second = tl.load(x_ptr + first + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * 2 * half + columns
    cos_first = tl.load(cos_ptr + angle, mask=is_column, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_ptr + angle + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_ptr + angle, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_ptr + angle + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_BACKWARD:
        y_first = x_first * cos_first + x_second * sin_second
        y_second = x_second * cos_second - x_first * sin_first
    else:
        y_first = x_first * cos_first - x_second * sin_first
        y_second = x_second * cos_second + x_first * sin_second
    place = (token * num_heads + heads[:, None]) * 2 * half + columns[None, :]
    tl.store(y_ptr + place, y_first.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + place + half, y_second.to(y_ptr.dtype.element_ty), mask=inside)


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, is_backward: bool = False) -> Tensor:
    """Return x * cos + (-x's second half, x's first half) * sin, contiguous; or the gradient of x.

    The numbers of a head are next to each other in x; its heads and tokens may have any stride.
    """
    num_tokens, num_heads, size = x_THD.shape
    y_THD = x_THD.new_empty(x_THD.shape)
    heads, half = triton.next_power_of_2(num_heads), triton.next_power_of_2(size // 2)
    _rotate_kernel[(num_tokens,)](
        *(x_THD, cos_TD, sin_TD, y_THD, x_THD.stride(0), x_THD.stride(1), num_heads, size // 2),
        IS_BACKWARD=is_backward,
        HEADS=heads,
        HALF=half,
        num_warps=_num_warps(heads * half),
    )
    return y_THD


@triton.jit
def _gate_kernel(gate_ptr, up_ptr, y_ptr, size, IS_SILU: tl.constexpr, PART: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    inside = places < size
    gate = tl.load(gate_ptr + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        share = _sigmoid(gate)
    else:
        share = 0.5 + 0.5 * _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))
    tl.store(y_ptr + places, (gate * share * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    size,
    IS_SILU: tl.constexpr,
    PART: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * PART + tl.arange(0, PART)
    inside = places < size
    grad = tl.load(grad_ptr + places, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        share = _sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    else:
        square = gate * gate
        tanh = _tanh(0.7978845608028654 * gate * (1.0 + 0.044715 * square))
        share = 0.5 + 0.5 * tanh
        inner = 0.7978845608028654 * (1.0 + 3 * 0.044715 * square)
        slope = share + 0.5 * gate * (1.0 - tanh * tanh) * inner
    grad_gate, grad_up = grad * up * slope, grad * gate * share
    tl.store(grad_gate_ptr + places, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_up_ptr + places, grad_up.to(grad_up_ptr.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up of two contiguous tensors of one shape."""
    y, part = torch.empty_like(gate), 1024
    _gate_kernel[(triton.cdiv(gate.numel(), part),)](
        *(gate, up, y, gate.numel()), IS_SILU=activation == "silu", PART=part
    )
    return y


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    grad_gate, grad_up, part = torch.empty_like(gate), torch.empty_like(up), 1024
    _gate_backward_kernel[(triton.cdiv(gate.numel(), part),)](
        *(grad, gate, up, grad_gate, grad_up, gate.numel()),
        IS_SILU=activation == "silu",
        PART=part,
    )
    return grad_gate, grad_up


@triton.jit
def _logits(products, scale, cap, HAS_CAP: tl.constexpr):
    logits = products * scale
    if HAS_CAP:
        logits = cap * _tanh(logits / cap)
    return logits


@triton.jit
def _fold_kernel(
    products_ptr,
    targets_ptr,
    temperatures_ptr,
    largest_ptr,
    sum_ptr,
    weighted_ptr,
    target_ptr,
    row_stride,
    width,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    PART: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row_ptr = products_ptr + token * row_stride
    temperature = tl.load(temperatures_ptr + token)
    target = tl.load(targets_ptr + token)
    largest = tl.load(largest_ptr + token)
    total = tl.load(sum_ptr + token)
    weighted = tl.load(weighted_ptr + token)
    for start in range(0, width, PART):
        columns = start + tl.arange(0, PART)
        inside = columns < width
        products = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        logits = _logits(products, scale, cap, HAS_CAP) / temperature
        now = tl.maximum(largest, tl.max(tl.where(inside, logits, float("-inf")), 0))
        # Earlier terms e^x and x e^x, relative to a maximum that moves by d <= 0, become e^d e^x
        # and e^d (x e^x + d e^x).
        moved = largest - now
        shifted = tl.where(inside, logits - now, 0.0)
        powers = tl.where(inside, tl.exp(shifted), 0.0)
        weighted = (weighted + total * moved) * tl.exp(moved) + tl.sum(powers * shifted, 0)
        total = total * tl.exp(moved) + tl.sum(powers, 0)
        largest = now
    tl.store(largest_ptr + token, largest)
    tl.store(sum_ptr + token, total)
    tl.store(weighted_ptr + token, weighted)
    if (target >= 0) & (target < width):
        product = tl.load(row_ptr + target).to(tl.float32)
        tl.store(target_ptr + token, _logits(product, scale, cap, HAS_CAP) / temperature)


@triton.jit
def _logits_gradient_kernel(
    products_ptr,
    targets_ptr,
    temperatures_ptr,
    normaliser_ptr,
    entropy_ptr,
    grad_ptr,
    grad_entropy_ptr,
    gradient_ptr,
    row_stride,
    width,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    PART: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + token)
    target = tl.load(targets_ptr + token)
    normaliser = tl.load(normaliser_ptr + token)
    grad = tl.load(grad_ptr + token)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + token)
        grad_entropy = tl.load(grad_entropy_ptr + token)
    for start in range(0, width, PART):
        columns = start + tl.arange(0, PART)
        inside = columns < width
        row_ptr = products_ptr + token * row_stride
        products = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        logits = _logits(products, scale, cap, HAS_CAP)
        logs = logits / temperature - normaliser
        pushed = grad
        if HAS_ENTROPY:
            pushed += grad_entropy * (logs + entropy)
        found = tl.where(columns == target, grad, 0.0) - tl.exp(logs) * pushed
        found = found / temperature * scale
        if HAS_CAP:
            share = logits / cap
            found = found * (1.0 - share * share)
        places = gradient_ptr + token * width + columns
        tl.store(places, found.to(gradient_ptr.dtype.element_ty), mask=inside)


def fold_logits(
    products_CW: Tensor,
    targets_C: Tensor,
    temperatures_C: Tensor,
    running: tuple[Tensor, Tensor, Tensor, Tensor],
    rule: HeadRule,
) -> None:
    """Add a block of products to sums of its tokens; targets count from its first column.

    `running`: [C] float32 of each token, over the vocabulary so far: the largest logit; the sums of
    exp(logit - largest) and of that times (logit - largest); and the logit of the target.
    """
    num_tokens, width = products_CW.shape
    _fold_kernel[(num_tokens,)](
        *(products_CW, targets_C, temperatures_C, *running, products_CW.stride(0), width),
        **_arguments(rule, width),
    )


def logits_gradient(
    products_CW: Tensor, upstream: "LogitsUpstream", rule: HeadRule, dtype: torch.dtype
) -> Tensor:
    """Return the gradient [C, W] of a block of products in `dtype`, written once."""
    num_tokens, width = products_CW.shape
    gradient_CW = products_CW.new_empty(num_tokens, width, dtype=dtype)
    *tensors, grad_C, grad_entropy_C = upstream
    has_entropy = grad_entropy_C is not None
    _logits_gradient_kernel[(num_tokens,)](
        *(products_CW, *tensors, grad_C, grad_entropy_C if has_entropy else grad_C, gradient_CW),
        *(products_CW.stride(0), width),
        HAS_ENTROPY=has_entropy,
        **_arguments(rule, width),
    )
    return gradient_CW


def _arguments(rule: HeadRule, width: int) -> dict[str, Any]:
    part = min(_ROW_PART, triton.next_power_of_2(width))
    return {
        "scale": rule.scale,
        "cap": rule.cap or 0.0,
        "HAS_CAP": rule.cap is not None,
        "PART": part,
        "num_warps": _num_warps(part),
    }


def _row_block(width: int, part: int = _ROW_PART) -> tuple[int, int]:
    """Return the rows of a program at a time, and the width to which they are padded."""
    padded = triton.next_power_of_2(width)
    return max(1, part // padded), padded


def _num_warps(numbers: int) -> int:
    """Return the number of warps of a program, with about 16 values for each thread."""
    return max(1, min(_MAX_WARPS // 2, triton.next_power_of_2(numbers) // 512))


def _num_programs(device: torch.device, num_warps: int) -> int:
    """Return the number of programs of so many warps that a GPU holds at once."""
    if device.type != "cuda":
        return _FALLBACK_PROGRAMS
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return _MAX_WARPS // num_warps * processors
