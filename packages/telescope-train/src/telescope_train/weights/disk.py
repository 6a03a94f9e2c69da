"""`disk`: weights through files in a folder that all machines see, in Hugging Face's form.

An update is written beside the one before, and then one small file, `current.json`, is replaced:
readers see a whole update or the one before, never a part. Servers of others can be pointed at it.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from telescope_core.records.folders import open_as_folder
from telescope_core.records.room import room_for
from telescope_train.backends.transfer import Place
from telescope_train.weights.transport import Bucket, parts_of

CURRENT = "current.json"
"""File that names the folder of the newest update."""
_INDEX = "model.safetensors.index.json"
_KEPT = 2
"""Number of updates that are kept: one may still be read while the next is written."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_MOST_BYTES = 64 * 2**20
"""Largest file of the model that is put beside the weights."""


class _DiskSender:
    def __init__(self, folder: Path, model: Path | None) -> None:
        self._folder = folder
        self._model = model
        self._incoming = folder / "incoming"
        self._places: dict[str, str] = {}
        self._bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if bucket.number == 0:
            # Files left by a failed update are not part of this one.
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._incoming.mkdir()
            self._places, self._bytes = {}, 0
        file = _file_name(bucket.number)
        tensors = {
            header.name: part.view(header.torch_dtype).view(header.shape)
            for header, part in zip(bucket.headers, parts_of(flat, bucket), strict=True)
        }
        with room_for(self._incoming / file, SafetensorError):
            save_file(tensors, self._incoming / file, metadata={"format": "pt"})
        self._places |= dict.fromkeys(tensors, file)
        self._bytes += sum(header.num_bytes for header in bucket.headers)

    def settle(self) -> None:
        if not self._incoming.exists():
            return  # no tensor was sent
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._places}
        (self._incoming / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        self._copy_small_files()
        updates = _updates(self._folder)
        number = 1 + max(updates, default=0)
        whole = self._folder / f"update-{number:06d}"
        open_as_folder(self._incoming)
        self._incoming.rename(whole)
        beside = self._folder / f".{CURRENT}.new"
        beside.write_text(json.dumps({"folder": whole.name}), encoding="utf-8")
        os.replace(beside, self._folder / CURRENT)
        for old in sorted(updates)[: -(_KEPT - 1)]:
            shutil.rmtree(updates[old], ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._incoming, ignore_errors=True)

    def _copy_small_files(self) -> None:
        if self._model is None or not self._model.is_dir():
            return  # a name on a hub: whoever serves the folder has its files
        for file in self._model.iterdir():
            if (
                file.is_file()
                and file.suffix not in _WEIGHTS
                and not file.name.endswith(".index.json")
                and file.stat().st_size <= _MOST_BYTES
            ):
                shutil.copyfile(file, self._incoming / file.name)


class _DiskReceiver:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._update: Path | None = None

    def receive(self, bucket: Bucket) -> torch.Tensor:
        if self._update is None:
            self._update = current_update(self._folder)
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        path = self._update / _file_name(bucket.number)
        try:
            with safe_open(path, framework="pt") as file:
                for header, part in zip(bucket.headers, parts_of(flat, bucket), strict=True):
                    tensor = file.get_tensor(header.name)
                    part.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        except (OSError, SafetensorError) as error:
            raise RuntimeError(
                f"expected a part of the new weights in {path}, and could not read it: {error}; "
                "the run folder must be on storage that all machines share"
            ) from error
        return flat

    def settle(self) -> None:
        self._update = None  # the next transfer is another update

    def close(self) -> None:
        self._update = None


def current_update(folder: Path) -> Path:
    """Return the folder of the newest complete update; raises RuntimeError if there is none."""
    try:
        told = json.loads((folder / CURRENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"expected the new weights in {folder}, and found none ({error}); the run folder must "
            "be on storage that all machines share"
        ) from error
    return folder / told["folder"]


def _file_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _updates(folder: Path) -> dict[int, Path]:
    return {int(one.name.removeprefix("update-")): one for one in folder.glob("update-[0-9]*")}


class DiskTransport:
    """Weights in files, which are written while servers sample."""

    is_stored = True

    def sender(
        self, place: Place, *, device: torch.device, listen_fd: int | None, wait_s: float | None
    ) -> _DiskSender:
        """Open the folder for writing; waits for nobody."""
        if listen_fd is not None:
            os.close(listen_fd)  # nobody meets there
        return _DiskSender(_folder(place), None if not place.wire.model else Path(place.wire.model))

    def receiver(self, place: Place, *, rank: int, device: torch.device) -> _DiskReceiver:
        """Open the folder for reading."""
        return _DiskReceiver(_folder(place))


def _folder(place: Place) -> Path:
    assert place.wire.folder is not None, "the driver names the folder"
    return Path(place.wire.folder)


TRANSPORT = DiskTransport()
