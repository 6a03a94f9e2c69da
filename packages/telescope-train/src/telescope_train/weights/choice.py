"""Choose the transport of a run. Imports no torch, for use in a dry run."""

from telescope_train.config.schema import TrainConfig
from telescope_train.config.weights_section import AUTO_TRANSPORT
from telescope_train.models.device import Device


def transport_of(config: TrainConfig, device: Device) -> str:
    """Return the name of the transport between ranks and servers on `device`."""
    name = config.weights.weight_transport
    if name != AUTO_TRANSPORT:
        return name
    if device != "cuda":
        return "gloo"
    return "ipc" if config.inference.colocate else "nccl"
