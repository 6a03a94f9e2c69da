"""A worker behind a relay plays as one on this machine does, for who knows the secret alone."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from telescope_core.errors import EnvironmentProcessError
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.processes.launch import Lifeline
from telescope_core.protocols import EnvironmentClient, PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Sampling, Split
from telescope_train.cluster.environment_places import EnvironmentPlaces, WorkerOrder
from telescope_train.cluster.environment_workers import WorkerRelay, _connected
from telescope_train.cluster.network import Network

SECRET = "a-secret-for-this-test"
DEADLINE_S = 60.0
SOURCE = """
import os
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward

class Echo(SingleTurnEnvironment):
    secrets = ("JUDGE_KEY",)

    def examples(self, split):
        return ListSource([Example(id="a", prompt="a", answer="a")])

    @reward
    def right(self, rollout, example):
        return float(os.environ.get("JUDGE_KEY") == "known" and "OTHER_KEY" not in os.environ)
"""


@pytest.fixture
def order(tmp_path: Path) -> WorkerOrder:
    (tmp_path / "echo_environment.py").write_text(SOURCE)
    return WorkerOrder(
        number=0,
        environment=f"{tmp_path / 'echo_environment.py'}:Echo",
        index=0,
        label="environment process 0 of echo",
        processes=ProcessSettings(isolation=Isolation.PROCESS, log_folder=tmp_path / "logs"),
    )


class RelayEnd:
    """The driver's hold on a relay on another event loop."""

    def __init__(self, relay: WorkerRelay, transport: asyncio.Transport, there: "There") -> None:
        self.relay, self.transport, self._there = relay, transport, there

    async def end(self, *, within_s: float) -> None:
        self.kill()
        async with asyncio.timeout(within_s):
            await self.until_ended()

    async def until_ended(self) -> None:
        await self._there(self.relay.until_ended())

    def kill(self) -> None:
        self.transport.abort()

    async def epitaph(self) -> str:
        return await self._there(self.relay.epitaph())


class There:
    """An event loop in a thread, as Ray has for the methods of an actor: of uvloop."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)


class LocalLauncher:
    """Starts relays in this process, as actors on nodes would."""

    def __init__(self, there: There) -> None:
        self._there = there
        self.ends: list[RelayEnd] = []

    async def launch(
        self, order: WorkerOrder, protocol: asyncio.Protocol, *, silence_s: float
    ) -> Lifeline:
        relay = WorkerRelay(order, ["JUDGE_KEY"], Network(is_local=True))
        listening = await self._there(relay.listen(SECRET))
        transport = await _connected(listening, SECRET, protocol)
        self.ends.append(RelayEnd(relay, transport, self._there))
        return self.ends[-1]


@pytest.mark.slow
async def test_rollouts_are_played_there_with_that_node_s_secrets_also_after_a_loss(
    order: WorkerOrder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray's actors run on uvloop, whose transports are not of asyncio's classes."""
    monkeypatch.setenv("JUDGE_KEY", "known")
    monkeypatch.setenv("OTHER_KEY", "not declared")
    there = There()
    try:
        await play_twice(order, there)
    finally:
        there.close()
    assert list((tmp_path / "logs").iterdir())


async def play_twice(order: WorkerOrder, there: There) -> None:
    places = EnvironmentPlaces()
    pool = open_environment(
        order.environment,
        processes=order.processes,
        places=places.of(order.environment, order.processes),
    )
    with pytest.raises(EnvironmentProcessError, match="before the cluster was joined"):
        await places.of("x", order.processes)[0].start(asyncio.Protocol(), silence_s=1.0)
    launcher = places.launcher = LocalLauncher(there)
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await reward_of(pool) == 1.0
            launcher.ends[0].kill()  # as when its node is lost
            await launcher.ends[0].until_ended()
            assert await reward_of(pool) == 1.0
        assert len(launcher.ends) == 2
    finally:
        await pool.close()


async def reward_of(pool: EnvironmentClient) -> float:
    """Return the reward of a rollout; one whose worker is lost is played again."""
    while True:
        rollout = await pool.play(
            PlayRequest(
                group_id="g",
                index=0,
                split=Split.TRAIN,
                example_index=0,
                sampling=Sampling(max_tokens=8),
                deadline_s=30.0,
            ),
            ScriptedClient(["a"]).policy("g/0"),
        )
        if rollout.reward is not None:
            return rollout.reward
        assert "EnvironmentProcessError" in (rollout.error or ""), rollout


async def test_who_does_not_show_the_secret_gets_no_worker(order: WorkerOrder) -> None:
    relay = WorkerRelay(order, [], Network(is_local=True))
    listening = await relay.listen(SECRET)
    assert listening.host == "127.0.0.1"
    for given in (b"x" * len(SECRET), b"", SECRET[:-1].encode()):
        reader, writer = await asyncio.open_connection(listening.host, listening.port)
        writer.write(given)
        writer.write_eof()
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()
    assert relay._worker is None
    relay._server.close()
