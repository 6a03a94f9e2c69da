"""Servers of the package `openreward` in its virtual environment: prints their ports.

argv: the folder that `orwd init` wrote, which one of them serves, and what `itself` calls for each
task, whose rewards it prints as well.
"""

import asyncio
import json
import os
import runpy
import socket
import sys

import uvicorn
from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel


class Guessed(BaseModel):
    number: int


class Guess(Environment):
    """Guess a number; each wrong guess costs a tenth."""

    @classmethod
    def list_splits(cls):
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split):
        return [{"secret": secret} for secret in ((3, 5) if split == "train" else (7,))]

    def get_prompt(self):
        return [TextBlock(text="Guess a number from 1 to 8.")]

    @tool
    async def look(self) -> ToolOutput:
        """Look at the rules, which earns nothing."""
        # More than the server sends in one piece, with spaces where pieces begin.
        return ToolOutput(blocks=[TextBlock(text="Wrong ones cost 0.1.  " * 500)])

    @tool
    async def guess(self, params: Guessed) -> ToolOutput:
        """Guess the number."""
        if params.number == 13:
            raise RuntimeError("the server broke")
        is_right = params.number == self.task_spec["secret"]
        told = [TextBlock(text="right" if is_right else "wrong")]
        return ToolOutput(blocks=told, reward=1.0 if is_right else -0.1, finished=is_right)


async def itself(rollouts):
    """Return the rewards of the same calls where the environment is called directly."""
    totals = []
    for index, turns in rollouts:
        game, total = Guess(task_spec=Guess.list_tasks("train")[index]), 0.0
        for name, arguments in (one for turn in turns for one in turn):
            method = getattr(game, name)
            done = await (method(Guessed(**arguments)) if arguments else method())
            total += done.reward or 0.0
            if done.finished:
                break
        totals.append(total)
    return totals


async def main():
    module = runpy.run_path(f"{sys.argv[1]}/server.py")
    [written] = [
        one
        for one in module.values()
        if isinstance(one, type) and issubclass(one, Environment) and one is not Environment
    ]
    ports, serving = {}, []
    for name, kind in (("guess", Guess), ("written", written)):
        bound = socket.create_server(("127.0.0.1", 0))
        ports[name] = bound.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(Server([kind]).app, log_level="error"))
        serving.append(server.serve(sockets=[bound]))
    totals = await itself(json.loads(sys.argv[2]))
    print(json.dumps({"ports": ports, "itself": totals}), flush=True)
    # The package writes a line for each request, and nobody reads on.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    await asyncio.gather(*serving)


if __name__ == "__main__":
    asyncio.run(main())
