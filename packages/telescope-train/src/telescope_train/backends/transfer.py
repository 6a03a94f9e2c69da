"""Facts that both ends of a weight transfer know in advance: the tensors, how and where to meet.

Importing it imports no torch: the driver passes these on and has no tensors.
"""

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """Facts about a tensor that its receiver must know before it arrives."""

    name: str
    """Its name in the Hugging Face model."""
    dtype: str
    """Name of the torch dtype in which it is sent, such as `float32` or `bfloat16`."""
    shape: tuple[int, ...]
    """Sizes in each dimension, of the whole tensor."""

    @classmethod
    def from_tensor(cls, name: str, tensor: "torch.Tensor") -> "TensorHeader":
        """Describe `tensor`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name=name, dtype=dtype, shape=tuple(tensor.shape))

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype itself."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.torch_dtype.itemsize * prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The way in which weights travel in a run; both ends must agree on it."""

    transport: str = "gloo"
    """Name of the entry point."""
    bucket_bytes: int = 256 * 2**20
    """Most bytes that are sent at once, except for a larger tensor; 0 = each tensor by itself."""
    workers_per_server: int = 1
    """Number of processes of one server, each of which holds a part of the model or a copy."""
    is_staged: bool = False
    """Whether rank 0 has gathered, or written, all weights before servers take part."""
    folder: str | None = None
    """Folder of transports that use files; all machines can read it."""
    model: str | None = None
    """Folder or id of the model; its small files are put beside the weights in `folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Meeting place of both ends of a transfer; sent to servers as JSON."""

    wire: Wire
    host: str
    """Host of trainer rank 0."""
    port: int
    """Port that is reserved for rank 0."""
    world_size: int
    """Number of members: trainer rank 0 and every worker of every server."""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Place":
        """Return the place in the JSON of `as_json`."""
        return cls(**{**told, "wire": Wire(**told["wire"])})
