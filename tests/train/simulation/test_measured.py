"""Speeds that are measured from calls: those of the engine that answered them are found again."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measured_run import OPTIMIZER_S, REQUEST_S, STEP_S, TOKEN_S, UPDATE_S, write_measured_run

from telescope_core.errors import ConfigError
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.measured import (
    Call,
    engine_speed,
    fitted,
    measured_speeds,
    requests_beside,
)
from telescope_train.simulation.virtual_time import run_in_virtual_time

Pauses = list[tuple[float, float]]
SPEED = EngineSpeed(
    slots=64,
    step_s=0.02,
    step_per_request_s=0.001,
    step_per_cached_token_s=0.0,
    prefill_tokens_per_s=1000.0,
)


def played(num_calls: int, paused_s: float) -> tuple[list[Call], Pauses]:
    """Return calls to an engine of `SPEED` that come by chance, and when it was paused."""

    async def main() -> tuple[list[Call], Pauses]:
        clock, chance = asyncio.get_running_loop(), random.Random(1)
        engine = SimulatedEngine(SPEED)
        calls: list[Call] = []
        pauses: Pauses = []

        async def call(index: int) -> None:
            await asyncio.sleep(chance.random() * 60)
            began_s, num_tokens = clock.time(), chance.randint(20, 300)
            await engine.generate(1, num_tokens, rollout_id=f"{index}/0", salt="")
            calls.append(Call("one", began_s, clock.time(), num_tokens))

        async def pause() -> None:
            for _ in range(10):
                await asyncio.sleep(5)
                began_s = clock.time()
                engine.pause(clears_cache=False)
                await asyncio.sleep(paused_s)
                engine.resume()
                pauses.append((began_s, clock.time()))

        await asyncio.gather(pause(), *(call(index) for index in range(num_calls)))
        return calls, pauses

    return run_in_virtual_time(main)


@pytest.mark.parametrize("paused_s", [0.0, 2.0])
def test_an_engine_is_found_again_from_its_calls(paused_s: float) -> None:
    calls, pauses = played(150, paused_s)
    found, call_s = engine_speed(calls, {"one": pauses}, slots=64)
    assert found.slots == 64
    assert found.step_s == pytest.approx(SPEED.step_s, rel=0.15)
    assert found.step_per_request_s == pytest.approx(SPEED.step_per_request_s, rel=0.15)
    assert call_s < 0.2


def test_pauses_that_are_not_known_make_an_engine_look_slow() -> None:
    calls, _ = played(150, 4.0)
    found, _ = engine_speed(calls, {}, slots=64)
    assert found.step_s > 1.15 * SPEED.step_s


TIMES = st.tuples(st.floats(0, 100), st.floats(0.01, 50))


@pytest.mark.slow
@given(st.lists(st.tuples(TIMES, st.sampled_from("ab")), min_size=1, max_size=20))
def test_the_requests_beside_a_call_are_those_of_its_server(drawn: list) -> None:
    calls = [Call(server, began, began + length, 1) for (began, length), server in drawn]
    found_N = requests_beside(calls)
    for call, found in zip(calls, found_N, strict=True):
        shared = (
            min(call.ended_s, other.ended_s) - max(call.began_s, other.began_s)
            for other in calls
            if other.server == call.server
        )
        expected = sum(max(0.0, seconds) for seconds in shared) / (call.ended_s - call.began_s)
        assert found == pytest.approx(expected, abs=1e-6)
        assert found >= 1.0 - 1e-6


def test_no_fitted_time_is_negative() -> None:
    columns_NK = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert fitted(columns_NK, np.array([3.0, 5.0, 7.0])) == pytest.approx([2.0, 1.0])
    found_K = fitted(columns_NK, np.array([1.0, 3.0, 5.0]))
    assert found_K[1] == 0.0
    assert found_K[0] == pytest.approx(22 / 14)


@pytest.mark.slow
def test_a_run_is_found_again_from_its_records(tmp_path) -> None:
    write_measured_run(tmp_path / "run", num_steps=40)
    found = measured_speeds(tmp_path / "run", hidden_size=10**6, slots=32)
    assert found.engine.slots == 32
    assert found.engine.step_s == pytest.approx(STEP_S, rel=0.2)
    assert found.engine.step_per_request_s == pytest.approx(REQUEST_S, rel=0.2)
    assert found.servers.transfer_s <= UPDATE_S
    assert found.trainer.send_s == found.servers.transfer_s
    assert found.trainer.optimizer_s == pytest.approx(OPTIMIZER_S, rel=0.01)
    # The simulation counts tokens in units of 64, in which these rollouts are longer.
    assert 1 / found.trainer.tokens_per_s == pytest.approx(TOKEN_S, rel=0.3)
    assert 1 / found.trainer.tokens_per_s < TOKEN_S


def test_a_run_that_is_too_short_is_refused(tmp_path) -> None:
    write_measured_run(tmp_path / "run", num_steps=5)
    with pytest.raises(ConfigError, match=r"\b2 steps.*\b3\b.*\b5 steps"):
        measured_speeds(tmp_path / "run", hidden_size=None, slots=32)
