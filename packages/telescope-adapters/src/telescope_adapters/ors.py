"""Servers of the Open Reward Standard played as our environments: `ors:URL`.

One session of the server is one rollout, whose rewards are summed. An example is a task of a split
of the server. No package of OpenReward is needed.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from pydantic import Field

from telescope_adapters.servers import (
    Answer,
    ServedEnvironment,
    arguments_of,
    ask,
    code_raised,
    new_session,
    once_up,
    sendable,
)
from telescope_adapters.settings import AdaptedConfig, Earned, SteppedEnvironment, function_tool
from telescope_core.base.errors import (
    EndpointError,
    EnvironmentLoadError,
    RewardError,
    UnplayableError,
    unknown_name,
)
from telescope_core.base.messages import json_object
from telescope_core.base.types import Example, Message, Split, StopReason, ToolCall
from telescope_core.environments import Episode
from telescope_core.environments.sources import Examples
from telescope_core.examples import ListSource

_PING_S = 60.0
"""Between signs of life; a server drops a session that is silent for 15 minutes."""
_PAUSE_S = 2.0
_TYPES = {Split.TRAIN: ("train",), Split.EVAL: ("test", "validation")}
"""The types of splits of the server that a split of ours may be, the best first."""


class OrsConfig(AdaptedConfig):
    """Settings of an environment of a server of the Open Reward Standard."""

    environment: str = ""
    """Name of the environment on the server; empty = its first."""
    train_split: str = ""
    """The server's split that is trained on; empty = its first of the type train."""
    eval_split: str = ""
    """The server's split that is held out; empty = its first of the type test, or else of the type
    validation."""
    max_turns: int = Field(default=30, ge=1)
    """Most answers of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenSession:
    """One session of the server."""

    base: str
    """Address of its environment."""
    headers: Mapping[str, str]
    messages: Sequence[Message]
    """The first messages of the task."""
    final: Mapping[str, Any] | None
    """The tool that takes an answer without a call, if there is one."""


class _Tasks:
    """Tasks that a server tells one at a time."""

    def __init__(self, num_examples: int, read: Callable[[int], Example]) -> None:
        self.num_examples = num_examples
        self._read = read

    def example(self, index: int) -> Example:
        """Return one task. Runs in a thread."""
        return self._read(index)


class OrsEnvironment(SteppedEnvironment, ServedEnvironment):
    """An environment of a running server of the Open Reward Standard."""

    Config = OrsConfig
    scheme = "ors"

    @property
    def offers_tools(self) -> bool:
        """True: all actions are calls of tools."""
        return True

    def splits(self) -> tuple[Split, ...]:
        """Return the splits that the server has tasks for. Runs in a thread."""
        return tuple(asyncio.run(self._named_splits()))

    def examples(self, split: Split) -> Examples:
        """Return the tasks of a split of the server. Runs in a thread."""
        return asyncio.run(self._tasks(split))

    async def look(self) -> str:
        """Return the address of the environment."""
        return await self._base(self.session)

    async def play(self, episode: Episode[Earned]) -> StopReason:
        """Answer calls of tools until a result says that the rollout is finished."""
        async with self._begun(await self.looked(), episode) as session:
            episode.add(*session.messages)
            for _ in range(self.config.max_turns):
                said = await episode.generate()
                if said.finish_reason == "length":
                    return StopReason.LENGTH
                for call in said.message.tool_calls:
                    result, is_finished = await self._called(session, episode, call)
                    episode.add(*result)
                    if is_finished:
                        return StopReason.COMPLETED
                if not said.message.tool_calls:
                    if (final := session.final) is not None:
                        given = {final["arg"]: said.message.content} if final.get("arg") else {}
                        call = ToolCall(id="", name=final["name"], arguments=json.dumps(given))
                        await self._called(session, episode, call)
                    return StopReason.COMPLETED
        return StopReason.MAX_TURNS

    async def _called(
        self, session: _OpenSession, episode: Episode[Earned], call: ToolCall
    ) -> tuple[list[Message], bool]:
        """Return the result of a call as messages, and whether the rollout is finished."""

        def refused(why: str) -> tuple[list[Message], bool]:
            return [Message(role="tool", content=f"error: {why}", tool_call_id=call.id)], False

        arguments = arguments_of(call)
        if arguments is None:
            return refused(f"the arguments are no JSON object: {call.arguments}")
        answer = await ask(
            self.session,
            "POST",
            f"{session.base}/call",
            body={"name": call.name, "input": arguments},
            headers={**session.headers, "Accept": "text/event-stream"},
        )
        got = _streamed(answer, call)
        if not got["ok"]:
            return refused(got["error"])
        output = got["output"]
        episode.state.add(output.get("reward"), of=session.base)
        is_finished = bool(output.get("finished"))
        if is_finished and episode.state.total is None:
            raise RewardError(
                f"{session.base} says that the rollout is finished, and no result had a reward, "
                "which is not a reward of 0; choose an environment that scores each rollout"
            )
        return _shown("tool", output["blocks"], call_id=call.id), is_finished

    @asynccontextmanager
    async def _begun(self, base: str, episode: Episode[Earned]) -> AsyncGenerator[_OpenSession]:
        """Open a session for the task of a rollout, and close it at the end."""
        address = f"{self.url}/create_session"
        made = await once_up(lambda: ask(self.session, "POST", address))
        # Servers tell the id as an event, or as JSON.
        own_id = dict(_events(made.text)).get("task_id", "").strip() if made.status < 400 else ""
        headers = {"X-Session-ID": own_id or str(made.field("sid"))}
        body = {
            "env_name": base.removeprefix(f"{self.url}/"),
            "task_spec": episode.example.info["task"],
        }

        async def stay() -> None:
            while True:
                await asyncio.sleep(_PING_S)
                with suppress(EndpointError):  # the next request says that the session is lost
                    await ask(self.session, "POST", f"{self.url}/ping", headers=headers)

        staying = asyncio.create_task(stay())
        try:
            created = await ask(
                self.session, "POST", f"{self.url}/create", body=body, headers=headers
            )
            created.json()
            answer = await self._newest(base, "task_tools", "tools", headers)
            tools, listed = answer.field("tools"), answer.json()
            episode.tools = [
                function_tool(one["name"], one.get("description") or "", one.get("input_schema"))
                for one in tools
            ]
            answer = await self._newest(base, "messages", "prompt", headers)
            told: Any = answer.json()
            if answer.url.endswith("/prompt"):
                told = [{"role": "user", "blocks": told}]
            yield _OpenSession(
                base=base,
                headers=headers,
                messages=[one for said in told for one in _shown(said["role"], said["blocks"])],
                final=listed.get("terminal_tool"),
            )
        finally:
            staying.cancel()
            with suppress(EndpointError):
                await ask(self.session, "POST", f"{self.url}/delete", headers=headers)

    async def _newest(self, base: str, path: str, older: str, headers: Mapping[str, str]) -> Answer:
        """Return the answer at `path`, or at what older servers have for it, once it is ready."""
        while True:
            answer = await ask(self.session, "GET", f"{base}/{path}", headers=headers)
            if answer.status == 404 and path != older:
                path = older
            elif answer.headers.get("X-Backend-State") == "starting":
                await asyncio.sleep(_PAUSE_S)
            else:
                return answer

    async def _base(self, session: aiohttp.ClientSession) -> str:
        """Return the address of the environment, which the server has to list."""
        url = f"{self.url}/list_environments"
        names: Any = (await ask(session, "GET", url)).json()
        if not isinstance(names, list) or not names:
            raise EndpointError(f"{url} lists no environment, got {names!r:.200}")
        known = [str(name) for name in cast(list[object], names)]
        wanted = self.config.environment or known[0]
        if wanted.lower() not in {name.lower() for name in known}:
            raise UnplayableError(str(unknown_name("environment", wanted, known, f"(of {url})")))
        return f"{self.url}/{wanted}"

    async def _named_splits(self) -> dict[Split, str]:
        """Return the name of the server's split for each of ours that it has."""
        async with new_session() as session:
            base = await self._base(session)
            found: Any = (await ask(session, "GET", f"{base}/splits")).json()
        types = {str(one["name"]): str(one["type"]) for one in found}
        wanted = {Split.TRAIN: self.config.train_split, Split.EVAL: self.config.eval_split}
        named: dict[Split, str] = {}
        for split, name in wanted.items():
            if name and name not in types:
                raise UnplayableError(str(unknown_name("split", name, types, f"(of {base})")))
            fitting = [one for kind in _TYPES[split] for one in types if types[one] == kind]
            if name or fitting:
                named[split] = name or fitting[0]
        if not named:
            raise UnplayableError(
                f"{base} has no split of the type train, test or validation, only "
                f"{', '.join(types) or 'none'}; set env.train_split or env.eval_split"
            )
        return named

    async def _tasks(self, split: Split) -> Examples:
        """Return the tasks of the server's split, read one at a time where it lists none."""
        name = (await self._named_splits()).get(split)
        if name is None:
            raise EnvironmentLoadError(
                f"{self.url} has no split for {split}; set env.{split}_split to one that it has"
            )

        def example_of(task: Any, index: int) -> Example:
            place = f"task {index} of {name}"
            return Example(id=f"{name}-{index}", prompt=place, info={"task": task})

        async with new_session() as session:
            base = await self._base(session)
            listed = await ask(session, "POST", f"{base}/tasks", body={"split": name})
            if listed.status != 400:
                tasks = listed.field("tasks")
                return ListSource([example_of(task, index) for index, task in enumerate(tasks)])
            counted = await ask(session, "POST", f"{base}/num_tasks", body={"split": name})

        async def read(index: int) -> Example:
            async with new_session() as session:
                body = {"split": name, "index": index}
                task = await ask(session, "POST", f"{base}/task", body=body)
            return example_of(task.field("task"), index)

        return _Tasks(counted.field("num_tasks"), lambda index: asyncio.run(read(index)))


