"""Checkpoints with damaged files: those that are refused, and those that are skipped.

If a checkpoint lacks a part, the one before it is used, as after a crash. If its contents have
changed, it is refused, because the cause should be found first: a disk or memory that changes bits,
or a copy of two folders into one, may have changed other files too.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from telescope_core.base.errors import ConfigError
from telescope_core.base.file_proofs import wrong_contents, wrong_in_parallel
from telescope_train.backends.protocol import DamagedStateError, Ranks
from telescope_train.checkpoints.folders import (
    RunCheckpoint,
    complete_checkpoints,
    read_checkpoint,
)

GoOn = Callable[[Path, Path], str]
"""(damaged checkpoint, newest complete one before it) -> advice for continuing from there."""


def by_moving_it(damaged: Path, older: Path) -> str:
    """Return the advice for the run that wrote both."""
    away = damaged.parent.parent / f"damaged-{damaged.name}"
    return f"to go on from there, move it away (mv {damaged} {away}) and resume the run again"


def by_its_path(damaged: Path, older: Path) -> str:
    """Return the advice for another run, which begins at the older one."""
    return f"give that one: --resume_from_checkpoint {older}"


def by_exporting(damaged: Path, older: Path) -> str:
    """Return the advice for exporting the older one."""
    return f"to export that one: telescope export {older}"


def read_whole(path: Path, go_on: GoOn) -> RunCheckpoint:
    """Return the checkpoint in `path` if all files have their sizes; ConfigError if not."""
    checkpoint = read_checkpoint(path)
    if wrong := checkpoint.wrong_parts():
        raise _refused(checkpoint, wrong, go_on)
    return checkpoint


def require_start(checkpoint: RunCheckpoint, go_on: GoOn, *, samples: bool = True) -> None:
    """Raise ConfigError if the files that this process reads of a checkpoint are damaged.

    The ranks read their own large files, in `restore`. `samples`: whether the run samples its
    training data, so that the state of sampling must be there and readable.
    """
    names = [
        name
        for name in checkpoint.used
        if name == "state/.metadata" or not name.startswith("state/")
    ]
    wrong = wrong_contents(checkpoint.path, checkpoint.used, names)
    if not wrong and samples:
        try:
            checkpoint.sampler_state()
        except ConfigError as error:
            wrong = [str(error)]
    if wrong:
        raise _refused(checkpoint, wrong, go_on)


def require_whole(checkpoint: RunCheckpoint, go_on: GoOn) -> None:
    """Read all of a checkpoint and raise ConfigError if a file is damaged."""
    if wrong := wrong_in_parallel(checkpoint.path, checkpoint.used):
        raise _refused(checkpoint, wrong, go_on)


async def restore(ranks: Ranks, checkpoint: RunCheckpoint, go_on: GoOn) -> None:
    """Load a checkpoint into the ranks; ConfigError if a file is damaged."""
    try:
        # Absolute, because a rank may work in another folder.
        await ranks.load_checkpoint(checkpoint.state_path.absolute(), checkpoint.state_proofs)
    except DamagedStateError as error:
        wrong = [f"state/{one}" for one in error.wrong]
        # In a thread, because it reads older checkpoints, and the run still has others to watch.
        raise await asyncio.to_thread(_refused, checkpoint, wrong, go_on) from error


def unproved(checkpoint: RunCheckpoint) -> list[str]:
    """Return notes about a checkpoint without proofs of its files."""
    if checkpoint.manifest.files:
        return []
    return [
        f"{checkpoint.path} was written by an earlier version, without checksums: whether its "
        "files are what was written is not known"
    ]


def _refused(checkpoint: RunCheckpoint, wrong: list[str], go_on: GoOn) -> ConfigError:
    path = checkpoint.path
    text = f"the checkpoint {path} is damaged: {'; '.join(wrong[:3])}"
    if len(wrong) > 3:
        text += f"; and {len(wrong) - 3} more files"
    older = [
        one
        for one in complete_checkpoints(path.parent)
        if one.path != path and one.step <= checkpoint.step
    ]
    while older and wrong_in_parallel(older[-1].path, older[-1].used):
        older.pop()
    if not older:
        return ConfigError(
            f"{text}. {path.parent} holds no older one that is whole; bring the file back from a "
            "copy, or start again from the beginning"
        )
    return ConfigError(
        f"{text}. The newest whole one before it is {older[-1].path}; {go_on(path, older[-1].path)}"
    )
