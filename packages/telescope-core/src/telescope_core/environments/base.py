"""`Environment`: the base class of every environment."""

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import Any, ClassVar, Literal, cast

from telescope_core.base.code_places import (
    called_at,
    is_authors,
    is_own_module,
    location_of,
    raised_at,
)
from telescope_core.base.errors import (
    EnvironmentLoadError,
    RewardError,
    UnplayableError,
    nearest,
)
from telescope_core.base.solved import is_within
from telescope_core.base.types import Example, Message, Rollout, Split, StopReason
from telescope_core.environments.author_errors import contained
from telescope_core.environments.building import (
    built,
    check_class,
    class_location,
    folder_defining,
    require_built,
    require_rewards,
)
from telescope_core.environments.calls import Caller, RunsIn
from telescope_core.environments.episode import Episode
from telescope_core.environments.hooks import Hook, hooks, of_kind
from telescope_core.environments.outcomes import as_named_texts, as_truth
from telescope_core.environments.rewards import (
    ScoreFunction,
    as_number,
    evaluate,
    score_functions,
)
from telescope_core.environments.score_processes import ScoreProcesses
from telescope_core.environments.settings import EnvironmentConfig, read_settings
from telescope_core.environments.sources import ExampleReader, Examples, divided, kept_data
from telescope_core.examples import SplitSource
from telescope_core.examples.checks import checked_messages, require_whole


