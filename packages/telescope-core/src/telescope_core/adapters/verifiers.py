"""Environments of the `verifiers` package, up to 0.3.1: `verifiers:NAME`.

They drive generation: the client that they are given asks the policy of the rollout. Their rubric
scores; a reward function that raises, which they count as 0, fails the rollout here.
"""

import functools
import inspect
import json
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import packages_distributions
from typing import Any, cast

from telescope_core.adapters.schemes import VERIFIERS, VERIFIERS_TASKS, imported
from telescope_core.adapters.settings import (
    AdaptedConfig,
    AdaptedEnvironment,
    as_metrics,
    function_tool,
)
from telescope_core.environments import Episode, reward
from telescope_core.errors import EnvironmentLoadError, RewardRaisedError, unknown_name
from telescope_core.examples import ListSource, split_of
from telescope_core.types import Example, Message, Role, Rollout, Split, StopReason, ToolCall

_RAISED: ContextVar[list[tuple[str, Exception]] | None] = ContextVar("RAISED", default=None)
"""What reward functions of the running rollout raised, with their names."""
_MODEL = "policy"


class VerifiersEnvironment(AdaptedEnvironment):
    """An environment of the `verifiers` package."""

    Config = AdaptedConfig

    def __init__(self, config: AdaptedConfig | None = None) -> None:
        super().__init__(config)
        self._verifiers = imported(VERIFIERS, "verifiers")
        with without_signal_handlers():
            self.env = self._loaded()
        if self.env.requires_group_rollouts:
            raise EnvironmentLoadError(
                f"{self.config.id} has reward functions that need all rollouts of an example in "
                "one place, which this adapter cannot give them; choose an environment that "
                "scores each rollout by itself"
            )
        for rubric in _rubrics(self.env.rubric):
            rubric.funcs = [_noticed(function) for function in rubric.funcs]
        self._client = _client_class(self._verifiers)
        teardown = getattr(self.env, "_teardown", None)
        if teardown is not None:
            self.on_close(teardown)
        self._rows: dict[Split, list[dict[str, Any]]] | None = None

    @property
    def offers_tools(self) -> bool:
        """Whether the environment has tools of its own."""
        return bool(getattr(self.env, "tool_defs", None))

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have rows."""
        return tuple(split for split, rows in self._split_rows().items() if rows)

    def examples(self, split: Split) -> ListSource:
        """Return the rows of their dataset; without one for evals, a hash divides the other."""
        rows = self._split_rows()[split]
        return ListSource([_example(split, row) for row in rows])

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Let them play and score a rollout whose model is the policy."""
        row: dict[str, Any] = json.loads(str(episode.example.info["row"]))
        arguments = {"max_tokens": episode.sampling.max_tokens}
        raised: list[tuple[str, Exception]] = []
        reset = _RAISED.set(raised)
        try:
            play = self.env._run_rollout_state  # pyright: ignore[reportPrivateUsage]
            state = await play(row, self._client(episode), _MODEL, arguments)
        finally:
            _RAISED.reset(reset)
        if state.get("error") is not None:
            raise RuntimeError(f"verifiers stopped the rollout: {state['error']!r}")
        if raised:
            name, error = raised[0]
            raise RewardRaisedError(
                f"reward function {name} of {self.config.id} raised {type(error).__name__}: "
                f"{error}, which verifiers would count as 0"
            ) from error
        episode.messages[:] = as_messages([*state["prompt"], *state["completion"]])
        episode.state["reward"] = float(state["reward"])
        episode.metrics.update(as_metrics(state.get("metrics") or {}))
        episode.tags["stop_condition"] = str(state.get("stop_condition"))
        if state.get("is_truncated"):
            return StopReason.LENGTH
        was_cut = state.get("stop_condition") == "max_turns_reached"
        return StopReason.MAX_TURNS if was_cut and self.env.max_turns != 1 else StopReason.COMPLETED

    @reward
    def theirs(self, rollout: Rollout, example: Example, episode: Episode[Any]) -> float:
        """The reward of their rubric."""
        return episode.state["reward"]

    def _loaded(self) -> Any:
        try:
            return self._verifiers.load_environment(self.config.id, **self.config.options)
        except ValueError as error:
            module = self.config.id.rpartition("/")[2].replace("-", "_")
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name == module:
                known = {name for name in packages_distributions() if not name.startswith("_")}
                raise unknown_name(
                    "verifiers environment",
                    self.config.id,
                    known,
                    "(its package is installed by `telescope env link --with PACKAGE`)",
                ) from error
            raise
        except RuntimeError as error:
            if "does not expose load_environment" not in str(error):
                raise
            tasksets = VERIFIERS_TASKS.requirement
            raise EnvironmentLoadError(
                f"expected a package with load_environment, as verifiers {VERIFIERS.pin} loads "
                f"them, and {self.config.id} has none; if it is a taskset of the new API, link it "
                f"with --with {tasksets} too"
            ) from error

    def _split_rows(self) -> dict[Split, list[dict[str, Any]]]:
        if self._rows is None:
            self.env.build_eval_dataset()
            held_out = self.env.eval_dataset
            self.env.build_dataset()
            rows = [] if self.env.dataset is None else [dict(row) for row in self.env.dataset]
            if held_out is not None:
                found = {Split.TRAIN: rows, Split.EVAL: [dict(row) for row in held_out]}
            else:
                found = {
                    split: [row for row in rows if split_of(str(row["example_id"])) is split]
                    for split in Split
                }
            self._rows = found
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


