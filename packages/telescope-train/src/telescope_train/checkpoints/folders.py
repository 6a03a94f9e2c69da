"""The checkpoints of a run as folders: their content, their completeness, their removal.

A folder gets the name of a checkpoint by a rename once it is complete. Folders left by a crash have
names that begin with a dot and are never taken for checkpoints. If a checkpoint was damaged later,
as by an interrupted copy, the sizes of its files differ from its manifest, and the one before it is
used, as after a crash. If its contents have changed, it is refused, because the cause should be
found first: a disk or memory that changes bits, or a copy of two folders into one, may have changed
other files too. Imports no torch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.file_proofs import (
    FileProof,
    proofs_of,
    wrong_contents,
    wrong_in_parallel,
    wrong_sizes,
)
from telescope_core.records.files import read_json, write_json
from telescope_train.backends.protocol import DamagedStateError, Ranks
from telescope_train.checkpoints.sampler_state import read_sampler_state
from telescope_train.config.run_folder import run_folder
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.sampled import SamplerState

FINAL = "final"
NO_INPUTS: Mapping[str, str] = MappingProxyType({})
"""Inputs of a run that reads no files, or whose files are not known."""
_MANIFEST = "checkpoint.json"
_STATE = "state/"
_PARTS = (".distcp", ".pkl")
"""File name endings of the parts that each rank writes."""
FORMAT_VERSION = 2
"""2: the sampler's state holds chains of tokens (`sampler.msgpack`). 1 is still read."""
GoOn = Callable[[Path, Path], str]
"""(damaged checkpoint, another that is whole) -> advice for continuing from there."""


class RemovedCheckpointError(ConfigError):
    """A checkpoint was removed after it was found, as a run removes old ones while it goes on."""


class CheckpointManifest(BaseModel):
    """`checkpoint.json`: run and step of a checkpoint, with its settings and files."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format_version: int = FORMAT_VERSION
    run: str
    """Name of the run."""
    started_at: str = ""
    """When the run began, which tells runs of one name apart; empty in checkpoints of earlier
    versions, and of supervised training."""
    step: int
    """Number of steps taken, which is also the version of the weights."""
    created_at: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    """UTC time in ISO 8601."""
    num_ranks: int
    """Number of trainer ranks that wrote it."""
    has_training_state: bool
    """Whether a run can continue from it; if not, it holds only weights."""
    config: dict[str, Any]
    """Every setting of the run, defaults included."""
    model_folder: str = ""
    """Absolute path of the folder of the model that the run began with, which `config` has as it
    was typed; empty for a Hub id, and in checkpoints of earlier versions."""
    environment_records: dict[str, EnvironmentRecord] = Field(default_factory=dict)
    """Name of each environment in the settings -> record of its code."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Each file that the run reads beside its environments -> digest, see `inputs_of`; empty in
    checkpoints of earlier versions."""
    files: dict[str, FileProof] = Field(default_factory=dict)
    """Path in the folder -> what proves the file, of all but this one; empty in checkpoints of
    earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """One complete checkpoint."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.manifest.step

    @property
    def state_path(self) -> Path:
        """The trainer ranks' part: a distributed checkpoint of torch."""
        return self.path / "state"

    @property
    def model_path(self) -> Path:
        """Config, tokenizer and generation config of the model, without weights."""
        return self.path / "model"

    @property
    def export_path(self) -> Path:
        """Default folder for an export to Hugging Face format."""
        return self.path / "hf"

    @property
    def used(self) -> dict[str, FileProof]:
        """The proofs of all files that a resume or an export reads."""
        files = self.manifest.files
        return {name: proof for name, proof in files.items() if not name.startswith("hf/")}

    @property
    def state_proofs(self) -> dict[str, FileProof]:
        """The proofs of the trainer ranks' files, by their names in `state_path`."""
        return {
            name.removeprefix(_STATE): proof
            for name, proof in self.manifest.files.items()
            if name.startswith(_STATE)
        }

    def wrong_parts(self) -> list[str]:
        """Return one line for each file that lacks a part, is missing, or is of another folder.

        Contents are not read.
        """
        used = self.used
        wrong = wrong_sizes(self.path, used)
        if used:
            # A rank would take up the part of one that did not exist when this was written.
            parts = [one for one in self.state_path.glob("*") if one.suffix in _PARTS]
            there = sorted(f"{_STATE}{one.name}" for one in parts)
            wrong += [f"{name} is of another checkpoint" for name in there if name not in used]
        return wrong

    def is_there(self) -> bool:
        """Return whether it still has its manifest, without which it is none."""
        return (self.path / _MANIFEST).is_file()

    def is_of(self, run: str, started_at: str) -> bool:
        """Return whether the run of this name wrote it that began then; "" = not known."""
        known = self.manifest.started_at
        is_same_start = not known or not started_at or known == started_at
        return self.manifest.run == run and is_same_start

    def ends(self, number_of_steps: int) -> bool:
        """Return whether it is the last one of a run with so many steps, which also exports it."""
        return self.path.name == FINAL and self.step == number_of_steps

    def sampler_state(self) -> SamplerState:
        """Return the state of sampling, including rollouts that waited for training."""
        return read_sampler_state(self.path)