def _streamed(answer: Answer, call: ToolCall) -> dict[str, Any]:
    """Return the result of a call; raises EndpointError where the tool raised or was cut off."""
    if answer.status >= 400:
        answer.json()
    parts: list[str] = []
    for kind, data in _events(answer.text):
        if kind == "error":
            raise code_raised(f"the tool {call.name} failed at {answer.url}: {data:.1000}")
        if kind in ("chunk", "end"):
            parts.append(data)
        if kind == "end":
            got = json_object("".join(parts)) or {}
            if "output" in got if got.get("ok") else "error" in got:
                return got
            break
    raise EndpointError(f"{answer.url} gave no result of the tool {call.name}: {answer.text:.200}")


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Yield kind and data of each server-sent event in `text`."""
    kind, lines = "", list[str]()
    for line in re.split(r"\r\n|\n|\r", text):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            lines.append(value)
        elif not line and kind:
            yield kind, "\n".join(lines)
            kind, lines = "", []


def _shown(
    role: str, blocks: Sequence[Mapping[str, Any]], *, call_id: str | None = None
) -> list[Message]:
    """Return the messages of one turn; results of tools in it are messages of their own.

    Raises UnplayableError for pictures of a kind that no endpoint takes.
    """
    by_type: dict[str, list[Mapping[str, Any]]] = {}
    for block in blocks:
        by_type.setdefault(block["type"], []).append(block)
    told = [
        one
        for block in by_type.get("tool_result", ())
        for one in _shown("tool", block["blocks"], call_id=block["tool_call_id"])
    ]
    content = [
        {"type": "text", "text": block["text"]}
        if block["type"] == "text"
        else {
            "type": "image_url",
            "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"},
        }
        for block in blocks
        if block["type"] in ("text", "image")
    ]
    if told and not content:
        return told
    fields: dict[str, Any] = {
        "role": role,
        "content": content,
        "reasoning_content": "\n".join(one["text"] for one in by_type.get("reasoning", ())),
        "tool_calls": [
            {"id": one["id"], "function": {"name": one["name"], "arguments": one["input"]}}
            for one in by_type.get("tool_call", ())
        ],
        "tool_call_id": call_id,
    }
    return [*told, sendable(fields)]
