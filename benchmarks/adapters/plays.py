"""Plays one environment by its framework's own loop and by our adapter, in turns, in one process.

Run by `bench_adapters.py` with the Python of the framework, as `plays.py FRAMEWORK ROLLOUTS ROUNDS
[PATH]`; prints rollouts per second and rewards of both sides as JSON.
"""

import asyncio
import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split

AT_ONCE = 16
HERE = "telescope_adapters."
DOWN_TO_GOAL = ["down", "down", "right", "right", "down", "right"]
GUESSES = [*(f"[{n * 7 % 20 + 1}]" for n in range(10)), "[0]", "[0]"]
Theirs = Callable[[int], Awaitable[list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One environment: how their side plays rollouts 0 to N - 1, and what ours is."""

    theirs: Theirs
    """Plays so many rollouts, and returns their rewards."""
    factory: str
    settings: dict[str, Any]
    replies: Callable[[int], list[str]]
    """The policy's replies in rollout i, on both sides."""
    example: Callable[[int], int]
    """Index of the example of rollout i."""
    split: Split = Split.TRAIN
    prompt: Callable[[int], str] | None = None
    """Last message of rollout i, where that tells its example and `example` cannot."""


async def at_once(play: Callable[[int], Awaitable[float]], number: int) -> list[float]:
    """Play rollouts, 16 at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> float:
        async with places:
            return await play(index)

    return await asyncio.gather(*(one(index) for index in range(number)))


def gymnasium_case(path: str) -> Case:
    """FrozenLake, to the goal."""
    import gymnasium

    words = ["left", "down", "right", "up"]

    def lake(seed: int) -> float:
        game = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="ansi")
        game.reset(seed=seed)
        total = 0.0
        for move in DOWN_TO_GOAL:
            game.render()
            total += game.step(words.index(move))[1]
        game.close()
        return total

    async def play(index: int) -> float:
        return await asyncio.to_thread(lake, 2 * index + 1)

    return Case(
        theirs=lambda number: at_once(play, number),
        factory=f"{HERE}gymnasium:GymEnvironment",
        settings={"id": "FrozenLake-v1", "options": {"is_slippery": False}},
        replies=lambda index: DOWN_TO_GOAL,
        example=lambda index: index,
    )


def textarena_case(path: str) -> Case:
    """GuessTheNumber, ten guesses at most."""
    import textarena

    def guess(seed: int) -> float:
        game = textarena.make("GuessTheNumber-v0-raw")
        game.reset(num_players=1, seed=seed)
        for said in GUESSES:
            game.get_observation()
            done, _ = game.step(action=said)
            if done:
                break
        return float(game.close()[0][0])

    async def play(index: int) -> float:
        return await asyncio.to_thread(guess, 2 * index + 1)

    return Case(
        theirs=lambda number: at_once(play, number),
        factory=f"{HERE}textarena:ArenaEnvironment",
        settings={"id": "GuessTheNumber-v0"},
        replies=lambda index: GUESSES,
        example=lambda index: index,
    )


def verifiers_case(path: str) -> Case:
    """Sums in one turn, with their old API."""
    import verifiers as vf
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Script(Client):
        async def get_response(self, prompt, model, sampling_args, tools=None, **_):
            message = ResponseMessage(
                content=self._client, finish_reason="stop", is_truncated=False
            )
            return Response(id="r", created=0, model=model, message=message)

        async def unused(self, *_: Any, **__: Any) -> None: ...

        setup_client = to_native_tool = to_native_prompt = get_native_response = unused
        raise_from_native_response = from_native_response = close = unused

    env = vf.load_environment("sums")
    rows = [dict(row) for row in env.get_dataset()]

    async def play(index: int) -> float:
        row = rows[index % len(rows)]
        state = await env._run_rollout_state(row, Script(str(index % 3)), "m", {"max_tokens": 8})
        return float(state["reward"])

    return Case(
        theirs=lambda number: at_once(play, number),
        factory=f"{HERE}verifiers:VerifiersEnvironment",
        settings={"id": "sums"},
        replies=lambda index: [str(index % 3)],
        example=lambda index: index % len(rows),
    )


def verifiers_tasks_case(path: str) -> Case:
    """Sums in one turn, with their new API: a program asks an endpoint, which they stand before."""
    import verifiers.v1 as vf
    from verifiers.v1.envs.single_agent import SingleAgentEnvConfig

    sys.modules["asks_once"] = asking_harness()
    env = vf.load_environment(
        SingleAgentEnvConfig.model_validate(
            {
                "taskset": {"id": "sums_tasks"},
                "interception": {"type": "server"},
                "agent": {"harness": {"id": "asks_once"}, "runtime": {"type": "subprocess"}},
            }
        )
    )
    tasks = list(env.taskset)[:39]

    async def play(number: int) -> list[float]:
        async with endpoint() as url, env.serving():
            client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")
            context = vf.ModelContext(model="m", client=client)

            async def one(index: int) -> float:
                episode = await env.run_episode(tasks[index % len(tasks)], context)
                [trace] = episode.traces
                return trace.reward

            return await at_once(one, number)

    return Case(
        theirs=play,
        factory=f"{HERE}verifiers_tasks:VerifiersTasksEnvironment",
        settings={"id": "sums_tasks"},
        replies=lambda index: [answer_of_third(index % len(tasks))],
        example=lambda index: index % len(tasks),
        prompt=lambda index: f"{index % len(tasks)}+1=",
    )


def answer_of_third(number: int) -> str:
    """Return the answer to `N+1=`: right for every third N."""
    return str(number + (number % 3 == 0))


def asking_harness() -> Any:
    """Return a module with a program of theirs that asks once, within this process."""
    from types import ModuleType

    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult

    class Asks(Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
            said = [("system", data.system_prompt), ("user", data.prompt)]
            body = {
                "model": ctx.model,
                "messages": [{"role": role, "content": content} for role, content in said],
            }
            async with httpx.AsyncClient(timeout=None) as client:
                await client.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
            return ProgramResult(0, "", "")

    module = ModuleType("asks_once")
    module.Asks, module.__all__ = Asks, ["Asks"]
    return module


@asynccontextmanager
async def endpoint() -> AsyncGenerator[str]:
    """Yield the address of a model that answers `N+1=`."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked = int(body["messages"][-1]["content"].partition("+")[0])
        message = {"role": "assistant", "content": answer_of_third(asked)}
        return web.json_response(
            {
                **{"id": "r", "object": "chat.completion", "created": 0, "model": "m"},
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def openenv_case(path: str) -> Case:
    """Guess a number at a server of theirs: their client, and ours."""
    from openenv.core import GenericEnvClient

    words = [sys.executable, path, "guess", str(AT_ONCE)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    guesses = [str(guess) for guess in (4, 2, 6, 1, 3, 5, 7, 8)]

    async def play(index: int) -> float:
        async with GenericEnvClient(base_url=url) as client:
            await client.reset(seed=2 * index + 1)
            total = 0.0
            for guess in guesses:
                result = await client.step({"text": guess})
                total += result.reward or 0.0
                if result.done:
                    break
            return total

    return Case(
        theirs=lambda number: at_once(play, number),
        factory=f"{HERE}openenv:OpenEnvEnvironment",
        settings={"id": url, "max_sessions": AT_ONCE, "reward_min": -1.0},
        replies=lambda index: guesses,
        example=lambda index: index,
    )


def inspect_case(path: str) -> Case:
    """Sums in one turn: their whole eval, which is the only loop that they have."""
    from inspect_ai import eval_async
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import value_to_float

    async def play(number: int) -> list[float]:
        outputs = [ModelOutput.from_content("mockllm", "1") for _ in range(number)]
        for output in outputs:
            output.usage = ModelUsage(input_tokens=1, output_tokens=1)
        [log] = await eval_async(
            f"{path}@sums",
            model=get_model("mockllm/model", custom_outputs=outputs),
            epochs=number // 6,
            max_samples=AT_ONCE,
            log_dir=tempfile.mkdtemp(),
        )
        assert log.status == "success", log.error
        samples = sorted(log.samples, key=lambda s: (s.epoch, str(s.id)))
        return [value_to_float()(one.scores["includes"].value) for one in samples]

    return Case(
        theirs=play,
        factory=f"{HERE}inspect_ai:InspectEnvironment",
        settings={"id": f"{path}@sums", "scorer": "includes"},
        replies=lambda index: ["1"],
        example=lambda index: index % 6,
        split=Split.EVAL,
    )


CASES = {
    "gymnasium": gymnasium_case,
    "textarena": textarena_case,
    "verifiers": verifiers_case,
    "verifiers-0.4": verifiers_tasks_case,
    "openenv": openenv_case,
    "inspect": inspect_case,
}


def policy(replies: list[str]) -> Any:
    """Return a policy that says `replies`."""
    return ScriptedClient(replies).policy("r")


async def places_of(client: InProcessEnvironment) -> dict[str, tuple[Split, int]]:
    """Return where the example with each last message is."""
    found: dict[str, tuple[Split, int]] = {}
    for split, size in (await client.describe()).num_examples.items():
        for index in range(size or 0):
            example = await client.example(split, index)
            found[str(example.prompt[-1].content)] = (split, index)
    return found


async def main(name: str, number: int, rounds: int, path: str) -> dict[str, Any]:
    """Play both sides in turns; returns rollouts per second and rewards."""
    case = CASES[name](path)
    environment = load_environment_class(case.factory).from_settings(case.settings)
    client = InProcessEnvironment(environment, name=name)

    places = await places_of(client) if case.prompt is not None else {}

    async def ours(index: int) -> float:
        split, example = case.split, case.example(index)
        if case.prompt is not None:
            split, example = places[case.prompt(index)]
        request = PlayRequest(
            split=split,
            example_index=example,
            group_id="g",
            index=index,
            sampling=Sampling(max_tokens=8),
            deadline_s=300.0,
        )
        rollout = await client.play(request, policy(case.replies(index)))
        assert rollout.reward is not None, rollout.error
        return rollout.reward

    rates: dict[str, list[float]] = {"theirs": [], "ours": []}
    rewards: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for side, run in (("theirs", case.theirs), ("ours", lambda n: at_once(ours, n))):
            began_s = time.perf_counter()
            rewards[side] = await run(number)
            rates[side].append(number / (time.perf_counter() - began_s))
    await client.close()
    # The first round imports and compiles what later ones have.
    return {side: {"rates": rates[side][1:], "rewards": rewards[side]} for side in rates}


if __name__ == "__main__":
    os.environ["INSPECT_DISPLAY"] = "none"
    words = sys.argv[1:]
    path = words[3] if len(words) > 3 else ""
    print("\n" + json.dumps(asyncio.run(main(words[0], int(words[1]), int(words[2]), path))))
