"""Decoder layers with the fused kernels of `gpu_kernels`, where results are the same.

Norms, rotations and gated MLPs of a model get faster forwards, each after it agreed with the
module's own on a few rows. A module that computes differently keeps its own code. Parameters and
names stay as they were.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOGGER = logging.getLogger(__name__)
_ROTATION = "apply_rotary_pos_emb"
"""The function that rotates queries and keys in transformers' models."""
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Share of the largest output that a few roundings explain. Another activation gives ten times
that."""


class Fused(NamedTuple):
    """Number of modules with a new forward; rotations are counted per architecture."""

    norms: int
    mlps: int
    rotations: int
    kept: tuple[str, ...] = ()
    """Classes or functions of norms, MLPs and rotations that keep their own code, sorted."""


class _NormForm(NamedTuple):
    offset: float
    """Added to the weight: 1 in Gemma."""
    rounds: bool
    """Whether x / rms(x) is rounded before the multiplication by the weight."""


_NORM_FORMS = [_NormForm(0.0, True), _NormForm(1.0, False), _NormForm(0.0, False)]


def gpu_kernels() -> ModuleType:
    """Return `telescope_train.models.gpu_kernels`, which imports Triton: only on a GPU."""
    return import_module("telescope_train.models.gpu_kernels")


def fuse_layers(
    model: torch.nn.Module, kernels: ModuleType, device: torch.device, dtype: torch.dtype
) -> Fused:
    """Give `model` the forwards of `kernels` (`gpu_kernels`); it computes in `dtype`.

    Modules may be without memory: copies of them are compared on `device`.
    """
    if dtype not in _TOLERANCE:
        _LOGGER.info("fused kernels: none, because the model computes in %s", dtype)
        return Fused(0, 0, 0)
    kept: set[str] = set()
    known: dict[tuple[Any, ...], Callable[..., Tensor] | None] = {}
    norms = mlps = 0
    for module in model.modules():
        is_norm = type(module).__name__.endswith("RMSNorm")
        if not is_norm and not _is_gated_mlp(module):
            continue
        kind = _kind(module)
        if kind not in known:
            candidates = _norm_forwards(kernels, module) if is_norm else _mlp_forwards(kernels)
            known[kind] = _nearest(module, list(candidates), device, dtype)
        forward = known[kind]
        if forward is not None:
            module.forward = partial(forward, module)
            norms, mlps = norms + is_norm, mlps + (not is_norm)
        else:
            kept.add(type(module).__name__)
    rotations = _fuse_rotations(model, kernels, device, dtype, kept)
    fused = Fused(norms, mlps, rotations, tuple(sorted(kept)))
    _LOGGER.info(
        "fused kernels: %d norms, %d gated MLPs, %d rotations of queries and keys%s",
        *fused[:3],
        f"; {', '.join(fused.kept)} keep their own code, which computes something else or was not "
        "recognized"
        if kept
        else "",
    )
    return fused


def _kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return everything that determines a module's computation, except its weights.

    Layers of one class may differ in a number, as in how many activations they keep, or in the
    activation itself.
    """
    return tuple(
        (
            type(part),
            frozenset((n, v) for n, v in vars(part).items() if isinstance(v, int | float | str)),
            tuple(parameter.shape for parameter in part.parameters(recurse=False)),
        )
        for part in module.modules()
    )


def _is_gated_mlp(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)


def _norm_forwards(kernels: ModuleType, module: Any) -> Iterator[Callable[..., Tensor]]:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if isinstance(epsilon, float) and isinstance(weight, Tensor):
        for form in _NORM_FORMS:
            yield partial(_norm_forward, kernels, epsilon, form)


def _mlp_forwards(kernels: ModuleType) -> Iterator[Callable[..., Tensor]]:
    for activation in ("silu", "gelu_tanh"):
        yield partial(_mlp_forward, kernels, activation)


def _norm_forward(
    kernels: ModuleType, epsilon: float, form: _NormForm, module: Any, values: Tensor
) -> Tensor:
    return _RmsNorm.apply(values, module.weight, kernels, epsilon, form)


def _mlp_forward(kernels: ModuleType, activation: str, module: Any, values: Tensor) -> Tensor:
    gate, up = module.gate_proj(values), module.up_proj(values)
    return module.down_proj(_Gated.apply(gate, up, kernels, activation))


