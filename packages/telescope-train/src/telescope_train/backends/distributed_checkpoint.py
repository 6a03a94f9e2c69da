"""Folders that appear complete or not at all, and distributed checkpoints (torch DCP).

Every rank calls every function. A checkpoint can be read by a different number of ranks. The thread
that writes a file also computes its digest, so that readers can prove that the file is unchanged.
"""

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

from telescope_core.base.errors import ConfigError, NotWrittenError
from telescope_core.base.file_proofs import FileProof, wrong_contents
from telescope_core.records.folders import partial_folder, put_in_place
from telescope_core.records.room import lack_of_room
from telescope_train.backends.protocol import DamagedStateError
from telescope_train.models.group_wait import group_wait
from telescope_train.models.location import require_replaceable


@contextmanager
def folder_of_all_ranks(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to; it replaces `folder` once every rank has finished.

    A crash leaves the old `folder`, or none, and a `.partial` folder beside it.
    """
    require_replaceable(folder)
    partial = partial_folder(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    # No rank writes before rank 0 has made the folder, and rank 0 moves it only when all are done.
    dist.barrier()
    yield partial
    dist.barrier()
    if dist.get_rank() == 0:
        put_in_place(folder)
    dist.barrier()


class _ProvingStream:
    """A file that is written sequentially, with a digest that is computed meanwhile."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream: Any = stream
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def write(self, content: Any) -> int:
        # hashlib lets other threads work while it reads, so that training goes on.
        self._digest.update(content)
        self._num_bytes += memoryview(content).nbytes
        return self._stream.write(content)

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def proof(self) -> FileProof:
        return FileProof(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())


class _ProvingFileSystem(FileSystem):
    """Keeps the proof of each file that is written through it, by file name."""

    def __init__(self) -> None:
        self.proofs: dict[str, FileProof] = {}

    @contextmanager
    def create_stream(
        self, path: "str | os.PathLike[str]", mode: str
    ) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            proving = _ProvingStream(stream)
            yield cast(io.IOBase, proving)
        self.proofs[Path(path).name] = proving.proof()

    def rename(self, path: "str | os.PathLike[str]", new_path: "str | os.PathLike[str]") -> None:
        super().rename(path, new_path)
        self.proofs[Path(new_path).name] = self.proofs.pop(Path(path).name)


class _ProvingWriter(FileSystemWriter):
    """Writes the files of a checkpoint, and keeps their proofs."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.fs = _ProvingFileSystem()


class Saving:
    """A state that is being written in the background; call `wait` once."""

    def __init__(
        self,
        folder: Path,
        written: "Future[Any]",
        group: dist.ProcessGroup,
        proofs: Mapping[str, FileProof],
        num_bytes: int,
    ) -> None:
        """`proofs`: of each file by its name, complete when `written` is done.

        `num_bytes`: size of the tensors of this rank.
        """
        self._folder = folder
        self._written = written
        self._group = group
        self._proofs = proofs
        self._num_bytes = num_bytes

    def is_done(self) -> bool:
        """Return whether this rank has finished writing or failed."""
        return self._written.done()

    def wait(self) -> dict[str, FileProof]:
        """Wait until every rank's part is on disk; raises NotWrittenError if that fails.

        Returns the proof of each file that this rank wrote, by its name in the folder.
        """
        try:
            self._written.result()
        except (OSError, RuntimeError, CheckpointException) as error:
            first: BaseException = error
            if isinstance(error, CheckpointException):
                # Its own text is the tracebacks of all ranks.
                first, _ = next(iter(error.failures.values()))
            lack = lack_of_room(self._folder, first, needed_bytes=self._num_bytes)
            raise lack or NotWrittenError(
                f"the checkpoint {self._folder} could not be written: "
                f"{str(first).strip().partition(chr(10))[0]}; choose another checkpoint_dir, and "
                "resume from the one before"
            ) from error
        finally:
            dist.destroy_process_group(self._group)
        return dict(self._proofs)


def num_bytes_of(state: object) -> int:
    """Return the size of the tensors in `state` that are on this rank."""
    if isinstance(state, DTensor):
        state = state.to_local()
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(num_bytes_of, cast("Mapping[object, object]", state).values()))
    if isinstance(state, list | tuple):
        return sum(map(num_bytes_of, cast("Sequence[object]", state)))
    return 0


def start_saving(folder: str | Path, state: dict[str, Any]) -> Saving:
    """Copy `state` to CPU memory and write it to `folder` while the caller continues.

    The writing threads of the ranks communicate over a process group of their own. On the group
    that training uses, their messages would mix with its collectives.
    """
    group = dist.new_group(backend="gloo", timeout=group_wait())
    # The writer stages in the foreground, so training may change the tensors once this returns.
    writer = _ProvingWriter(folder)
    written = dcp.async_save(state, storage_writer=writer, async_stager=writer, process_group=group)
    assert isinstance(written, Future), "the writer stages in the foreground"
    return Saving(Path(folder), written, group, writer.fs.proofs, num_bytes_of(state))


def write_in_background(folder: Path, state: dict[str, Any], planner: SavePlanner) -> Saving:
    """Write `state`, which must not change any more, by `planner` in the background."""
    group = dist.new_group(backend="gloo", timeout=group_wait())
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    writer = _ProvingWriter(folder)
    written = thread.submit(
        dcp.save,
        state,
        storage_writer=writer,
        planner=planner,
        process_group=group,
    )
    thread.shutdown(wait=False)
    return Saving(folder, written, group, writer.fs.proofs, num_bytes_of(state))


def save_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Write `state` (sharded tensors, tensors, plain values) to `folder`."""
    with folder_of_all_ranks(Path(folder)) as partial:
        start_saving(partial, state).wait()


def require_proved(
    folder: Path, proofs: Mapping[str, FileProof], moved: Callable[[], None] | None = None
) -> None:
    """Raise DamagedStateError on every rank if a file in `folder` differs from its proof.

    `proofs`: of each file by its name there. Each rank reads a share of them, so that all of it is
    read once, about 1 GB/s and rank. `moved` is called for every 4 MiB.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    # The largest files, those of the ranks, go round first, so that each rank gets one of them.
    by_size = sorted(proofs, key=lambda name: (-proofs[name].num_bytes, name))
    found: list[Any] = [wrong_contents(folder, proofs, by_size[rank::num_ranks], moved)]
    if num_ranks > 1:
        mine, found = found[0], [None] * num_ranks
        dist.all_gather_object(found, mine)
    wrong = [line for lines in found for line in lines]
    if wrong:
        raise DamagedStateError(folder, wrong)


def load_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Fill `state` in place from `folder`, which must hold all of its keys: see `saved_keys`.

    Raises DamagedStateError if a file cannot be read.
    """
    with reading(Path(folder)):
        dcp.load(state, storage_reader=FileSystemReader(Path(folder)))


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise DamagedStateError if torch cannot read a file of the state in `folder`."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise DamagedStateError(folder, [f"{type(first).__name__} {first}".strip()]) from error


def saved_keys(folder: str | Path) -> set[str]:
    """Return the flattened names of everything in a checkpoint; ConfigError if there is none."""
    if not (Path(folder) / ".metadata").is_file():
        raise ConfigError(f"{str(folder)!r} holds no checkpoint; expected a file .metadata in it")
    return set(FileSystemReader(Path(folder)).read_metadata().state_dict_metadata)
