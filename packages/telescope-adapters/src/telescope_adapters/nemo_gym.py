"""Resources servers of NeMo Gym played as our environments: `nemo-gym:URL`.

A rollout is one row of a dataset of the server: `/seed_session` begins it, each tool is an address,
and `/verify` gives the reward for what was said. No package of NeMo Gym is needed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast
from urllib.parse import quote

from pydantic import Field

from telescope_adapters.servers import (
    Answer,
    ServedEnvironment,
    arguments_of,
    as_fields,
    ask,
    once_up,
)
from telescope_adapters.settings import AdaptedConfig, as_metrics
from telescope_core.base.errors import (
    ConfigError,
    EndpointError,
    EnvironmentLoadError,
    RewardError,
    RewardRaisedError,
    UnplayableError,
)
from telescope_core.base.types import (
    Completion,
    Example,
    Message,
    Rollout,
    Sampling,
    Split,
    StopReason,
    ToolCall,
)
from telescope_core.environments import Episode, reward
from telescope_core.environments.outcomes import finite
from telescope_core.examples import ListSource
from telescope_core.examples.rows import id_of, read_rows
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import ChatRequest, read_request
from telescope_core.gateway.responses_reply import response_json
from telescope_core.gateway.responses_request import read_responses

_MODEL = "policy"
_ASKED = ("instructions", "input", "tools", "tool_choice")
"""Fields of a row that the policy gets. Its settings of sampling are left out."""


class NemoGymConfig(AdaptedConfig):
    """Settings of an environment of a resources server of NeMo Gym."""

    train_data: str = ""
    """Absolute path of the .jsonl file with the rows that are trained on; empty = none are."""
    eval_data: str = ""
    """Absolute path of the .jsonl file with the rows that are held out; empty = none are."""
    max_turns: int = Field(default=30, ge=1)
    """Most answers of a rollout."""
    call_tools: bool = True
    """Whether the server runs calls; False = they end the rollout, and its verifier grades them."""


@dataclass(slots=True)
class Seeded:
    """The session of one rollout."""

    has_begun: bool = False
    cookies: dict[str, str] = field(default_factory=dict[str, str])
    """Cookies that identify the session to the server."""
    reward: float = 0.0
    """The reward from the server's verifier."""


