"""A simulated disk: real files in a folder, but writing takes virtual time, and may fail.

The `Checkpointer` of a simulated run does its file work by `call`. `SavingRanks` write their part
by `StateWriter`, as far as readers of checkpoints look at it: `.metadata` comes last.
"""

import asyncio
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telescope_core.base.errors import TelescopeError
from telescope_core.base.file_proofs import FileProof, wrong_contents
from telescope_train.backends.protocol import RankDiedError
from telescope_train.batches.batch import PackedBatch, Shards
from telescope_train.config.schema import ModelSection
from telescope_train.simulation.trainer import SimulatedRanks, TrainerSpeed

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


class SavingRanks(SimulatedRanks):
    """Ranks that write checkpoints, know what they have learned, and may die."""

    def __init__(self, num_ranks: int, speed: TrainerSpeed, times: DiskTimes) -> None:
        """`times`: of the disk for checkpoints."""
        super().__init__(num_ranks, speed)
        self.disk = SimulatedDisk(times)
        self.weights: Weights = ()
        self._saving: StateWriter | None = None
        self._gradient: list[PackedBatch] = []
        """The data over which the gradient was accumulated."""
        self._version = 0
        self._died = asyncio.Event()

    def die(self) -> None:
        """Fail every later call, and running ones at their end."""
        self._died.set()

    async def start_again(self) -> None:
        """Replace ranks that died, with the initial weights."""
        await self.close()
        self._died.clear()
        self._queue = asyncio.Lock()
        self._take(())

    async def watch(self) -> None:
        """Never return; raises RankDiedError when the ranks die."""
        await self._died.wait()
        raise RankDiedError("trainer ranks died, as planned")

    async def accumulate_gradient(self, shards: Shards, version: int) -> None:
        """Take the time of forward and backward passes, and note the data."""
        await super().accumulate_gradient(shards, version)
        self._version = version
        self._gradient += (batch for shard in shards for batch in shard)

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        """Take the time of an optimizer step, and learn."""
        metrics = await super().apply_gradient(scale)
        self._take((*self.weights, Learned.from_batches(self._version, self._gradient)))
        return metrics

    @property
    def digest(self) -> str:
        """Digest that servers report after receiving the weights."""
        return f"after {self.num_steps} steps, the last {self.weights[-1:]}"

    async def start_checkpoint(self, folder: Path, *, with_training_state: bool) -> None:
        """Take the time of a copy, and write it in the background."""
        await self._hold(self.disk.times.copy_s)
        assert self._saving is None, "finish_checkpoint comes first"
        self._saving = StateWriter(folder, self.weights, num_ranks=self.num_ranks, disk=self.disk)

    async def checkpoint_is_written(self) -> bool:
        """Return whether it is written, after the present activity."""
        await self._hold(0.0)
        return self._saving is None or self._saving.is_done

    async def finish_checkpoint(self) -> Mapping[str, FileProof]:
        """Wait for the background write; raises TelescopeError if it failed."""
        await self._hold(0.0)
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving.wait()
        return {}  # they are so small that whoever publishes them reads them

    async def load_checkpoint(self, folder: Path, proofs: Mapping[str, FileProof]) -> None:
        """Load the weights of a checkpoint, in no time."""
        assert not wrong_contents(folder, proofs, proofs)
        await self._hold(0.0)
        self._take(read_weights(folder))

    async def save_pretrained(self, folder: Path) -> None:
        """Write a file in place of the export."""
        await self._hold(0.0)
        self.disk.export(folder, self.digest)

    async def close(self) -> None:
        """Stop the background write."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving.end()

    async def _work(self, seconds: float) -> None:
        await super()._work(seconds)
        self._require_alive()

    async def _hold(self, seconds: float) -> None:
        """Do work outside of a step, after the present activity."""
        async with self._queue:
            if seconds:
                await asyncio.sleep(seconds)
            self._require_alive()

    def _require_alive(self) -> None:
        if self._died.is_set():
            raise RankDiedError("trainer ranks died, as planned")

    def _take(self, weights: Weights) -> None:
        self.weights, self.num_steps, self._gradient = weights, len(weights), []
