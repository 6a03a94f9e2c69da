"""What both ends of a weight transfer know before it begins: the tensors, how and where to meet.

Importing it imports no torch: the driver passes these on and has no tensors.
"""

from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a receiver of weights must know about a tensor before it arrives."""

    name: str
    """Its name in the Hugging Face model."""
    dtype: str
    """Name of the torch dtype that it is sent in, such as `float32` or `bfloat16`."""
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
    """How weights travel in a run: what both ends must agree on."""

    transport: str = "gloo"
    """Name of the entry point."""
    bucket_bytes: int = 256 * 2**20
    """Most bytes that are sent at once, but for a larger tensor; 0 = each tensor by itself."""
    workers_per_server: int = 1
    """Processes of one server, each of which holds a part of the model or a copy."""
    is_staged: bool = False
    """Whether rank 0 has all weights, or has written them, before servers take part."""
    folder: str | None = None
    """Where transports that go through files put them; all machines see it."""
    model: str | None = None
    """Folder of the model, or its id; its small files are put beside weights in `folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where both ends of a transfer meet; servers are told it as JSON."""

    wire: Wire
    host: str
    """A machine of trainer rank 0."""
    port: int
    """A port there that is held for rank 0."""
    world_size: int
    """Members: trainer rank 0 and every worker of every server."""

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Place":
        """Return the place that `as_json` described."""
        return cls(**{**told, "wire": Wire(**told["wire"])})
