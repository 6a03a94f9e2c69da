"""When a run goes on after its ranks died, and when it ends."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope_core.errors import TelescopeError
from telescope_core.records import RunFolder
from telescope_train import run as training
from telescope_train.backends.protocol import RankDiedError
from telescope_train.observability.timeline import UNRECORDED
from telescope_train.restarts import Restarts, run_with_restarts

sys.path.insert(0, str(Path(__file__).parent))
from resume_run import config_of


class Run:
    """Dies at each of `reached` steps, one life after the other."""

    def __init__(self, reached, *, most, dies_in_go_back=()):
        self.reached = list(reached)
        self.restarts = Restarts(most)
        self.step = 0
        self.begun = []
        self.dies_in_go_back = set(dies_in_go_back)
        self.num_back = 0

    async def take_steps(self, begun):
        self.begun.append(begun)
        if self.reached:
            self.step = self.reached.pop(0)
            raise RankDiedError("trainer rank 1 died: killed")

    async def go_back(self, died):
        self.num_back += 1
        if self.num_back in self.dies_in_go_back:
            raise RankDiedError("trainer rank 0 died: no memory")
        return self.step - self.step % 10

    async def play(self):
        await run_with_restarts(
            0,
            self.take_steps,
            go_back=self.go_back,
            died=lambda died: self.restarts.count(died, self.step),
        )


async def test_each_life_begins_where_the_last_one_left_off():
    run = Run([5, 17, 29], most=1)
    await run.play()
    assert run.begun == [0, 0, 10, 20]


async def test_restarts_without_a_further_step_are_bounded():
    run = Run([12, 12, 11, 12, 12, 12], most=3)
    with pytest.raises(
        RankDiedError, match=r"killed.* 3 times in a row .* beyond step 12"
    ) as ended:
        await run.play()
    assert "max_trainer_restarts" in str(ended.value)
    assert run.begun == [0, 10, 10, 10]


async def test_a_further_step_begins_a_new_row():
    run = Run([12, 12, 13, 13, 14], most=2)
    await run.play()
    assert len(run.begun) == 6


async def test_ranks_may_die_while_they_start_again():
    run = Run([12], most=3, dies_in_go_back=[1, 2])
    await run.play()
    assert run.begun == [0, 10]
    with pytest.raises(RankDiedError, match="no memory"):
        await Run([12], most=3, dies_in_go_back=[1, 2, 3]).play()


async def test_without_restarts_the_death_ends_the_run():
    run = Run([3], most=0)
    with pytest.raises(RankDiedError, match=r"^trainer rank 1 died: killed$"):
        await run.play()
    assert (run.begun, run.num_back) == ([0], 0)


async def nothing(*arguments):
    """Take the place of what the other parts of a run do."""


@pytest.mark.parametrize("num_started", [0, 1])
async def test_ranks_of_a_run_without_its_folder_do_not_go_on(
    tiny, tmp_path, monkeypatch, num_started
):
    folder = RunFolder.create(tmp_path / "run", config={}, name="run")
    started = []

    async def start_again(settings, *, num_threads):
        started.append(settings)
        shutil.rmtree(folder.path)
        (folder.path / "logs").mkdir(parents=True)  # as ranks do

    if not num_started:
        shutil.rmtree(folder.path)
    monkeypatch.setattr(training, "rank_settings", lambda prepared: None)
    monkeypatch.setattr(training, "threads_of", lambda prepared: 1)
    resources = SimpleNamespace(
        prepared=SimpleNamespace(config=config_of(tmp_path, tiny), resume=None),
        folder=folder,
        view=SimpleNamespace(warn=lambda line: None, go_back=lambda step: None),
        processes=SimpleNamespace(ranks=SimpleNamespace(close=nothing, start_again=start_again)),
        policies=SimpleNamespace(
            publisher=SimpleNamespace(weights_change=nothing, restore=nothing),
            gpu_sharing=SimpleNamespace(trainer_works=nothing, servers_work=nothing),
            recording=SimpleNamespace(timeline=UNRECORDED),
        ),
    )
    with pytest.raises(TelescopeError, match="is gone: it was removed or moved"):
        await training._go_back(resources, RankDiedError("trainer rank 0 died: killed"))
    assert len(started) == num_started
    assert folder.path.exists() == bool(num_started)
