"""A simulated run and its restarts: its driver is killed or fails, its ranks die, and it goes on.

Checkpoints are written by the real `Checkpointer` to a folder that a kill leaves as it is at that
moment: what the old driver still does while it is taken down happens elsewhere.
"""

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.disk import Weights, describe_nothing, read_weights
from tests.simulation.ledger import Ledger

from telescope_core.base.errors import TelescopeError
from telescope_train.backends.protocol import RankDiedError
from telescope_train.checkpoints.folders import (
    FINAL,
    RunCheckpoint,
    checkpoints_folder,
    complete_checkpoints,
)
from telescope_train.checkpoints.resume import LATEST, newest_to_go_on, resume_point
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.cluster.supervision import supervised
from telescope_train.config.schema import TrainConfig
from telescope_train.loop import LoopParts, train
from telescope_train.restarts import run_with_restarts
from telescope_train.rollouts.sampled import BEGINNING
from telescope_train.simulation.run import History, Scenario, SimulatedRun


class KilledRun(SimulatedRun):
    """A run whose driver may be killed; the caller must then end it."""

    def __init__(self, scenario: Scenario, history: History) -> None:
        super().__init__(scenario, history)
        self.killed = asyncio.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a run left behind."""

    weights: Weights
    """Of its last checkpoint."""
    problems: Sequence[str]
    """What is wrong with its checkpoints."""


class RestartedRun:
    """One run, through all starts of its driver."""

    def __init__(
        self,
        scenario: Scenario,
        disturb: Callable[[SimulatedRun, random.Random], None],
        kills_s: Sequence[float],
        ledger: Ledger,
        folder: Path,
    ) -> None:
        """`folder`: an empty one for checkpoints. `kills_s`: when the driver is killed."""
        self._scenario = scenario
        self._disturb = disturb
        self._kills_s = list(kills_s)
        self._ledger = ledger
        self._folder = folder
        self._config = _saving_in(scenario.config, folder / "0")
        self._num_starts = 1
        self._problems: list[str] = []

    async def all(self, chance: random.Random) -> Ended:
        """Run the driver; each time it ends too early, run another from the newest checkpoint."""
        asyncio.get_running_loop().set_exception_handler(self._not_handled)
        while True:
            begun = self._resumed()
            if begun is not None and begun.step == self._config.run.number_of_steps:
                break
            run = KilledRun(self._scenario, self._ledger)
            self._disturb(run, chance)
            is_over = await self._is_over(run, begun)
            await run.ranks.close()
            if is_over:
                break
        newest = complete_checkpoints(checkpoints_folder(self._config))[-1]
        self._problems += _wrong_checkpoints(self._config, begun)
        return Ended(weights=read_weights(newest.state_path), problems=self._problems)

    async def _is_over(self, run: KilledRun, begun: RunCheckpoint | None) -> bool:
        """Run one driver until it ends, is killed, or fails because a checkpoint did."""
        kill_s = self._kills_s[0] if self._kills_s else None
        driver = asyncio.create_task(run.watched(self._driver(run, begun)))
        killed = asyncio.create_task(run.killed.wait())
        now_s = asyncio.get_running_loop().time()
        timeout = None if kill_s is None else max(0.0, kill_s - now_s)
        await asyncio.wait([driver, killed], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if driver.done():
            killed.cancel()
            try:
                await driver
            except (TelescopeError, OSError):
                if not run.ranks.disk.num_failures:
                    raise
                return False
            return True
        if not killed.done():
            killed.cancel()
            del self._kills_s[0]
        self._move_on()
        driver.cancel()
        await asyncio.wait([driver])
        return False

    def _move_on(self) -> None:
        """Let the next driver find the files as they are now."""
        before = checkpoints_folder(self._config)
        self._config = _saving_in(self._config, self._folder / str(self._num_starts))
        self._num_starts += 1
        if before.exists():
            shutil.copytree(before, checkpoints_folder(self._config))

    def _resumed(self) -> RunCheckpoint | None:
        """Return where a driver goes on that is started with `--resume`; None = at the start."""
        found = complete_checkpoints(checkpoints_folder(self._config))
        if found and found[-1].step < self._config.run.number_of_steps:
            point = resume_point(self._config, {})
            assert point is not None
            assert not point.changed, point.changed
            return self._gone_back_to(point.checkpoint)
        return self._gone_back_to(found[-1] if found else None)

    def _gone_back_to(self, begun: RunCheckpoint | None) -> RunCheckpoint | None:
        """Forget what is done again from `begun` on."""
        step = 0 if begun is None else begun.step
        reached = self._ledger.rows[-1]["step"] if self._ledger.rows else 0
        every = self._config.checkpoint.checkpoint_every
        # The one before the last that was due may still have been written, but none before it.
        if every and step < reached // every * every - 2 * every:
            self._problems.append(f"step {reached} went back to step {step}: saved every {every}")
        self._ledger.forget_after(step, BEGINNING if begun is None else begun.sampler_state())
        return begun

    async def _driver(self, run: SimulatedRun, begun: RunCheckpoint | None) -> None:
        """Take all steps after a checkpoint; if ranks die, from the newest of that time."""

        async def go_back(died: RankDiedError) -> RunCheckpoint | None:
            await run.ranks.start_again()
            newest = self._gone_back_to(newest_to_go_on(self._config, None))
            if newest is not None:
                await run.ranks.load_checkpoint(newest.state_path, newest.state_proofs)
            await run.publisher.restore(0 if newest is None else newest.step)
            return newest

        if begun is not None:
            await run.ranks.load_checkpoint(begun.state_path, begun.state_proofs)
        await run_with_restarts(
            begun,
            lambda begun: supervised(self._steps(run, begun), [run.ranks.watch()], grace_s=0.0),
            go_back=go_back,
            died=lambda died: None,
        )

    async def _steps(self, run: SimulatedRun, begun: RunCheckpoint | None) -> None:
        """Go on from a checkpoint to the end, as `telescope train` does."""
        parts = await run.parts(0 if begun is None else begun.step)
        parts.sampler.restore(BEGINNING if begun is None else begun.sampler_state())
        run.follow(parts)
        checkpointer = Checkpointer(
            SavedRun.from_config(self._config, {}),
            run.ranks,
            parts.sampler,
            resumed_from=None if begun is None else begun.path,
            call=run.ranks.disk.call,
            describe=describe_nothing,
        )
        try:
            await train(parts, after_step=lambda step, row: checkpointer.after_step(step))
            await checkpointer.finish(self._config.run.number_of_steps)
        finally:
            # Both, also if the driver is killed while it closes after ranks have died.
            try:
                await checkpointer.close()
            finally:
                await parts.sampler.close()
        _require_all_free(run, parts)

    def _not_handled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Note what asyncio would only log, such as an error that nobody has asked for."""
        self._problems.append(f"{context['message']}: {context.get('exception')!r}")


