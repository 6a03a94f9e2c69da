"""OpenEnv servers played as our environments: `openenv:URL`.

One WebSocket is one episode, and no package of OpenEnv is needed. An example is a task of the
server, where it has tasks, and otherwise a seed. A server without a free session is asked again.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import aiohttp
from pydantic import Field

from telescope_adapters.games import OnePlayer, PlayersConfig, SeveralPlayers, seeds
from telescope_adapters.servers import (
    ServedEnvironment,
    arguments_of,
    as_fields,
    ask,
    code_raised,
    new_session,
    once_up,
    sendable,
)
from telescope_adapters.settings import Earned, as_metrics, as_number, function_tool
from telescope_core.base.errors import (
    EndpointError,
    EnvironmentLoadError,
    RewardError,
    RewardRaisedError,
)
from telescope_core.base.messages import json_object, message_to_json
from telescope_core.base.types import Example, JsonValue, Message, Split, StopReason, ToolCall
from telescope_core.chat.http import proxy_for
from telescope_core.environments import Episode
from telescope_core.environments.sources import Examples
from telescope_core.examples import ListSource
from telescope_core.models.matches import Match

_ANSWER_S = 120.0
"""Seconds in which a server must answer a step."""
_LARGEST_MIB = 64
"""Most of one answer."""
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_OWN_FIELDS = ("metadata",)
"""Fields of every action that are not part of its content."""
_NO_TYPE = "MESSAGE"
"""Category of a message that has no type in its game."""
_NEVER_AGAIN = ("VALIDATION_ERROR", "UNKNOWN_TYPE", "INVALID_JSON")


class OpenEnvConfig(PlayersConfig):
    """Settings of an environment of an OpenEnv server."""

    max_sessions: int = Field(default=1, ge=1)
    """Most episodes at once; a server supports one unless it reports more."""
    tools: Literal["auto", "yes", "no"] = "auto"
    """Whether steps are calls of tools; `auto` = if the server's actions are calls of tools."""
    action_field: str = ""
    """The field of an action that takes the answer; empty = its only required text field, or
    its only text field where none is required."""
    action: dict[str, Any] = Field(default={})
    """Other fields of each action, by name."""
    observation_field: str = ""
    """The field of an observation that is shown; empty = all texts in it, or everything as JSON
    where it has none."""
    environment: str = ""
    """Name of the environment whose tasks are played; empty = an example is a seed."""


@dataclass(slots=True)
class _Server:
    """Facts about a server from its first answer."""

    action_field: str
    has_tools: bool
    room: asyncio.Semaphore


class CapacityError(Exception):
    """The server has no free session."""


