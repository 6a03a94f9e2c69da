"""Digests of the tensors of a weight update, which must be equal at both ends.

A digest is of bytes, so it sees a wrong tensor, an old one, a missing one and a swapped one. It is
computed where the bytes are, in one pass, and only a few numbers of each tensor leave a GPU.

Importing it imports no torch: the driver compares digests and has no tensors.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ROW = 1024
"""Number of 8-byte words that are summed before their sum is weighted by its position."""


class Digests:
    """The digest of each tensor of an update, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._texts: dict[str, str] = {}

    def add(self, name: str, content: "torch.Tensor") -> None:
        """Add a tensor's content, [bytes] uint8, which begins at a multiple of 8 bytes."""
        self._sums[name] = _sums(content)

    def by_name(self) -> dict[str, str]:
        """Return name -> digest; waits for a GPU to finish."""
        sums, self._sums = self._sums, {}
        if sums:
            import torch

            # Together: one wait instead of one for each tensor.
            numbers = torch.stack(list(sums.values())).tolist()
            for name, parts in zip(sums, numbers, strict=True):
                self._texts[name] = "-".join(f"{value & (2**64 - 1):x}" for value in parts)
        return dict(self._texts)

    def whole(self) -> str:
        """Return one digest of all tensors and their names, independent of their order."""
        digest = hashlib.sha256()
        for name, text in sorted(self.by_name().items()):
            digest.update(f"{name}={text}\n".encode())
        return digest.hexdigest()[:32]


def difference(sent: Mapping[str, str], held: Mapping[str, str]) -> str:
    """Return a text that names the tensors in which two updates differ."""
    names = [name for name in sorted({*sent, *held}) if sent.get(name) != held.get(name)]
    shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    return f"{len(names)} of {len(sent)} tensors differ: {shown}" if names else "no tensor differs"


def _sums(content: "torch.Tensor") -> "torch.Tensor":
    """Return [3] int64: sums of the words, and of the rest. They wrap around.

    The sum of each row of words is weighted by its place, so that rows cannot change theirs. The
    weights are odd: an even one would wipe out the highest bit.
    """
    import torch

    num_words = content.numel() // 8
    words = content[: 8 * num_words].view(torch.int64)
    num_rows = num_words // _ROW
    rows = words[: num_rows * _ROW].view(num_rows, _ROW).sum(1)
    places = 2 * torch.arange(num_rows, device=content.device) + 1
    rest = words[num_rows * _ROW :]
    rest_places = 2 * torch.arange(len(rest), device=content.device) + 1
    end = content[8 * num_words :].to(torch.int64)
    end_places = 256 ** torch.arange(len(end), device=content.device)
    size = content.numel()
    return torch.stack(
        [(rows * places).sum(), (rest * rest_places).sum(), (end * end_places).sum() + size]
    )