@torch.no_grad()
def _nearest(
    module: Any,
    candidates: list[Callable[..., Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[..., Tensor] | None:
    """Return the candidate closest to the forward of `module`; None = none is close.

    They are compared on a copy with random weights that keep activations between -3 and 3, where
    the activation functions differ most.
    """
    if not candidates:
        return None
    judged = copy.deepcopy(module).to_empty(device=device).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for weight in judged.parameters():
        values = torch.randn(weight.shape, generator=generator)
        weight.copy_(values * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1.0 + 0.5 * values)
    width = next(judged.parameters()).shape[-1]
    values = torch.randn(2, 3, width, generator=generator).to(device, dtype)
    expected = judged(values)
    distances = [(_distance(one(judged, values), expected), one) for one in candidates]
    distance, found = min(distances, key=lambda one: one[0])
    return found if distance <= _TOLERANCE[dtype] else None


def _distance(found: Tensor, expected: Tensor) -> float:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return torch.inf
    size = expected.double().abs().max().clamp_min(1e-6)
    return float((found.double() - expected.double()).abs().max() / size)


@torch.no_grad()
def _fuse_rotations(
    model: torch.nn.Module,
    kernels: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    kept: set[str],
) -> int:
    """Replace the rotation of each architecture in `model` that has the usual one.

    The names of those that stay are added to `kept`.
    """
    names = sorted({type(module).__module__ for module in model.modules()})
    fused = 0
    for name in names:
        architecture = sys.modules[name]
        own = getattr(architecture, _ROTATION, None)
        if own is None or isinstance(own, _Rotation):
            continue
        ours = _Rotation(kernels, own, device.type)
        generator = torch.Generator(device="cpu").manual_seed(0)
        queries, keys, cos, sin = (
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape in ((1, 3, 4, 16), (1, 3, 2, 16), (1, 3, 16), (1, 3, 16))
        )
        # With angles whose halves differ, though no model has them: who repeats one of them shows.
        arguments = (queries.transpose(1, 2), keys.transpose(1, 2), cos, sin)
        try:
            pairs = list(zip(ours(*arguments), own(*arguments), strict=True))
            distance = max(_distance(*pair) for pair in pairs)
        except (RuntimeError, TypeError, ValueError):
            distance = torch.inf  # a rotation of other arguments
        if distance <= _TOLERANCE[dtype]:
            setattr(architecture, _ROTATION, ours)
            fused += 1
        else:
            kept.add(f"{name}.{_ROTATION}")
    return fused


class _Rotation:
    """Replaces the rotation of an architecture; calls the original except for packed rows.

    Other models of the architecture may be on another device, or compute in float64.
    """

    def __init__(
        self, kernels: ModuleType, own: Callable[..., tuple[Tensor, Tensor]], device_type: str
    ) -> None:
        self._kernels = kernels
        self._device_type = device_type
        self.own = own

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        cos: Tensor,
        sin: Tensor,
        *others: Any,
        **named: Any,
    ) -> tuple[Tensor, Tensor]:
        """Rotate [1, heads, T, D] by [1, T, D]."""
        is_usual = not others and not named and queries.dim() == 4 and len(queries) == 1
        is_whole = queries.shape[-1] == cos.shape[-1] and queries.device == cos.device
        # Tensors without numbers are those of whoever counts what the kernels do.
        is_here = queries.device.type in (self._device_type, "meta")
        is_judged = is_here and queries.dtype in _TOLERANCE
        is_usual = is_usual and is_judged and queries.stride(-1) == keys.stride(-1) == 1
        if not (is_usual and is_whole and cos.dim() == 3):
            return self.own(queries, keys, cos, sin, *others, **named)
        angles = (cos[0].contiguous(), sin[0].contiguous(), self._kernels)
        return _Rotated.apply(queries, *angles), _Rotated.apply(keys, *angles)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        kernels: ModuleType,
        epsilon: float,
        form: _NormForm,
    ) -> Tensor:
        rows = values.reshape(-1, values.shape[-1]).contiguous()
        normed = kernels.rms_norm(rows, weight, epsilon=epsilon, **form._asdict())
        ctx.kernels, ctx.form = kernels, form
        ctx.save_for_backward(rows, weight, normed.scales_R)
        return normed.values_RN.view(values.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scales = ctx.saved_tensors
        grads = grad.reshape(rows.shape).contiguous()
        found = ctx.kernels.rms_norm_backward(grads, rows, weight, scales, **ctx.form._asdict())
        return found[0].view(grad.shape), found[1], None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: ModuleType, activation: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.kernels, ctx.activation = kernels, activation
        ctx.save_for_backward(gate, up)
        return kernels.gated(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.kernels.gated_backward(grad.contiguous(), *ctx.saved_tensors, ctx.activation)
        return *found, None, None


class _Rotated(torch.autograd.Function):
    """[1, heads, T, D] in the memory of [T, heads, D], as the products before it left them."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, cos_TD: Tensor, sin_TD: Tensor, kernels: ModuleType
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(cos_TD, sin_TD)
        return kernels.rotate(values[0].transpose(0, 1), cos_TD, sin_TD).transpose(0, 1)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_THD = grad[0].transpose(0, 1)
        if grad_THD.stride(-1) != 1:
            grad_THD = grad_THD.contiguous()
        found = ctx.kernels.rotate(grad_THD, *ctx.saved_tensors, is_backward=True)
        return found.transpose(0, 1)[None], None, None, None
