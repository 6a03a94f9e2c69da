"""`Checkpointer`: saves a run while it goes on, one checkpoint at a time.

The ranks copy their state and write it in the background. The driver adds its own part, and when
everything is on disk, the folder is renamed into place. A failure is raised at the next step.
"""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.errors import ConfigError
from telescope_core.base.file_proofs import FileProof
from telescope_core.base.secret_names import without_secrets
from telescope_core.records.folders import partial_folder, put_in_place, remove_folder, sweep
from telescope_core.records.room import room_for
from telescope_train.backends.protocol import Ranks
from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.checkpoints.folders import (
    FINAL,
    NO_INPUTS,
    CheckpointManifest,
    checkpoints_folder,
    complete_checkpoints,
    expendable,
    read_checkpoint,
    write_manifest,
)
from telescope_train.checkpoints.sampler_state import write_sampler_state
from telescope_train.config.schema import CheckpointSection, ModelSection, TrainConfig
from telescope_train.models.saving import save_generation_config
from telescope_train.models.source import trained_config
from telescope_train.observability.timeline import CHECKPOINTS, UNRECORDED, Timeline
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.rollouts.sampler import RolloutSampler

_LOGGER = logging.getLogger(__name__)

_POLL_S = 0.2
"""Seconds between two checks whether the ranks have written everything."""
Call: TypeAlias = Callable[..., Awaitable[Any]]
"""Calls a function outside the event loop, and returns when it has ended."""
Describe: TypeAlias = Callable[[Path, ModelSection], None]
"""Writes the description of the model, without its weights, to a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """Content, folder and frequency of the checkpoints of a run."""

    name: str
    folder: Path
    """Absolute path of the folder that holds the checkpoints."""
    number_of_steps: int
    """Steps of the whole run."""
    section: CheckpointSection
    model: ModelSection
    config: Mapping[str, Any]
    """All settings, for the manifest."""
    environments: Mapping[str, EnvironmentRecord] = field(
        default_factory=dict[str, EnvironmentRecord]
    )
    """Name of each environment in the settings -> record of its code."""
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the other input files, see `inputs_of`."""
    started_at: str = ""
    """When the run began; empty = not known."""

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        environments: Mapping[str, EnvironmentRecord],
        inputs: Mapping[str, str] = NO_INPUTS,
        *,
        started_at: str = "",
    ) -> "SavedRun":
        """Return the model, folder and intervals in the settings of a run.

        `environments` and `inputs` are the code and the files that it began with, at `started_at`.
        """
        return cls(
            name=config.run.name,
            folder=checkpoints_folder(config).absolute(),
            number_of_steps=config.run.number_of_steps,
            section=config.checkpoint,
            model=config.model,
            config=config.model_dump(mode="json"),
            environments=environments,
            inputs=inputs,
            started_at=started_at,
        )


