"""`--fork RUN --at N`: the settings of RUN, its checkpoint, and what a fork may not change."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.reports.run_comparison import Outcome, compare_runs
from telescope_core.settings.differing import differing
from telescope_train.checkpoints.folders import CheckpointManifest
from telescope_train.checkpoints.resume import open_run_folder, resume_point
from telescope_train.checkpoints.sampler_state import write_sampler_state
from telescope_train.config.origin import origin_of
from telescope_train.plan.fork import load_fork
from telescope_train.plan.load import load_train_config
from telescope_train.rollouts.sampled import SamplerState

sys.path.insert(0, str(Path(__file__).parents[1]))
from resume_run import config_of, contents, numbers, records_of, run


def checkpoint_at(folder: Path, config, step: int, **changed) -> Path:
    path = folder / f"step-{step:06d}"
    (path / "state").mkdir(parents=True)
    (path / "state" / ".metadata").write_text("")
    fields = {
        **{"run": config.run.name, "step": step, "num_ranks": 1, "has_training_state": True},
        "config": config.model_dump(mode="json"),
    }
    manifest = CheckpointManifest(**(fields | changed))
    (path / "checkpoint.json").write_text(manifest.model_dump_json())
    state = SamplerState(next_batch=step, draw_position=0, batches={})
    write_sampler_state(path, state)
    return path


@pytest.fixture
def source(tiny, tmp_path) -> RunFolder:
    """A run with checkpoints of steps 2 and 5, as far as its settings are concerned."""
    return a_run(config_of(tmp_path, tiny, "--max_async_rollout", "0", "--use_tis", "false"))


def a_run(config) -> RunFolder:
    folder = open_run_folder(config, None, {})
    for step in (2, 5):
        checkpoint_at(folder.checkpoints_path, config, step)
    folder.finish()
    return folder


def changed(before, after) -> dict[str, object]:
    configs = {"before": before.model_dump(mode="json"), "after": after.model_dump(mode="json")}
    return {
        one.name: one.values.get("after") for one in differing(configs, {})[0] if not one.is_place
    }


def test_a_fork_is_set_as_its_run_but_for_its_place(source, tiny, tmp_path):
    before = config_of(tmp_path, tiny, "--max_async_rollout", "0", "--use_tis", "false")
    fork = load_fork(source, 5)
    assert changed(before, fork) == {}
    assert (fork.run.name, fork.run.output_dir) == ("run-fork-5", str(tmp_path))
    at = Path(fork.checkpoint.resume_from_checkpoint)
    assert at == source.checkpoints_path / "step-000005"
    # What nobody set still follows from what somebody changes.
    own = {"checkpoint.resume_from_checkpoint", "run.output_dir"}
    assert {*origin_of(fork).given} - own == {*origin_of(before).given} - own


def test_one_changed_setting_is_the_one_difference(source):
    fork = load_fork(source, 5, flags=["--learning_rate", "1e-4", "--name", "slower"])
    assert changed(load_fork(source, 5), fork) == {"trainer.learning_rate": 1e-4}
    point = resume_point(fork, records_of(fork))
    assert point is not None
    assert point.changed == ("trainer.learning_rate: 0.001 -> 0.0001",)
    assert (point.checkpoint.step, point.is_same_run) == (5, False)
    info = open_run_folder(fork, point, {}).info()
    (resume,) = info.resumes
    assert (info.name, resume.step, resume.changed) == ("slower", 5, point.changed)
    assert Path(resume.run) == source.path


def test_what_follows_from_a_change_follows(tiny, tmp_path):
    place = ["--name", "run", "--output_dir", str(tmp_path), "--model", str(tiny)]
    environment = ["--environments", '[{"name": "digit"}]', "--number_of_steps", "9"]
    run = a_run(load_train_config([], [*place, *environment, "--max_async_rollout", "0"]))
    fork = load_fork(run, 2, flags=["--max_async_rollout", "1"])
    follows = {"scheduling.max_async_rollout": 1, "algorithm.use_tis": True}
    assert changed(load_fork(run, 2), fork) == follows


def test_a_default_of_the_version_that_ran_it_holds_for_its_forks(source):
    """Defaults may change with a version, and none may be a second difference."""
    assert load_fork(source, 5).trainer.grad_clip == 1.0
    for name, keys in (
        ("settings.json", ("defaults", "trainer.grad_clip")),
        ("config.json", ("trainer", "grad_clip")),
    ):
        path = source.path / name
        found = json.loads(path.read_text())
        found[keys[0]][keys[1]] = 0.25
        path.write_text(json.dumps(found))
    assert load_fork(source, 5).trainer.grad_clip == 0.25
    assert load_fork(source, 5, flags=["--grad_clip", "2"]).trainer.grad_clip == 2.0


def test_how_the_run_itself_began_is_not_taken_over(tiny, tmp_path):
    flags = ("--resume_if_saved", "true", "--allow_changed_environments", "true")
    run = a_run(config_of(tmp_path, tiny, *flags))
    section = load_fork(run, 2).checkpoint
    assert not section.resume_if_saved
    assert not section.allow_changed_environments
    again = load_fork(run, 2, flags=["--resume_from_checkpoint", "latest"])
    assert again.checkpoint.resume_from_checkpoint == "latest"
    assert again.run.name == "run-fork-2"


@pytest.mark.parametrize("step", [3, 0])
def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(source, step):
    with pytest.raises(ConfigError) as refused:
        load_fork(source, step)
    assert str(refused.value).endswith("; give --at one of 2, 5") == (step == 3)
    (source.checkpoints_path / "step-000002" / "state" / ".metadata").unlink()
    weights = {"has_training_state": False}
    checkpoint_at(source.checkpoints_path, load_fork(source, 5), 7, run="run", **weights)
    with pytest.raises(ConfigError, match=f"no checkpoint of step {step}") as refused:
        load_fork(source, step)
    said = str(refused.value)
    assert ("can go on only from step 5: give --at 5" in said) == (step == 3)
    assert ("train its settings file again" in said) == (step == 0)
    assert "step-000002 is not whole" in said
    assert "7" not in said.replace(str(source.path), "")


def test_a_run_without_any_checkpoint_says_how_they_are_saved(tiny, tmp_path):
    run = open_run_folder(config_of(tmp_path, tiny), None, {})
    with pytest.raises(ConfigError, match="--checkpoint_every"):
        load_fork(run, 2)
    (run.path / "settings.json").unlink()
    with pytest.raises(ConfigError, match=r"settings\.json"):
        load_fork(run, 2)


def test_checkpoints_apart_from_the_run_are_found(tiny, tmp_path):
    apart = tmp_path / "apart"
    config = config_of(tmp_path, tiny, "--checkpoint_dir", str(apart))
    folder = open_run_folder(config, None, {})
    path = checkpoint_at(apart / "run", config, 5)
    fork = load_fork(folder, 5)
    assert fork.checkpoint.resume_from_checkpoint == str(path)
    point = resume_point(fork, records_of(fork))
    assert Path(open_run_folder(fork, point, {}).info().resumes[0].run) == folder.path


@pytest.mark.parametrize(
    ("flags", "fixed"),
    [
        (["--seed", "4"], "run.seed: 0 -> 4"),
        (["--model_dtype", "bfloat16"], "model.model_dtype"),
        (
            ["--environments", '[{"name": "endless"}, {"name": "digit", "weight": 2.0}]'],
            r"environments\[0\].name: 'digit' -> 'endless'",
        ),
    ],
)
def test_what_a_fork_cannot_change_is_refused_by_name(source, flags, fixed):
    fork = load_fork(source, 5, flags=flags)
    with pytest.raises(ConfigError, match=fixed):
        resume_point(fork, records_of(fork))


def test_a_secret_comes_again_with_the_settings_file(tiny, tmp_path):
    entries = '[{"name": "digit", "env": {"judge_key": "a-secret"}}]'
    run = a_run(config_of(tmp_path, tiny, "--environments", entries))
    with pytest.raises(ConfigError, match=r"environments\[0\]\.env\.judge_key: a secret"):
        load_fork(run, 5)
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "run"\n[[environments]]\nname = "digit"\nenv = {judge_key = "another"}\n'
    )
    fork = load_fork(run, 5, [file])
    assert fork.environments[0].env == {"judge_key": "another"}
    assert fork.run.name == "run-fork-5"


@pytest.mark.slow
def test_what_differs_by_more_than_a_setting_is_told(source, tmp_path):
    def notes(*flags):
        fork = load_fork(source, 2, flags=flags)
        return resume_point(fork, records_of(fork)).notes

    assert any("seed_sampling is off" in note for note in notes())
    seeded = ["--seed_sampling", "true"]
    assert not any("chance" in note for note in notes(*seeded))
    assert any("max_async_rollout is 1" in note for note in notes(*seeded, "--max_async_rollout=1"))
    info = json.loads((source.path / "run.json").read_text())
    later = {"at": "", "step": 5, "checkpoint": "", "changed": ["trainer.learning_rate: 1 -> 2"]}
    (source.path / "run.json").write_text(json.dumps(info | {"resumes": [later]}))
    assert any("itself went on from step 5" in note for note in notes())


@pytest.mark.slow
async def test_a_fork_without_a_change_is_the_run_and_one_with_a_change_differs_by_it(
    tiny, tmp_path
):
    """The tokens of a step follow from its place and weights, as with seeds in an engine."""
    flags = ("--max_async_rollout", "0", "--number_of_steps", "5", "--checkpoint_every", "2")
    straight = await run(config_of(tmp_path, tiny, *flags))
    source = RunFolder.open(tmp_path / "run")
    saved = contents(source.path)

    same = await run(load_fork(source, 2))
    assert all(np.array_equal(same[name], straight[name]) for name in straight)
    fork = RunFolder.open(tmp_path / "run-fork-2")
    for found, expected in zip(numbers(fork.path), numbers(source.path), strict=True):
        assert {name for name in expected if found.get(name) != expected[name]} == set()
    assert rollouts(fork) == [row for row in rollouts(source) if row.step > 2]
    comparison = compare_runs(source, fork)
    assert (comparison.settings, comparison.outcome) == ((), Outcome.NOT_SHOWN)
    assert "scored the same" in comparison.verdict
    assert comparison.fork.step == 2

    other = await run(load_fork(source, 2, flags=["--learning_rate", "1e-2", "--name", "faster"]))
    assert not all(np.array_equal(other[name], straight[name]) for name in straight)
    fork = RunFolder.open(tmp_path / "faster")
    # The weights of the checkpoint sample step 3, and the change shows in what is made of it.
    first, expected = numbers(fork.path)[2], numbers(source.path)[2]
    differ = {name for name in expected if first[name] != expected[name]}
    assert "learning_rate" in differ
    assert differ <= {"learning_rate", "weights/changed"}
    comparison = compare_runs(source, fork)
    assert [one.name for one in comparison.settings] == ["trainer.learning_rate"]
    assert min(pair.first_step for pair in comparison.training) == 3
    assert contents(source.path) == saved


def rollouts(folder: RunFolder):
    return [replace(row, generate_s=0.0, score_s=0.0) for row in folder.rollouts()]


def test_a_setting_of_a_file_that_stands_for_settings_is_named_with_its_origin(source):
    path = source.path / "settings.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"set": [*found["set"], "trainer.gone"]}))
    config = json.loads((source.path / "config.json").read_text())
    config["trainer"]["gone"] = 1
    (source.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json.*gone"):
        load_fork(source, 5)
