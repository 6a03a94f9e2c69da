"""Import megatron-core, or say why not, and adapt it to torch's own optimizers.

Everything else of this folder imports the library late and inside `using()`, because it is an
optional dependency and its import already asks for a GPU.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from telescope_core.base.errors import ConfigError
from telescope_train.backends.megatron.on_cpu import on_cpu

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
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer = module.DistributedOptimizer
    optimizer._set_main_param_and_optimizer_states = _loading(
        optimizer._set_main_param_and_optimizer_states
    )


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # The original leaves alone what is not on a GPU, and collectives refuse sizes that are tensors.
    return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor


def _nothing(*_: Any, **__: Any) -> None: ...


def _loading(original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that loads a parameter's optimizer state, in place of `original`.

    The original fails on the key `step` of torch's AdamW, which a checkpoint keeps by group.
    """

    def load(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if self.config.use_precision_aware_optimizer:
            original(self, model_param, tensors)
            return
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for key, target in {"param": main, **self.optimizer.state[main]}.items():
            if key in tensors:
                target.copy_(tensors[key])

    return load
