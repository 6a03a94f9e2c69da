"""The models of an inspect_ai task: the policy of the rollout, and the judge of scorers.

A task's settings for its model are sorted here: some go to the policy, some are for the user to
set, and the rest is refused by name.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from telescope_adapters.frameworks import INSPECT, imported
from telescope_adapters.requests import Requests
from telescope_adapters.settings import function_tool
from telescope_core.base.errors import EnvironmentLoadError, UnplayableError
from telescope_core.base.types import Message, ToolCall
from telescope_core.chat.trouble import relay
from telescope_core.environments import Episode

_POLICY = "telescope/policy"
_KEPT = {
    *("system_message", "stop_seqs", "max_tool_output", "reasoning_history", "fail_on_refusal"),
}
"""Settings of a request that change its content, or what happens to the answer."""
_USERS = {
    *("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty"),
    *("presence_penalty", "parallel_tool_calls", "verbosity", "effort", "reasoning_effort"),
    *("reasoning_mode", "reasoning_tokens", "reasoning_summary"),
}
"""Sampling settings, which those of the eval or the run replace."""
_OF_CLIENTS = {
    *("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections"),
    *("adaptive_connections", "cache_prompt", "cache", "batch", "extra_headers"),
    *("fallback_models", "internal_tools"),
}
"""Settings of inspect_ai's own client, which the policy lacks."""
_LIMITS = ("message_limit", "token_limit", "cost_limit", "time_limit", "working_limit")
_MANY = 1 << 20
"""Requests to the policy at once; rollouts are limited elsewhere."""


class InspectModels:
    """The models of one task."""

    def __init__(self, name: str, task: Any, *, judge: str) -> None:
        """`judge`: name of the model for scorers; empty = only models that the task names."""
        self._name = name
        self._model = imported(INSPECT, "inspect_ai.model")
        self._context = imported(INSPECT, "inspect_ai._eval.context")
        self._data = imported(INSPECT, "inspect_ai.model._model")
        self._transcript = imported(INSPECT, "inspect_ai.log._transcript")
        self._states = imported(INSPECT, "inspect_ai.solver._task_state")
        self._store = imported(INSPECT, "inspect_ai.util._store")
        self._scoring = imported(INSPECT, "inspect_ai.scorer._score")
        self._samples = imported(INSPECT, "inspect_ai.log._samples")
        self._sample = imported(INSPECT, "inspect_ai.dataset").Sample
        self._unsaved = imported(INSPECT, "inspect_ai.util._checkpoint.checkpointer_noop")
        self._errors = imported(INSPECT, "inspect_ai._util.error")
        self._said: set[str] = set()
        self._roles = task.model_roles or {}
        self._config = self.kept(task.config)
        self._policy, self._unasked = _model_classes(self._model, self)
        self.policy_name = self._model.ModelName(_POLICY)
        self.judge = self._judge(judge) if judge else self._unasked(name)

    def policy(self, episode: Episode[Any]) -> Any:
        """Return an inspect_ai model that calls the policy of `episode`.

        Its `api.failed` is the error that kept it from being called; None = there was none.
        """
        return self._policy(episode)

    def enter(self, state: Any, model: Any, scorers: Sequence[Any]) -> None:
        """Make `model` and `state` those of the running task, as their eval does for a sample."""
        self._context.init_model_context(model, self._roles, self._config)
        self._data.init_sample_model_data()
        self._states.set_sample_state(state)
        self._store.init_subtask_store(state.store)
        transcript = self._transcript.Transcript()
        self._transcript.init_transcript(transcript)
        # Agents such as `react` take their checkpoints from the active sample: none are saved.
        fields: dict[str, Any] = dict.fromkeys(_LIMITS) | {"sandboxes": {}, "fails_on_error": True}
        fields |= {"task": self._name, "model": _POLICY, "log_location": "", "eval_id": ""}
        fields |= {"epoch": state.epoch, "sample_uuid": state.uuid, "transcript": transcript}
        fields["sample"] = self._sample(id=state.sample_id, input=state.input)
        fields["checkpointer"] = self._unsaved._NoopCheckpointer()
        self._samples._sample_active.set(self._samples.ActiveSample(**fields))
        self._scoring.init_scoring_context(list(scorers), state.target)

    def kept(self, config: Any) -> Any:
        """Return the settings of a request that are passed to the policy.

        Logs once which settings are for the user. Raises UnplayableError for unsupported requests.
        """
        given: dict[str, Any] = {key: one for key, one in dict(config).items() if one is not None}
        used = given.keys()
        others = used - _KEPT - _USERS - _OF_CLIENTS
        if config.num_choices == 1:
            others -= {"num_choices"}
        if others:
            raise UnplayableError(
                f"{self._name} sets {', '.join(sorted(others))} for its model, which a policy "
                "cannot be asked for; run it with `inspect eval`, or choose a task without"
            )
        news = (used & _USERS) - self._said
        if news:
            self._said |= news
            relay(
                f"{self._name}: what the task sets for its model is not used here, since the "
                f"sampling of the eval or the run counts: {', '.join(sorted(news))}"
            )
        return self._model.GenerateConfig(**{key: given[key] for key in used & _KEPT})

    def _judge(self, judge: str) -> Any:
        try:
            return self._model.get_model(judge)
        except (self._errors.PrerequisiteError, ImportError, ValueError) as error:
            raise EnvironmentLoadError(
                f"{self._name}: the judge {judge!r} cannot be asked: {told(error)}. "
                f"{judge_advice()}"
            ) from error


def judge_advice() -> str:
    """Return advice on the key and the package of a judge."""
    return (
        "Its key reaches the environment when it is linked with --secret NAME, such as --secret "
        "OPENAI_API_KEY, and its client with --with PACKAGE, such as --with openai"
    )


