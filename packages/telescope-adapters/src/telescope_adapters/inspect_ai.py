"""Tasks of inspect_ai: `inspect:TASK`, by registered name or as `file.py@task`.

The task's solver and scorers are called as functions, and the solver's model is the policy of the
rollout. Features that need a whole inspect_ai eval, such as sandboxes, are refused by name.
`inspect_models` has the models, and `inspect_scores` the scores.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from telescope_adapters.frameworks import INSPECT, imported
from telescope_adapters.inspect_models import InspectModels, as_message, inner, told
from telescope_adapters.inspect_scores import InspectScores
from telescope_adapters.settings import (
    AdaptedConfig,
    AdaptedEnvironment,
    note_place,
    require_options,
    told_of_example,
)
from telescope_core.base.code_places import raised_at
from telescope_core.base.errors import (
    ConfigError,
    EnvironmentLoadError,
    UnplayableError,
    unknown_name,
)
from telescope_core.base.solved import is_within
from telescope_core.base.types import Example, Message, Rollout, Split, StopReason
from telescope_core.chat.trouble import relay
from telescope_core.environments import Episode, cleanup, reward
from telescope_core.environments.building import raised_by
from telescope_core.examples import ListSource, split_of

_PLAYED = {
    *("dataset", "setup", "solver", "cleanup", "scorer", "metrics", "config", "model_roles"),
    *("message_limit", "turn_limit", "token_limit", "token_limit_type", "time_limit"),
}
"""Fields of a task that are used unchanged."""
_SAID_OF_IT = {
    *("version", "description", "metadata", "tags", "viewer", "headline_metric"),
    *("checkpoint", "on_checkpoint", "on_resume"),
}
"""Fields that do not affect how a sample is played and scored."""
_OURS = {
    "model": "the policy",
    "epochs": "the number of rollouts",
    "epochs_reducer": "the mean over rollouts",
    "fail_on_error": "the limits on failed rollouts",
    "continue_on_fail": "the limits on failed rollouts",
    "score_on_error": "no score for what raised",
}
"""Fields of a task that the user of Telescope decides instead, each with the replacement."""
_SAMPLE = {"input", "choices", "target", "id", "description", "metadata", "checkpoint"}
_STOPS = {"time": StopReason.TIMEOUT, "token": StopReason.LENGTH}
"""Stop reason of a rollout that reached one of their limits; others count messages and turns."""


class InspectConfig(AdaptedConfig):
    """Settings of an inspect_ai task."""

    scorer: str = ""
    """The scorer whose score is the reward, as NAME, or as NAME/KEY where its score has several
    values; empty = the task's only one, or its first."""
    judge: str = ""
    """The model that scorers ask where the task names none, as inspect_ai writes it, such as
    openai/gpt-5-mini; empty = none."""
    samples: Literal["eval", "divided"] = "eval"
    """`eval`: every sample is held out, as in a benchmark. `divided`: a hash of the id holds out a
    tenth of them, and the others are trained on."""


