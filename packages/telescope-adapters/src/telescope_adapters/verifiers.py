"""Environments of the `verifiers` package, from 0.1.8 up to 0.3.1: `verifiers:NAME`.

They drive generation: the client that they are given asks the policy of the rollout. Their rubric
scores; a reward function that raises, which they count as 0, fails the rollout here.
"""

import functools
import inspect
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from importlib.metadata import packages_distributions
from types import SimpleNamespace
from typing import Any, cast

from telescope_adapters.frameworks import VERIFIERS, VERIFIERS_TASKS, imported, missing_import
from telescope_adapters.requests import Requests
from telescope_adapters.settings import (
    AdaptedConfig,
    AdaptedEnvironment,
    as_metrics,
    as_number,
    function_tool,
    note_place,
    require_options,
    told_of_example,
)
from telescope_core.base.code_places import raised_at
from telescope_core.base.errors import (
    ConfigError,
    ContextLengthError,
    EndpointError,
    EnvironmentLoadError,
    RewardError,
    RewardRaisedError,
    TelescopeError,
    UnplayableError,
    unknown_name,
)
from telescope_core.base.retries import is_too_long
from telescope_core.base.secret_names import link_advice
from telescope_core.base.types import Example, Message, Role, Rollout, Split, StopReason, ToolCall
from telescope_core.chat.trouble import relay
from telescope_core.environments import Episode, reward
from telescope_core.environments.building import raised_by, told_of
from telescope_core.examples import ListSource, split_of
from telescope_core.gateway.listener import reply_json
from telescope_core.sandboxes.protocol import SandboxError

_RAISED: ContextVar[list[tuple[str, Exception]] | None] = ContextVar("RAISED", default=None)
"""Errors of reward functions in the running rollout, with their names."""
_MODEL = "policy"
_ROLES: Mapping[str, Role] = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "text": "user",
}
"""Their roles -> ours. A prompt that is one text becomes a message with the role `text`, which
their own chat client sends as a user's."""
_NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "include_stop_str_in_output": False,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}
"""Settings of a request with the value that is every policy's own."""
_SHAPING = {
    *("include_stop_str_in_output", "response_format", "tool_choice", "stop_token_ids"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "functions", "function_call"),
}
"""Settings that allow other answers, or end them elsewhere: without them, a score says less."""
_LENGTHS = ("max_tokens", "max_completion_tokens")
_OLD_SANDBOXES = (
    "this prime-sandboxes refuses a start command that is text, which SandboxEnv and PythonEnv "
    "pass; link it with --with verifiers==0.1.14 --with 'prime-sandboxes<0.2.37'"
)
_TOO_LONG = "this model's maximum context length is exceeded"
"""Text by which versions before 0.1.11 recognize an error that ends and scores a rollout."""


