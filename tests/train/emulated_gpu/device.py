"""A GPU on a machine without one: tensors of the device `cuda:0` that hold numbers on the CPU.

    trainer --operation on cuda:0--> Emulated: refuses a mixture of devices, notes what waits
                                          \\--the same operation--> torch on the CPU

What runs here takes the way of a GPU in all code of the trainer: its choice of attention, kernels
(in Triton's interpreter), copies, events and dtypes. What it shows: that no operation mixes tensors
of host and GPU, where the host waits, and that numbers are those of the CPU. It says nothing of
speed and memory, nor of what runs at the same time, as here one operation ends before the next.
The library made of device.cpp is loaded before torch, by LD_PRELOAD in a process of its own.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.runtime.interpreter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
"""Operations whose answer the host needs."""
COPIES = ("_to_copy", "copy_", "_foreach_copy_")
waits: Counter[str] = Counter()
"""Operation and place in our code for which the host waited -> how often."""


class GpuTensor(torch.Tensor):
    """A tensor of `cuda:0`; `on_cpu` holds its numbers."""

    on_cpu: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=GPU,
        )
        made.on_cpu = on_cpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self):
        return self.on_cpu.untyped_storage()

    def tolist(self):
        waited("tolist")
        return self.on_cpu.detach().tolist()


class Emulated(TorchDispatchMode):
    """While it is entered, tensors can be made on `cuda:0`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if is_gpu(kwargs.get("device")) or any(isinstance(one, GpuTensor) for one in leaves):
            return computed(func, args, kwargs)
        return func(*args, **kwargs)


def is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def on_cpu(value: Any) -> Any:
    return value.on_cpu if isinstance(value, GpuTensor) else value


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation with at least one tensor of the GPU in it, or one that makes one."""
    name = func.__name__.split(".")[0]
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    gpus = [one for one in tensors if isinstance(one, GpuTensor)]
    # A number may be on the host. torch copies indices itself, if what they index is on the GPU.
    hosts = [one for one in tensors if not isinstance(one, GpuTensor) and one.dim()]
    is_indexed = name in ("index", "index_put_", "index_put") and isinstance(args[0], GpuTensor)
    if gpus and hosts and name not in COPIES and func.namespace != "c10d" and not is_indexed:
        raise RuntimeError(f"{func} mixes cuda:0 with cpu, {[tuple(one.shape) for one in hosts]}")
    note_waits(name, args, kwargs)
    asked = kwargs.get("device")
    stays = is_gpu(asked) or (asked is None and bool(gpus))
    if name == "copy_":
        stays = isinstance(args[0], GpuTensor)
    if is_gpu(asked):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    args, kwargs = tree_map(on_cpu, args), tree_map(on_cpu, kwargs)
    if name in ("mm", "bmm") and func._overloadname.startswith("dtype"):  # not on the CPU
        product = torch.matmul(args[0].float(), args[1].float()).to(args[2])
        found = kwargs["out"].copy_(product) if "out" in kwargs else product
    else:
        found = func(*args, **kwargs)
    if not stays:
        return found
    known = {id(one.on_cpu): one for one in gpus}  # what changes in place stays the same tensor

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else GpuTensor(value)

    return tree_map(placed, found)


def note_waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note an operation for which the host waits until the GPU has done all that was launched."""
    first = isinstance(args[0], GpuTensor) if args else False
    if name == "_to_copy":
        leaves = first != is_gpu(kwargs.get("device", GPU if first else None))
        if leaves and not kwargs.get("non_blocking"):
            waited("to cpu" if first else "to cuda")
    elif name == "copy_":
        crosses = first != isinstance(args[1], GpuTensor)
        if crosses and not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
            waited("copy_")
    elif name in WAITS:
        waited(name)
    elif name.startswith("index") and any(
        getattr(one, "dtype", None) == torch.bool for one in tree_leaves(args[1:])
    ):
        waited("index by a mask")


def waited(what: str) -> None:
    stack = traceback.extract_stack()
    ours = [one for one in stack if "telescope_train" in one.filename]
    waits[f"{what} in {ours[-1].name if ours else '?'}"] += 1


