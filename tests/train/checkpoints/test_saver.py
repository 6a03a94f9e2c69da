"""What a Checkpointer leaves behind when it is given up, and what a crash leaves of a rename."""

import asyncio
import errno
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from telescope_core.records.folders import end_replacing, sweep
from telescope_train.checkpoints.folders import read_checkpoint
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.config.schema import CheckpointSection, ModelSection


class QuickRanks:
    num_ranks = 1

    async def start_checkpoint(self, folder, *, with_training_state):
        folder.mkdir()
        (folder / ".metadata").write_text("")

    async def checkpoint_is_written(self):
        return True

    async def finish_checkpoint(self):
        return {}

    async def save_pretrained(self, folder):
        folder.mkdir()


def describe(folder: Path, settings: ModelSection) -> None:
    folder.mkdir()


def saved_in(folder: Path) -> SavedRun:
    return SavedRun(
        name="run",
        folder=folder,
        number_of_steps=9,
        section=CheckpointSection(checkpoint_every=1),
        model=ModelSection(model="none"),
        config={},
    )


@pytest.mark.parametrize("slow", ["sweep", "mkdir"])
async def test_nothing_happens_in_the_folder_once_saving_was_given_up(tmp_path, slow):
    begun, may_end = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def in_thread(function, *arguments, **named):
        """Go on when canceled, as a thread does."""
        begun.set()
        await may_end.wait()
        function(*arguments, **named)
        ended.append(function.__name__)

    async def call(function, *arguments, **named):
        if function.__name__ == slow:
            await asyncio.shield(asyncio.ensure_future(in_thread(function, *arguments, **named)))
        else:
            function(*arguments, **named)

    checkpointer = Checkpointer(
        saved_in(tmp_path), QuickRanks(), None, call=call, describe=describe
    )
    step = asyncio.ensure_future(checkpointer.after_step(1))
    await begun.wait()
    step.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not step.done(), "the next checkpoint may use the same folder"
    may_end.set()
    await asyncio.wait([step])
    assert step.cancelled()
    assert ended == [slow]
    await checkpointer.close()


async def test_a_checkpoint_that_is_given_up_says_that_it_had_failed(tmp_path, caplog):
    def fails(folder, settings):
        raise OSError(errno.EIO, "Input/output error")

    found: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context))
    checkpointer = Checkpointer(saved_in(tmp_path), QuickRanks(), None, describe=fails)
    await checkpointer.after_step(1)
    assert checkpointer._writing is not None
    await asyncio.wait([checkpointer._writing])
    with caplog.at_level(logging.WARNING):
        await checkpointer.close()
    del checkpointer
    assert "Input/output error" in caplog.text
    assert found == []


async def test_retention_leaves_what_another_run_saved(tmp_path):
    async def saved(name: str, *steps: int) -> None:
        section = CheckpointSection(checkpoint_every=1, checkpoint_keep_last=1)
        run = replace(saved_in(tmp_path), name=name, section=section)
        checkpointer = Checkpointer(run, QuickRanks(), None, describe=describe)
        for step in steps:
            await checkpointer.after_step(step)
        await checkpointer.written()
        await checkpointer.close()

    await saved("other", 1, 2)
    await saved("run", 3, 4, 5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000002", "step-000005"]


@pytest.mark.parametrize(("keep_last", "kept"), [(None, ["4", "5", "6"]), (1, ["4", "6"])])
async def test_the_last_checkpoint_of_a_run_that_goes_on_is_kept(tmp_path, keep_last, kept):
    section = CheckpointSection(checkpoint_every=1, checkpoint_keep_last=keep_last)
    run = replace(saved_in(tmp_path), section=section)
    for steps, resumed_from in [((4,), None), ((5, 6, 7), tmp_path / "final")]:
        checkpointer = Checkpointer(
            run, QuickRanks(), None, resumed_from=resumed_from, describe=describe
        )
        for step in steps[:-1]:
            await checkpointer.after_step(step)
        for _ in range(2):  # as a run does that is resumed at its last step
            await checkpointer.finish(steps[-1])
        await checkpointer.close()
    found = {path.name: read_checkpoint(path).step for path in tmp_path.iterdir()}
    assert found == {"final": 7, **{f"step-00000{step}": int(step) for step in kept}}
    assert (tmp_path / "step-000004" / "hf").is_dir()


def replaced_halfway(folder: Path) -> None:
    """Leave what a crash does between the two renames of `put_in_place`."""
    for name in (".final.old", ".final.partial"):
        (folder / name).mkdir()
        (folder / name / "which").write_text(name)


@pytest.mark.parametrize("restore", [end_replacing, sweep])
def test_a_crash_between_two_renames_loses_neither_folder(tmp_path, restore):
    replaced_halfway(tmp_path)
    restore(tmp_path)
    assert (tmp_path / "final" / "which").read_text() == ".final.partial"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("partial")] == []


def test_what_was_never_finished_replaces_nothing(tmp_path):
    replaced_halfway(tmp_path)
    (tmp_path / "final").mkdir()
    end_replacing(tmp_path)
    assert list((tmp_path / "final").iterdir()) == []