class OpenEnvSessions(ServedEnvironment):
    """The examples of a running OpenEnv server, and its sessions."""

    Config = OpenEnvConfig
    scheme = "openenv"

    def examples(self, split: Split) -> Examples:
        """Return the tasks of the server, or seeds. Runs in a thread."""
        if not self.config.environment:
            return seeds(split)
        return ListSource(asyncio.run(self._tasks(split)))

    def _shown(self, got: Mapping[str, Any], told: "_Told") -> str:
        """Return the text of an observation, without what the player was told before."""
        seen: Any = got.get("observation", {})
        if not isinstance(seen, Mapping):
            return str(seen)
        fields = cast(Mapping[str, Any], seen)
        name = self.config.observation_field
        if not name and (news := told.news(fields)):
            return news
        if name:
            if name not in fields:
                raise EnvironmentLoadError(
                    f"env.observation_field is {name!r}, but the observation has "
                    f"{', '.join(fields) or 'no field'}"
                )
            value = fields[name]
            return value if isinstance(value, str) else json.dumps(value)
        texts = {key: text for key, text in fields.items() if isinstance(text, str) and text}
        if len(texts) > 1:
            return "\n\n".join(f"{key}:\n{text}" for key, text in texts.items())
        return "".join(texts.values()) or json.dumps(dict(fields) or got.get("metadata", {}))

    async def look(self) -> _Server:
        """Return how the actions of the server are filled."""
        schema = (await ask(self.session, "GET", f"{self.url}/schema")).field("action")
        action_field, has_tools = self._reading_of(schema)
        return _Server(action_field, has_tools, asyncio.Semaphore(self.config.max_sessions))

    def _reading_of(self, schema: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the action field that takes the answer, and whether actions are tool calls."""
        fields: dict[str, Any] = dict(schema.get("properties", {}))
        calls = "tool_name" in fields and "arguments" in fields
        if self.config.tools == "yes" or (self.config.tools == "auto" and calls):
            return "", True
        if self.config.action_field in fields:
            return self.config.action_field, False
        required = [name for name in schema.get("required", ()) if name not in self.config.action]
        # Where nothing must be given, an answer can only go to a text that may be.
        possible = required or [name for name in fields if name not in _OWN_FIELDS]
        texts = [name for name in possible if fields.get(name, {}).get("type") == "string"]
        if self.config.action_field or len(required) > 1 or len(texts) != 1:
            known = ", ".join(name for name in fields if name not in _OWN_FIELDS) or "none"
            raise EnvironmentLoadError(
                f"the answer must fill one text field of an action of {self.url}; got "
                f"env.action_field {self.config.action_field!r}, and the fields are: {known}. Set "
                "env.action_field to one of them, and env.action to the values of the others"
            )
        return texts[0], False

    @asynccontextmanager
    async def _begun(
        self, reset: Mapping[str, Any]
    ) -> AsyncGenerator[tuple["_Socket", dict[str, Any]]]:
        """Open and reset a session; waits while others use all of them."""
        pause_s = _FIRST_PAUSE_S
        address = f"ws{self.url.removeprefix('http')}/ws"
        while True:
            wire = await once_up(partial(self._connected, address))
            socket = _Socket(wire, address)
            try:
                # A server without room accepts the connection, says so and closes it.
                got = await socket.ask("reset", reset)
                break
            except CapacityError:
                await wire.close()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except BaseException:
                await wire.close()
                raise
        try:
            yield socket, got
        finally:
            await socket.close()

    async def _connected(self, address: str) -> aiohttp.ClientWebSocketResponse:
        proxy = proxy_for(self.url)
        try:
            return await self.session.ws_connect(
                address,
                max_msg_size=_LARGEST_MIB * 2**20,
                headers=proxy.request_headers,
                proxy=proxy.url,
                proxy_headers=proxy.connect_headers,
            )
        except aiohttp.ClientError as error:
            raise EndpointError(f"{address} does not answer: {error}") from error

    async def _tasks(self, split: Split) -> list[Example]:
        """Return the tasks of the server's split with that name."""
        base = f"{self.url}/{self.config.environment}"
        async with new_session() as session:
            found: Any = (await ask(session, "GET", f"{base}/splits")).json()
            names: list[str] = [str(one["name"]) for one in found]
            named = {"train": Split.TRAIN, "eval": Split.EVAL}
            wanted = next((n for n in names if named.get(n) is split), "")
            if not wanted and split is Split.EVAL:
                wanted = next((n for n in names if n in ("test", "validation")), "")
            if not wanted:
                raise EnvironmentLoadError(f"{base} has no split for {split}: {', '.join(names)}")
            listed = await ask(session, "POST", f"{base}/tasks", body={"split": wanted})
        tasks: list[Any] = listed.field("tasks")
        # The arguments of `reset` are the own fields of a task, or its index.
        resets: list[Any] = [
            one if isinstance(one, dict) else {"index": at} for at, one in enumerate(tasks)
        ]
        return [
            Example(id=f"{wanted}-{index}", prompt="task", info={"reset": reset})
            for index, reset in enumerate(resets)
        ]


class OpenEnvMatch(OpenEnvSessions, SeveralPlayers):
    """A game for several players, whose observations say whose move it is.

    So do those of OpenEnv's server of TextArena. The protocol itself knows one reward for a step;
    what each player got stands in the state of such a server.
    """

    async def play_match(self, match: Match) -> dict[str, float]:
        """Let the players answer what they see; a game that a limit ended is a draw."""
        server: _Server = await self.looked()
        reset = cast(Mapping[str, Any], match.example.info["reset"])
        told = {name: _Told() for name in self.seats}
        async with server.room, self._begun(reset) as (socket, got):
            for _ in range(self.config.max_turns):
                player = self._mover(got)
                text = self._shown(got, told[player])
                said = await match[player].ask(text)
                got = await socket.ask("step", {**self.config.action, server.action_field: said})
                if _is_done(got):
                    return self._earned(await socket.ask("state"))
            return dict.fromkeys(self.seats, 0.0)

    def _mover(self, got: Mapping[str, Any]) -> str:
        """Return the seat whose move it is."""
        seen = as_fields(got.get("observation"))
        player, players = seen.get("current_player_id"), seen.get("legal_players")
        if not isinstance(player, int) or players != list(range(len(self.seats))):
            raise EnvironmentLoadError(
                f"env.players is {len(self.seats)}, but an observation of {self.url} does not say "
                f"whose move of so many players it is: current_player_id is {player!r}, and "
                f"legal_players is {players!r}; set env.players to what the server was started "
                "with, or leave it out for a game for one player"
            )
        return f"player-{player}"

    def _earned(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Return the reward of each seat in the state of a game that is over."""
        rewards: Mapping[str, Any] = state.get("raw_state", {}).get("rewards") or {}
        earned = {f"player-{player}": reward for player, reward in rewards.items()}
        if set(earned) != set(self.seats):
            raise RewardError(
                f"the game of {self.url} is over, and its state has no reward for each player "
                f"(raw_state.rewards is {rewards!r:.200}); the reward of a step is that of one"
            )
        return {
            seat: as_number(reward, of=f"the game of {self.url}, for {seat},")
            for seat, reward in earned.items()
        }


class OpenEnvEnvironment(OnePlayer, OpenEnvSessions):
    """An environment for one player; a game for several is an `OpenEnvMatch`."""

    several = OpenEnvMatch

    async def play(self, episode: Episode[Earned]) -> StopReason:
        """Play one episode over one WebSocket."""
        server: _Server = await self.looked()
        reset = cast(Mapping[str, Any], episode.example.info["reset"])
        async with server.room, self._begun(reset) as (socket, got):
            players: Any = as_fields(got.get("observation")).get("legal_players")
            num_players = len(cast(list[Any], players)) if isinstance(players, list) else 1
            if num_players > 1:
                raise EnvironmentLoadError(
                    f"{self.url} plays a game for {num_players} players; set "
                    "env.players to as many, so that each is a seat with a reward of its own"
                )
            told = _Told()
            self._add(episode, got, told)
            tools = await _tools(socket) if server.has_tools else _offered(got)
            for _ in range(self.config.max_turns):
                if _is_done(got):
                    break
                said = await episode.generate(tools=tools)
                if said.finish_reason == "length":
                    return StopReason.LENGTH
                if server.has_tools and tools and not said.message.tool_calls:
                    return StopReason.COMPLETED
                got = await self._stepped(episode, server, socket, said.message)
                if not server.has_tools and not _is_done(got):
                    self._add(episode, got, told)
                    tools = _offered(got)
        if not _is_done(got):
            return StopReason.MAX_TURNS
        self._keep_last(episode, got)
        if episode.state.total is None:
            raise RewardError(
                f"the episode of {self.url} is over, and no step of it gave a reward, which is not "
                "a reward of 0; choose an environment that scores"
            )
        return StopReason.COMPLETED

    def _add(self, episode: Episode[Earned], got: Mapping[str, Any], told: "_Told") -> None:
        chat = [] if self.config.observation_field else _chat(got, episode)
        episode.add(*(chat or [self._shown(got, told)]))

    async def _stepped(
        self, episode: Episode[Earned], server: _Server, socket: "_Socket", message: Message
    ) -> dict[str, Any]:
        """Take the steps of an answer up to the last of the episode; add the results of calls."""
        if not (server.has_tools and message.tool_calls):
            action = {**self.config.action, server.action_field: message.content}
            if message.tool_calls:  # all in one step, in the form of the chat API
                action["tool_calls"] = message_to_json(message)["tool_calls"]
            got = await socket.ask("step", action)
            episode.state.add(got.get("reward"), of=self.url)
            return got
        got: dict[str, Any] = {}
        for call in message.tool_calls:
            got = await _called(socket, call)
            episode.state.add(got.get("reward"), of=self.url)
            result = _result_text(as_fields(got.get("observation")))
            episode.add(Message(role="tool", content=result, tool_call_id=call.id))
            if _is_done(got):
                break
        return got

    def _keep_last(self, episode: Episode[Earned], got: Mapping[str, Any]) -> None:
        """Keep the last observation; raises RewardRaisedError if it tells why there is no reward.

        The policy does not answer it, so it is a note; numbers in its metadata are metrics.
        """
        seen: Any = got.get("observation")
        about = {**as_fields(got.get("metadata")), **as_fields(as_fields(seen).get("metadata"))}
        episode.note("last observation", json.dumps(seen))
        if got.get("reward") is None and about.get("error"):
            raise RewardRaisedError(f"the episode of {self.url} raised {about['error']}")
        metrics = {**about, **as_fields(about.get("metrics"))}
        episode.metrics.update(as_metrics(metrics, of=self.url))


@dataclass(slots=True)
class _Told:
    """What one player was told, in observations with messages such as those of TextArena's server.

    A game of TextArena sends typed messages that are new, or else its whole history in one message
    without a type, which begins with what was sent before.
    """

    history: str = ""

    def news(self, seen: Mapping[str, Any]) -> str:
        """Return the new messages without the player's own; empty if there are none."""
        found: Any = seen.get("messages")
        messages = [
            cast(dict[str, Any], one)
            for one in cast(list[Any], found if isinstance(found, list) else [])
            if isinstance(one, dict) and {"sender_id", "content"} <= one.keys()
        ]
        player = seen.get("current_player_id")
        text = "\n".join(str(one["content"]) for one in messages if one["sender_id"] != player)
        if {one.get("category") for one in messages} == {_NO_TYPE}:
            before, self.history = self.history, text
            text = text.removeprefix(before)
        return text.strip()


class _Socket:
    """One session of a server."""

    def __init__(self, wire: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self._wire = wire
        self.address = address

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the data of the answer; raises EndpointError for an error on the server."""
        try:
            # aiohttp's own limit begins anew with each ping.
            async with asyncio.timeout(_ANSWER_S):
                # Servers refuse a message with data that has none.
                fields = {} if data is None else {"data": data}
                await self._wire.send_json({"type": kind, **fields})
                got = await self._wire.receive()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            why = str(error) or f"nothing came within {_ANSWER_S:g} s"
            raise EndpointError(f"{self.address} did not answer {kind}: {why}") from error
        if got.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
            is_large = getattr(got.data, "code", None) == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            why = f"sent more than {_LARGEST_MIB} MiB" if is_large else "closed the connection"
            raise EndpointError(f"{self.address} {why} during {kind}")
        answer = json_object(got.data) or {}
        if "type" not in answer or not isinstance(answer.get("data"), dict):
            raise EndpointError(
                f"{self.address} answered {kind} with {got.data!r:.200}, expected a JSON object "
                "with a type and data"
            )
        if answer["type"] != "error":
            return answer["data"]
        code, text = answer["data"].get("code"), answer["data"].get("message")
        if code == "CAPACITY_REACHED":
            raise CapacityError(str(text))
        if code in _NEVER_AGAIN:
            raise EnvironmentLoadError(f"{self.address} refused {kind} {data!r:.200}: {text}")
        failure = f"{self.address} failed in {kind} ({code}): {text}"
        raise code_raised(failure) if code == "EXECUTION_ERROR" else EndpointError(failure)

    async def close(self) -> None:
        """End the session."""
        # To tell a server that is gone would raise, in place of the error that tells so.
        with suppress(aiohttp.ClientError, ConnectionError):
            if not self._wire.closed:
                await self._wire.send_json({"type": "close"})
        await self._wire.close()


async def _tools(socket: _Socket) -> list[dict[str, JsonValue]]:
    seen: Any = (await socket.ask("step", {"type": "list_tools"})).get("observation")
    if not isinstance(listed := as_fields(seen).get("tools"), list):
        raise EndpointError(f"{socket.address} lists no tools, got {seen!r:.200}")
    return [
        function_tool(one["name"], one.get("description") or "", one.get("input_schema"))
        for one in cast(list[dict[str, Any]], listed)
    ]


async def _called(socket: _Socket, call: ToolCall) -> dict[str, Any]:
    """Call one tool; arguments that are no JSON object get an error for the policy."""
    arguments = arguments_of(call)
    if arguments is None:
        return {"observation": {"error": f"the arguments are no JSON object: {call.arguments}"}}
    return await socket.ask(
        "step", {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
    )


def _result_text(seen: Mapping[str, Any]) -> str:
    """Return the text of a tool's result."""
    if seen.get("error"):
        return f"error: {json.dumps(seen['error'])}"
    result: Any = seen.get("result", "")
    if isinstance(result, dict) and "content" in result:
        parts: list[Any] = cast(dict[str, Any], result)["content"]
        return "\n".join(str(part.get("text", "")) for part in parts)
    return result if isinstance(result, str) else json.dumps(result)


def _is_done(got: Mapping[str, Any]) -> bool:
    return bool(got.get("done"))


def _chat(got: Mapping[str, Any], episode: Episode[Earned]) -> list[Message]:
    """Return the new messages of an observation in the form of the chat API, as of our server.

    Empty if it has none. Of a server that repeats the whole conversation, those are left out that
    are known.
    """
    found: Any = as_fields(got.get("observation")).get("messages")
    told = [as_fields(one) for one in cast(list[Any], found if isinstance(found, list) else [])]
    if not all({"role", "content"} <= one.keys() for one in told):
        return []
    messages = [sendable(one) for one in told]
    known = [(one.role, one.content) for one in episode.messages]
    repeated = [(one.role, one.content) for one in messages[: len(known)]] == known
    return messages[len(known) :] if repeated else messages


def _offered(got: Mapping[str, Any]) -> list[dict[str, JsonValue]]:
    """Return the tools in an observation, in OpenAI form, as of our server."""
    found: Any = as_fields(got.get("observation")).get("tools")
    tools = map(as_fields, cast(list[Any], found if isinstance(found, list) else []))
    return [tool for tool in tools if as_fields(tool.get("function"))]