def checkpoints_folder(config: TrainConfig) -> Path:
    """Return the folder that holds the checkpoints of the run of `config`."""
    shared = config.checkpoint.checkpoint_dir
    if shared is not None:
        return Path(shared).expanduser() / config.run.name
    return run_folder(config) / "checkpoints"


def write_manifest(
    folder: Path, manifest: CheckpointManifest, of_ranks: Mapping[str, FileProof]
) -> None:
    """Write the manifest of the checkpoint in `folder`, with a proof of each of its files.

    `of_ranks`: proofs of files in `state`, as the ranks wrote them; all others are read. Raises
    TelescopeError if a file of the ranks has not arrived as it was written.
    """
    known = {f"{_STATE}{name}": proof for name, proof in of_ranks.items()}
    if wrong := wrong_sizes(folder, known):
        raise TelescopeError(
            f"{folder}: {'; '.join(wrong)}; look at the disk or file system, and at what else "
            "writes there, and resume from the checkpoint before"
        )
    proved = manifest.model_copy(update={"files": proofs_of(folder, known)})
    write_json(folder / _MANIFEST, proved.model_dump(mode="json"))


def read_checkpoint(path: Path) -> RunCheckpoint:
    """Return the checkpoint in `path`; raises ConfigError if there is no complete one."""
    fields = read_json(path / _MANIFEST)
    if fields is None or not (path / "state" / ".metadata").is_file():
        raise ConfigError(
            f"{str(path)!r} holds no checkpoint; expected {_MANIFEST} and a folder state, as "
            f"`telescope train` writes them to checkpoints/step-000100{beside(path)}"
        )
    try:
        return RunCheckpoint(path=path, manifest=CheckpointManifest.model_validate(fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path / _MANIFEST}: {where}: {first['msg']}") from None


def beside(path: Path) -> str:
    """Return words on the whole checkpoints beside `path`, which is none; "" without any.

    A run that goes on removes old ones (`checkpoint_keep_last`), also one that was just read of.
    """
    # An existing folder is no removed checkpoint, and what is beside it may be anything.
    if path.exists() or not (found := complete_checkpoints(path.parent)):
        return ""
    names = ", ".join(one.path.name for one in found)
    return f"; there is no folder of that name, and {path.parent} holds {names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoints:
    """The checkpoints in a folder."""

    complete: list[RunCheckpoint]
    """Checkpoints whose files all exist with their sizes, oldest first."""
    broken: dict[Path, str]
    """Each other checkpoint folder -> the reason why it is not complete."""

    def broken_after(self, checkpoint: RunCheckpoint) -> list[str]:
        """Return one line for each broken checkpoint with a newer step in its name."""
        name = checkpoint.path.name
        return [
            f"{path} is not whole: {why}"
            for path, why in sorted(self.broken.items())
            if path.name == FINAL or (name != FINAL and path.name > name)
        ]


def find_checkpoints(folder: Path) -> FoundCheckpoints:
    """Return the checkpoints in `folder`, without reading the content of their files."""
    complete: list[RunCheckpoint] = []
    broken: dict[Path, str] = {}
    for path in folder.glob("[!.]*/"):
        if not (path / "state").is_dir():
            if (path / _MANIFEST).is_file():
                broken[path] = "state is missing"
            continue
        lacking = [name for name in (_MANIFEST, "state/.metadata") if not (path / name).is_file()]
        if lacking:
            broken[path] = f"{lacking[0]} is missing"
            continue
        try:
            one = read_checkpoint(path)
        except ConfigError:
            broken[path] = f"{_MANIFEST} cannot be read"
            continue
        if wrong := one.wrong_parts():
            broken[path] = "; ".join(wrong)
        else:
            complete.append(one)
    complete.sort(key=lambda one: (one.step, one.path.name == FINAL))
    # A run that goes on may have removed one in the middle of this.
    broken = {path: why for path, why in broken.items() if path.is_dir()}
    return FoundCheckpoints(complete=complete, broken=broken)


def complete_checkpoints(folder: Path) -> list[RunCheckpoint]:
    """Return the complete checkpoints in `folder`, oldest first."""
    return find_checkpoints(folder).complete


def expendable(
    checkpoints: Sequence[RunCheckpoint],
    *,
    keep_last: int | None,
    keep_every: int | None,
    never: Path | None,
) -> list[RunCheckpoint]:
    """Return the checkpoints that retention removes, which never include the newest one.

    `keep_last`: how many of the newest to keep; None = all. `keep_every`: checkpoints at multiples
    of this many steps are kept as well. `never`: the checkpoint that the run was resumed from,
    which is always kept.
    """
    if keep_last is None:
        return []
    periodic = [one for one in checkpoints if one.path.name != FINAL]
    return [
        one
        for one in periodic[: -max(1, keep_last)]
        if not (keep_every and one.step % keep_every == 0)
        and (never is None or one.path.resolve() != never.resolve())
    ]


def by_moving_it(damaged: Path, whole: Path) -> str:
    """Return the advice for the run that wrote both."""
    away = damaged.parent.parent / f"damaged-{damaged.name}"
    return f"to go on from there, move it away (mv {damaged} {away}) and resume the run again"


def by_its_path(damaged: Path, whole: Path) -> str:
    """Return the advice for another run, which begins at the one that is whole."""
    return f"give that one: --resume_from_checkpoint {whole}"


def by_exporting(damaged: Path, whole: Path) -> str:
    """Return the advice for exporting the one that is whole."""
    return f"to export that one: telescope export {whole}"


def read_whole(path: Path, go_on: GoOn) -> RunCheckpoint:
    """Return the checkpoint in `path` if all files have their sizes; ConfigError if not."""
    checkpoint = read_checkpoint(path)
    if wrong := checkpoint.wrong_parts():
        raise _refused(checkpoint, wrong, go_on)
    return checkpoint


def require_start(
    checkpoint: RunCheckpoint, go_on: GoOn, *, samples: bool = True
) -> SamplerState | None:
    """Raise ConfigError if the files that this process reads of a checkpoint are damaged.

    The ranks read their own large files, in `restore`. `samples`: whether the run samples its
    training data; then the state of sampling must be there and readable, and is returned.
    """
    names = [
        name
        for name in checkpoint.used
        if name == "state/.metadata" or not name.startswith("state/")
    ]
    wrong = wrong_contents(checkpoint.path, checkpoint.used, names)
    state = None
    if not wrong and samples:
        try:
            state = checkpoint.sampler_state()
        except ConfigError as error:
            wrong = [str(error)]
    if wrong:
        raise _refused(checkpoint, wrong, go_on)
    return state


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
    if not checkpoint.is_there():
        return removed(checkpoint, go_on)
    path = checkpoint.path
    text = f"the checkpoint {path} is damaged: {'; '.join(wrong[:3])}"
    if len(wrong) > 3:
        text += f"; and {len(wrong) - 3} more files"
    others = [one for one in complete_checkpoints(path.parent) if one.path != path]
    older = _newest_whole([one for one in others if one.step <= checkpoint.step])
    newer = _newest_whole([one for one in others if one.step > checkpoint.step])
    if older is not None:
        also = "" if newer is None else f" ({newer} after it is whole too)"
        return ConfigError(
            f"{text}. The newest whole one before it is {older}{also}; {go_on(path, older)}"
        )
    none = f"{text}. {path.parent} holds no older one that is whole"
    if newer is not None:
        return ConfigError(f"{none}; the newest one after it is {newer}; {go_on(path, newer)}")
    return ConfigError(
        f"{none}; bring the file back from a copy, or start again from the beginning"
    )


def removed(checkpoint: RunCheckpoint, go_on: GoOn) -> RemovedCheckpointError:
    """Return the error of a checkpoint that is no longer there, and what there is instead."""
    path = checkpoint.path
    text = (
        f"the checkpoint {path} was removed meanwhile, as a run that goes on removes old ones "
        "(checkpoint_keep_last)"
    )
    found = [one.path for one in complete_checkpoints(path.parent) if one.path != path]
    if not found:
        return RemovedCheckpointError(f"{text}. {path.parent} holds no other that is whole")
    names = ", ".join(one.name for one in found)
    advice = "resume the run again" if go_on is by_moving_it else go_on(path, found[-1])
    return RemovedCheckpointError(f"{text}. {path.parent} holds {names}; {advice}")


def _newest_whole(checkpoints: list[RunCheckpoint]) -> Path | None:
    """Return the newest of which all files were read and are what was written; None without one."""
    for one in reversed(checkpoints):
        if not wrong_in_parallel(one.path, one.used):
            return one.path
    return None
