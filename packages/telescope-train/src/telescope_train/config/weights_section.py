"""The settings of `[weights]`: how new weights reach the servers. Imports no torch."""

from typing import Literal

from telescope_train.config.fields import Index, Section

TRANSPORTS_GROUP = "telescope.weight_transports"
"""Entry points of transports; see `telescope_train.weights.transport`."""
AUTO_TRANSPORT = "auto"
STORED = ("disk",)
"""Transports of this package whose servers read files, at any time."""


class WeightsSection(Section):
    """The transfer of new weights to the servers."""

    weight_transport: str = "auto"
    """Name of an installed transport: `gloo` over TCP, `nccl` from GPU to GPU, `ipc` inside one
    GPU, `disk` through files in the run folder; `auto` = `ipc` with `colocate`, else `nccl` with
    GPUs and `gloo` without."""
    weight_broadcast_bucket_mb: Index = 256
    """Most MiB that are sent at once; a larger tensor is sent by itself, and with 0 every tensor
    is. A transfer needs room for two of them in the trainer and one in each worker of a server."""
    weight_broadcast_staging: Literal["none", "pinned", "pageable"] = "none"
    """Gather all weights in the CPU memory of rank 0 before servers pause, so that they pause for
    the transfer alone: `pinned` = in page-locked memory, from which a GPU reads faster, `pageable`
    = where the machine does not allow that, `none` = no."""
    weight_broadcast_free_grad_buffers: bool = True
    """Free the gradient buffers while weights are gathered; with `train_backend = "megatron"`
    only."""
    lora_transfer: Literal["merged", "adapter"] = "merged"
    """Form of the weights for servers with `use_lora`: `merged` = the matrices with the adapter
    added, `adapter` = the adapter alone, which is far less to send, but slows sampling, and in
    bfloat16 its first small changes are lost."""