class NemoGymEnvironment(ServedEnvironment):
    """An environment of a running resources server of NeMo Gym."""

    Config = NemoGymConfig
    State: ClassVar[type[Seeded]] = Seeded
    scheme = "nemo-gym"

    def __init__(self, config: NemoGymConfig | None = None) -> None:
        super().__init__(config)
        settings = cast(NemoGymConfig, self.config)
        self._calls_tools = settings.call_tools
        files = {Split.TRAIN: settings.train_data, Split.EVAL: settings.eval_data}
        self._examples = {split: _read(path) for split, path in files.items() if path}
        if not self._examples:
            raise ConfigError(
                f"nemo-gym:{self.url} has no rows to play; set env.eval_data, env.train_data or "
                "both to a .jsonl file of the server's data (with `telescope env link`, --settings "
                '\'{"eval_data": "/path/of/example.jsonl"}\')'
            )
        self._tools = {
            name
            for examples in self._examples.values()
            for one in examples
            for name in _names(_asked_of(one).tools)
        }

    @property
    def offers_tools(self) -> bool:
        """Whether any row has tools."""
        return bool(self._tools)

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that have a file."""
        return tuple(self._examples)

    def examples(self, split: Split) -> ListSource:
        """Return the rows of the split's file; equal ones are one example."""
        return ListSource(self._examples[split])

    async def first_messages(self, example: Example) -> list[Message]:
        """Return what the row asks."""
        return self.opening(example.prompt)

    async def look(self) -> None:
        """Raise UnplayableError unless the server has a verifier and all tools of the rows."""
        about = await ask(self.session, "GET", f"{self.url}/openapi.json")
        paths = as_fields(as_fields(about.json()).get("paths"))
        if missing := {"/seed_session", "/verify"} - {*paths}:
            steps = "; environments that are stepped are not played" if "/step" in paths else ""
            raise UnplayableError(
                f"{self.url} is no resources server of NeMo Gym with a verifier: it has no "
                f"{' and no '.join(sorted(missing))}{steps}; give the address of the resources "
                "server, not that of an agent or of the head server"
            )
        takes_any = any(re.fullmatch(r"/\{[^/]+\}", path) for path in paths)
        lacking = sorted(name for name in self._tools if f"/{name}" not in paths)
        if self._calls_tools and lacking and not takes_any:
            raise UnplayableError(
                f"{self.url} has no tool {', '.join(lacking)}, which the rows offer; give rows of "
                "its own data, or set env.call_tools to false if its verifier grades the calls"
            )

    async def play(self, episode: Episode[Seeded]) -> StopReason:
        """Answer calls of tools until an answer has none."""
        await self.looked()
        example, state = episode.example, episode.state
        tools = episode.tools = _asked_of(example).tools
        begun = await once_up(lambda: self._post(state, "seed_session", example.info["row"]))
        seeded = as_fields(begun.json())
        state.has_begun = True
        if not tools and "mcp" in seeded:
            raise UnplayableError(
                f"the tools of {self.url} are offered over MCP alone, which is not played; serve "
                "them as addresses of the server"
            )
        for _ in range(self.config.max_turns):
            said = await episode.generate()
            if said.finish_reason == "length":
                return StopReason.LENGTH
            if not said.message.tool_calls or not self._calls_tools:
                return StopReason.COMPLETED
            for call in said.message.tool_calls:
                text = await self._result(state, call, _names(tools))
                episode.add(Message(role="tool", content=text, tool_call_id=call.id))
        return StopReason.MAX_TURNS

    async def score(self, rollout: Rollout, example: Example, episode: Episode[Seeded]) -> Rollout:
        """Let the server verify what was said in the session of the rollout."""
        if not episode.state.has_begun:
            raise ConfigError(
                f"{example.id}: a rollout is verified in its session at {self.url}, which is gone; "
                "play it again"
            )
        row = cast(Mapping[str, Any], example.info["row"])
        said = {**row, "response": _response(episode)}
        answer = await self._post(episode.state, "verify", said)
        try:
            told = as_fields(answer.json())
        except EndpointError as error:
            raise RewardRaisedError(str(error), is_transient=error.is_transient) from None
        if told.get("mask_sample"):
            why = told.get("failure_reason") or told.get("failure_kind") or "it does not say why"
            raise RewardRaisedError(f"{answer.url} says that its reward measures nothing: {why}")
        given = told.get("reward")
        number = None if isinstance(given, bool) else finite(given)
        if number is None:
            raise RewardError(
                f"{answer.url} must answer a finite number as reward, got {given!r:.80}"
            )
        episode.state.reward = number
        done = await super().score(rollout, example, episode)
        own = {
            name: one for name, one in told.items() if name not in {*row, "reward", "mask_sample"}
        }
        parts = as_fields(told.get("reward_components"))
        metrics = as_metrics({**own, **parts}, of=answer.url)
        return replace(done, metrics={**done.metrics, **metrics})

    @reward
    def verified(self, episode: Episode[Seeded]) -> float:
        """The reward of the server's verifier."""
        return episode.state.reward

    async def _result(self, state: Seeded, call: ToolCall, known: Sequence[str]) -> str:
        """Return the text of the result of a call; raises EndpointError if the server failed."""
        arguments = arguments_of(call)
        # Other names are addresses too, and /verify or /seed_session is no tool.
        if call.name not in known:
            told = f"there is no tool {call.name!r}; the tools are {', '.join(known) or 'none'}"
            return json.dumps({"error": told})
        if arguments is None:
            return json.dumps({"error": f"the arguments are no JSON object: {call.arguments}"})
        answer = await self._post(state, quote(call.name, safe=""), arguments)
        if answer.status >= 500:
            answer.json()
        return answer.text

    async def _post(self, state: Seeded, path: str, body: object) -> Answer:
        """Return the answer of the server in the session of a rollout."""
        url = f"{self.url}/{path}"
        answer = await ask(self.session, "POST", url, body=body, cookies=state.cookies)
        state.cookies.update(answer.cookies)
        return answer


