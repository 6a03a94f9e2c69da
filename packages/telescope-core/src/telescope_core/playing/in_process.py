"""`InProcessEnvironment`: an EnvironmentClient that plays rollouts in this process."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context, copy_context
from dataclasses import replace

from telescope_core.base.code_places import location_of, raised_at
from telescope_core.base.errors import ConfigError, EnvironmentLoadError, StrayCancelError
from telescope_core.base.protocols import LATE_SCORE_S, PlayRequest, Policy
from telescope_core.base.retries import as_cancelled, as_failed
from telescope_core.base.types import (
    EnvironmentDescription,
    Example,
    Group,
    Rollout,
    Split,
)
from telescope_core.environments.author_errors import contained, stray_cancel
from telescope_core.environments.base import Environment
from telescope_core.environments.building import class_folder, class_location
from telescope_core.environments.loop_watch import LoopWatch
from telescope_core.environments.outcomes import as_named_texts, as_splits
from telescope_core.environments.running import CURRENT, HoldWatch, Request
from telescope_core.environments.usage import asking_nobody, require_may_ask
from telescope_core.playing.rescoring import rescore_rollout
from telescope_core.playing.rollout import play_gold, play_rollout, score_group

_LOAD_DEADLINE_S = 600.0
_log = logging.getLogger(__name__)


class InProcessEnvironment:
    """Plays rollouts of `environment` on the running event loop."""

    def __init__(
        self,
        environment: Environment,
        *,
        name: str,
        version: str = "0",
        load_deadline_s: float = _LOAD_DEADLINE_S,
        hold_watch: HoldWatch | None = None,
        asks_models: bool = True,
    ) -> None:
        """`hold_watch`: ends this process when the environment's code holds it for good.

        `asks_models`: whether the environment may ask judges and simulated users.
        """
        if isinstance(environment, type):
            raise ConfigError(
                f"InProcessEnvironment takes an environment, got the class {environment.__name__}; "
                f"write {environment.__name__}()"
            )
        environment.require_built()
        self._asks_models = asks_models
        self._hold_watch = hold_watch
        self._environment = environment
        self.name = name
        """The id that the environment was opened with."""
        self.secrets = environment.secrets
        """Names of the environment variables that it declares as its secrets."""
        self._version = version
        self._playing: dict[str, asyncio.Task[Rollout]] = {}
        self._stopped: set[str] = set()
        """Ids of the rollouts in `_playing` that were asked to stop."""
        self._load_deadline_s = load_deadline_s
        self._watch = LoopWatch(own_folder=class_folder(type(environment)))

    def tell_secrets(self, tell: Callable[[tuple[str, ...]], object]) -> None:
        """Call `tell` with the names of its secrets, if it has any."""
        if self.secrets:
            tell(self.secrets)

    async def describe(self) -> EnvironmentDescription:
        """Return what the environment declares; loads its data in a thread to count examples."""
        with contained():
            return await self._description()

    async def _description(self) -> EnvironmentDescription:
        environment = self._environment
        sources = await self._sources()
        return EnvironmentDescription(
            name=self.name,
            version=self._version,
            reward_min=environment.reward_min,
            reward_max=environment.reward_max,
            success_threshold=environment.success_threshold,
            num_examples={split: size for split, (size, _) in sources.items()},
            num_dropped={split: dropped for split, (_, dropped) in sources.items()},
            network=environment.network,
            secrets=environment.secrets,
            dataset_revisions=as_named_texts(
                environment.dataset_revisions(), method=environment.dataset_revisions
            ),
            metrics={f.name: f.range for f in environment.score_functions if f.kind == "metric"},
            # A total of the author's own is no sum of its parts.
            reward_weights={
                f.name: f.weight
                for f in environment.score_functions
                if f.kind in ("reward", "group_reward")
                and type(environment).compute_reward is Environment.compute_reward
            },
            system_prompt=environment.system_prompt,
            has_group_rewards=any(f.kind == "group_reward" for f in environment.score_functions),
            offers_tools=environment.offers_tools,
            sends_system=environment.sends_system,
            goes_on=environment.goes_on,
            # One with a `play` of its own may ask as often as it likes.
            max_turns=None if environment.goes_on is None else getattr(environment, "max_turns", 1),
        )

    async def _sources(self) -> dict[Split, tuple[int | None, int]]:
        """Return the number of examples in each split, and of rows that were left out of it."""
        environment = self._environment

        def read() -> dict[Split, tuple[int | None, int]]:
            splits = as_splits(environment.splits(), method=environment.splits)
            sources = {split: environment.fetcher.source(split) for split in splits}
            return {
                split: (one.num_examples, getattr(one, "num_dropped", 0))
                for split, one in sources.items()
            }

        try:
            async with asyncio.timeout(self._load_deadline_s):
                return await environment.caller.in_thread(read)
        except TimeoutError:
            raise EnvironmentLoadError(
                f"the examples of {class_location(type(environment))} were not read after "
                f"{self._load_deadline_s:g} s; give endless examples with draw(self, random), and "
                "read large data as it is needed, with a DatasetSource"
            ) from None

    async def example(self, split: Split, index: int) -> Example:
        """Return one example."""
        return await self._environment.fetcher.get(split, index)

    async def gold(self, split: Split, index: int) -> Rollout | None:
        """Return the scored rollout of the gold answer; None when there is none."""
        return await play_gold(self._environment, self.name, split, index)

    async def play(self, request: PlayRequest, policy: Policy) -> Rollout:
        """Play and score one rollout."""
        self._watch.deadline_s = request.deadline_s
        self._watch.start()
        if request.saved is None:
            played = play_rollout(self._environment, self.name, request, policy)
        else:
            played = rescore_rollout(self._environment, self.name, request, request.saved)
        with self._asking():
            context = self._noted(request)
        task = asyncio.get_running_loop().create_task(played, context=context)
        self._playing[request.rollout_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()
                await asyncio.wait([task])
                raise
            if request.rollout_id not in self._stopped:
                return stray_cancelled(self.name, request)
            return as_cancelled(request.rollout(self.name))
        finally:
            self._playing.pop(request.rollout_id, None)
            self._stopped.discard(request.rollout_id)

    def _noted(self, request: PlayRequest) -> Context:
        """Return a context in which calls of the environment's code are noted for a watcher."""
        context = copy_context()
        if self._hold_watch is not None:
            late_s = LATE_SCORE_S if request.scores_at_deadline else 0.0
            played = (
                f"rollout {request.rollout_id} (example {request.example_index} of {self.name})"
            )
            noted = Request(
                self._hold_watch.start(),
                call=0,
                played=played,
                until_s=time.monotonic() + request.deadline_s + late_s,
            )
            context.run(CURRENT.set, noted)
        return context

    async def score_group(self, split: Split, example_index: int, group: Group) -> Group:
        """Return `group` with its group rewards applied.

        Raises NotAskedError if they need a judge that may not be called.
        """
        example = await self._environment.fetcher.get(split, example_index)
        with self._asking() as refused:
            try:
                return await score_group(self._environment, group, example)
            finally:
                # Whatever the author's code made of it, its values would be those without a judge.
                if refused:
                    require_may_ask(refused[0])

    def _asking(self) -> AbstractContextManager[list[str]]:
        """Return a context manager for code that may call other models, if that is allowed."""
        return nullcontext([]) if self._asks_models else asking_nobody()

    async def cancel(self, rollout_id: str) -> None:
        """Stop a rollout that is being played; unknown ids are ignored."""
        task = self._playing.get(rollout_id)
        if task is not None:
            self._stopped.add(rollout_id)
            task.cancel()

    async def health(self) -> None:
        """Return at once: the environment runs in this process, so it is always reachable."""

    def stats(self) -> Mapping[str, float]:
        """Return nothing: the environment has no process of its own."""
        return {}

    async def close(self) -> None:
        """Cancel the rollouts still being played and close the environment."""
        self._stopped.update(self._playing)
        tasks = list(self._playing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._watch.stop()
        if self._hold_watch is not None:
            self._hold_watch.stop()
        try:
            with contained():
                await self._environment.close()
        except Exception as error:  # noqa: BLE001 - a boundary: what was played is not lost
            method = location_of(self._environment.close)
            _log.warning(
                "%s raised %s: %s%s", method, type(error).__name__, error, raised_at(error)
            )


def stray_cancelled(name: str, request: PlayRequest) -> Rollout:
    """Return a rollout that ended with a CancelledError that nobody requested."""
    reason = StrayCancelError.__name__
    rollout = replace(request.rollout(name), tags={"failed_in": "play"})
    return as_failed(rollout, f"{reason}: {stray_cancel(' while it was played')}")
