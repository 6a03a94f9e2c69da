"""A simulated disk: real files in a folder, but writing takes virtual time, and may fail.

The `Checkpointer` of a simulated run does its file work by `call`. Simulated ranks write their part
by `StateWriter`, as far as readers of checkpoints look at it: `.metadata` comes last.
"""

import asyncio
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telescope_core.base.errors import TelescopeError
from telescope_train.batches.batch import PackedBatch
from telescope_train.config.schema import ModelSection

_STATE = "weights.json"
_METADATA = ".metadata"


class Learned(NamedTuple):
    """The data of one optimizer step of simulated weights."""

    version: int
    """Version of the weights before the step."""
    num_tokens: int
    """Number of trained tokens."""
    samples: str
    """Digest of the lengths of all samples, independent of their order."""

    @classmethod
    def from_batches(cls, version: int, batches: Sequence[PackedBatch]) -> "Learned":
        """Return the step over all samples of `batches`."""
        lengths_N = np.sort(np.concatenate([one.lengths_S for one in batches]))
        return cls(
            version,
            sum(one.num_trained_tokens for one in batches),
            hashlib.sha256(lengths_N.astype(np.int64).tobytes()).hexdigest()[:16],
        )


Weights = tuple[Learned, ...]
"""The data from which simulated weights have learned, in order: () = the initial weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTimes:
    """Durations of checkpoints, in seconds."""

    copy_s: float = 0.0
    """Time for ranks to copy their state; no step goes on meanwhile."""
    write_s: float = 0.0
    """Time for all ranks to write the copy, in the background."""
    file_s: float = 0.0
    """Mean time of each operation of the driver: make a folder, write a file, publish it all."""


class SimulatedDisk:
    """The disk to which checkpoints are written."""

    def __init__(self, times: DiskTimes) -> None:
        self.times = times
        self._chance = random.Random("disk")
        self._threads = set[asyncio.Task[None]]()
        self.num_failures = 0
        """Number of failed writes."""
        self.failure: Callable[[], OSError | None] = lambda: None
        """Planned failure of the next write; called before and after it."""
        self.on_write: Callable[[float], None] = lambda seconds: None
        """Called when a slow write begins."""

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Call `function` like `asyncio.to_thread`: canceling it does not stop the function."""
        thread = asyncio.create_task(self._thread(partial(function, *arguments, **named)))
        self._threads.add(thread)
        thread.add_done_callback(self._ended)
        await asyncio.shield(thread)

    async def _thread(self, work: "partial[Any]") -> None:
        seconds = self._chance.expovariate(1) * self.times.file_s
        self.on_write(seconds)
        await asyncio.sleep(seconds / 2)
        # This one ignores errors.
        removes = work.func is shutil.rmtree
        if not removes:
            self.may_fail()
        work()
        await asyncio.sleep(seconds / 2)
        if not removes:
            self.may_fail()

    def _ended(self, thread: "asyncio.Task[None]") -> None:
        self._threads.remove(thread)
        # A canceled caller does not ask for the error.
        if not thread.cancelled():
            thread.exception()

    def export(self, folder: Path, text: str) -> None:
        """Write a file in place of a model in Hugging Face format."""
        self.may_fail()
        folder.mkdir()
        (folder / "model.safetensors").write_text(text)

    def may_fail(self) -> None:
        """Raise the planned failure, if there is one."""
        error = self.failure()
        if error is not None:
            self.num_failures += 1
            raise error


class StateWriter:
    """Ranks that write a copy of their state in the background."""

    def __init__(
        self, folder: Path, weights: Weights, *, num_ranks: int, disk: SimulatedDisk
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._num_left = num_ranks
        self._parts = [repr(rank) for rank in range(1, num_ranks)]
        self._weights = json.dumps(weights)
        self._writing = asyncio.create_task(self._write())

    @property
    def is_done(self) -> bool:
        """Whether all ranks have written their part, or one has failed."""
        return self._writing.done()

    async def wait(self) -> None:
        """Return when all is written; raises TelescopeError if a write failed."""
        try:
            await self._writing
        except OSError as error:
            raise TelescopeError(f"{self._folder} could not be written: {error}") from error

    async def end(self) -> None:
        """Stop in the middle, like processes that die."""
        self._writing.cancel()
        await asyncio.wait([self._writing])
        if not self._writing.cancelled():
            # Nobody asks for it any more.
            self._writing.exception()

    async def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        files = {_STATE: self._weights} | {f"{one}.part": one for one in self._parts}
        seconds = self._disk.times.write_s / (len(files) + 1)
        for name, text in files.items():
            self._disk.on_write(seconds)
            await asyncio.sleep(seconds)
            path = self._folder / name
            path.write_text(text[: len(text) // 2])
            self._disk.may_fail()
            path.write_text(text)
        # Written by one rank once all have said that they are done.
        self._disk.on_write(seconds)
        await asyncio.sleep(seconds)
        (self._folder / _METADATA).write_text("")


def read_weights(folder: Path) -> Weights:
    """Return the weights that `StateWriter` wrote to `folder`."""
    assert (folder / _METADATA).is_file(), f"{folder} is not whole"
    return tuple(Learned(*one) for one in json.loads((folder / _STATE).read_text()))


def describe_nothing(folder: Path, settings: ModelSection) -> None:
    """Replace `save_model_description`: there is no model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model": settings.model}))
