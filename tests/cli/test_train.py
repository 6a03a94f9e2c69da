"""`telescope train --resume`: what it goes on from, and what it says when there is nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ui.recorded import kill

from telescope_cli import main as cli
from telescope_cli.settings_files import SMALLEST_RUN, SMALLEST_SFT
from telescope_core.base.interrupts import Interrupted
from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_train.plan.load import load_train_config
from telescope_train.sft.config import load_sft_config

ENVIRONMENT = """
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward

class Echo(SingleTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id=str(split), prompt="say")])

    @reward
    def right(self, rollout, example):
        return 1.0
"""
SETTINGS = """
[run]
name = "toy"
number_of_steps = 3
output_dir = "{folder}/runs"

[model]
model = "{folder}/model"

[[environments]]
name = "resumed_environment:Echo"
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from telescope_train.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture
def settings(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "resumed_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS.format(folder=tmp_path))
    return path


def train(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments])
    output = capsys.readouterr()
    # Texts are wrapped for a terminal.
    return int(ended.value.code or 0), " ".join(output.out.split()), " ".join(output.err.split())


@pytest.mark.slow
def test_without_a_run_there_is_nothing_to_resume(settings, capsys):
    code, _, said = train(capsys, str(settings), "--resume")
    assert code == 2
    assert "there is no run in" in said
    assert "start it without --resume" in said
    assert not (settings.parent / "runs").exists()


@pytest.mark.slow
def test_a_queue_begins_a_run_of_which_nothing_is_there(settings, capsys):
    """The same command as for every later try."""
    code, plan, _ = train(capsys, str(settings), "--resume-if-saved", "--dry-run")
    assert "cannot start" not in plan
    assert code == 0
    code, _, said = train(capsys, str(settings), "--resume", "--resume-if-saved", "--dry-run")
    assert code == 2
    assert "remove one of them" in said


@pytest.mark.slow
def test_a_run_without_a_checkpoint_says_how_to_go_on(settings, capsys):
    (settings.parent / "runs" / "toy").mkdir(parents=True)
    (settings.parent / "runs" / "toy" / "run.json").write_text("{}")
    code, plan, _ = train(capsys, str(settings), "--resume", "--dry-run")
    assert code == 2
    assert "has no complete checkpoint" in plan
    assert "start it again from the beginning" in plan
    assert "checkpoint_every" in plan


@pytest.mark.slow
def test_resume_wins_over_the_checkpoint_that_a_run_began_with(settings, capsys):
    """A run that was started from another one's checkpoint goes on from its own."""
    begun_with = '[checkpoint]\nresume_from_checkpoint = "elsewhere"\n'
    settings.write_text(settings.read_text() + begun_with)
    _, plan, _ = train(capsys, str(settings), "--dry-run")
    assert "'elsewhere' holds no checkpoint" in plan
    _, plan, _ = train(capsys, str(settings), "--resume", "--dry-run")
    assert "elsewhere" not in plan
    assert "there is no run in" in plan


@pytest.mark.parametrize(
    "other",
    [
        ["--resume_from_checkpoint", "latest"],
        ["--checkpoint.resume_from_checkpoint", "x"],
        ["--resume-from-checkpoint=x"],
    ],
)
def test_two_ways_to_resume_are_one_too_many(settings, capsys, other):
    code, _, said = train(capsys, str(settings), "--resume", *other)
    assert code == 2
    assert "--resume and --resume_from_checkpoint say where to go on; give one of them" in said


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (["--fork", "x"], "--at"),
        (["--at", "2"], "--fork"),
        (["--fork", "nowhere", "--at", "2"], "nowhere: no such folder"),
        (["--fork", "model", "--at", "2"], "no run.json"),
        (["--fork", "x", "--at", "2", "--resume_from_checkpoint", "y"], "give one of them"),
    ],
)
def test_a_fork_needs_a_run_and_a_step(settings, capsys, monkeypatch, flags, fact):
    monkeypatch.chdir(settings.parent)
    code, _, said = train(capsys, *flags)
    assert code == 2
    assert fact in said


