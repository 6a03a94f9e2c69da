"""Import megatron-core, or say why not, and adapt it to torch's own optimizers.

Everything else of this folder imports the library late and inside `using()`, because it is an
optional dependency and its import already asks for a GPU. On ranks without one, "cuda" then means
the CPU.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from telescope_core.base.errors import ConfigError

HINT = (
    'train_backend "megatron" needs megatron-core, which is not installed; install '
    "telescope-train[megatron], or use train_backend = 'fsdp'"
)


@contextmanager
def using(device: torch.device) -> Iterator[None]:
    """Use the library inside the block on `device`; ConfigError if it is not installed."""
    if device.type == "cuda":
        _prepare()
        yield
        return
    with on_cpu():
        _prepare()
        yield


_is_prepared = False
_QUIET = (
    # The library calls torch's collectives by their older names, in every step,
    r"`torch\.distributed\.\w+` is deprecated",
    # and looks whether views of its buffers have gradients.
    r"The \.grad attribute of a Tensor that is not a leaf Tensor",
    # Its own norms are not used.
    "Apex is not installed",
)
"""Beginnings of warnings about which users cannot do anything."""


def _prepare() -> None:
    """Import the library once, without its output, and fix it for use without extensions."""
    global _is_prepared
    if _is_prepared:
        return
    with warnings.catch_warnings():
        # It warns of each optional extension that is absent, and of its own deprecations.
        warnings.simplefilter("ignore")
        # It imports W&B, whose temporary folders a rank does not live to delete. Python takes None
        # for a module that cannot be imported.
        modules: dict[str, Any] = sys.modules
        hides_wandb = modules.setdefault("wandb", None) is None
        try:
            importlib.import_module("megatron.core")
        except ImportError as error:
            raise ConfigError(HINT) from error
        except FileNotFoundError as error:
            # Transformer Engine is one package, and its part for torch another, built on the spot.
            raise ConfigError(
                f'train_backend "megatron" found a Transformer Engine that lacks a file: {error}; '
                "install its part for torch (transformer_engine[pytorch], built for this one), or "
                "remove transformer_engine"
            ) from error
        finally:
            if hides_wandb:
                del modules["wandb"]
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        importlib.import_module("megatron.core.dist_checkpointing")
    for quiet in _QUIET:
        warnings.filterwarnings("ignore", message=quiet)
    _mend()
    _is_prepared = True


def _mend() -> None:
    """Fix errors of version 0.16.1 that appear without Transformer Engine or a GPU."""
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        # The router asks whether it is None, and without Transformer Engine it is not defined.
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        dispatcher.maybe_move_tensor_to_cpu = _to_host
        random = importlib.import_module("megatron.core.tensor_parallel.random")
        random._set_cuda_rng_state = _nothing
    optimizers = importlib.import_module("megatron.core.optimizer")
    # An optimizer in CPU memory saves these classes with its state, and torch loads no class that
    # it was not told of.
    torch.serialization.add_safe_globals([optimizers.Adam, optimizers.CPUAdam])
    if find_spec("transformer_engine") is None:
        # Its version is compared, and there is none.
        config = importlib.import_module("megatron.core.optimizer.optimizer_config")
        config.is_te_min_version = _always(False)
    module = importlib.import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    module.HybridDeviceOptimizer._move_new_state_to_right_device = _to_parameters
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer = module.DistributedOptimizer
    optimizer._set_main_param_and_optimizer_states = _loading(
        optimizer._set_main_param_and_optimizer_states
    )


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # The original leaves alone what is not on a GPU, and collectives refuse sizes that are tensors.
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _nothing(*_: Any, **__: Any) -> None: ...


def _to_parameters(self: Any) -> None:
    # The original finds the device by the optimizer's class, and without Transformer Engine the
    # one on the GPU is of the same class as those of the CPU.
    for optimizer in self.sub_optimizers:
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if torch.is_tensor(value):
                    # The offloading optimizer and the one that it calls share this dictionary.
                    state[key] = value.to(param.device)


def _loading(original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that loads a parameter's optimizer state, in place of `original`.

    The original fails on the key `step` of torch's AdamW, which a checkpoint keeps by group.
    """

    def load(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if self.config.use_precision_aware_optimizer:
            # It may keep these, which are views of the state of all data-parallel ranks.
            original(self, model_param, {key: value.clone() for key, value in tensors.items()})
            return
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for key, target in {"param": main, **self.optimizer.state[main]}.items():
            if key in tensors:
                target.copy_(tensors[key])

    return load


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let "cuda" mean the CPU for this thread, inside the block; outside nothing is changed.

    Tensors requested on "cuda" are created on the CPU, and the functions of torch.cuda that the
    library calls return harmless values.
    """
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
