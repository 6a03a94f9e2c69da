"""Read a chat request: its conversation and sampling parameters; refuse one that cannot be exact.

A parameter is honored, has no effect on tokens, or is refused by name. None is accepted and then
ignored. A parameter that is absent or null takes the value with which the rollout is sampled, and
one that the gateway does not know may be empty.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from telescope_core.base.types import JsonValue, Message, Sampling
from telescope_core.gateway.messages import read_messages
from telescope_core.gateway.refusal import Refusal, is_empty, unknown, unsupported, wrong

OLDER_VERSION: Literal["older-version"] = "older-version"
"""The model to name for an answer of an older version of the policy, which is not trained on."""
LABELS = frozenset(
    {
        *("user", "metadata", "safety_identifier", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention"),
        # Each request of a rollout has a seed of its own: with that of a program, the rollouts of
        # a group would all be the same.
        "seed",
    }
)
"""Parameters that never change what is sampled."""

_CONSTRAINED = (
    "tokens sampled under a constraint have other log-probs than the model in training gives them"
)
_FREE_CHOICE = (
    "use 'auto', and say in the prompt which tool to call. A library that always asks for a call "
    "can be told: in smolagents, OpenAIModel(..., tool_choice='auto'); in instructor, Mode.MD_JSON"
)
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")
_ALL_TOKENS = "training learns the plain softmax at a temperature"
_ONE_TEMPLATE = "prompts are written by the template of the run; set it in [model]"
_TEXT_ALONE = "the model in training reads and writes text alone; leave it out"

NEUTRAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: n == 1, "a request gets one answer; ask several times to get several"),
    "best_of": (lambda n: n == 1, "a request gets one answer; ask several times to get several"),
    "frequency_penalty": (lambda p: p == 0, f"{_ALL_TOKENS}; leave it out"),
    "presence_penalty": (lambda p: p == 0, f"{_ALL_TOKENS}; leave it out"),
    "logit_bias": (lambda _: False, f"{_ALL_TOKENS}; leave it out"),
    "response_format": (
        lambda form: form == {"type": "text"},
        f"{_CONSTRAINED}; ask for the format in the prompt and check the answer",
    ),
    "echo": (lambda echo: echo is False, "the prompt is not repeated; leave it out"),
    "logprobs": (lambda asked: asked is False, "they are recorded for training; leave it out"),
    "top_logprobs": (lambda n: n == 0, "only sampled tokens have log-probs here; leave it out"),
    "store": (lambda store: store is False, "the run records every turn; leave it out"),
    "modalities": (lambda kinds: kinds == ["text"], _TEXT_ALONE),
    "audio": (lambda _: False, _TEXT_ALONE),
    "prediction": (lambda _: False, "every token is sampled; leave it out"),
    "functions": (lambda _: False, "this is the old form; use tools"),
    "function_call": (lambda _: False, "this is the old form; use tools"),
    "reasoning_effort": (lambda _: False, f"{_ONE_TEMPLATE}, and leave it out"),
    "verbosity": (lambda _: False, f"{_ONE_TEMPLATE}, and leave it out"),
    "thinking": (lambda _: False, f"{_ONE_TEMPLATE}, and leave it out"),
    "chat_template": (lambda _: False, f"{_ONE_TEMPLATE} as chat_template"),
    "chat_template_kwargs": (lambda _: False, f"{_ONE_TEMPLATE}, and leave it out"),
    "web_search_options": (lambda _: False, "there is no search; bring it as a tool"),
    "ignore_eos": (lambda ignore: ignore is False, f"{_CONSTRAINED}; leave it out"),
    "min_tokens": (lambda n: n == 0, f"{_CONSTRAINED}; leave it out"),
}
"""Parameter -> (values that change nothing, reason and advice for any other value)."""

READ = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "tools", "tool_choice"),
        "parallel_tool_calls",
        *("max_tokens", "max_completion_tokens", "temperature", "stop"),
        "include_stop_str_in_output",
        *("top_p", "top_k", "min_p", "repetition_penalty"),
    }
)
"""Parameters that define the request and how its answer is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request that can be answered."""

    messages: tuple[Message, ...]
    sampling: Sampling
    tools: tuple[dict[str, JsonValue], ...] = ()
    takes_one_call: bool = False
    """Whether the program gets only the first call of an answer, however many are sampled."""
    stream: bool = False
    include_usage: bool = False
    """Whether the last chunk of a stream reports the numbers of tokens."""
    model: str = ""
    """The model that is asked: the policy, or `OLDER_VERSION`; empty = the policy."""
    items: tuple[object, ...] = field(default=(), compare=False)
    """The history as the Responses API wrote it, for requests that go on from it; empty = none may.

    Requests that ask the same are equal however it is written.
    """
    fields: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """The request as it is passed on to another endpoint; empty if the policy answers itself."""


def read_request(body: object, own: Sampling, *, model: str) -> ChatRequest:
    """Read a request to a rollout with sampling settings `own`; raises Refusal unless exact."""
    given = given_fields(body, model=model)
    _require_known(given)
    stream = flag(given, "stream")
    tools = read_tools(given.get("tools", []))
    choice = given.get("tool_choice", "auto")
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", f"{_CONSTRAINED}; {_FREE_CHOICE}")
    if choice not in ("auto", "none"):
        raise wrong("tool_choice", "'auto' or 'none'", choice)
    return ChatRequest(
        model=model,
        messages=read_messages(given.get("messages")),
        sampling=_sampling(given, own),
        # A model that must not call a tool is not shown any.
        tools=() if choice == "none" else tools,
        takes_one_call=not flag(given, "parallel_tool_calls", default=True),
        stream=stream,
        include_usage=include_usage(given.get("stream_options"), stream=stream),
    )


def given_fields(body: object, *, model: str) -> dict[str, Any]:
    """Return the parameters that are not null; raises Refusal unless the model is `model`."""
    if not isinstance(body, dict):
        raise wrong("the request", "a JSON object", body)
    given = {name: value for name, value in cast(dict[str, Any], body).items() if value is not None}
    if (asked := given.get("model")) != model:
        raise Refusal(
            f"there is no model {asked!r} here, only {model!r}; use the model of episode.endpoint",
            param="model",
            code="model_not_found",
            status=404,
        )
    return given


def _require_known(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in READ or name in LABELS or is_empty(value):
            continue
        if name in NEUTRAL:
            changes_nothing, why = NEUTRAL[name]
            if isinstance(value, bool) is not (name in _FLAGS) or not changes_nothing(value):
                raise unsupported(name, why)
        else:
            raise unknown("parameter", name, [*READ, *NEUTRAL, *LABELS])


_FLAGS = frozenset({"echo", "logprobs", "store", "ignore_eos"})
"""Parameters of `NEUTRAL` with a boolean neutral value: in Python 1 == True, but not in JSON."""


def _sampling(given: Mapping[str, Any], own: Sampling) -> Sampling:
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        value, as_run = given.get(name), getattr(own, name)
        if value is not None and value != as_run:
            raise unsupported(name, f"{_ALL_TOKENS}; leave it out (this run samples at {as_run:g})")
    return replace(
        own,
        max_tokens=min(own.max_tokens, max_tokens_of(given) or own.max_tokens),
        temperature=_temperature(given.get("temperature"), own.temperature),
        stop=_stop(given.get("stop"), own.stop),
        include_stop_str_in_output=_includes_stop(given, own),
    )


def _temperature(value: object, own: float | None) -> float | None:
    if value is None:
        return own
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2:
        raise wrong("temperature", "a number from 0 to 2", value)
    if value == 0 and own != 0:
        run = "that of the run" if own is None else f"{own:g}"
        raise unsupported(
            "temperature", f"0 leaves no log-prob to learn from; leave it out for {run}"
        )
    return float(value)


def max_tokens_of(given: Mapping[str, Any]) -> int | None:
    """Return the smallest of the given token limits; None = none is given."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    for name in names:
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise wrong(name, "a whole number of at least 1", value)
    return min((given[name] for name in names), default=None)


