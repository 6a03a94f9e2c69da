"""A checkpoint proves itself: what is not what was written is found before its use, and named."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.checkpoints.test_resume import end_process, point_of

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.records.folders import remove_folder
from telescope_train.backends.protocol import DamagedStateError
from telescope_train.checkpoints import export, folders
from telescope_train.checkpoints.export import export_checkpoint
from telescope_train.checkpoints.folders import (
    RemovedCheckpointError,
    by_moving_it,
    complete_checkpoints,
    find_checkpoints,
    read_checkpoint,
    read_whole,
    restore,
)
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.plan.notes import notes_of
from telescope_train.plan.prepared import prepare
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parents[1]))
from resume_run import config_of, settings_of

SHARD, METADATA, SAMPLER = "state/__0_0.distcp", "state/.metadata", "sampler.msgpack"


class Idle:
    """A sampler that waits at the beginning of a batch."""

    async def settled(self, version):
        return SamplerState(next_batch=version, draw_position=0, batches={})


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory):
    """The folder of a run with real checkpoints of steps 2 and 4, and the last one, of step 10."""
    folder = tmp_path_factory.mktemp("written")
    config = config_of(folder, tiny, "--checkpoint_every", "2")

    async def save():
        RunFolder.create(folder / "run", config=config.model_dump(mode="json"), name="run")
        ranks = LocalRanks(TrainerWorker(settings_of(config)))
        try:
            checkpointer = Checkpointer(SavedRun.from_config(config, {}), ranks, Idle())
            for step in (2, 4):
                await checkpointer.after_step(step)
            await checkpointer.finish(10)
        finally:
            await ranks.close()

    asyncio.run(save())
    end_process(folder / "run")
    return folder


@pytest.fixture
def saved(written, tiny, tmp_path):
    """A copy of it, without the last checkpoint, and the settings that go on from its newest."""
    shutil.copytree(written / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "final")
    return config_of(
        tmp_path, tiny, "--checkpoint_every", "2", "--resume_from_checkpoint", "latest"
    )


@pytest.fixture
def newest(saved, tmp_path):
    return tmp_path / "run" / "checkpoints" / "step-000004"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.slow
def test_the_manifest_proves_every_file(written):
    for checkpoint in complete_checkpoints(written / "run" / "checkpoints"):
        path = checkpoint.path
        there = {one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()}
        assert checkpoint.manifest.files.keys() == there - {"checkpoint.json"}
        assert {SHARD, METADATA, SAMPLER, "model/config.json"} <= there
    assert "hf/model.safetensors" in checkpoint.manifest.files


@pytest.mark.slow
@pytest.mark.parametrize("name", [SHARD, METADATA, SAMPLER, "model/config.json"])
@pytest.mark.parametrize("harm", [cut, Path.unlink], ids=["cut", "missing"])
def test_one_that_lacks_a_part_is_passed_over_with_a_line(saved, newest, name, harm):
    assert point_of(saved).checkpoint.step == 4
    assert point_of(saved).notes == ()
    harm(newest / name)
    point = point_of(saved)
    assert point.checkpoint.step == 2
    (note,) = point.notes
    assert all(part in note for part in (str(newest), name, "step-000002"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["__1_0.distcp", "random-1.pkl"])
def test_a_part_of_another_checkpoint_is_not_taken_up(saved, newest, name):
    shutil.copy(newest / SHARD, newest / "state" / name)
    point = point_of(saved)
    assert point.checkpoint.step == 2
    assert name in point.notes[0]
    with pytest.raises(ConfigError, match=name):
        read_whole(newest, by_moving_it)


def test_a_manifest_that_cannot_be_read_hides_no_other_checkpoint(saved, newest):
    cut(newest / "checkpoint.json")
    point = point_of(saved)
    assert (point.checkpoint.step, len(point.notes)) == (2, 1)


def test_what_a_finished_run_has_lost_is_not_trained_again_unasked(saved, newest, written):
    final = newest.with_name("final")
    shutil.copytree(written / "run" / "checkpoints" / "final", final)
    cut(final / SHARD)
    RunFolder(newest.parents[1]).finish()
    with pytest.raises(ConfigError, match="the run is finished") as refused:
        point_of(saved)
    assert all(part in str(refused.value) for part in (SHARD, str(newest)))


def test_when_none_is_whole_the_error_says_what_each_lacks(saved, newest):
    cut(newest / SHARD)
    (newest.with_name("step-000002") / METADATA).unlink()
    section = saved.checkpoint.model_copy(
        update={"resume_if_saved": True, "resume_from_checkpoint": None}
    )
    # Also for a queue: a run that has saved something is not begun again over it.
    for config in (saved, saved.model_copy(update={"checkpoint": section})):
        with pytest.raises(ConfigError, match="no complete checkpoint") as refused:
            point_of(config)
        assert all(part in str(refused.value) for part in (str(newest), SHARD, METADATA))


@pytest.mark.slow
@pytest.mark.parametrize("name", [METADATA, SAMPLER, "model/config.json"])
def test_small_files_with_another_bit_are_refused_before_the_start(saved, newest, name):
    flip(newest / name)
    with pytest.raises(ConfigError) as refused:
        point_of(saved)
    older = newest.with_name("step-000002")
    assert all(part in str(refused.value) for part in (name, str(newest), str(older), "mv "))
    shutil.move(newest, newest.parents[1] / "damaged-step-000004")  # as it says
    assert point_of(saved).checkpoint.path == older


def test_the_one_that_is_recommended_was_read_as_a_whole(saved, newest):
    flip(newest / METADATA)
    flip(newest.with_name("step-000002") / SHARD)
    with pytest.raises(ConfigError, match="no older one that is whole"):
        point_of(saved)


def test_a_path_that_was_given_is_refused_with_another_path(tiny, tmp_path, saved, newest):
    cut(newest / SHARD)
    flags = ("--name", "other", "--resume_from_checkpoint", str(newest))
    with pytest.raises(ConfigError) as refused:
        point_of(config_of(tmp_path, tiny, *flags))
    wanted = f"--resume_from_checkpoint {newest.with_name('step-000002')}"
    assert all(part in str(refused.value) for part in (SHARD, wanted))


@pytest.mark.parametrize("is_mixed", [False, True], ids=["a bit", "of another checkpoint"])
def test_what_is_damaged_is_not_exported(saved, newest, tmp_path, is_mixed):
    older = newest.with_name("step-000002")
    name = METADATA if is_mixed else SHARD
    if is_mixed:
        shutil.copy(older / name, newest / name)
    else:
        flip(newest / name)
    with pytest.raises(ConfigError) as refused:
        export_checkpoint(
            read_checkpoint(newest), tmp_path / "hf", dtype=None, max_shard_size="1GB"
        )
    assert all(part in str(refused.value) for part in (name, f"telescope export {older}"))
    assert not (tmp_path / "hf").exists()


def test_a_newer_one_is_recommended_where_no_older_one_is_whole(saved, newest, tmp_path):
    older = read_checkpoint(newest.with_name("step-000002"))
    flip(older.path / SHARD)
    with pytest.raises(ConfigError, match=rf"is damaged.*no older one.*telescope export {newest}"):
        export_checkpoint(older, tmp_path / "hf", dtype=None, max_shard_size="1GB")


@pytest.mark.parametrize("when", ["before", "reading", "writing"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_one_that_its_run_removed_is_not_called_damaged(
    saved, newest, tmp_path, monkeypatch, when, is_inside
):
    older = read_checkpoint(newest.with_name("step-000002"))
    calls = {"before": "require_whole", "reading": "read_weights", "writing": "write_sums"}
    then = getattr(export, calls[when])

    def removing(*arguments):
        remove_folder(older.path)
        return then(*arguments) if when != "writing" else None

    monkeypatch.setattr(export, calls[when], removing)
    output = older.export_path if is_inside else tmp_path / "hf"
    if when == "writing" and not is_inside:
        # All of it was read by then.
        export_checkpoint(older, output, dtype=None, max_shard_size="1GB")
        assert (output / "model.safetensors").is_file()
        return
    with pytest.raises(RemovedCheckpointError) as told:
        export_checkpoint(older, output, dtype=None, max_shard_size="1GB")
    said = str(told.value)
    assert "removed meanwhile" in said
    assert said.endswith(f"holds step-000004; to export that one: telescope export {newest}")
    assert [one.name for one in newest.parent.iterdir()] == ["step-000004"]
    assert not output.exists()


@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("by_path", [False, True])
def test_what_a_renamed_or_copied_run_is_told_works(
    tiny, tmp_path, saved, newest, is_renamed, by_path
):
    copy = tmp_path / "copy"
    shutil.copytree(newest.parents[1], copy)
    if is_renamed:
        shutil.rmtree(newest.parents[1])
    path = copy / "checkpoints" / newest.name
    given = ("--resume_from_checkpoint", str(path) if by_path else "latest")
    every = ("--checkpoint_every", "2")
    with pytest.raises(ConfigError) as told:
        point_of(config_of(tmp_path, tiny, *every, "--name", "copy", *given))
    found = re.search(r"move it \((.*)\) and give (.*) --resume(.*); to start", str(told.value))
    assert str(told.value).endswith(f"and --resume_from_checkpoint {path}")
    new = ("--name", "new", "--resume_from_checkpoint", str(path))
    assert point_of(config_of(tmp_path, tiny, *every, *new)).checkpoint.path == path
    subprocess.run(found[1], shell=True, check=True)
    flags = f"{found[2]}{found[3]}".split()
    config = config_of(tmp_path, tiny, *every, *flags, "--resume_from_checkpoint", "latest")
    assert point_of(config).is_same_run
    assert ("--output_dir" in flags) != is_renamed


def test_a_path_that_is_gone_is_answered_with_what_is_there(tiny, tmp_path, saved, newest):
    remove_folder(newest)
    flags = ("--name", "other", "--resume_from_checkpoint", str(newest))
    with pytest.raises(ConfigError, match=r"no folder of that name, and .* holds step-000002$"):
        point_of(config_of(tmp_path, tiny, *flags))


def test_one_that_is_removed_while_they_are_listed_is_not_broken(saved, newest, monkeypatch):
    then = folders.read_checkpoint

    def removing(path):
        if path == newest:
            remove_folder(path)
        return then(path)

    monkeypatch.setattr(folders, "read_checkpoint", removing)
    found = find_checkpoints(newest.parent)
    assert [one.path.name for one in found.complete] == ["step-000002"]
    assert found.broken == {}


@pytest.mark.slow
async def test_ranks_prove_their_files_before_they_load_them(tiny, tmp_path, saved, newest):
    worker = TrainerWorker(settings_of(config_of(tmp_path, tiny)))
    ranks = LocalRanks(worker)
    try:
        before = {name: value.clone() for name, value in worker.export_weights()}
        await restore(ranks, read_checkpoint(newest), by_moving_it)
        flip(newest / SHARD)
        with pytest.raises(ConfigError) as refused:
            await restore(ranks, read_checkpoint(newest), by_moving_it)
        assert all(part in str(refused.value) for part in (SHARD, "step-000002", "mv "))
        after = dict(worker.export_weights())
        assert all((after[name] == value).all() for name, value in before.items())
        # One of an earlier version proves nothing, but a file that torch cannot read is named.
        cut(newest / SHARD)
        with pytest.raises(DamagedStateError, match="step-000004"):
            await ranks.load_checkpoint(newest / "state", {})
    finally:
        await ranks.close()


@pytest.mark.slow
def test_one_of_an_earlier_version_goes_on_and_is_told_as_unproved(saved, newest):
    path = newest / "checkpoint.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]
    path.write_text(json.dumps(manifest))
    point = point_of(saved)
    assert point.checkpoint.step == 4
    (note,) = point.notes
    assert "without checksums" in note
    cut(newest / SAMPLER)
    with pytest.raises(ConfigError, match=SAMPLER) as refused:
        point_of(saved)
    assert "step-000002" in str(refused.value)
    cut(newest / SHARD)
    with pytest.raises(DamagedStateError, match="step-000004"):
        export_checkpoint(read_checkpoint(newest), newest / "hf", dtype=None, max_shard_size="1GB")


@pytest.mark.slow
def test_only_a_run_that_has_evals_left_needs_what_it_sampled(written, tiny, tmp_path):
    """One that has nothing left but its summary reads no checkpoint."""
    shutil.copytree(written / "run", tmp_path / "run")
    cut(tmp_path / "run" / "checkpoints" / "final" / SAMPLER)
    manifest = tmp_path / "run" / "checkpoints" / "final" / "checkpoint.json"
    fields = json.loads(manifest.read_text())
    del fields["files"]
    manifest.write_text(json.dumps(fields))
    flags = ("--checkpoint_every", "2", "--resume_from_checkpoint", "latest")
    point = point_of(config_of(tmp_path, tiny, *flags))
    assert (point.checkpoint.step, point.is_at_last_step) == (10, True)
    evals = ("--evals", '[{"name": "digit", "eval_every": 5}]')
    with pytest.raises(ConfigError, match=SAMPLER):
        point_of(config_of(tmp_path, tiny, *flags, *evals))


def test_the_plan_says_what_is_passed_over(saved, newest):
    cut(newest / SHARD)
    notes = notes_of(prepare(saved))
    assert any(SHARD in note and "step-000002 is taken" in note for note in notes)
