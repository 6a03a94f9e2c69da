"""`ToolCalls`: a request and some functions; the reward is the share of right calls in one turn."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from telescope_core import (
    EnvironmentConfig,
    Episode,
    Example,
    ExampleSource,
    ListSource,
    Message,
    Rollout,
    SingleTurnEnvironment,
    Split,
    SplitSource,
    StopReason,
    metric,
    reward,
)
from telescope_core.environments.tool_calls import turn_calls
from telescope_core.types import JsonValue, ToolCall
from telescope_env_telescope_tool_calls.bfcl import bfcl_examples
from telescope_env_telescope_tool_calls.catalog import FUNCTIONS
from telescope_env_telescope_tool_calls.functions import draw_request
from telescope_env_telescope_tool_calls.matching import WantedCall, share_right

Questions = Literal[
    "own",
    "bfcl-simple",
    "bfcl-multiple",
    "bfcl-parallel",
    "bfcl-parallel-multiple",
    "bfcl-live-simple",
    "bfcl-live-multiple",
    "bfcl-live-parallel",
    "bfcl-live-parallel-multiple",
]
_MAX_TEXT = 200_000


class ToolCalls(SingleTurnEnvironment):
    """Answer a request with the right calls of the functions that are offered."""

    class Config(EnvironmentConfig):
        """Which requests are drawn, and how functions are offered."""

        questions: Questions = "own"
        """`own` draws requests for the functions of this environment; the others are categories of
        the package bfcl-eval, which have no training split."""
        min_calls: Annotated[int, Field(ge=1, le=6)] = 1
        max_calls: Annotated[int, Field(ge=1, le=6)] = 3
        """How many calls an own request needs."""
        num_functions: Annotated[int, Field(ge=1, le=50)] = 6
        """How many functions are offered with an own request."""
        tool_call_format: Literal["native", "xml"] = "native"
        """With `native`, the chat template offers the functions and calls are the message's
        `tool_calls`; with `xml`, a system message lists them and calls are <tool_call> tags."""
        seed: int = 0

        @model_validator(mode="after")
        def _counts_in_order(self) -> Self:
            if not self.min_calls <= self.max_calls <= self.num_functions:
                raise ValueError(
                    "expected min_calls <= max_calls <= num_functions, got "
                    f"{self.min_calls}, {self.max_calls} and {self.num_functions}"
                )
            return self

    config: Config

    @property
    def offers_tools(self) -> bool:
        """Whether requests offer the functions; with `xml`, a system message lists them."""
        return self.config.tool_call_format == "native"

    @property
    def sends_system(self) -> bool:
        """With `xml`, the functions are in a system message."""
        return not self.offers_tools

    @property
    def goes_on(self) -> bool:
        """False: calls are judged, not run."""
        return False

    def splits(self) -> tuple[Split, ...]:
        """Return the splits: questions of BFCL are only for evals."""
        return (Split.TRAIN, Split.EVAL) if self.config.questions == "own" else (Split.EVAL,)

    def examples(self, split: Split) -> ExampleSource:
        """Return endless requests, split by a hash of their text, or the questions of BFCL."""
        if self.config.questions != "own":
            return ListSource(
                [one for one in bfcl_examples(self.config.questions) if self._has_answer(one)]
            )
        return SplitSource(
            self._draw,
            split=split,
            seed=f"tool-calls/{self.config.seed}",
            split_key=lambda example: str(example.info["request"]),
        )

    def _has_answer(self, example: Example) -> bool:
        """Whether the recorded calls are accepted, which those of some questions are not."""
        gold = Message(role="assistant", content=self.gold_answer(example))
        return share_right(turn_calls(gold).calls, _wanted(example)) == 1.0

    def _draw(self, rng: random.Random) -> Example:
        offered = rng.sample(FUNCTIONS, self.config.num_functions)
        num_calls = rng.randint(self.config.min_calls, self.config.max_calls)
        chosen = rng.choices(offered, k=num_calls)
        requests = [draw_request(function, rng) for function in chosen]
        texts = [request.text for request in requests]
        if len(set(texts)) < num_calls:
            return self._draw(rng)
        text = texts[0] if num_calls == 1 else "\n".join(f"- {one}" for one in texts)
        names = ",".join(function.name for function in offered)
        return Example(
            id=hashlib.sha256(f"{names}/{text}".encode()).hexdigest()[:16],
            prompt=text,
            info={
                "request": text,
                "functions": [function.schema for function in offered],
                "calls": [
                    {
                        "name": request.name,
                        "arguments": {key: [one] for key, one in request.arguments.items()},
                        "may_omit": list(request.may_omit),
                    }
                    for request in requests
                ],
            },
        )

    def format_prompt(self, example: Example) -> str | list[Message]:
        """Return the request, after a list of the functions where calls are tags."""
        if self.offers_tools:
            prompt = example.prompt
            return prompt if isinstance(prompt, str) else list(prompt)
        listed = "\n".join(json.dumps(one, ensure_ascii=False) for one in _functions(example))
        about = (
            f"Answer the request with calls of these functions:\n{listed}\n\n"
            'Write each call as <tool_call>{"name": "...", "arguments": {...}}</tool_call>. Write '
            "all the calls that the request needs into one message."
        )
        asked = example.prompt
        if isinstance(asked, str):
            asked = (Message(role="user", content=asked),)
        elif asked[0].role == "system":
            about, asked = f"{asked[0].content}\n\n{about}", asked[1:]
        return [Message(role="system", content=about), *asked]

    async def play(self, episode: Episode[Any]) -> StopReason:
        """Ask for one turn with the functions of the example."""
        if self.offers_tools:
            episode.tools = _functions(episode.example)
        return await super().play(episode)

    def gold_answer(self, example: Example) -> str:
        """Return the right calls in tags, which are read with either format."""
        gold = [
            {"name": call.name, "arguments": call.first_accepted()} for call in _wanted(example)
        ]
        return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in gold)

    @reward
    def right_calls(self, rollout: Rollout, example: Example) -> float:
        """The share of right calls among those that were wanted or made; 0 to 1."""
        return share_right(_made(rollout), _wanted(example))

    @metric(low=0, high=1)
    def right_names(self, rollout: Rollout, example: Example) -> float:
        """1 when the functions are the right ones, whatever their arguments."""
        made = sorted(call.name for call in _made(rollout))
        return float(made == sorted(call.name for call in _wanted(example)))

    @metric(low=0)
    def calls(self, rollout: Rollout, example: Example) -> float:
        """How many calls were made."""
        return float(len(_made(rollout)))


def _made(rollout: Rollout) -> Sequence[ToolCall]:
    said = [message for message in rollout.messages if message.role == "assistant"]
    if not said or len(said[-1].content) > _MAX_TEXT:
        return ()
    return turn_calls(said[-1]).calls


def _functions(example: Example) -> list[dict[str, JsonValue]]:
    return cast(list[dict[str, JsonValue]], example.info["functions"])


def _wanted(example: Example) -> list[WantedCall]:
    types: dict[str, dict[str, str]] = {}
    for one in _functions(example):
        function = cast(Mapping[str, Any], one["function"])
        known = cast(Mapping[str, Mapping[str, Any]], function["parameters"].get("properties", {}))
        types[str(function["name"])] = {
            name: str(schema.get("type", "")) for name, schema in known.items()
        }
    return [
        WantedCall(
            name=call["name"],
            arguments=call["arguments"],
            may_omit=frozenset(call["may_omit"]),
            types=types.get(call["name"], {}),
        )
        for call in cast(Sequence[Mapping[str, Any]], example.info["calls"])
    ]
