"""Load the adapter from the trainer into a vLLM worker, in place of the previous one.

vLLM loads adapters from folders only. Here the matrices come from memory, and go through the same
steps: packed for fused layers, cast to the dtype of adapters, copied into the slot of the adapter.
"""

from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager

from telescope_train.inference.vllm_plugin.adapter import ADAPTER_ID


def load_adapter(worker_manager: WorkerLoRAManager, tensors: dict[str, Tensor]) -> None:
    """Make `tensors` the adapter of every request; names are those of a peft file.

    Raises RuntimeError if the model has no place for one of them.
    """
    manager = worker_manager._adapter_manager
    # A scale of 1, because the trainer sends it as a part of the matrices.
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    described = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        described,
        device="cpu",
        dtype=worker_manager.lora_config.lora_dtype,
        weights_mapper=_renames(manager.model),
    )
    # The slot that becomes free is the one that is filled: the matrices that kernels, and on a GPU
    # captured graphs, read stay where they are.
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    # vLLM passes over what it cannot place, and would sample without it.
    if homeless := sorted(adapter.loras.keys() - manager.modules.keys()):
        raise RuntimeError(
            f"this model has no place for the adapters of {', '.join(homeless[:3])}; set "
            'lora_transfer = "merged"'
        )


def _renames(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