def _read(path: str) -> list[Example]:
    """Return the rows of a file as examples, whose ids are digests of them."""
    if not Path(path).is_absolute():
        raise ConfigError(
            f"the path of a file of rows must be absolute, because workers start in other folders; "
            f"got {path!r}, write {str(Path(path).resolve())!r}"
        )
    found: dict[str, Example] = {}
    for number, row in enumerate(read_rows(Path(path)), 1):
        own_id = id_of(json.dumps(row, sort_keys=True))
        prompt = _asked(row, where=f"{path}, row {number}").messages
        found[own_id] = Example(id=own_id, prompt=prompt, info={"row": cast(Any, row)})
    return list(found.values())


def _asked_of(example: Example) -> ChatRequest:
    return _asked(cast(Mapping[str, Any], example.info["row"]), where=example.id)


def _asked(row: Mapping[str, Any], *, where: str) -> ChatRequest:
    """Return the messages and tools of a row; raises EnvironmentLoadError for what is not played.

    A row is a request of the Responses API, with what the verifier needs beside it.
    """
    params = as_fields(row.get("responses_create_params"))
    if "input" not in params:
        raise EnvironmentLoadError(
            f"{where} is no row of NeMo Gym's data: it has no responses_create_params with an "
            f"input, only {', '.join(row) or 'nothing'}"
        )
    body = {name: params[name] for name in _ASKED if name in params}
    if isinstance(body["input"], list):
        body["input"] = [*map(_shown_thinking, cast(list[object], body["input"]))]
    try:
        return read_responses(
            {**body, "model": _MODEL},
            lambda chat: read_request(chat, Sampling(max_tokens=1), model=_MODEL),
        )
    except Refusal as refusal:
        raise EnvironmentLoadError(f"{where}: {refusal.message}") from None


def _shown_thinking(item: object) -> object:
    """Return an item of a row, whose thinking NeMo Gym keeps in the summary, as others show it."""
    fields = as_fields(item)
    if fields.get("type") != "reasoning" or fields.get("content"):
        return item
    shown = fields.get("summary") or [{"text": ""}]
    return {**fields, "content": [{**as_fields(one), "type": "reasoning_text"} for one in shown]}


def _response(episode: Episode[Seeded]) -> dict[str, Any]:
    """Return what was said and done as one answer of the Responses API."""
    completions = [turn.completion for turn in episode.turns]
    said, items = iter(completions), list[dict[str, Any]]()
    for message in episode.messages[episode.num_opening_messages :]:
        if message.role == "assistant":
            # Their verifiers read thinking where their own model servers put it.
            shown = {"summary": [{"type": "summary_text", "text": message.reasoning}]}
            items += [
                {**item, **shown} if item["type"] == "reasoning" else item
                for item in response_json(next(said), model=_MODEL)["output"]
            ]
        else:
            result = {"call_id": message.tool_call_id, "output": message.content}
            items.append({"type": "function_call_output", **result})
    nothing = Completion(message=Message(role="assistant", content=""), finish_reason="length")
    whole = replace(
        completions[-1] if completions else nothing,
        num_prompt_tokens=sum(one.num_prompt_tokens for one in completions),
        num_completion_tokens=sum(one.num_completion_tokens for one in completions),
    )
    params = as_fields(as_fields(episode.example.info["row"])["responses_create_params"])
    return {
        **response_json(whole, model=_MODEL),
        "output": items,
        "tools": params.get("tools") or [],
        "parallel_tool_calls": params.get("parallel_tool_calls") is not False,
    }


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]
