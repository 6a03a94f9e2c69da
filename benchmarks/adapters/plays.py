"""Plays one environment by its framework's own loop and by our adapter, in turns, in one process.

Run by `bench_adapters.py` with the Python of the framework, as `plays.py FRAMEWORK ROLLOUTS ROUNDS
[PATH]`; prints rollouts per second and rewards of both sides as JSON.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from telescope_core.in_process import InProcessEnvironment
from telescope_core.locate import load_environment_class
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split

AT_ONCE = 16
HERE = "telescope_core.adapters."
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
    "inspect": inspect_case,
}


def policy(replies: list[str]) -> Any:
    """Return a policy that says `replies`."""
    return ScriptedClient(replies).policy("r")


async def main(name: str, number: int, rounds: int, path: str) -> dict[str, Any]:
    """Play both sides in turns; returns rollouts per second and rewards."""
    case = CASES[name](path)
    environment = load_environment_class(case.factory).from_settings(case.settings)
    client = InProcessEnvironment(environment, name=name)

    async def ours(index: int) -> float:
        request = PlayRequest(
            split=case.split,
            example_index=case.example(index),
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
