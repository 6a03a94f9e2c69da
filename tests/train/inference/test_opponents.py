"""Older versions of the policy: which server holds which, after any step and after losses."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulation.fleet import SimulatedFleet
from tests.train.simulated_config import small_batches

from telescope_core.errors import ProcessDiedError
from telescope_core.records.servers import ServerRole, ServerState
from telescope_core.types import Sampling
from telescope_train import run
from telescope_train.cluster.supervision import supervised
from telescope_train.inference.generation import ServerLostError
from telescope_train.inference.opponents import KeptVersions, OpponentServers
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.supervisor import Supervisor
from telescope_train.loop import train
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.environments import Workload, lognormal
from telescope_train.simulation.run import History, Scenario, SimulatedRun
from telescope_train.simulation.servers import ServerTimes, SimulatedClient, SimulatedPolicy
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.weights.publish import WeightPublisher


@given(servers=st.integers(1, 5), every=st.integers(1, 7), steps=st.integers(0, 60))
def test_servers_hold_the_last_versions_that_were_kept(servers, every, steps):
    kept = KeptVersions(num_servers=servers, update_every=every)
    held = [0] * servers
    for step in range(1, steps + 1):
        server = kept.server_of(step)
        if server is not None:
            assert held[server] == min(held), "the oldest one goes"
            held[server] = step
    assert kept.at(steps) == held
    newest = list(range(every, steps + 1, every))[-servers:]
    assert sorted(held) == [0] * (servers - len(newest)) + newest


def test_a_run_without_them_has_none():
    kept = KeptVersions(num_servers=0, update_every=10)
    assert kept.at(20) == []
    assert kept.server_of(20) is None


def opponent_servers(num_servers):
    engines = [SimulatedEngine(EngineSpeed(), name=str(n)) for n in range(num_servers)]
    clients = [SimulatedClient(one, ServerTimes(), lambda: "") for one in engines]
    pools = [ServerPool([one], is_kept=True, role=ServerRole.OPPONENT) for one in clients]
    return OpponentServers(pools, KeptVersions(num_servers=num_servers, update_every=2))


async def test_each_version_goes_to_the_server_whose_turn_it_is():
    opponents, sent = opponent_servers(2), []

    async def send(pool):
        sent.append(opponents.pools.index(pool))

    await opponents.begin(send)
    assert sent == [0, 1]
    sent.clear()
    for step in range(1, 7):
        await opponents.after_step(step, send)
    assert sent == [0, 1, 0]
    # One that was lost and is back has no weights, and does not wait for its turn.
    (lost,) = opponents.pools[1].servers
    for state in (ServerState.LOST, ServerState.STARTING, ServerState.LOADING):
        lost.become(state)
    sent.clear()
    await opponents.after_step(7, send)
    assert sent == [1]


async def test_groups_play_against_all_versions_and_a_lost_one_is_left_out():
    opponents = opponent_servers(3)
    groups = [f"nim/{number}" for number in range(300)]
    drawn = {group: opponents.pool_of(group) for group in groups}
    assert all(opponents.pool_of(group) is pool for group, pool in drawn.items())
    shares = [sum(pool is one for pool in drawn.values()) for one in opponents.pools]
    assert min(shares) > 60, shares
    (lost,) = opponents.pools[0].servers
    lost.become(ServerState.LOST)
    assert {id(opponents.pool_of(group)) for group in groups} == {
        id(one) for one in opponents.pools[1:]
    }
    for pool in opponents.pools[1:]:
        pool.servers[0].become(ServerState.LOST)
    assert opponents.pool_of("nim/0") in opponents.pools, "it waits until one is back"


def test_the_run_goes_on_while_one_opponent_is_left_and_no_match_waits_for_a_lost_one():
    async def main() -> None:
        opponents = opponent_servers(2)
        first, second = opponents.pools
        engines = [one.clients[0].engine for one in opponents.pools]
        fleet = SimulatedFleet(engines, start_s=1.0, failed_starts=10**6)
        supervisors = [
            Supervisor(one, fleet, bring_in, first=number, beside=opponents.pools).run()
            for number, one in enumerate(opponents.pools)
        ]

        async def work() -> None:
            engines[0].die("killed")
            await first.servers[0].until(ServerState.LOST)
            asked = asyncio.create_task(SimulatedPolicy(first, "g/0").say(SAMPLING, **SHORT))
            await first.servers[0].until(ServerState.GIVEN_UP)
            with pytest.raises(ServerLostError, match="no inference server is left"):
                await asked
            assert {id(opponents.pool_of(f"nim/{n}")) for n in range(20)} == {id(second)}
            await SimulatedPolicy(second, "g/0").say(SAMPLING, **SHORT)
            engines[1].die("killed")
            await second.servers[0].until(ServerState.LOST)
            assert {id(opponents.pool_of(f"nim/{n}")) for n in range(20)} == {id(second)}
            await asyncio.Event().wait()

        with pytest.raises(ProcessDiedError, match="with the role opponent is left"):
            await supervised(work(), supervisors, grace_s=0.0)

    async def bring_in(server):
        raise AssertionError("none comes back")

    run_in_virtual_time(main)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_between_two_kept_versions_nothing_is_sent(step):
    assert KeptVersions(num_servers=2, update_every=2).server_of(step) is None


SAMPLING, SHORT = Sampling(max_tokens=64), {"num_new_tokens": 64, "num_tokens": 64}
SCENARIO = Scenario(
    config=small_batches(steps=7),
    workload=Workload(lengths=lognormal(400, 0.5)),
    num_servers=1,
    num_ranks=1,
)


def trained(*, dies_at: int | None = None):
    """Train, and return which versions each opponent has answered with, after each step.

    `dies_at`: the step after which the process of the first opponent dies.
    """
    answered: list[list[tuple[int, ...]]] = []

    async def main() -> None:
        simulated = SimulatedRun(SCENARIO, History())
        engines = [SimulatedEngine(SCENARIO.engine, name=f"older-{n}") for n in range(2)]
        pools = [
            ServerPool(
                [SimulatedClient(one, ServerTimes(), lambda: simulated.ranks.digest)], is_kept=True
            )
            for one in engines
        ]
        opponents = OpponentServers(pools, KeptVersions(num_servers=2, update_every=2))
        publisher = WeightPublisher(
            simulated.pool, simulated.ranks, in_flight="pause", others=pools
        )
        parts = replace(await simulated.parts(), publisher=publisher)
        await publisher.connect()

        async def ask_all() -> None:
            now = []
            for pool in pools:
                policy = SimulatedPolicy(pool, "g/0")
                said = await policy.say(Sampling(max_tokens=640), num_new_tokens=64, num_tokens=640)
                now.append(tuple(span.version for span in said.spans))
            answered.append(now)

        async def after_step(step, row):
            await opponents.after_step(step, publisher.send_to)
            if step == dies_at:
                engines[0].die("killed")
                await pools[0].until_down()
            await ask_all()

        await opponents.begin(publisher.send_to)
        await ask_all()
        fleet = SimulatedFleet(engines, start_s=0.5)
        keeping = [
            Supervisor(one, fleet, publisher.bring_in, first=number).run()
            for number, one in enumerate(pools)
        ]
        try:
            await supervised(train(parts, after_step=after_step), keeping, grace_s=0.0)
        finally:
            await parts.sampler.close()

    run_in_virtual_time(main)
    return answered


def test_beside_training_each_server_answers_with_the_version_that_it_keeps():
    kept = KeptVersions(num_servers=2, update_every=2)
    assert trained() == [[(version,) for version in kept.at(step)] for step in range(8)]


def test_a_server_that_comes_back_has_the_present_version_and_whoever_asks_waits():
    answered = trained(dies_at=3)
    assert answered[:3] == [[(0,), (0,)], [(0,), (0,)], [(2,), (0,)]]
    assert answered[3] == [(3,), (0,)], "its version 2 is gone, and no rank has it any more"
    assert answered[5:] == [[(3,), (4,)], [(6,), (4,)], [(6,), (4,)]]


class Weights:
    """Ranks and publisher in one: notes which version goes where."""

    def __init__(self):
        self.live, self.sent = 0, []

    async def load_checkpoint(self, path, proofs):
        self.loaded = int(path.name)

    async def weights_change(self):
        """Do nothing."""

    async def publish(self, version):
        assert version == self.loaded
        self.live = version

    async def send_to(self, pool):
        self.sent.append((pool, self.live))


def checkpoint(step):
    manifest = SimpleNamespace(run="r")
    return SimpleNamespace(
        step=step,
        path=Path(f"/r/step-{step}"),
        manifest=manifest,
        state_path=Path(f"/r/{step}"),
        state_proofs={},
    )


@pytest.mark.parametrize(
    ("step", "saved", "sent", "num_warnings"),
    [
        (7, [2, 4, 6, 7], [("b", 4), ("a", 6)], 0),
        (6, [2, 4, 6], [("b", 4), ("a", 6)], 0),
        (6, [2, 6], [("a", 6), ("b", 6)], 1),
        (2, [2], [("a", 2)], 0),
        (1, [1], [], 0),
    ],
)
async def test_a_resume_gives_each_server_the_version_that_it_held(
    monkeypatch, step, saved, sent, num_warnings
):
    monkeypatch.setattr(run, "complete_checkpoints", lambda folder: map(checkpoint, saved))
    weights, warnings = Weights(), []
    opponents = OpponentServers(["a", "b"], KeptVersions(num_servers=2, update_every=2))
    resources = SimpleNamespace(
        prepared=SimpleNamespace(
            resume=SimpleNamespace(checkpoint=checkpoint(step), is_same_run=True)
        ),
        policies=SimpleNamespace(opponents=opponents, publisher=weights),
        processes=SimpleNamespace(ranks=weights),
        view=SimpleNamespace(warn=warnings.append),
    )
    assert await run._restore(resources) == step
    assert (weights.sent, weights.live) == (sent, step)
    assert len(warnings) == num_warnings


@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_new_run_publishes_weights_that_were_rounded_more_than_servers_round_them(
    model_dtype, dtype
):
    weights, published = Weights(), []
    weights.publish = AsyncMock(side_effect=published.append)
    prepared = SimpleNamespace(
        resume=None,
        config=SimpleNamespace(model=SimpleNamespace(model_dtype=model_dtype)),
        dtype=dtype,
    )
    policies = SimpleNamespace(opponents=None, publisher=weights)
    assert await run._restore(SimpleNamespace(prepared=prepared, policies=policies)) == 0
    assert published == ([0] if (model_dtype, dtype) == ("bfloat16", "float32") else [])
