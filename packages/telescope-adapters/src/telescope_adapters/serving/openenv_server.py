"""Serve one of our environments with OpenEnv's server, for training with that.

`python -m telescope_adapters.serving.openenv_server NAME` serves `NAME`; `openenv_app` returns the
application. A reset starts a rollout and returns the first prompt; a step passes the policy's
answer. The last observation has the reward, and status, metrics and error of the rollout in its
metadata.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

from telescope_adapters.frameworks import OPENENV_SERVER, imported
from telescope_adapters.serving.inside_out import ModelCall, Stepped
from telescope_core.base.errors import TelescopeError, unknown_name
from telescope_core.base.messages import json_object, message_to_json
from telescope_core.base.protocols import EnvironmentClient
from telescope_core.base.secret_names import secrets_line
from telescope_core.base.types import Completion, Message, Rollout, Split, ToolCall
from telescope_core.open import open_environment


def openenv_app(client: EnvironmentClient, *, max_sessions: int = 100) -> Any:
    """Return the FastAPI application that serves the environment of `client`."""
    server: Any = imported(OPENENV_SERVER, "openenv.core.env_server")
    pydantic: Any = imported(OPENENV_SERVER, "pydantic")
    no_list = pydantic.Field(default_factory=list)
    reply = pydantic.create_model(
        "Reply",
        __base__=server.Action,
        content=(str, ""),
        tool_calls=(list[dict[str, Any]], no_list),
    )
    shown = pydantic.create_model(
        "Shown",
        __base__=server.Observation,
        messages=(list[dict[str, Any]], no_list),
        tools=(list[dict[str, Any]], no_list),
    )
    parts: dict[str, Any] = {
        "SUPPORTS_CONCURRENT_SESSIONS": True,
        "client": client,
        "numbers": itertools.count(),
        "shown": shown,
        "new_state": server.State,
    }
    served: Any = type("Served", (_Session, server.Environment), parts)
    return server.create_fastapi_app(
        served, reply, shown, max_concurrent_envs=max_sessions, env_name=client.name
    )


class _Session:
    """One session, as a subclass of OpenEnv's environment class."""

    client: EnvironmentClient
    numbers: "itertools.count[int]"
    shown: Any
    new_state: Any

    def __init__(self) -> None:
        super().__init__()
        self._stepped: Stepped | None = None
        self._state: Any = self.new_state()

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> Any:
        """Start a rollout of the example `index` of `split`, or of one chosen by a seed."""
        split, index = options.get("split", Split.TRAIN), options.get("index")
        if split not in list(Split):
            raise unknown_name("split", str(split), Split)
        if index is not None and not str(index).isdecimal():
            raise TelescopeError(f"index must be a whole number from 0 on, got {index!r:.80}")
        self.close()
        self._state = self.new_state(episode_id=episode_id)
        index = await self._drawn(split, seed or 0) if index is None else int(index)
        group_id = f"openenv-{next(self.numbers)}"
        self._stepped = Stepped(self.client, split, index, group_id=group_id)
        return _observed(self.shown, await self._stepped.begun())

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        """Take one step with the policy's answer; returns the observation with its reward."""
        if self._stepped is None:
            raise TelescopeError("step before reset; reset begins a rollout")
        calls = tuple(tool_call(fields) for fields in action.tool_calls)
        self._state.step_count += 1
        message = Message(role="assistant", content=action.content, tool_calls=calls)
        answer = Completion(message=message, finish_reason="tool_calls" if calls else "stop")
        asked = await self._stepped.answered(answer)
        if isinstance(asked, ModelCall) and asked.is_rewritten:
            self.close()
            raise TelescopeError(
                f"{self.client.name} changed messages that it had shown, and OpenEnv's clients "
                "get only new ones; use an environment whose conversation only grows, or serve it "
                "to verifiers"
            )
        return _observed(self.shown, asked)

    def reset(self, *_: Any, **__: Any) -> Any:
        """Raise: OpenEnv's server awaits `reset_async`."""
        raise TelescopeError("this environment is asynchronous; call reset_async")

    def step(self, *_: Any, **__: Any) -> Any:
        """Raise: OpenEnv's server awaits `step_async`."""
        raise TelescopeError("this environment is asynchronous; call step_async")

    def close(self) -> None:
        """End the running rollout."""
        if self._stepped is not None:
            self._stepped.cancel()
            self._stepped = None

    @property
    def state(self) -> Any:
        """Id and number of steps of the episode."""
        return self._state

    async def _drawn(self, split: str, seed: int) -> int:
        """Return the index of an example for `seed`: any number, however few examples there are."""
        count = await self.num_tasks(split)
        return seed % count if count else abs(seed)

    async def list_splits(self) -> list[str]:
        """Return the names of the splits."""
        return [split.value for split in (await self.client.describe()).num_examples]

    async def num_tasks(self, split: str) -> int:
        """Return the number of examples; 0 where they are endless."""
        return (await self.client.describe()).num_examples[Split(split)] or 0

    async def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the arguments of `reset` for one example."""
        return {"split": split, "index": index}

    async def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Return the arguments of `reset` for each example."""
        count = await self.num_tasks(split)
        return [{"split": split, "index": index} for index in range(count)]


def main(arguments: list[str] | None = None) -> None:
    """Serve one environment until the process is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m telescope_adapters.serving.openenv_server",
        description="Serve one environment as an OpenEnv server.",
    )
    parser.add_argument("environment", help="installed name, or module:Class")
    parser.add_argument(
        "--settings", type=_settings, default={}, help="settings of the environment, in JSON"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-sessions", type=_count, default=100)
    options = parser.parse_args(arguments)
    try:
        client = open_environment(options.environment, options.settings)
        client.tell_secrets(
            lambda names: sys.stderr.write(
                f"{secrets_line(options.environment, names, os.environ)}\n"
            )
        )
        app = openenv_app(client, max_sessions=options.max_sessions)
    except (TelescopeError, ValueError) as error:
        sys.exit(f"error: {error}")
    uvicorn: Any = imported(OPENENV_SERVER, "uvicorn")
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


def _settings(text: str) -> dict[str, Any]:
    found = json_object(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a JSON object, such as '{{\"size\": 3}}', got {text!r}"
        )
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def tool_call(fields: Mapping[str, Any]) -> ToolCall:
    """Return the call in `fields`: as in the chat API, or with `name` and `arguments` beside `id`.

    Arguments are JSON, as text or as they are. Raises TelescopeError for any other form.
    """
    given: object = fields.get("function", fields)
    is_table = isinstance(given, Mapping)
    about: Mapping[str, Any] = cast(Mapping[str, Any], given) if is_table else {}
    call_id, name = fields.get("id"), about.get("name")
    if not (isinstance(call_id, str) and call_id and isinstance(name, str) and name):
        raise TelescopeError(
            'expected each of tool_calls as {"id": ID, "type": "function", "function": {"name": '
            f'NAME, "arguments": JSON}}}}, with an id of your choice, got {dict(fields)!r:.200}'
        )
    arguments: Any = about.get("arguments") or {}
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=call_id, name=name, arguments=as_text)


def _observed(shown: Any, what: ModelCall | Rollout) -> Any:
    if isinstance(what, ModelCall):
        return shown(
            messages=[message_to_json(one) for one in what.new],
            tools=[dict(tool) for tool in what.tools],
            done=False,
            reward=0.0,
        )
    about = {
        "status": what.status.value,
        "stop_reason": what.stop_reason.value,
        "metrics": dict(what.metrics),
        "error": what.error,
    }
    return shown(done=True, reward=what.reward, metadata=about)


if __name__ == "__main__":
    main()
