"""Servers of the real OpenEnv package in its virtual environment, all in one process.

Prints their ports by name, and what `itself` returns for the two lists that are its arguments.
"""

import asyncio
import json
import random
import socket
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)
from pydantic import Field


class Guess(Action):
    text: str


class Hint(Observation):
    prompt: str = ""
    rule: str = ""


class GuessServer(Environment[Guess, Hint, State]):
    """Guess a number from 1 to 8; each wrong guess costs a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, index=None, **_):
        self.now = State(episode_id=episode_id)
        self.secret = random.Random(seed if index is None else index).randint(1, 8)
        return Hint(prompt="Guess 1-8.", rule="Wrong ones cost 0.1.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        if action.text == "break":
            raise RuntimeError("the server broke")
        if action.text == "give up":
            return Hint(prompt="You gave up.", done=True)
        self.now.step_count += 1
        guess = int(action.text)
        if guess == self.secret:
            return Hint(prompt="Right.", done=True, reward=1.0)
        return Hint(prompt="Lower." if guess > self.secret else "Higher.", reward=-0.1)

    @property
    def state(self):
        return self.now

    def list_splits(self):
        return ["train", "test"]

    def list_tasks(self, split):
        return [{"index": n} for n in (range(6) if split == "train" else range(10, 12))]


class Said(Action):
    message: str


class Seen(Observation):
    prompt: str = ""
    messages: list[dict] = Field(default_factory=list)
    current_player_id: int = 0
    legal_players: list[int] = Field(default_factory=list)


class Table(State):
    raw_state: dict = Field(default_factory=dict)


class HigherServer(Environment[Said, Seen, Table]):
    """Two players name a number each; shaped like OpenEnv's server of TextArena."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.now, self.said = Table(episode_id=episode_id), []
        return self.seen()

    def step(self, action, timeout_s=None, **_):
        self.said.append(int(action.message))
        self.now.step_count += 1
        if len(self.said) == 2 and self.said[0] != self.said[1]:
            won = 1 if self.said[0] > self.said[1] else -1
            self.now.raw_state = {"rewards": {0: won, 1: -won}}
        return self.seen()

    def seen(self):
        player, said = len(self.said) % 2, list(enumerate(self.said))
        told = [{"sender_id": -1, "content": f"You are player {player}.", "category": "PROMPT"}]
        told += [{"sender_id": one, "content": f"{n}!", "category": "MOVE"} for one, n in said]
        over = len(self.said) == 2
        return Seen(
            prompt="Higher",
            messages=told,
            current_player_id=player,
            legal_players=[0, 1],
            done=over,
            reward=1.0,
        )

    @property
    def state(self):
        return self.now


class HintsServer(Environment[Said, Seen, Table]):
    """A game for one player in the form of TextArena's server: the prompt says nothing new.

    With an odd seed each observation has the whole history, and otherwise what is new.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.now, self.has_history = Table(episode_id=episode_id), seed % 2 == 1
        self.news = [{"sender_id": -1, "content": "Guess 1 or 2.", "category": "PROMPT"}]
        self.history = "[GAME] Guess 1 or 2."
        return self.seen()

    def step(self, action, timeout_s=None, **_):
        self.now.step_count += 1
        self.history += f"\n[Player] {action.message}\n[GAME] Not that one."
        self.news = [
            {"sender_id": 0, "content": action.message, "category": "PLAYER_ACTION"},
            {"sender_id": -1, "content": "Not that one.", "category": "GAME_MESSAGE"},
        ]
        return self.seen()

    def seen(self):
        whole = [{"sender_id": -1, "content": self.history, "category": "MESSAGE"}]
        return Seen(
            prompt="Hints-v0",
            messages=whole if self.has_history else self.news,
            legal_players=[0],
            done=self.now.step_count == 3,
            reward=float(self.now.step_count == 3),
        )

    @property
    def state(self):
        return self.now


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id)
        return Observation(done=False, reward=0.0, metadata={"task": "add 1 and 2"})

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation(done=True, reward=1.0)

    @property
    def state(self):
        return self._state


SERVERS = {
    "guess": (GuessServer, Guess, Hint, 1),
    "higher": (HigherServer, Said, Seen, 4),
    "hints": (HintsServer, Said, Seen, 4),
    "tools": (Tools, CallToolAction, CallToolObservation, 4),
}
"""What each has of its own, and for how many sessions there is room: one is usual."""


def itself(seeds, guesses):
    """Return the rewards of the same guesses where the environment is stepped directly."""
    totals = []
    for seed in seeds:
        game, total = GuessServer(), 0.0
        game.reset(seed=seed)
        for guess in guesses:
            seen = game.step(Guess(text=guess))
            total += seen.reward
            if seen.done:
                break
        totals.append(total)
    return totals


async def main():
    ports, serving = {}, []
    for name, (*kinds, rooms) in SERVERS.items():
        app = create_fastapi_app(*kinds, max_concurrent_envs=rooms, env_name="guess")
        bound = socket.create_server(("127.0.0.1", 0))
        ports[name] = bound.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        serving.append(server.serve(sockets=[bound]))
    print(
        json.dumps({"ports": ports, "itself": itself(*map(json.loads, sys.argv[1:]))}), flush=True
    )
    await asyncio.gather(*serving)


if __name__ == "__main__":
    asyncio.run(main())