class Checkpointer:
    """Saves a run. Call `after_step` after each step, `finish` at the end, and always `close`."""

    def __init__(
        self,
        run: SavedRun,
        ranks: Ranks,
        sampler: RolloutSampler | None,
        *,
        resumed_from: Path | None = None,
        timeline: Timeline = UNRECORDED,
        call: Call = asyncio.to_thread,
        describe: Describe | None = None,
    ) -> None:
        """`call`: runs work on files outside of the event loop.

        `describe`: writes the description of the model; None means `save_model_description`.
        """
        self._run = run
        self._ranks = ranks
        self._sampler = sampler
        self._resumed_from = resumed_from
        self._timeline = timeline
        self._call = call
        self._describe = describe
        self._folder = run.folder
        base = Path(run.model.model).expanduser()
        # Here and now: it may be relative to the working directory.
        self._model_folder = str(base.absolute()) if base.is_dir() else ""
        self._writing: asyncio.Task[None] | None = None
        self._needed_bytes: int | None = None

    async def after_step(self, step: int) -> None:
        """Begin a checkpoint if one is due; raises the error of the one before if it failed."""
        # Asked at every step, and not only when a checkpoint is due: a full disk would otherwise
        # be reported `checkpoint_every` steps later.
        if self._writing is not None and self._writing.done():
            await self.written()
        every = self._run.section.checkpoint_every
        # `finish` saves the last step.
        if every and step % every == 0 and step < self._run.number_of_steps:
            await self._start(_name(step), step)

    async def finish(self, step: int, *, is_exported: bool = True) -> None:
        """Save the last step, in Hugging Face format too; without that, like any other step."""
        await self._start(FINAL if is_exported else _name(step), step, is_exported=is_exported)
        await self.written()

    async def close(self) -> None:
        """Give up a checkpoint that is being written; its folder never gets its name."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.cancel()
        await asyncio.wait([writing])
        _tell_failure(writing)

    async def _start(self, name: str, step: int, *, is_exported: bool = False) -> None:
        # One at a time: each holds a copy of the state in memory, and `sweep` below would delete
        # the folder of a checkpoint that is still being written.
        await self.written()
        path = self._folder / name
        partial = partial_folder(path)
        # File operations run in threads, because rollouts go on in this event loop.
        await self._in_thread(sweep, self._folder)
        self._needed_bytes = await self._call(_size_of_newest, self._folder)
        with self._room_for(path):
            await self._in_thread(partial.mkdir, parents=True)
        # The next step begins only after this method returns, so the weights that the ranks copy
        # and the state of the sampler belong to the same step.
        state = None if self._sampler is None else await self._sampler.settled(step)
        with_training_state = self._run.section.checkpoint_save_training_state
        async with self._removed_on_failure(partial):
            with self._timeline.span("copy for checkpoint", step=step):
                await self._ranks.start_checkpoint(
                    partial / "state", with_training_state=with_training_state
                )
            if is_exported:
                await self._ranks.save_pretrained(partial / "hf")
        manifest = CheckpointManifest(
            run=self._run.name,
            started_at=self._run.started_at,
            step=step,
            num_ranks=self._ranks.num_ranks,
            has_training_state=with_training_state,
            config=without_secrets(self._run.config),
            model_folder=self._model_folder,
            environment_records=dict(self._run.environments),
            inputs=dict(self._run.inputs),
        )
        self._writing = asyncio.create_task(self._complete(path, manifest, state))

    def _room_for(self, path: Path) -> AbstractContextManager[None]:
        # The files that ranks write meanwhile take most of it.
        return room_for(path, needed_bytes=self._needed_bytes)

    async def written(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error if it failed."""
        # Forgotten before it is awaited, so that its error is raised only once.
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def _complete(
        self, path: Path, manifest: CheckpointManifest, state: SamplerState | None
    ) -> None:
        """Write the driver's part, wait for the parts of the ranks, and publish all."""
        partial = partial_folder(path)
        span = self._timeline.span(
            f"write {path.name}", step=manifest.step, version=manifest.step, source=CHECKPOINTS
        )
        async with self._removed_on_failure(partial):
            with span:
                with self._room_for(path):
                    describe = self._describe or save_model_description
                    await self._in_thread(describe, partial / "model", self._run.model)
                    if state is not None:
                        await self._in_thread(write_sampler_state, partial, state)
                of_ranks = await self._until_ranks_are_done()
                with self._room_for(path):
                    await self._in_thread(write_manifest, partial, manifest, of_ranks)
                    await self._in_thread(self._publish, path, manifest.step)

    async def _until_ranks_are_done(self) -> Mapping[str, FileProof]:
        """Return the proofs of the files that the ranks have written, by name."""
        # A rank handles its calls one after the other. A call that waited for the writing would
        # keep the rank from training, so it gets short questions, which it answers between steps.
        while not await self._ranks.checkpoint_is_written():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        # Every rank has ended its writing by now, so this only raises their errors.
        return await self._ranks.finish_checkpoint()

    def _publish(self, path: Path, step: int) -> None:
        if path.name == FINAL:
            self._keep_older_final(path, step)
        # Older checkpoints are removed only after the new one has its name, so that a crash in
        # between leaves one too many and never one too few.
        put_in_place(path)
        section = self._run.section
        # A checkpoint of another run that somebody put into this folder is never removed.
        name, started_at = self._run.name, self._run.started_at
        mine = [one for one in complete_checkpoints(self._folder) if one.is_of(name, started_at)]
        for one in expendable(
            mine,
            keep_last=section.checkpoint_keep_last,
            keep_every=section.checkpoint_keep_every,
            never=self._resumed_from,
        ):
            remove_folder(one.path)

    def _keep_older_final(self, path: Path, step: int) -> None:
        """Give the last checkpoint of a run that went on after it the name of its step."""
        try:
            older = read_checkpoint(path)
        except ConfigError:  # there is none, or none that could be used
            return
        kept = path.with_name(_name(older.step))
        # One of the same step, from before the run was shortened, needs no second one beside it.
        if older.step == step or kept.exists():
            return
        if self._resumed_from is not None and self._resumed_from.resolve() == path.resolve():
            self._resumed_from = kept
        path.rename(kept)

    @asynccontextmanager
    async def _removed_on_failure(self, partial: Path) -> AsyncIterator[None]:
        """Remove `partial` if the block fails, because it could only waste disk space."""
        try:
            yield
        except Exception:
            await self._in_thread(shutil.rmtree, partial, ignore_errors=True)
            raise

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Call `function` in a thread; a cancellation waits until it has returned.

        After a checkpoint is given up, nothing changes its folder any more.
        """
        calling = asyncio.ensure_future(self._call(function, *arguments, **named))
        try:
            await asyncio.shield(calling)
        except asyncio.CancelledError:
            await asyncio.wait([calling])
            _tell_failure(calling)
            raise


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _size_of_newest(folder: Path) -> int | None:
    """Return the size in bytes of the newest checkpoint, to estimate the next; None without one."""
    whole = complete_checkpoints(folder)
    if not whole:
        return None
    return sum(path.stat().st_size for path in whole[-1].path.rglob("*") if path.is_file())


def _tell_failure(given_up: "asyncio.Future[Any]") -> None:
    """Log the reason of a failure that nobody awaits any more."""
    if not given_up.cancelled() and (error := given_up.exception()) is not None:
        _LOGGER.warning("a checkpoint that was given up had failed: %s", error)


def save_model_description(folder: Path, settings: ModelSection) -> None:
    """Write the description to `folder`, with which the weights can become a model anywhere."""
    config = trained_config(
        settings.model,
        dtype=settings.model_dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    config.save_pretrained(folder)
    save_generation_config(settings.model, folder)
    load_tokenizer(settings).save_pretrained(folder)