def inner(error: Exception) -> Exception:
    """Return the exception inside those that inspect_ai's task groups wrap around it."""
    found: Any = imported(INSPECT, "inspect_ai.util._anyio")
    return found.inner_exception(error)


def told(error: Exception) -> str:
    """Return the text of an inspect_ai error, on one line and without marks for bold text."""
    text = str(getattr(error, "message", "") or error or type(error).__name__)
    plain = re.sub(r"\[/?(?:bold|blue|green|red)[^\]]*\]", "", text)
    return " ".join(plain.split()).rstrip(".")


def as_message(theirs: Any) -> Message:
    """Convert an inspect_ai message to ours; parts other than text are refused by name."""
    content: Any = theirs.content
    if not isinstance(content, str):
        others = sorted({part.type for part in content} - {"text", "reasoning"})
        if others:
            raise EnvironmentLoadError(
                f"a message has parts of the type {', '.join(others)}; this adapter takes text"
            )
    calls = tuple(
        ToolCall(id=call.id, name=call.function, arguments=json.dumps(call.arguments))
        for call in getattr(theirs, "tool_calls", None) or ()
    )
    error = getattr(theirs, "error", None)
    parts: list[Any] = [] if isinstance(content, str) else content
    # An answer with its tags is kept in the text without them: a policy reads what it said.
    said = [str(part.internal) for part in parts if part.internal and part.type == "text"]
    kept = next((one for one in said if "<think" in one and theirs.text in one), "")
    thoughts = [part.reasoning for part in parts if part.type == "reasoning"]
    return Message(
        role=theirs.role,
        content=kept or theirs.text if error is None else f"Error: {error.message}",
        reasoning="" if kept else "\n".join(thoughts),
        tool_calls=calls,
        tool_call_id=getattr(theirs, "tool_call_id", None),
    )


def _their_content(said: Message) -> Any:
    """Return an answer as inspect_ai's own clients read it: its scorers do not see the thinking."""
    model: Any = imported(INSPECT, "inspect_ai.model")
    parse: Any = imported(INSPECT, "inspect_ai.model._reasoning").parse_content_with_reasoning
    rest, found = (said.content, said) if said.reasoning else parse(said.content)
    if found is None:
        return said.content
    # Of thinking alone they take all as the answer.
    text = model.ContentText(text=rest or said.content, internal=said.content)
    return [model.ContentReasoning(reasoning=found.reasoning), text]


def _model_classes(model: Any, models: InspectModels) -> tuple[Any, Any]:
    """Return the model classes of the policy, and of a model that scorers must not use."""
    parse_call: Any = imported(INSPECT, "inspect_ai.model._call_tools").parse_tool_call
    registry: Any = imported(INSPECT, "inspect_ai._util.registry")
    about = registry.RegistryInfo(type="modelapi", name=_POLICY)

    class PolicyAPI(model.ModelAPI):
        def __init__(self, episode: Episode[Any] | None) -> None:
            super().__init__("policy")
            registry.set_registry_info(self, about)
            self._requests = episode and Requests(episode)
            self.failed: Exception | None = None

        async def generate(
            self, input: Any, tools: Sequence[Any], tool_choice: Any, config: Any
        ) -> Any:
            assert self._requests is not None, "only a policy is asked"
            shown = [
                function_tool(t.name, t.description, t.parameters.model_dump(exclude_none=True))
                for t in tools
            ]
            try:
                if tool_choice not in ("auto", "none"):
                    raise UnplayableError(
                        f"its solver forces the policy to call a tool (tool_choice is "
                        f"{tool_choice!r}), which cannot be asked of a policy that is trained; "
                        "choose a solver that leaves the choice to the model"
                    )
                asked = [as_message(one) for one in input]
                said = await self._requests.answer(asked, tools=shown, stop=config.stop_seqs or ())
            except Exception as error:
                self.failed = self.failed or error
                raise
            calls = [
                parse_call(call.id, call.name, call.arguments or "{}", list(tools))
                for call in said.message.tool_calls
            ]
            message = model.ChatMessageAssistant(
                content=_their_content(said.message), tool_calls=calls or None
            )
            stopped = "max_tokens" if said.finish_reason == "length" else said.finish_reason
            choice = model.ChatCompletionChoice(message=message, stop_reason=stopped)
            num_in, num_out = said.num_prompt_tokens, said.num_completion_tokens
            total = num_in + num_out
            usage = model.ModelUsage(input_tokens=num_in, output_tokens=num_out, total_tokens=total)
            known = {"usage": usage} if said.is_counted else {}
            return model.ModelOutput(model=_POLICY, choices=[choice], **known)

    class PolicyModel(model.Model):
        def __init__(self, episode: Episode[Any]) -> None:
            super().__init__(PolicyAPI(episode), model.GenerateConfig(max_connections=_MANY))
            self._ask: Any = super().generate

        async def generate(
            self,
            input: Any,
            tools: Any = (),
            tool_choice: Any = None,
            config: Any = None,
            cache: Any = None,
            on_stream: Any = None,
        ) -> Any:
            # Never from a cache: each rollout has an answer of its own.
            kept = models.kept(config or model.GenerateConfig())
            return await self._ask(input, tools, tool_choice, kept, False, on_stream)

    class UnaskedModel(model.Model):
        def __init__(self, name: str) -> None:
            super().__init__(PolicyAPI(None), model.GenerateConfig())
            self._task_name = name

        async def generate(self, *_: Any, **__: Any) -> Any:
            raise UnplayableError(
                f"a scorer of {self._task_name} asks a model, and none is named but the policy, "
                "which must not judge its own answers; name a judge with env.judge, such as "
                f"openai/gpt-5-mini. {judge_advice()}"
            )

    return PolicyModel, UnaskedModel
