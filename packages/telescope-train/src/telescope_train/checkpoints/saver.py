"""`Checkpointer`: saves a run while it goes on, one checkpoint at a time.

The ranks copy their state and write it in the background; the driver adds what it knows, and the
folder is renamed into place when all of it is on disk. A failure is raised at the next step.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from telescope_core.environment_record import EnvironmentRecord
from telescope_core.records.folders import partial_folder, put_in_place, remove_folder, sweep
from telescope_core.types import WeightVersion
from telescope_train.backends.protocol import Ranks
from telescope_train.checkpoints.description import save_model_description
from telescope_train.checkpoints.folders import (
    FINAL,
    CheckpointManifest,
    checkpoints_folder,
    complete_checkpoints,
    expendable,
    write_manifest,
)
from telescope_train.config.schema import CheckpointSection, ModelSection, TrainConfig
from telescope_train.rollouts.sampled import SamplerState

_POLL_S = 0.2


class ResumableSampler(Protocol):
    """What saving needs of the sampler."""

    async def settled(self, version: WeightVersion) -> SamplerState:
        """Return where sampling stands."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """What is saved, where and how often."""

    name: str
    folder: Path
    """Holds the checkpoints; absolute."""
    number_of_steps: int
    section: CheckpointSection
    model: ModelSection
    config: Mapping[str, Any]
    """Every setting, for the manifest."""
    environments: Mapping[str, EnvironmentRecord] = field(
        default_factory=dict[str, EnvironmentRecord]
    )
    """Which code each one is."""

    @classmethod
    def of(cls, config: TrainConfig, environments: Mapping[str, EnvironmentRecord]) -> "SavedRun":
        """Return what the settings of a run say; `environments` is the code it began with."""
        return cls(
            name=config.run.name,
            folder=checkpoints_folder(config).absolute(),
            number_of_steps=config.run.number_of_steps,
            section=config.checkpoint,
            model=config.model,
            config=config.model_dump(mode="json"),
            environments=environments,
        )


class Checkpointer:
    """Saves a run. `after_step` each step, `finish` at the end, `close` always."""

    def __init__(
        self,
        run: SavedRun,
        ranks: Ranks,
        sampler: ResumableSampler | None,
        *,
        resumed_from: Path | None = None,
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._sampler = sampler
        self._resumed_from = resumed_from
        self._folder = run.folder
        self._writing: asyncio.Task[None] | None = None

    async def after_step(self, step: int) -> None:
        """Begin a checkpoint when one is due; raises what went wrong with the one before."""
        if self._writing is not None and self._writing.done():
            await self.written()
        every = self._run.section.checkpoint_every
        if every and step % every == 0 and step < self._run.number_of_steps:
            await self._start(f"step-{step:06d}", step)

    async def finish(self, step: int) -> None:
        """Save the last step, exported to Hugging Face format as well."""
        await self._start(FINAL, step, is_exported=True)
        await self.written()

    async def close(self) -> None:
        """Stop waiting for what is being written; without its end it is no checkpoint."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    async def _start(self, name: str, step: int, *, is_exported: bool = False) -> None:
        await self.written()
        path = self._folder / name
        partial = partial_folder(path)
        await asyncio.to_thread(sweep, self._folder)
        await asyncio.to_thread(partial.mkdir, parents=True)
        state = None if self._sampler is None else await self._sampler.settled(step)
        with_training_state = self._run.section.checkpoint_save_training_state
        await self._ranks.start_checkpoint(
            partial / "state", with_training_state=with_training_state
        )
        if is_exported:
            await self._ranks.save_pretrained(partial / "hf")
        manifest = CheckpointManifest(
            run=self._run.name,
            step=step,
            num_ranks=self._ranks.num_ranks,
            has_training_state=with_training_state,
            config=dict(self._run.config),
            environment_records=dict(self._run.environments),
        )
        self._writing = asyncio.create_task(self._complete(path, manifest, state))

    async def written(self) -> None:
        """Wait for the checkpoint before, and raise what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def _complete(
        self, path: Path, manifest: CheckpointManifest, state: SamplerState | None
    ) -> None:
        """Consumes what the ranks write, waits for their end, produces the checkpoint."""
        partial = partial_folder(path)
        await asyncio.to_thread(save_model_description, partial / "model", self._run.model)
        await asyncio.to_thread(write_manifest, partial, manifest, state)
        # A rank is asked between its steps: waiting inside it would keep it from training.
        while not await self._ranks.checkpoint_is_written():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        await self._ranks.finish_checkpoint()
        await asyncio.to_thread(self._publish, path)

    def _publish(self, path: Path) -> None:
        put_in_place(path)
        section = self._run.section
        mine = [
            one for one in complete_checkpoints(self._folder) if one.manifest.run == self._run.name
        ]
        for one in expendable(
            mine,
            keep_last=section.checkpoint_keep_last,
            keep_every=section.checkpoint_keep_every,
            never=self._resumed_from,
        ):
            remove_folder(one.path)