@pytest.mark.slow
def test_the_plan_of_a_fork_says_where_it_begins_and_what_is_changed(
    settings, capsys, monkeypatch, tiny
):
    from telescope_train.checkpoints.folders import CheckpointManifest
    from telescope_train.checkpoints.resume import open_run_folder
    from telescope_train.checkpoints.sampler_state import write_sampler_state
    from telescope_train.plan.load import load_train_config
    from telescope_train.plan.prepared import prepare
    from telescope_train.rollouts.sampled import SamplerState

    prepared = prepare(load_train_config([settings]))
    run = open_run_folder(prepared.config, None, prepared.environments.records, prepared.inputs)
    saved = run.checkpoints_path / "step-000002"
    (saved / "state").mkdir(parents=True)
    (saved / "state" / ".metadata").write_text("")
    manifest = CheckpointManifest(
        run="toy",
        step=2,
        num_ranks=1,
        has_training_state=True,
        config=prepared.config.model_dump(mode="json"),
        environment_records=dict(prepared.environments.records),
        inputs=dict(prepared.inputs),
    )
    (saved / "checkpoint.json").write_text(manifest.model_dump_json())
    write_sampler_state(saved, SamplerState(next_batch=2, draw_position=0, batches={}))
    monkeypatch.chdir(settings.parent)
    fork = ["--fork", "toy", "--at", "2", "--dry-run"]
    code, plan, _ = train(capsys, *fork, "--learning_rate", "1e-5")
    assert "continuing from runs/toy/checkpoints/step-000002 (2 steps done)" in plan
    assert "changed since: trainer.learning_rate: 1e-06 -> 1e-05" in plan
    assert "written to runs/toy-fork-2" in plan
    assert code == 0
    code, plan, _ = train(capsys, *fork, "--seed", "1")
    assert code == 2
    assert "run.seed: 0 -> 1" in plan
    assert [path.name for path in (settings.parent / "runs").iterdir()] == ["toy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_run", "remedy"), [(True, "--resume-if-saved"), (False, "--name")], ids=["run", "notes"]
)
def test_a_folder_in_the_way_stays_and_the_way_on_is_named(settings, capsys, is_run, remedy):
    """A run that saved nothing can begin again; a folder of anything else is somebody's."""
    folder = settings.parent / "runs" / "toy"
    if is_run:
        kill(RunFolder.create(folder, config={}))
    else:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for flags in (("--dry-run",), ()):
        code, out, err = train(capsys, str(settings), *flags)
        assert code == 2
        (said,) = re.findall(r"/runs/toy is not empty[^.]*", out + err)
        assert re.findall(r"--[a-z-]+", said)[0] == remedy
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_signal_while_the_pages_of_the_report_are_written_is_no_interrupted_run(
    settings, tmp_path, capsys, monkeypatch
):
    def signalled(run: RunFolder) -> None:
        raise Interrupted(signal.SIGTERM)

    report = tmp_path / "runs" / "toy" / "report.html"
    monkeypatch.setattr("telescope_train.run.run_training", lambda _: {"report": str(report)})
    monkeypatch.setattr("telescope_cli.run_report.write_run_report", signalled)
    code, out, err = train(capsys, str(settings), "--json")
    assert (code, json.loads(out)) == (0, {"report": str(report)})
    assert f"the run has finished; {report} has no pages" in err


@pytest.mark.parametrize(
    ("call", "load", "smallest"),
    [
        (["train", "--name", "a"], load_train_config, SMALLEST_RUN),
        (["simulate"], load_train_config, SMALLEST_RUN),
        (["sft"], load_sft_config, SMALLEST_SFT),
    ],
)
def test_without_settings_the_smallest_file_is_shown(call, load, smallest, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(call)
    assert ended.value.code == 2
    assert smallest.strip() in capsys.readouterr().err
    written = tmp_path / "run.toml"
    written.write_text(smallest)
    load([written], [])
    for line in re.findall(r"^\w+ = .*$", smallest, re.MULTILINE):
        written.write_text(smallest.replace(line, ""))
        with pytest.raises(ConfigError):
            load([written], [])


def test_help_shows_how_to_resume(capsys):
    code, said, _ = train(capsys, "--help")
    assert code == 0
    assert "telescope train run.toml --resume" in said
    assert "Go on from the newest checkpoint" in said
    assert "telescope train --fork quickstart --at 20 --learning_rate 1e-5" in said


@pytest.mark.slow
def test_the_installed_command_completes(tmp_path):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "run.json").write_text("{}")
    environ = {
        "_TELESCOPE_COMPLETE": "complete_bash",
        "COMP_WORDS": "telescope train --fork quick",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("telescope")],
        env=os.environ | environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["quickstart"]