def _includes_stop(given: Mapping[str, Any], own: Sampling) -> bool:
    """Return whether the answer includes its stop text: as given, else not for a given `stop`."""
    if "include_stop_str_in_output" in given:
        return flag(given, "include_stop_str_in_output")
    return own.include_stop_str_in_output and not given.get("stop")


def _stop(value: object, own: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return own
    given: object = [value] if isinstance(value, str) else value
    texts = cast(list[object], given) if isinstance(given, list) else [None]
    if not all(isinstance(one, str) and one for one in texts):
        raise wrong("stop", "a text or a list of texts, none of them empty", value)
    return tuple(cast(list[str], texts)) or own


def read_tools(plain: object) -> tuple[dict[str, JsonValue], ...]:
    """Return the functions that the model may call."""
    if not isinstance(plain, list):
        raise wrong("tools", "a list of functions", plain)
    for number, one in enumerate(cast(list[Any], plain)):
        match one:
            case {"type": "function", "function": {"name": str()}}:
                pass
            case {"type": str(kind)} if kind != "function":
                raise unsupported(
                    f"tools[{number}].type", f"{kind!r} is not run here; offer it as a function"
                )
            case _:
                form = "{'type': 'function', 'function': {'name': ...}}"
                raise wrong(f"tools[{number}]", form, one)
    return tuple(cast(list[dict[str, JsonValue]], plain))


def flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return the truth value of `name`, or `default` if it is not given."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def include_usage(options: object, *, stream: bool) -> bool:
    """Return whether the options of a stream ask for numbers of tokens."""
    if options is None:
        return False
    if not stream:
        raise wrong("stream_options", "absent unless stream is true", options)
    if not isinstance(options, dict):
        raise wrong("stream_options", "an object", options)
    known = cast(dict[str, Any], options)
    for name, value in known.items():
        if name not in _STREAM_OPTIONS and not is_empty(value):
            raise unknown("parameter", f"stream_options.{name}", _STREAM_OPTIONS)
    return flag(known, "include_usage")