class VerifiersEnvironment(AdaptedEnvironment):
    """An environment of the `verifiers` package."""

    Config = AdaptedConfig

    def __init__(self, config: AdaptedConfig | None = None) -> None:
        super().__init__(config)
        self._verifiers = imported(VERIFIERS, "verifiers")
        self._module = self.config.id.rpartition("/")[2].replace("-", "_")
        with without_signal_handlers():
            self.env = self._loaded()
        # Versions before 0.1.11 have none.
        threshold = getattr(self.env, "pass_threshold", None)
        if threshold is not None and self.config.success_threshold is None:
            vars(self).update(success_threshold=self._passing(threshold))
        self._leaves = list(_leaves(self.env))
        self._require_playable()
        rubrics = {id(one): one for leaf in self._leaves for one in _rubrics(leaf.rubric)}
        for rubric in rubrics.values():
            weighed = itertools.zip_longest(rubric.funcs, rubric.weights[: len(rubric.funcs)])
            rubric.funcs = [_noticed(function, weight or 0.0) for function, weight in weighed]
        # In a group, the settings of its parts are used by nobody, as with their own `generate`.
        self._settings = ModelSettings(self.config.id, self.env.sampling_args)
        # From 0.1.11 on, environments ask a client of theirs, before that one of OpenAI's.
        self._has_clients = hasattr(self.env, "tool_defs")
        self._client = (
            _client_class(self._verifiers, self._settings)
            if self._has_clients
            else functools.partial(_openai_client, self._settings)
        )
        for one in {id(one): one for one in (self.env, *self._leaves)}.values():
            teardown = getattr(one, "_teardown", None)
            if teardown is not None:
                self.on_close(teardown)
        self._rows: dict[Split, dict[str, dict[str, Any]]] | None = None

    @property
    def offers_tools(self) -> bool:
        """Whether the environment has tools of its own."""
        return any(
            getattr(leaf, "tool_defs", None) or getattr(leaf, "oai_tools", None)
            for leaf in self._leaves
        )

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have rows."""
        return tuple(split for split, rows in self._split_rows().items() if rows)

    def examples(self, split: Split) -> ListSource:
        """Return the rows of their dataset; a hash divides it where there is none for evals."""
        found: list[Example] = []
        for name, row in self._split_rows()[split].items():
            with told_of_example(name, of=self.config.id):
                found.append(_example(name, row))
        return ListSource(found)

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Let verifiers play and score a rollout with the policy as its model."""
        split = Split(episode.example.id.partition("-")[0])
        env, row = _routed(self.env, deepcopy(self._split_rows()[split][episode.example.id]))
        if isinstance(row["prompt"], str) and not self._has_clients:
            # These versions take no text for a chat.
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        arguments = {
            **deepcopy(self.env.sampling_args),
            "max_tokens": episode.sampling.max_tokens,
        }
        raised: list[tuple[str, Exception]] = []
        reset = _RAISED.set(raised)
        try:
            state = await _played_and_scored(env, row, self._client(Requests(episode)), arguments)
        except Exception as error:
            note_place(error, self._module)
            raise
        finally:
            _RAISED.reset(reset)
        if state.get("error") is not None:
            raise _reason(state["error"], self._module) from state["error"]
        if raised:
            name, error = raised[0]
            text = (
                f"reward function {name} of {self.config.id} raised {type(error).__name__}: "
                f"{error}{raised_at(error, self._module)}, which verifiers would count as 0"
            )
            raise RewardRaisedError(f"{text}{link_advice(text, os.environ)}") from error
        episode.messages[:] = as_messages([*state["prompt"], *(state.get("completion") or ())])
        own = self.config.id
        metrics: Mapping[str, object] = state.get("metrics") or {}
        episode.metrics.update(as_metrics(metrics, of=own, kind="reward function"))
        episode.state["reward"] = as_number(state["reward"], of=f"the rubric of {own}")
        condition = str(state.get("stop_condition"))
        episode.tags["stop_condition"] = condition
        if state.get("timed_out"):
            return StopReason.TIMEOUT
        if state.get("prompt_too_long"):
            return StopReason.CONTEXT_LENGTH
        if state.get("is_truncated") or condition == "max_total_completion_tokens_reached":
            return StopReason.LENGTH
        was_cut = condition == "max_turns_reached" and getattr(env, "max_turns", -1) != 1
        return StopReason.MAX_TURNS if was_cut else StopReason.COMPLETED

    @reward
    def theirs(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """The reward of the environment's rubric."""
        return own_reward(episode)

    def _loaded(self) -> Any:
        try:
            return self._verifiers.load_environment(self.config.id, **self.config.options)
        except Exception as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name == self._module:
                # Modules have underscores, and names of environments hyphens.
                mark = "_" if "_" in self.config.id else "-"
                modules = (name for name in packages_distributions() if not name.startswith("_"))
                raise unknown_name(
                    "verifiers environment",
                    self.config.id,
                    {name.replace("_", mark) for name in modules},
                    "(its package is installed by `telescope env link --with PACKAGE`)",
                ) from error
            if trouble := missing_import(error, VERIFIERS, otherwise=VERIFIERS_TASKS):
                raise EnvironmentLoadError(f"{self.config.id}: {trouble}") from error
            module = sys.modules.get(self._module)
            load = getattr(module, "load_environment", None)
            if module is not None and load is None:
                tasksets = VERIFIERS_TASKS.requirement
                raise EnvironmentLoadError(
                    f"expected a package with load_environment, as verifiers {VERIFIERS.pin} loads "
                    f"them, and {self.config.id} has none; if it is a taskset of the new API, link "
                    f"it with --with {tasksets} too"
                ) from error
            if load is not None:
                where = f"load_environment of {self.config.id}"
                require_options(load, self.config.options, of=where)
            else:
                where = f"the module of {self.config.id}"
            # Theirs wraps what the author's code raised.
            meant = missing if isinstance(missing, Exception) else error
            if isinstance(meant, AttributeError) and meant.name == "env_id":
                # Their loader sets it on what it was given.
                raise EnvironmentLoadError(
                    f"{where} returned {meant.obj!r:.80}, expected an environment of verifiers"
                ) from error
            told = raised_by(where, meant, self._module)
            if "CreateSandboxRequest" in str(told):
                raise EnvironmentLoadError(f"{told}; {_OLD_SANDBOXES}") from error
            raise told from error

    def _passing(self, threshold: Any) -> float:
        """Return the reward from which on the environment counts a rollout as solved."""
        passing = as_number(threshold, of=f"pass_threshold of {self.config.id}")
        low, high = self.config.reward_min, self.config.reward_max
        if not low < passing <= high:
            raise ConfigError(
                f"{self.config.id} counts a rollout as solved from a reward of {passing:g} on "
                f"(pass_threshold), and rewards go from {low:g} to {high:g}; set env.reward_min "
                "and env.reward_max to its range, or env.success_threshold to the reward of a "
                "rollout that solves its example"
            )
        return passing

    def _require_playable(self) -> None:
        """Raise EnvironmentLoadError for environments that cannot be played, before any cost."""
        wrong = ""
        rubrics = [one for leaf in self._leaves for one in _rubrics(leaf.rubric)]
        plain = self._verifiers.Rubric.score_rollout
        if any(one._is_group_func(function) for one in rubrics for function in one.funcs):
            wrong = (
                "has reward functions that need all rollouts of an example in one place, which "
                "this adapter cannot give them; choose an environment that scores each rollout by "
                "itself"
            )
        elif others := sorted({type(one).__name__ for one in rubrics if self._scores_groups(one)}):
            wrong = (
                f"scores by {', '.join(others)}.score_group, which gets all rollouts of an example "
                "in one place, and this adapter cannot give it them; choose an environment that "
                "scores each rollout by itself"
            )
        elif not all(getattr(one, "score_rollouts", True) for one in (self.env, *self._leaves)):
            wrong = (
                "does not score its rollouts (score_rollouts is false), so each would have the "
                "reward 0; set it to true"
            )
        elif any(not one.funcs and type(one).score_rollout is plain for one in rubrics):
            wrong = "has a rubric without a reward function, so no rollout could be scored"
        elif any(getattr(leaf, "message_type", "chat") != "chat" for leaf in self._leaves):
            wrong = "asks for plain completions (message_type), but policies here answer chats"
        elif not hasattr(self.env, "_route_child_input") and any(
            hasattr(inner, "env_map") for inner in getattr(self.env, "envs", ())
        ):
            wrong = (
                "is a group within a group, whose rows old versions of verifiers give to the wrong "
                f"environment; link it with --with {VERIFIERS.requirement}"
            )
        if wrong:
            raise EnvironmentLoadError(f"{self.config.id} {wrong}")

    def _scores_groups(self, rubric: Any) -> bool:
        """Whether `rubric` scores a group by other rules than each of its rollouts.

        Only these two classes of theirs give the same reward both ways.
        """
        classes = (self._verifiers.Rubric, self._verifiers.RubricGroup)
        used = getattr(rubric.score_group, "__func__", rubric.score_group)
        return used not in [one.score_group for one in classes]

    def _split_rows(self) -> dict[Split, dict[str, dict[str, Any]]]:
        """Return the rows of each split by the ids of their examples."""
        if self._rows is None:
            # Before 0.1.10, datasets are there at once, and groups take the rows to train on for
            # evals where an environment of theirs has no others.
            is_early = not hasattr(self.env, "build_dataset")
            if not is_early:
                with told_of(f"the dataset of {self.config.id}", self._module):
                    self.env.build_eval_dataset()
                    self.env.build_dataset()
            rows = [dict(row) for row in self.env.dataset or ()]
            held_out: Any = self.env.eval_dataset
            if is_early and any(leaf.eval_dataset is None for leaf in self._leaves):
                held_out = None
            found = {
                Split.TRAIN: rows,
                Split.EVAL: [dict(row) for row in held_out or ()],
            }
            if held_out is None:
                found = {
                    split: [row for row in rows if split_of(str(row["example_id"])) is split]
                    for split in Split
                }
            if not any(found.values()):
                raise EnvironmentLoadError(f"the dataset of {self.config.id} has no rows")
            self._rows = {split: _by_id(split, rows) for split, rows in found.items()}
        return self._rows


@contextmanager
def without_signal_handlers() -> Generator[None]:
    """Keep code in the block from installing signal handlers, which would replace ours."""
    install = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal = install


class ModelSettings:
    """What an environment sets for its model (`sampling_args`): of it, stop texts are used."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        """`given` are the settings of all requests of the environment `name`."""
        self._name = name
        self._said: set[str] = set()
        self.stop_of(given)

    def stop_of(self, given: Mapping[str, Any], *, max_tokens: int | None = None) -> list[str]:
        """Return the stop texts in the settings of a request.

        Logs once which other settings are for the user; `max_tokens` is what the user set. Raises
        UnplayableError for settings that allow other answers, or end them elsewhere.
        """
        # OpenAI's client writes those of `extra_body` over the others.
        merged: dict[str, Any] = {**given, **(given.get("extra_body") or {})}
        neutral = {**_NEUTRAL, **dict.fromkeys(_LENGTHS, max_tokens)}
        used = {
            key
            for key, value in merged.items()
            if value not in (None, [], {}) and (key not in neutral or value != neutral[key])
        } - {"stop", "extra_body"}
        if refused := used & _SHAPING:
            raise UnplayableError(
                f"{self._name} sets {', '.join(sorted(refused))} for its model, which a policy "
                "cannot be asked for; choose an environment that takes any answer"
            )
        if news := used - self._said:
            self._said |= news
            relay(
                f"{self._name}: what the environment sets for its model is not used here, since "
                f"the sampling of the eval or the run counts: {', '.join(sorted(news))}"
            )
        stop: Any = merged.get("stop") or ()
        return [stop] if isinstance(stop, str) else [*stop]


def own_reward(episode: Episode[Any]) -> float:
    """Return the reward of the environment; raises RewardError if its loop gave none."""
    if "reward" not in episode.state:
        raise RewardError(
            "verifiers scores a rollout when its own loop has ended, and this one was cut before, "
            "at its deadline or by a full context; give it more time or a larger context"
        )
    return episode.state["reward"]


def as_messages(theirs: Iterable[Any]) -> list[Message]:
    """Convert verifiers' messages to ours; they are dicts or objects with the same names.

    Raises EnvironmentLoadError for a role that no chat has, and for parts that are no text.
    """
    return [_message(_fields(one)) for one in theirs]


def _fields(theirs: Any) -> dict[str, Any]:
    return dict(theirs) if isinstance(theirs, Mapping) else theirs.model_dump()  # pyright: ignore[reportUnknownArgumentType]


def _message(fields: dict[str, Any]) -> Message:
    role = _ROLES.get(str(fields["role"]))
    if role is None:
        raise EnvironmentLoadError(
            f"a message has the role {fields['role']!r}; expected one of {', '.join(_ROLES)}"
        )
    return Message(
        role=role,
        content=text_of(fields.get("content")),
        reasoning=str(fields.get("reasoning_content") or "") if role == "assistant" else "",
        tool_calls=tuple(_call(_fields(call)) for call in fields.get("tool_calls") or ()),
        tool_call_id=fields.get("tool_call_id"),
    )


def _call(theirs: dict[str, Any]) -> ToolCall:
    inner = _fields(theirs.get("function") or theirs)
    arguments = inner["arguments"]
    return ToolCall(
        id=str(theirs["id"]),
        name=inner["name"],
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def text_of(content: Any) -> str:
    """Return the text of a message, its parts as lines.

    Raises EnvironmentLoadError for parts that are no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    others = sorted({str(part.get("type")) for part in content if part.get("type") != "text"})
    if others:
        raise EnvironmentLoadError(
            f"a message has parts of the type {', '.join(others)}; this adapter takes text"
        )
    return "\n".join(str(part["text"]) for part in content)


def _example(name: str, row: dict[str, Any]) -> Example:
    prompt: Any = row["prompt"]
    messages = as_messages(
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    answer = row.get("answer")
    return Example(
        id=name,
        prompt=tuple(messages),
        answer="" if answer is None else str(answer),
        # For people alone: what is played is the row itself.
        info={"row": json.dumps(row, default=str)},
    )


def _by_id(split: Split, rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows by ids of examples: their own, with a number added to repeated ones."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = f"{split}-{row['example_id']}"
        others = itertools.count(2)
        while name in found:
            name = f"{split}-{row['example_id']}.{next(others)}"
        found[name] = row
    return found


def _leaves(env: Any) -> Iterator[Any]:
    """Yield the environments that play: those of a group, nested ones included, else `env`."""
    inner: list[Any] = [*getattr(env, "env_map", {}).values()]
    if not inner:
        yield env
    for one in inner:
        yield from _leaves(one)


def _routed(env: Any, row: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the environment that plays `row`, and the row in its form."""
    while hasattr(env, "env_map"):
        if hasattr(env, "_route_child_input"):
            name, row, _ = env._route_child_input(row)
        else:  # before 0.1.14
            name = row["task"]
        env = env.env_map[name]
    return env, row


async def _played_and_scored(
    env: Any, row: dict[str, Any], client: Any, arguments: dict[str, Any]
) -> Any:
    """Return the state of a rollout of `env`, which scored it."""
    play = getattr(env, "_run_rollout_state", None)
    if play is not None:
        return await play(row, client, _MODEL, arguments)
    state = await env.rollout(row, client, _MODEL, arguments)  # before 0.1.14
    score = env.rubric.score_rollout
    takes_limit = "score_sem" in inspect.signature(score).parameters
    await score(state, **({"score_sem": nullcontext()} if takes_limit else {}))
    return state


def _reason(theirs: BaseException, module: str) -> Exception:
    """Return why verifiers stopped a rollout: the policy's error, if that was the cause.

    `module` is the author's, whose place is named otherwise.
    """
    cause: BaseException | None = theirs
    while cause is not None:
        if isinstance(cause, TelescopeError):
            return cause
        cause = cause.__cause__
    came_of = f", which came of {theirs.__cause__!r}" if theirs.__cause__ else ""
    text = f"verifiers stopped the rollout: {theirs!r}{came_of}{raised_at(theirs, module)}"
    text += link_advice(text, os.environ)
    # Of its sandboxes and tunnels; older versions have no such class.
    if any(one.__name__ == "InfraError" for one in type(theirs).__mro__):
        return SandboxError(text)
    return RuntimeError(text)


def _rubrics(rubric: Any) -> list[Any]:
    """Return `rubric` and all of its parts."""
    inner: list[Any] = [*getattr(rubric, "rubrics", ())]
    return [rubric, *(leaf for one in inner for leaf in _rubrics(one))]


def _noticed(function: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """Return `function` wrapped so that its errors are recorded with the scored rollout.

    So is a value that is no number, unless it is a metric alone: theirs counts it as 0.
    """

    @functools.wraps(function)
    async def noticed(*arguments: Any, **named: Any) -> Any:
        try:
            value = function(*arguments, **named)
            value = await value if inspect.isawaitable(value) else value
            if weight:
                float(value)
            return value
        except Exception as error:
            raised = _RAISED.get()
            if raised is not None:
                raised.append((getattr(function, "__name__", "?"), error))
            raise

    return noticed


def _client_class(verifiers: Any, settings: ModelSettings) -> Callable[[Requests], Any]:
    """Return a verifiers client class that calls the policy of an episode."""
    clients: Any = imported(VERIFIERS, "verifiers.clients")
    types: Any = imported(VERIFIERS, "verifiers.types")

    class PolicyClient(clients.Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            requests: Requests = self._client
            episode = requests.episode
            shown = [function_tool(t.name, t.description, t.parameters) for t in tools or ()]
            stop = settings.stop_of(sampling_args, max_tokens=episode.sampling.max_tokens)
            try:
                said = await requests.answer(as_messages(prompt), tools=shown, stop=stop)
            except (ContextLengthError, EndpointError) as error:
                if not episode.turns or not is_too_long(error):
                    raise
                # It ends their loop, which scores what was said.
                raise verifiers.OverlongPromptError(str(error)) from error
            calls = [
                types.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in said.message.tool_calls
            ]
            message = types.ResponseMessage(
                content=said.message.content,
                tool_calls=calls or None,
                reasoning_content=said.message.reasoning or None,
                # Theirs knows the other reasons alone, and its own client says None as well.
                finish_reason=None
                if said.finish_reason == "content_filter"
                else said.finish_reason,
                is_truncated=said.finish_reason == "length",
            )
            spent = (said.num_prompt_tokens, said.num_completion_tokens)
            usage = types.Usage(
                prompt_tokens=spent[0],
                reasoning_tokens=said.num_reasoning_tokens or 0,
                completion_tokens=spent[1],
                total_tokens=sum(spent),
            )
            return types.Response(
                id="r",
                created=int(time.time()),
                model=model,
                usage=usage if said.is_counted else None,
                message=message,
            )

        async def unused(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("get_response is all that environments call")

        setup_client = to_native_tool = to_native_prompt = get_native_response = unused
        raise_from_native_response = from_native_response = close = unused

    return cast(Any, PolicyClient)


def _openai_client(settings: ModelSettings, requests: Requests) -> Any:
    """Return the part of OpenAI's client that environments before 0.1.11 use."""
    openai: Any = imported(VERIFIERS, "openai")
    httpx: Any = imported(VERIFIERS, "httpx")
    types: Any = imported(VERIFIERS, "openai.types.chat")
    episode = requests.episode

    async def create(*, model: str, messages: Any, tools: Any = (), **given: Any) -> Any:
        stop = settings.stop_of(given, max_tokens=episode.sampling.max_tokens)
        shown = [dict(tool) for tool in tools or ()]
        try:
            said = await requests.answer(as_messages(messages), tools=shown, stop=stop)
        except (ContextLengthError, EndpointError) as error:
            if not episode.turns or not is_too_long(error):
                raise
            text = f"{_TOO_LONG}: {error}"
            request = httpx.Request("POST", "http://127.0.0.1/v1/chat/completions")
            refusal = httpx.Response(400, text=text, request=request)
            raise openai.BadRequestError(text, response=refusal, body=None) from error
        return types.ChatCompletion.model_validate(reply_json(said, model=model))

    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=create)), base_url=""
    )
