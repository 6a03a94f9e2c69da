"""Compute with rounded copies of the weights where one rank holds the whole policy.

Master weights are the parameters of the modules. While the policy computes, copies in the dtype of
its layers replace them, and each gradient of a copy is added to that of its master, so that batches
add up in the master's dtype. FSDP does the same for several ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter


class _CopyPlace(NamedTuple):
    """A name under which a module has a parameter; tied weights have several of them."""

    module: torch.nn.Module
    name: str
    master: Parameter


@contextmanager
def compute_copies(policy: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let `policy` compute in `dtype` inside the block, forward and backward.

    Parameters that have this dtype already are not copied.
    """
    places = [
        _CopyPlace(module, name, parameter)
        for module in policy.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype != dtype
    ]
    copies = {place.master: _copy_of(place.master, dtype) for place in places}
    # Each time, since torch does not count what a fused optimizer writes: stale copies would
    # train on without an error, and rounding all is one read and half a write of the weights.
    if copies:
        with torch.no_grad():
            torch._foreach_copy_(list(copies.values()), list(copies))
    for place in places:
        setattr(place.module, place.name, copies[place.master])
    try:
        yield
    finally:
        for place in places:
            setattr(place.module, place.name, place.master)


def _copy_of(master: Parameter, dtype: torch.dtype) -> Parameter:
    copy = Parameter(torch.empty_like(master, dtype=dtype), master.requires_grad)
    if master.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_add_to, master))
    return copy


def _add_to(master: Parameter, copy: Tensor) -> None:
    gradient, copy.grad = copy.grad, None
    assert gradient is not None, "the hook runs after the gradient was added up"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
