"""A worker in this process behind a real socket, and what the tests ask of workers."""

import asyncio
import socket

from telescope_core.finding.locate import load_environment_class
from telescope_core.processes import StageDeadlines
from telescope_core.processes.handshake import Identity
from telescope_core.processes.serve import Served, Serving
from telescope_core.protocols import PlayRequest
from telescope_core.types import Sampling, Split

IMPATIENT = StageDeadlines(grace_s=0.5, cancel_s=0.5, close_s=2, hang_s=2.0)
"""For the tests of hangs; others would fail by it where the machine is busy elsewhere."""


class WireInThisProcess:
    """A place whose worker is this event loop, over a real socket."""

    label = "a worker in this process"
    gets_secrets = False

    def __init__(self, factory: str, *, token: str = "", shown: str = "", version: str = "1"):
        self.token = shown
        self.served = Served(
            identity=Identity(name="toy", version=version),
            environment_class=load_environment_class(factory),
            token=token,
        )
        self.servings: list[Serving] = []

    async def start(self, protocol, *, silence_s):
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        serving = Serving(self.served, on_ended=lambda _: None)
        self.servings.append(serving)
        await loop.create_connection(lambda: serving.connection, sock=theirs)
        await loop.create_connection(lambda: protocol, sock=ours)
        return self

    async def end(self, *, within_s):
        pass

    def kill(self):
        pass

    async def epitaph(self):
        return "it was in this process"


def request(index: int = 0, *, rollout: int = 0, deadline_s: float = 30.0) -> PlayRequest:
    """Ask for rollout `rollout` of example `index`."""
    return PlayRequest(
        split=Split.TRAIN,
        example_index=index,
        group_id=f"g{index}",
        index=rollout,
        sampling=Sampling(max_tokens=8),
        deadline_s=deadline_s,
    )
