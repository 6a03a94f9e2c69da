"""`resume_if_saved`: one command for the first try of a queue and for every later one."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.records.identity import NOTHING_SAVED
from telescope_train.checkpoints.resume import (
    LATEST,
    drop_repeated,
    location_problems,
    open_run_folder,
    resume_point,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from resume_run import config_of, records_of
from tests.train.checkpoints.test_resume import checkpoint_at, end_process

IF_SAVED = ("--checkpoint_every", "5", "--resume_if_saved", "true")


@pytest.fixture
def config(tiny, tmp_path):
    return config_of(tmp_path, tiny, *IF_SAVED)


def a_try(config, *, num_steps: int, host: str | None = None) -> RunFolder:
    """An earlier try that was killed after so many steps."""
    path = Path(config.run.output_dir) / "run"
    folder = RunFolder.create(path, config=config.model_dump(mode="json"), name="run")
    for step in range(1, num_steps + 1):
        folder.log_metrics({"step": step})
    if host is None:
        end_process(path)
    else:
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(info | {"host": host}))
    return folder


def begun(config):
    """Open the run; returns its folder and where it begins, or why it does not."""
    point = resume_point(config, records_of(config))
    if problems := location_problems(config, point):
        return problems, point
    folder = open_run_folder(config, point, records_of(config))
    drop_repeated(point, folder)
    return folder, point


def test_the_first_try_begins(config):
    folder, point = begun(config)
    assert (folder.info().resumes, point) == ((), None)


@pytest.mark.slow
@pytest.mark.parametrize("host", [None, "a node that is lost"])
def test_a_try_that_saved_nothing_is_repeated_in_its_folder(config, host):
    a_try(config, num_steps=7, host=host)
    folder, point = begun(config)
    assert point is None
    assert folder.metrics() == []
    (resume,) = folder.info().resumes
    assert (resume.step, resume.checkpoint) == (0, NOTHING_SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("host", [None, "a node that is lost"])
def test_a_try_that_saved_something_goes_on(config, host):
    folder = a_try(config, num_steps=7, host=host)
    checkpoint_at(folder.checkpoints_path, 5)
    manifest = folder.checkpoints_path / "step-000005" / "checkpoint.json"
    settings = config.model_dump(mode="json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"config": settings}))
    folder, point = begun(config)
    assert (point.checkpoint.step, point.is_same_run) == (5, True)
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_try_that_was_killed_while_it_replaced_its_checkpoint_goes_on(config):
    """Between two renames, none of the two folders has the name of a checkpoint."""
    folder = a_try(config, num_steps=7)
    settings = config.model_dump(mode="json")
    for step, name in ((4, ".final.old"), (5, ".final.partial")):
        checkpoint_at(folder.checkpoints_path, step, name=name)
        manifest = folder.checkpoints_path / name / "checkpoint.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"config": settings}))
    _, point = begun(config)
    assert (point.checkpoint.path.name, point.checkpoint.step) == ("final", 5)


@pytest.mark.slow
def test_a_run_that_began_at_a_checkpoint_begins_there_again(tiny, config, tmp_path):
    checkpoint_at(tmp_path / "other", 3)
    saved = tmp_path / "other" / "step-000003"
    config = config_of(tmp_path, tiny, *IF_SAVED, "--resume_from_checkpoint", str(saved))
    manifest = json.loads((saved / "checkpoint.json").read_text())
    manifest["config"] = config.model_dump(mode="json")
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    a_try(config, num_steps=7)
    folder, point = begun(config)
    assert (point.checkpoint.path, point.is_same_run) == (saved, False)
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("had", ["nothing saved", "a checkpoint", "finished"])
def test_a_new_run_in_its_place_is_told_what_takes_it_up(tiny, tmp_path, had):
    config = config_of(tmp_path, tiny, *IF_SAVED[:2])
    folder = a_try(config, num_steps=7)
    if had == "finished":
        folder.finish()
    elif had == "a checkpoint":
        checkpoint_at(folder.checkpoints_path, 5)
    (problem,), _ = begun(config)
    told = [word for word in problem.split() if word.startswith("--resume")]
    advice = {"nothing saved": ["--resume-if-saved"], "a checkpoint": ["--resume"], "finished": []}
    assert told == advice[had]
    assert "give another --name, or move the folder" in problem


def test_records_that_nothing_brings_back_are_kept(config):
    """Two checkpoints were due, so that their folder is gone rather than empty."""
    folder = a_try(config, num_steps=10)
    (problem,), _ = begun(config)
    assert "took 10 steps and saved every 5" in problem
    assert "bring back the folder with its checkpoints" in problem
    folder.finish()
    (problem,), _ = begun(config)
    assert "is finished" in problem
    assert len(folder.metrics()) == 10


@pytest.mark.parametrize("flags", [(), ("--resume_from_checkpoint", LATEST), IF_SAVED[2:]])
@pytest.mark.parametrize("has_saved", [False, True])
def test_a_run_that_is_going_on_is_left_alone(tiny, tmp_path, flags, has_saved):
    config = config_of(tmp_path, tiny, *IF_SAVED[:2], *flags)
    folder = RunFolder.create(tmp_path / "run", config={}, name="run")
    folder.log_metrics({"step": 1})
    if has_saved:
        # It replaces its newest checkpoint now, which nobody else may end.
        for name in (".final.old", ".final.partial"):
            checkpoint_at(folder.checkpoints_path, 5, name=name)
    files = sorted(tmp_path.rglob("*"))
    advice = "stop it before you resume it" if flags else "wait for it or stop it"
    said = rf"still going on \(process {os.getpid()} on .*\); {advice}, or give another --name$"
    with pytest.raises(ConfigError, match=said):
        resume_point(config, records_of(config))
    assert (folder.info().resumes, len(folder.metrics())) == ((), 1)
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("flags", [(), ("--resume_from_checkpoint", LATEST)])
def test_a_copy_of_a_run_that_is_going_on_is_told_from_it(tiny, tmp_path, flags):
    checkpoint_at(RunFolder.create(tmp_path / "run", config={}).checkpoints_path, 5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    config = config_of(tmp_path, tiny, "--name", "copy", *flags)
    with pytest.raises(ConfigError) as told:
        resume_point(config, records_of(config))
    said = str(told.value)
    assert "that of the run 'run': if the folder is a copy" in said
    assert f"--resume_from_checkpoint {tmp_path}/copy/checkpoints/step-..." in said


@pytest.mark.parametrize("flags", [(), ("--resume_from_checkpoint", LATEST)])
def test_a_try_on_a_machine_that_may_be_lost_is_left_to_queues(tiny, tmp_path, flags):
    config = config_of(tmp_path, tiny, *IF_SAVED[:2], *flags)
    a_try(config, num_steps=1, host="a node that is lost")
    with pytest.raises(ConfigError, match=r"on a node that is lost.*--resume-if-saved goes on"):
        resume_point(config, records_of(config))