class InspectEnvironment(AdaptedEnvironment):
    """A task of inspect_ai."""

    Config = InspectConfig

    def __init__(self, config: InspectConfig | None = None) -> None:
        super().__init__(config)
        self._load = imported(INSPECT, "inspect_ai._eval.loader")
        self._run = imported(INSPECT, "inspect_ai._eval.task.run")
        self._generate = imported(INSPECT, "inspect_ai._eval.task.generate").task_generate
        self._states = imported(INSPECT, "inspect_ai.solver._task_state")
        self._target = imported(INSPECT, "inspect_ai.scorer").Target
        self._util = imported(INSPECT, "inspect_ai.util")
        self.task = self._loaded()
        self._require_playable()
        self._samples = {str(sample.id): sample for sample in self._numbered()}
        is_divided = self.config.samples == "divided"
        self._names: dict[Split, list[str]] = {split: [] for split in Split}
        for name in self._samples:
            self._names[split_of(name) if is_divided else Split.EVAL].append(name)
        self._plan = self._run.resolve_plan(self.task, None)
        self._models = InspectModels(self.config.id, self.task, judge=self.config.judge)
        self._scores = InspectScores(
            self.config.id, self.task.scorer, self._models, wanted=self.config.scorer
        )
        self._try_scorers()

    def splits(self) -> tuple[Split, ...]:
        """Return only the split of evals, unless the samples are divided."""
        return tuple(split for split in Split if self._names[split])

    def examples(self, split: Split) -> ListSource:
        """Return the samples of the task."""
        found: list[Example] = []
        for name in self._names[split]:
            sample = self._samples[name]
            with told_of_example(name, of=self.config.id):
                prompt = _prompt(sample.input)
            found.append(Example(id=name, prompt=prompt, answer=_text_of(sample.target)))
        return ListSource(found)

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Let the task's solver call the policy."""
        policy = self._models.policy(episode)
        state = episode.state["state"] = self._new_state(episode.example.id)
        self._models.enter(state, policy, self.task.scorer)

        async def generate(asked: Any, tool_calls: str = "loop", **settings: Any) -> Any:
            config = self.task.config.merge(settings)
            return await self._generate(policy, asked, tool_calls, False, config)

        self._run.set_task_generate(generate)
        try:
            stop_reason = await self._solved(episode, state, generate)
        except Exception as error:
            if policy.api.failed is not None:
                raise policy.api.failed from error
            note_place(error, _package_of(self.config.id))
            raise
        if policy.api.failed is not None:
            # The output of a solver after this error is no answer of the policy.
            raise policy.api.failed
        state = episode.state["state"]
        said = [as_message(one) for one in state.messages]
        # A system message of the task's config is in requests alone.
        opening = [one for one in episode.messages[:1] if one.role == "system"]
        episode.messages[:] = [*(one for one in opening if one not in said[:1]), *said]
        was_cut = state.output.stop_reason == "max_tokens" if state.output.choices else False
        return stop_reason or (StopReason.LENGTH if was_cut else StopReason.COMPLETED)

    async def score(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> Rollout:
        """Let the task's scorers score the rollout, even if a limit ended it."""
        scored = await self._scores.of(episode.state["state"])
        episode.state["reward"] = scored.reward
        episode.tags.update(scored.tags)
        done = await super().score(rollout, example, episode)
        return replace(done, metrics={**done.metrics, **scored.metrics})

    @reward
    def theirs(self, episode: Episode[Any]) -> float:
        """The score of the task's scorer, as a number."""
        return episode.state["reward"]

    @cleanup
    async def clean_up(self, episode: Episode[Any]) -> None:
        """Call the task's own cleanup."""
        if self.task.cleanup is not None and "state" in episode.state:
            await self.task.cleanup(episode.state["state"])

    async def _solved(self, episode: Episode[Any], state: Any, generate: Any) -> StopReason | None:
        """Run the solver, and return the task's limit that ended it; None = none did."""
        over = self._util.LimitExceededError
        try:
            with (
                state._message_limit,
                state._token_limit,
                self._util.turn_limit(self.task.turn_limit),
                self._util.time_limit(self.task.time_limit),
            ):
                episode.state["state"] = await self._plan(state, generate)
            return None
        except (over, ExceptionGroup) as error:
            limit: Any = inner(error)
            if not isinstance(limit, over):
                raise
            episode.state["state"] = self._states.sample_state() or state
            return _STOPS.get(limit.type, StopReason.MAX_TURNS)

    def _new_state(self, name: str) -> Any:
        """Return the state at the start of a rollout, which shares nothing with others."""
        sample = deepcopy(self._samples[name])
        return self._states.TaskState(
            model=self._models.policy_name,
            sample_id=sample.id,
            epoch=1,
            input=sample.input,
            messages=self._run.sample_messages(sample),
            target=self._target(sample.target),
            choices=sample.choices,
            message_limit=self.task.message_limit,
            token_limit=self.task.token_limit,
            token_limit_type=self.task.token_limit_type or "all",
            metadata=sample.metadata or {},
        )

    def _try_scorers(self) -> None:
        """Score an empty answer and the target of the first sample.

        This finds errors that are independent of the policy's answer before any rollout is paid
        for.
        """
        name = next(iter(self._samples))
        texts = ("", _text_of(self._samples[name].target))

        def check(reward: float, text: str) -> None:
            if not is_within(reward, self.config.reward_min, self.config.reward_max):
                what = "the target of its first sample" if text else "an empty answer"
                found = f"{self.config.id} gives {what} a score of {reward:g}"
                raise UnplayableError(self.range_advice(found))

        trial = self._scores.tried(lambda: self._new_state(name), texts, check)
        # In a thread, because whoever builds this may do so within an event loop.
        with ThreadPoolExecutor(1) as threads:
            threads.submit(asyncio.run, trial).result()

    def _loaded(self) -> Any:
        name = str(self.config.id)
        errors: Any = imported(INSPECT, "inspect_ai._util.error")
        file = name.partition("@")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise EnvironmentLoadError(f"{file}: no such file; expected file.py@task")
        try:
            found = self._load.load_tasks([name], dict(self.config.options))
        except (errors.PrerequisiteError, LookupError, ValueError) as error:
            raise self._not_loaded(name, error) from error
        except Exception as error:
            self._require_arguments(name.rpartition("@")[2])
            raise raised_by(f"the task {name}", error, _package_of(name)) from error
        if not found:
            raise self._not_loaded(name)
        if len(found) > 1:
            names = [task.name for task in found]
            raise unknown_name("task", name, names, "(name one of them: file.py@task)")
        # It leaves out an argument that the task does not take, and goes on.
        registry: Any = imported(INSPECT, "inspect_ai._util.registry")
        self._require_arguments(registry.registry_info(found[0]).name)
        return found[0]

    def _require_arguments(self, task: str) -> None:
        """Raise ConfigError for options that are no arguments of the task, and for missing ones."""
        registry: Any = imported(INSPECT, "inspect_ai._util.registry")
        function = registry.registry_lookup("task", task)
        if function is not None:
            require_options(function, self.config.options, of=f"the task {self.config.id}")

    def _not_loaded(self, name: str, error: Exception | None = None) -> Exception:
        """Return why there is no task: `error`, or that nothing was found."""
        why = "no task is there" if error is None else told(error)
        registry: Any = imported(INSPECT, "inspect_ai._util.registry")

        def is_task(info: Any) -> bool:
            return info.type == "task"

        known = {registry.registry_info(task).name for task in registry.registry_find(is_task)}
        if name.rpartition("@")[2] in known:
            self._require_arguments(name.rpartition("@")[2])
            place = "" if error is None else raised_at(error, _package_of(name))
            return EnvironmentLoadError(f"{name} cannot be made: {why}{place}")
        package, _, task = name.partition("/")
        files = _files_with(package, task) if task else []
        if files:
            return EnvironmentLoadError(
                f"the package {package} is installed, but its tasks cannot be found by name: it "
                "declares no entry point of the group inspect_ai, by which tasks register; name "
                f"the file: inspect:{files[0]}@{task}"
            )
        return unknown_name("inspect_ai task", name, known, f"(inspect_ai said: {why:.200})")

    def _require_playable(self) -> None:
        """Raise for features of the task that a rollout lacks; note what is decided here."""
        task, name = self.task, self.config.id
        says = cast(dict[str, Any], vars(task))
        used = {key for key, value in says.items() if value is not None and key[0] != "_"}
        needs = sorted(used - _PLAYED - _SAID_OF_IT - _OURS.keys())
        for sample in task.dataset:
            fields: dict[str, Any] = dict(sample)
            others = {key for key, value in fields.items() if value} - _SAMPLE
            needs += sorted(f"{key} of a sample" for key in others)
        if needs:
            raise EnvironmentLoadError(
                f"{name} uses {', '.join(dict.fromkeys(needs))}, which only a whole eval of "
                "inspect_ai gives; run it with `inspect eval`, or choose a task without"
            )
        if not task.scorer:
            raise EnvironmentLoadError(f"{name} has no scorer, so it has no reward")
        if not len(task.dataset):
            raise EnvironmentLoadError(f"{name} has no samples")
        replaced = [f"{key} ({_OURS[key]} counts)" for key in _OURS if key in used]
        if replaced:
            relay(f"{name}: what the task sets is not used here: {', '.join(replaced)}")

    def _numbered(self) -> list[Any]:
        """Return the samples; those without ids get their positions as ids."""
        samples: list[Any] = list(self.task.dataset)
        for place, sample in enumerate(samples, 1):
            sample.id = place if sample.id is None else sample.id
        if len({str(sample.id) for sample in samples}) < len(samples):
            raise ConfigError(f"{self.config.id} has samples with the same id")
        return samples


def _package_of(name: str) -> str:
    """Return the package that the name of a task begins with; empty for a file."""
    return "" if "@" in name else name.partition("/")[0]


def _files_with(package: str, task: str) -> list[str]:
    """Return the files of an installed package that define a task."""
    found = find_spec(package) if package.isidentifier() else None
    listing: Any = imported(INSPECT, "inspect_ai._eval.list")
    folders = [Path(one) for one in (found and found.submodule_search_locations) or ()]
    return [
        str(one.file)
        for folder in folders
        for one in listing.list_tasks(absolute=True, root_dir=folder)
        if one.name == task
    ]


def _prompt(given: Any) -> "str | tuple[Message, ...]":
    return given if isinstance(given, str) else tuple(as_message(one) for one in given)


def _text_of(target: Any) -> str:
    return target if isinstance(target, str) else "\n".join(target)
