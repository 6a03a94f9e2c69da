"""Let megatron-core run on ranks without a GPU, where "cuda" then means the CPU.

`on_cpu()` wraps every use of the library, including its import. Inside the block, tensors requested
on "cuda" are created on the CPU, and the functions of torch.cuda that the library calls return
harmless values. Outside the block nothing is changed. On a GPU the block is not entered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace functions of torch.cuda for this thread, inside the block."""
    places = [
        *((torch.cuda, name, answer) for name, answer in _ANSWERS.items()),
        (torch.cuda.random, "get_rng_state", _ANSWERS["get_rng_state"]),
        (torch.nn.Module, "cuda", _itself),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    for owner, name, answer in places:
        setattr(owner, name, answer)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _itself(module: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    return module


class _Stream:
    """A stream for the CPU, whose work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> "_Event":
        return _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _always(answer: Any) -> Callable[..., Any]:
    """Return a new function each time: torch's compiler wants a separate one for each name."""

    def function(*_: Any, **__: Any) -> Any:
        return answer

    return function


_ANSWERS: dict[str, Any] = {
    **{
        name: _always(None)
        for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "set_rng_state")
    },
    **{name: _always(0) for name in ("memory_allocated", "max_memory_allocated")},
    **{name: _always(_Stream()) for name in ("current_stream", "default_stream")},
    "current_device": _always("cpu"),
    "get_rng_state": _always(torch.empty(0, dtype=torch.uint8)),
    "stream": _always(nullcontext()),
    "Stream": _Stream,
    "Event": _Event,
}
"""Function or class of torch.cuda -> its replacement."""


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces the device "cuda" by "cpu", also in backward passes, which run in this thread."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]  # the distributed optimizer takes what is not in 16 bits for float32
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _name_of_type(args[0])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _name_of_type(tensor: torch.Tensor) -> str:
    """Return the value of `Tensor.type()` for the same tensor on a GPU.

    Megatron's optimizers branch on these names. They have no branch for float64, which only tests
    use: it is treated like float32, the type that needs no second copy.
    """
    names = {torch.bfloat16: "BFloat16", torch.float16: "Half"}
    return f"torch.cuda.{names.get(tensor.dtype, 'Float')}Tensor"
