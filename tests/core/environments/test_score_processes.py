"""Rewards that run in processes: real ones, which hang, die and raise."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest
from tests.asking import ask

from telescope_core import RolloutStatus, StopReason
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

pytestmark = pytest.mark.slow


@pytest.fixture
def slow_scores(monkeypatch):
    """The module slow_scores, importable by that name here and in the processes."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    spec = importlib.util.find_spec("slow_scores")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "slow_scores", module)
    spec.loader.exec_module(module)
    return module


async def play(client, index, *, deadline_s=300.0):
    request = ask(example_index=index, group_id=f"{index}", deadline_s=deadline_s)
    return await client.play(request, ScriptedClient(["it"]).policy("r"))


async def test_scores_run_in_processes_which_are_killed_when_they_hang(slow_scores):
    client = InProcessEnvironment(slow_scores.SlowScores(), name="slow")
    before = set(psutil.Process().children())
    good = await play(client, 0)
    assert good.reward == 1.0
    assert good.metrics["process"] != os.getpid()

    hung = await play(client, 1, deadline_s=0.3)
    assert hung.stop_reason is StopReason.TIMEOUT
    assert len(set(psutil.Process().children()) - before) == 0, "the one that hangs is killed"

    died = await play(client, 2)
    assert died.status is RolloutStatus.FAILED
    assert died.status_reason == "ProcessDiedError"
    assert "ended with status -9" in died.error

    raised = await play(client, 3)
    assert raised.error.startswith(
        "RewardRaisedError: SlowScores.judged raised KeyError: 'nothing there' (in reward "
    )
    left = await play(client, 4)
    assert left.error.startswith(
        "RewardRaisedError: SlowScores.judged raised SystemExit: bye (in reward"
    )
    again = await asyncio.gather(*(play(client, 0) for _ in range(4)))
    assert [rollout.reward for rollout in again] == [1.0] * 4
    assert len({rollout.metrics["process"] for rollout in again}) <= 2
    await client.close()
    assert set(psutil.Process().children()) - before == set()


async def test_a_class_that_cannot_be_built_elsewhere_says_so(slow_scores, monkeypatch):
    monkeypatch.setenv("ONLY_HERE", str(os.getpid()))
    client = InProcessEnvironment(slow_scores.Unbuildable(), name="slow")
    rollout = await play(client, 0)
    await client.close()
    assert rollout.status is RolloutStatus.FAILED
    assert "ValueError: not in another process" in rollout.error