class Event:
    """An event of a stream on which everything is done at once."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waited("synchronize")


class Stream:
    """The only stream of the device."""

    def __init__(self, *place: Any, **options: Any) -> None:
        pass

    def synchronize(self) -> None:
        waited("synchronize")

    def wait_stream(self, other: "Stream") -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


MEMORY = 80 * 2**30
convert_float = triton.runtime.interpreter._convert_float
RANDOM_STATE = torch.zeros(16, dtype=torch.uint8)
ANSWERS = {
    **{"is_available": True, "is_initialized": True, "is_bf16_supported": True},
    **{"device_count": 1, "current_device": 0, "get_device_name": "emulated H100"},
    **{"get_device_capability": (9, 0), "mem_get_info": (MEMORY, MEMORY)},
    **{"memory_reserved": 2**28, "memory_allocated": 2**27, "max_memory_allocated": 2**28},
    **{"get_rng_state": RANDOM_STATE, "get_rng_state_all": [RANDOM_STATE]},
    **dict.fromkeys(["set_device", "empty_cache", "_lazy_init", "init", "ipc_collect"]),
    **dict.fromkeys(["manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all"]),
    "reset_peak_memory_stats": None,
    "get_device_properties": SimpleNamespace(
        name="emulated H100", multi_processor_count=1, total_memory=MEMORY, major=9, minor=0
    ),
    "stream": nullcontext(),
}
"""Function of torch.cuda -> what it answers."""


shares = [1.0]
"""Shares of the memory that this process might take, one after another."""


def install() -> None:
    """Put the device into torch for the rest of this process."""
    torch.cuda.set_per_process_memory_fraction = lambda share, *asked: shares.append(share)
    torch.cuda.get_per_process_memory_fraction = lambda *asked: shares[-1]
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *asked, answer=answer, **options: answer)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *asked: Stream())
    torch.cuda.synchronize = lambda *asked: waited("synchronize")
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.Tensor.pin_memory = lambda tensor: tensor.clone()
    # `torch.tensor(..., device="cuda")` makes its numbers on the CPU and then moves them.
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    data = torch._C.TensorBase.data

    def set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, GpuTensor):
            moved = GpuTensor(value.on_cpu.detach()).requires_grad_(parameter.requires_grad)
            moved._is_param = True
            torch.utils.swap_tensors(parameter, moved)
        else:
            data.__set__(parameter, value)

    for kind in (GpuTensor, torch.nn.Parameter):
        kind.data = property(data.__get__, set_data)
    start = dist.init_process_group
    dist.init_process_group = lambda backend, **options: start("gloo", **options)
    launch = triton.runtime.interpreter.GridExecutor.__call__

    def launched(grid: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return launch(grid, *tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))

    triton.runtime.interpreter.GridExecutor.__call__ = launched
    triton.runtime.interpreter._convert_float = converted
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", attention, "CPU")
    library.impl("_flash_attention_backward", attention_backward, "CPU")
    ANSWERS["library"] = library  # what is implemented is forgotten with it


def converted(numbers: Any, given: Any, asked: Any, rounding: Any) -> Any:
    """Convert floats as the interpreter does, but those of 16 and 32 bits by torch.

    There each takes dozens of operations, and most kernels begin and end with some.
    """
    match given.name, asked.name:
        case "bf16", "fp32":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        case "fp32", "bf16":
            rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        case _:
            return convert_float(numbers, given, asked, rounding)


def samples_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> Iterator[tuple[Any, ...]]:
    """Yield of each sample its slices of queries and keys, and in float32 [H, ...] states, scores.

    Causal from the end, as flash attention is: the last query sees all keys.
    """
    shared_heads = query.shape[1] // key.shape[1]
    firsts = [one.tolist() for one in starts]
    for number in range(len(firsts[0]) - 1):
        queries, keys = (slice(first[number], first[number + 1]) for first in firsts)
        query_HQD = query[queries].float().transpose(0, 1) * scale
        key_HKD, value_HKD = (
            one[keys].float().repeat_interleave(shared_heads, 1).transpose(0, 1)
            for one in (key, value)
        )
        num_queries, num_keys = query_HQD.shape[1], key_HKD.shape[1]
        behind = torch.arange(num_queries)[:, None] - torch.arange(num_keys)[None]
        behind += num_keys - num_queries
        is_hidden = (behind < 0) & is_causal
        if window is not None and window >= 0:
            is_hidden |= behind > window
        scores = (query_HQD @ key_HKD.transpose(1, 2)).masked_fill(is_hidden, float("-inf"))
        yield queries, keys, query_HQD, key_HKD, value_HKD, scores


def attention(
    *inputs: Any, scale: float | None = None, window_size_left: int | None = None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_forward, over samples of different lengths."""
    query, key, value, starts_q, starts_k, _, _, _, is_causal, _ = (
        inputs if len(inputs) == 10 else (*inputs, False)
    )
    output, normalizers = torch.empty(query.shape), []
    for queries, _, _, _, value_HKD, scores in samples_of(
        *(query, key, value, (starts_q, starts_k)),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal=is_causal,
        window=window_size_left,
    ):
        output[queries] = (scores.softmax(-1) @ value_HKD).transpose(0, 1)
        normalizers.append(scores.logsumexp(-1))
    seeds = torch.zeros(2, dtype=torch.uint64)
    return output.to(query.dtype), torch.cat(normalizers, 1), seeds, seeds[0], torch.empty(0)


def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *known: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_backward."""
    _, _, starts_q, starts_k, _, _, _, is_causal, _, _ = known
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grads = [torch.zeros(one.shape) for one in (query, key, value)]

    def added(of_HKD: torch.Tensor, num_heads: int) -> torch.Tensor:
        return of_HKD.transpose(0, 1).unflatten(1, (num_heads, -1)).sum(2)

    for queries, keys, query_HQD, key_HKD, value_HKD, scores in samples_of(
        *(query, key, value, (starts_q, starts_k)),
        scale=scale,
        is_causal=is_causal,
        window=window_size_left,
    ):
        weights, grad_HQD = scores.softmax(-1), grad[queries].float().transpose(0, 1)
        sums = (grad_HQD * (weights @ value_HKD)).sum(-1, keepdim=True)
        by_scores = weights * (grad_HQD @ value_HKD.transpose(1, 2) - sums)
        grads[0][queries] = (by_scores @ key_HKD).transpose(0, 1) * scale
        grads[1][keys] += added(by_scores.transpose(1, 2) @ query_HQD, key.shape[1])
        grads[2][keys] += added(weights.transpose(1, 2) @ grad_HQD, key.shape[1])
    return tuple(found.to(one.dtype) for found, one in zip(grads, (query, key, value), strict=True))