def as_messages(theirs: Iterable[Any]) -> list[Message]:
    """Return their messages as ours; they are dicts or objects with the same names."""
    return [_message(one) for one in theirs]


def _message(theirs: Any) -> Message:
    fields: dict[str, Any] = (
        dict(theirs) if isinstance(theirs, Mapping) else theirs.model_dump()  # pyright: ignore[reportUnknownArgumentType]
    )
    calls = tuple(_call(call) for call in fields.get("tool_calls") or ())
    role = cast(Role, fields["role"])
    return Message(
        role=role,
        content=text_of(fields.get("content")),
        reasoning=str(fields.get("reasoning_content") or "") if role == "assistant" else "",
        tool_calls=calls,
        tool_call_id=fields.get("tool_call_id"),
    )


def _call(theirs: Mapping[str, Any]) -> ToolCall:
    inner: Mapping[str, Any] = theirs.get("function") or theirs
    return ToolCall(id=str(theirs["id"]), name=inner["name"], arguments=inner["arguments"])


def text_of(content: Any) -> str:
    """Return the text of a message; raises EnvironmentLoadError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    others = sorted({str(part.get("type")) for part in content if part.get("type") != "text"})
    if others:
        raise EnvironmentLoadError(
            f"a message has parts of the type {', '.join(others)}; this adapter takes text"
        )
    return "".join(str(part["text"]) for part in content)


def _example(split: Split, row: dict[str, Any]) -> Example:
    prompt: Any = row["prompt"]
    messages = as_messages(
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    return Example(
        id=f"{split}-{row['example_id']}",
        prompt=tuple(messages),
        answer=str(row.get("answer") or ""),
        info={"row": json.dumps(row, default=str)},
    )


def _rubrics(rubric: Any) -> list[Any]:
    """Return `rubric` and all that it is made of."""
    inner: list[Any] = [*getattr(rubric, "rubrics", ())]
    return [rubric, *(leaf for one in inner for leaf in _rubrics(one))]


def _noticed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that what it raises is known to the rollout that it scores."""

    @functools.wraps(function)
    async def noticed(*arguments: Any, **named: Any) -> Any:
        try:
            value = function(*arguments, **named)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            raised = _RAISED.get()
            if raised is not None:
                raised.append((getattr(function, "__name__", "?"), error))
            raise

    return noticed


def _client_class(verifiers: Any) -> Callable[[Episode[Any]], Any]:
    """Return the class of their clients that ask the policy of an episode."""
    clients: Any = imported(VERIFIERS, "verifiers.clients")
    types: Any = imported(VERIFIERS, "verifiers.types")

    class PolicyClient(clients.Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            episode: Episode[Any] = self._client
            episode.messages[:] = as_messages(prompt)
            shown = [function_tool(t.name, t.description, t.parameters) for t in tools or ()]
            said = await episode.generate(tools=shown)
            calls = [
                types.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in said.message.tool_calls
            ]
            message = types.ResponseMessage(
                content=said.message.content,
                tool_calls=calls or None,
                reasoning_content=said.message.reasoning or None,
                finish_reason=said.finish_reason,
                is_truncated=said.finish_reason == "length",
            )
            return types.Response(id="r", created=int(time.time()), model=model, message=message)

        async def unused(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("get_response is all that environments call")

        setup_client = to_native_tool = to_native_prompt = get_native_response = unused
        raise_from_native_response = from_native_response = close = unused

    return cast(Any, PolicyClient)