class Environment:
    """A source of examples, a way to play them, and rewards.

    Subclass `SingleTurnEnvironment`, `MultiTurnEnvironment` or `ToolEnvironment`. For full
    control, subclass this class and override `play`. Every method that is called for a rollout may
    be sync or async; `sync_runs_in` and `@runs_in` decide where sync methods run. One instance
    serves many rollouts at once: keep the state of a rollout in its `Episode`, never on `self`.
    """

    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    """The class of the environment's settings; an instance of it is `self.config`."""
    State: ClassVar[type[Any]] = dict
    """The class of `episode.state`; it is built anew for each rollout, without arguments."""
    data: ClassVar[Examples | Mapping[str, Examples] | None] = None
    """The examples: the path of a .jsonl, .json, .csv or .parquet file, relative to the file of
    the class, or a list of examples, rows or prompts. A hash of each id decides its split, unless
    this is a dict with a path or list for `train` and one for `eval`."""
    reward_min: ClassVar[float] = 0.0
    """Smallest reward of a rollout; a smaller one is an error."""
    reward_max: ClassVar[float] = 1.0
    """Largest reward of a rollout; a larger one is an error."""
    success_threshold: ClassVar[float] = 1.0
    """A rollout with at least this reward counts as solved in pass@k."""
    network: Literal["none", "load", "always"] = "none"
    """When the environment needs the network: never, to load its data, or while rollouts are
    played."""
    secrets: ClassVar[tuple[str, ...]] = ()
    """Names of the environment variables that it may read with `secret`."""
    system_prompt: str = ""
    """Text of the system message; empty = none is added."""
    needs_answer: ClassVar[bool | None] = None
    """Whether every example must have an answer; None = only if a reward, metric or group reward
    reads `answer`."""
    sync_runs_in: ClassVar[RunsIn] = "thread"
    """Place in which sync methods run unless `@runs_in` declares another."""
    max_threads: ClassVar[int] = 32
    """Most threads that run sync methods at the same time."""
    max_processes: ClassVar[int] = 4
    """Most processes that run `@runs_in("process")` methods at the same time."""
    score_functions: ClassVar[tuple[ScoreFunction, ...]] = ()
    """The `@reward`, `@metric` and `@group_reward` methods; set when the class is defined."""
    hooks: ClassVar[tuple[Hook, ...]] = ()
    """The `@setup`, `@stop` and `@cleanup` methods; set when the class is defined."""

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        self.config: Any = config if config is not None else self.Config()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.score_functions = score_functions(cls)
        cls.hooks = hooks(cls)
        check_class(cls, scores=cls.score_functions, hooks=cls.hooks, known=_declared_names(cls))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Environment":
        """Build the environment from plain settings; an unknown or invalid one is a ConfigError.

        Raises EnvironmentLoadError for a class that could give no reward.
        """
        environment: Environment = built(
            cls, read_settings(cls.Config, settings, owner=class_location(cls))
        )
        environment.require_built()
        has_total = cls.compute_reward is not Environment.compute_reward
        if not has_total and cls.score is Environment.score:
            require_rewards(cls, cls.score_functions)
        return environment

    def new_state(self) -> Any:
        """Return the state of a new rollout."""
        try:
            with contained():
                return self.State()
        except Exception as error:
            error.add_note(f"in State of {class_location(type(self))}{raised_at(error)}")
            raise

    def require_built(self) -> None:
        """Raise EnvironmentLoadError when the constructor did not set what playing needs."""
        require_built(self, known=_declared_names(type(self)))

    @cached_property
    def caller(self) -> Caller:
        """The object that calls the author's methods."""
        processes = ScoreProcesses(type(self), self.config, max_processes=self.max_processes)
        return Caller(
            place=self.sync_runs_in,
            max_threads=self.max_threads,
            processes=processes,
        )

    @cached_property
    def __releases(self) -> list[Callable[[], object]]:
        return []

    @cached_property
    def fetcher(self) -> ExampleReader:
        """The object that reads the examples."""
        return ExampleReader(
            self.examples,
            self.caller,
            owner=class_location(type(self)),
            folder=folder_defining(type(self), "examples"),
        )

    def examples(self, split: Split) -> Examples:
        """Return the examples of `split`; their ids must be stable and the splits disjoint.

        They are a list or another iterable of examples or rows, the path of a file, or an example
        source. By default they come from `data`, or are drawn by `draw`. Called once for a split.
        """
        has_draw = type(self).draw is not Environment.draw
        data = kept_data(self)
        if data is not None and has_draw:
            raise EnvironmentLoadError(
                f"{class_location(type(self))} has data and defines {location_of(self.draw)}, so "
                "it is not clear where its examples come from; keep one (data = None takes it away)"
            )
        if data is not None:
            where = f"data of {class_location(type(self))}"
            return divided(data, split, where=where, folder=folder_defining(type(self), "data"))
        if has_draw:
            seed = f"{type(self).__name__}/{getattr(self.config, 'seed', 0)}"
            return SplitSource(self.draw, split=split, seed=seed)
        raise EnvironmentLoadError(
            f"{class_location(type(self))} has no examples; set data to a file or a list, or "
            "define draw(self, random) or examples(self, split)"
        )

    @property
    def offers_tools(self) -> bool:
        """Whether requests offer tools, so that the policy's chat template has to support them."""
        return False

    @property
    def sends_system(self) -> bool:
        """Whether rollouts are known to begin with a system message."""
        return bool(self.system_prompt) and self._is_ours("opening", "first_messages")

    @property
    def goes_on(self) -> bool | None:
        """Whether rollouts continue after an answer without a tool call; None = not known."""
        return None

    def _is_ours(self, *methods: str) -> bool:
        """Return whether `methods` are Telescope's own, so that their behavior is known."""
        return not any(is_authors(getattr(self, name)) for name in methods)

    def draw(self, random: Random) -> Example:
        """Return a random example; equal problems need equal ids.

        Defining it makes the examples endless. A hash of the id decides the split, and the setting
        `seed`, if there is one, which examples are drawn.
        """
        raise EnvironmentLoadError(f"{class_location(type(self))} does not define draw")

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that the environment has."""
        return (Split.TRAIN, Split.EVAL)

    def dataset_revisions(self) -> dict[str, str]:
        """Return dataset id -> pinned revision for every dataset that the environment loads."""
        return {}

    def secret(self, name: str) -> str:
        """Return the value of the environment variable `name`, which `secrets` must declare.

        Raises UnplayableError, which ends the eval or the run, if it is not declared or not set.
        """
        if name not in self.secrets:
            declared = ", ".join(self.secrets) or "none"
            close = nearest(name, self.secrets)
            meant = f"did you mean {close[0]}? Else " if close else ""
            raise UnplayableError(
                f"{class_location(type(self))} reads the secret {name!r} but declares {declared}; "
                f"{meant}add it to the class: secrets = ({name!r},)"
            )
        value = os.environ.get(name)
        if not value:
            raise UnplayableError(
                f"{class_location(type(self))} needs the environment variable {name}, which is "
                "not set; export it before the command"
            )
        return value

    def format_prompt(self, example: Example) -> Any:
        """Return the prompt of `example`: text, which becomes one user message, or messages.

        May be async.
        """
        return example.prompt

    def gold_answer(self, example: Example) -> str | Sequence[str] | None:
        """Return a completion with the maximum reward, or one per turn; None = not known."""
        return None

    def task_files(self, example: Example) -> Mapping[str, str] | None:
        """Return `example` as files of a Harbor task folder, by path; None = it has no such form.

        `instruction.md` and `tests/test.sh` must be among them. Files below `environment/` are put
        where the agent works, and `solution/solve.sh` solves the task. `telescope env export`
        writes them.
        """
        return None

    def golden_answers(self, example: Example) -> Mapping[str, str]:
        """Return the right answers, by name, that are recorded with each rollout."""
        return {"answer": example.answer} if example.answer else {}

    def opening(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Return the first messages: the system prompt, if there is one, and then `prompt`."""
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else [*prompt]
        if self.system_prompt:
            messages.insert(0, Message(role="system", content=self.system_prompt))
        return messages

    def initial_messages(self, example: Example) -> list[Message]:
        """Return the first messages about `example`; works only with a sync format_prompt."""
        return self.opening(self.format_prompt(example))

    async def first_messages(self, example: Example) -> list[Message]:
        """Return the first messages about `example`; format_prompt may be sync or async."""
        if type(self).format_prompt is Environment.format_prompt:
            return self.opening(example.prompt)
        prompt = await self.caller.one("play", self.format_prompt, example)
        where = f"what {location_of(self.format_prompt)} returns"
        if isinstance(prompt, str):
            require_whole(prompt, where)
            return self.opening(prompt)
        if isinstance(prompt, list | tuple) and prompt:
            return self.opening(checked_messages(cast(Sequence[object], prompt), where=where))
        raise EnvironmentLoadError(
            f"{class_location(type(self))}: format_prompt must return text or a list of Message, "
            f"got {prompt!r:.80}"
        )

    async def play(self, episode: Episode[Any]) -> StopReason | None:
        """Run one rollout by calling `episode.generate` and `episode.add`.

        Without a stop reason, the rollout is completed, or its last turn was cut.
        """
        raise EnvironmentLoadError(
            f"{class_location(type(self))} must subclass SingleTurnEnvironment, "
            "MultiTurnEnvironment or ToolEnvironment, or define async play(self, episode)"
        )

    def compute_reward(self, rollout: Rollout, example: Example) -> Any:
        """Return the reward, by default the weighted sum of the `@reward` methods.

        May be async. `rollout.rewards` and `rollout.metrics` hold the unweighted values of the
        `@reward` and `@metric` methods by name.
        """
        weights = {function.name: function.weight for function in self.score_functions}
        return math.fsum(weights[name] * value for name, value in rollout.rewards.items())

    async def score(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> Rollout:
        """Return `rollout` with its reward, rewards by name and metrics."""
        require_answer(self, example)
        functions = [f for f in self.score_functions if f.kind != "group_reward"]
        values = await evaluate(
            functions, self, self.caller, rollout=rollout, example=example, episode=episode
        )
        return await with_total(self, rollout, example, values)

    def check_range(self, total: float) -> None:
        """Raise UnplayableError when `total` is outside the declared range.

        With a wrong range, only the rollouts inside it would count: often those that are not right.
        """
        if not is_within(total, self.reward_min, self.reward_max):
            weights = [f"{f.name} {f.weight:g}" for f in self.score_functions if f.kind != "metric"]
            is_sum = type(self).compute_reward is Environment.compute_reward
            summed = f" (weights: {', '.join(weights)})" if is_sum and weights[1:] else ""
            raise UnplayableError(
                f"{class_location(type(self))} returned reward {total:g}, outside its declared "
                f"range [{self.reward_min:g}, {self.reward_max:g}]; correct the reward{summed}, or "
                "reward_min and reward_max"
            )

    async def find_stop(self, episode: Episode[Any]) -> str | None:
        """Return the name of the first `@stop` method that returns True; None when none does."""
        for hook in of_kind(self.hooks, "stop"):
            method = getattr(self, hook.name)
            if as_truth(await self.caller.one("stop", method, episode), method=method):
                return hook.name
        return None

    def on_close(self, release: Callable[[], object]) -> None:
        """Call `release`, which may be async, when the environment is closed."""
        if not callable(cast(object, release)):
            raise EnvironmentLoadError(
                f"{called_at()}: on_close takes a function without arguments, got {release!r:.80}"
            )
        self.__releases.append(release)

    async def close(self) -> None:
        """Release processes and connections. Idempotent; an override must call super().close()."""
        try:
            while self.__releases:
                result = self.__releases.pop()()
                if inspect.isawaitable(result):
                    await result
        finally:
            if self.__releases:  # one of them raised
                await Environment.close(self)
            self.caller.close()


def require_answer(environment: Environment, example: Example) -> None:
    """Raise RewardError if a reward or metric reads the answer of `example`, which has none."""
    readers = [f.name for f in environment.score_functions if f.reads_answer]
    needs = bool(readers) if environment.needs_answer is None else environment.needs_answer
    if needs and not example.answer:
        reason = f"it is read by {' and '.join(readers)}" if readers else "needs_answer is True"
        raise RewardError(
            f"{class_location(type(environment))}: example {example.id!r} has no answer, but "
            f"{reason}; set Example(answer=...), or set needs_answer = False if an empty "
            "answer is intended"
        )


async def with_total(
    environment: Environment, rollout: Rollout, example: Example, values: Mapping[str, float]
) -> Rollout:
    """Return `rollout` with its reward; `values` are those of all reward and metric methods."""
    functions = [f for f in environment.score_functions if f.kind != "group_reward"]
    kind, caller = type(environment), environment.caller
    asked = environment.golden_answers
    if kind.golden_answers is Environment.golden_answers:
        golden: object = asked(example)
    else:
        golden = await caller.one("golden_answers", asked, example)
    scored = replace(
        rollout,
        rewards={f.name: values[f.name] for f in functions if f.kind == "reward"},
        metrics={
            **rollout.metrics,
            **{f.name: values[f.name] for f in functions if f.kind == "metric"},
        },
        golden_answers=as_named_texts(golden, method=asked),
    )
    if kind.compute_reward is Environment.compute_reward:
        value: object = environment.compute_reward(scored, example)
    else:
        value = await caller.one("reward", environment.compute_reward, scored, example)
    total = as_number(value, what=lambda: f"{class_location(kind)}: compute_reward")
    environment.check_range(total)
    return replace(scored, reward=total)


def _declared_names(cls: type) -> set[str]:
    """Return the public class attributes that Telescope's own base classes of `cls` declare."""
    return {
        name
        for base in cls.__mro__
        if is_own_module(base.__module__)
        for name in getattr(base, "__annotations__", {})
        if not name.startswith("_")
    }
