"""Folders that appear complete or not at all, and distributed checkpoints (torch DCP).

Every rank calls every function. A checkpoint can be read by a different number of ranks.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner

from telescope_core.errors import ConfigError, TelescopeError
from telescope_core.records.folders import partial_folder, put_in_place
from telescope_train.models.location import require_replaceable


@contextmanager
def folder_of_all_ranks(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to; it replaces `folder` when every rank has finished.

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


class Saving:
    """A state that is being written in the background; call `wait` once."""

    def __init__(self, folder: Path, written: "Future[Any]", group: dist.ProcessGroup) -> None:
        self._folder = folder
        self._written = written
        self._group = group

    def is_done(self) -> bool:
        """Return whether this rank has finished writing or failed."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until every rank's part is on disk; raises TelescopeError if that fails."""
        try:
            self._written.result()
        except (OSError, RuntimeError, CheckpointException) as error:
            raise TelescopeError(
                f"the checkpoint {self._folder} could not be written: {error}; "
                "make room or choose another checkpoint_dir, and resume from the one before"
            ) from error
        finally:
            dist.destroy_process_group(self._group)


def start_saving(folder: str | Path, state: dict[str, Any]) -> Saving:
    """Copy `state` to CPU memory and write it to `folder` while the caller continues.

    The writing threads of the ranks communicate over a process group of their own. On the group
    that training uses, their messages would mix with its collectives.
    """
    group = dist.new_group(backend="gloo")
    # The writer stages in the foreground, so training may change the tensors once this returns.
    writer = FileSystemWriter(folder)
    written = dcp.async_save(state, storage_writer=writer, async_stager=writer, process_group=group)
    assert isinstance(written, Future), "the writer stages in the foreground"
    return Saving(Path(folder), written, group)


def write_in_background(folder: Path, state: dict[str, Any], planner: SavePlanner) -> Saving:
    """Write `state`, which nobody changes any more, by `planner` while the caller continues."""
    group = dist.new_group(backend="gloo")
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    written = thread.submit(
        dcp.save,
        state,
        storage_writer=FileSystemWriter(folder),
        planner=planner,
        process_group=group,
    )
    thread.shutdown(wait=False)
    return Saving(folder, written, group)


def save_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Write `state` (sharded tensors, tensors, plain values) to `folder`."""
    with folder_of_all_ranks(Path(folder)) as partial:
        start_saving(partial, state).wait()


def load_state(folder: str | Path, state: dict[str, Any]) -> None:
    """Fill `state` in place from `folder`, which must hold all of its keys: see `saved_keys`."""
    dcp.load(state, storage_reader=FileSystemReader(Path(folder)))


def saved_keys(folder: str | Path) -> set[str]:
    """Return the flattened names of everything in a checkpoint; ConfigError if there is none."""
    if not (Path(folder) / ".metadata").is_file():
        raise ConfigError(f"{str(folder)!r} holds no checkpoint; expected a file .metadata in it")
    return set(FileSystemReader(Path(folder)).read_metadata().state_dict_metadata)
