"""The execution of decoder layers: activation checkpointing, compilation, and products of experts.

With checkpointing a layer keeps less for backward and computes it again there. "full" keeps only
the inputs of a layer. "selective" also keeps the results of attention and matrix products, so only
cheap operations (norms, rotations, activation functions) run twice. Forwards are replaced, not
modules, so the names of parameters do not change.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

CheckpointingKind = Literal["full", "selective"]
_KEPT_PRODUCTS = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten._grouped_mm.default",
        "mkldnn._linear_pointwise.default",
    }
)
_KEPT_WORDS = ("attention", "attn", "flex")
"""Words of which every attention operator has one in its name; FlashAttention 4 is no operator."""


def checkpoint_activations(layers: Iterable[torch.nn.Module], kind: CheckpointingKind) -> None:
    """Make each of `layers` recompute its activations in backward."""
    contexts = noop_context_fn if kind == "full" else _selective_contexts
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep_what_is_dear)


def _keep_what_is_dear(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(operator)
    is_dear = name in _KEPT_PRODUCTS or any(word in name for word in _KEPT_WORDS)
    return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE


def use_grouped_experts(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compute all experts of a layer in one grouped product, where torch has one for `dtype`."""
    if dtype == torch.float64:
        lm.set_experts_implementation("eager")
    else:
        lm.set_experts_implementation("grouped_mm")


class _Wide(TorchFunctionMode):
    """Computes in float64 where a model's code asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*(_widened(value) for value in args), **named)


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def stay_wide(lm: PreTrainedModel, layers: Iterable[torch.nn.Module]) -> None:
    """Keep a float64 model, and its decoder `layers`, in float64.

    transformers computes norms, rotations and routers in float32 whatever the model's dtype, which
    rounds a gradient by 1e-7. That is more than most faults of packing or sharding change it.
    """

    def wide(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Wide():
            return forward(*args, **kwargs)

    names = ("Norm", "RotaryEmbedding")
    alone = (one for one in lm.modules() if type(one).__name__.endswith(names))
    # Each layer as well: with checkpointing it runs again in backward, where the model's own
    # forward is not on the stack.
    for module in dict.fromkeys([*alone, *layers]):
        module.forward = partial(wide, module.forward)


def compile_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Compile the forward of each layer on first use; parameter names do not change."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