def _saving_in(config: TrainConfig, folder: Path) -> TrainConfig:
    saving = {"checkpoint_dir": str(folder), "resume_from_checkpoint": LATEST}
    section = config.checkpoint.model_copy(update=saving)
    return config.model_copy(update={"checkpoint": section})


def _wrong_checkpoints(config: TrainConfig, begun: RunCheckpoint | None) -> Iterator[str]:
    """Yield what is wrong in the folder of a run that has ended.

    `begun`: where its last driver went on.
    """
    folder = checkpoints_folder(config)
    found = complete_checkpoints(folder)
    last = read_weights(found[-1].state_path)
    names = [one.path.name for one in found]
    if names[-1] != FINAL:
        yield f"the last checkpoint is not {FINAL}: {names}"
    for one in found:
        weights = read_weights(one.state_path)
        if weights != tuple(learned for learned in last if learned.version < one.step):
            yield f"{one.path.name} holds {weights}, and the last one {last}"
    others = sorted(path.name for path in folder.iterdir() if path.name not in names)
    if others and not (begun is not None and begun.path.name == FINAL):
        yield f"beside {names} are left {others}"
    most = config.checkpoint.checkpoint_keep_last
    if most is not None:
        every = config.checkpoint.checkpoint_keep_every
        periodic = [one for one in found if one.path.name != FINAL]
        kept = [one for one in periodic if not (every and one.step % every == 0)]
        # One more is what the run went on from.
        if len(kept) > most + 1:
            yield f"{names} are kept, and checkpoint_keep_last is {most}"


def _require_all_free(run: SimulatedRun, parts: LoopParts) -> None:
    attempts = parts.sampler.attempts
    held = {"slots": attempts.slots.num_held, "rollouts": attempts.num_playing}
    held |= {engine.name: engine.num_running + engine.num_waiting for engine in run.engines}
    held |= {one.base_url: one.num_in_flight for one in run.pool.clients}
    assert not any(held.values()), f"a run that has ended still holds {held}"
