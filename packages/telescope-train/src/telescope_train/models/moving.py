"""Move arrays from the host to the device of a model."""

import torch
from numpy.typing import NDArray


def to_device(
    values: NDArray, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return `values` as a tensor on `device`; the copy to a GPU is not awaited.

    A copy from pinned memory runs while the GPU computes earlier work. A plain copy would wait
    until all of that is done.
    """
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
