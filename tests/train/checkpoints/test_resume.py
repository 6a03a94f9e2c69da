"""A run that is killed and resumed has the same numbers as one that was not, to the bit."""

import errno
import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.core.evals.test_comparison import an_eval

from telescope_core.base.chains import sampled_tokens
from telescope_core.errors import ConfigError, NoRoomError, NotWrittenError, TelescopeError
from telescope_core.evals import EvalFolder
from telescope_core.records import Resume, RolloutRow, RunFolder
from telescope_core.records.folders import remove_folder, sweep
from telescope_core.records.identity import NOTHING_SAVED
from telescope_core.types import Completion, Group, Message, Rollout, RolloutStatus, Turn
from telescope_train.checkpoints import saver
from telescope_train.checkpoints.folders import (
    CheckpointManifest,
    complete_checkpoints,
    expendable,
)
from telescope_train.checkpoints.resume import (
    ResumePoint,
    is_over,
    location_problems,
    newest_to_go_on,
    resume_point,
    trained_before,
)
from telescope_train.checkpoints.sampler_state import write_sampler_state
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.config.eval_folders import evals_left
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.sampled import SampledBatch, SamplerState
from telescope_train.trainer.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parents[1]))
from resume_run import Killed, config_of, numbers, records_of, run, settings_of

SAVED = ("--checkpoint_every", "5")
AHEAD = ("--max_async_rollout", "1")
LATEST = (*SAVED, "--resume_from_checkpoint", "latest")


def point_of(config):
    return resume_point(config, records_of(config))


def end_process(folder: Path) -> None:
    """Make the run folder look as if its process were gone, as after kill -9."""
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "process_started": "gone"}))


def assert_same_weights(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


def same_rollouts(one: Path, other: Path) -> bool:
    def rows(folder):
        return [
            replace(row, generate_s=0.0, score_s=0.0) for row in RunFolder.open(folder).rollouts()
        ]

    return rows(one) == rows(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (
            *("--max_async_rollout", "0", "--should_accept_fn", "resume_run:is_mixed"),
            *("--kl_penalty_tau", "0.1", "--reference_update_every", "3"),
        ),
        (*AHEAD, "--use_lora", "true", "--lora_dropout", "0.1"),
    ],
    ids=["synchronous, refused groups, moving reference", "ahead, adapters"],
)
async def test_ten_steps_equal_five_and_a_resume_and_five(tiny, tmp_path, more):
    straight = await run(config_of(tmp_path / "a", tiny, *more))
    with pytest.raises(Killed):
        await run(config_of(tmp_path / "b", tiny, *SAVED, *more), killed_after=7)
    end_process(tmp_path / "b" / "run")
    assert len(numbers(tmp_path / "b" / "run")) == 7
    resumed = await run(config_of(tmp_path / "b", tiny, *LATEST, *more))
    assert_same_weights(resumed, straight)
    assert numbers(tmp_path / "b" / "run") == numbers(tmp_path / "a" / "run")
    assert same_rollouts(tmp_path / "b" / "run", tmp_path / "a" / "run")
    assert RunFolder.open(tmp_path / "b" / "run").info().resumes[0].step == 5
    is_back_filled = len(RunFolder.open(tmp_path / "a" / "run").rollouts()) > 10 * 2 * 4
    assert is_back_filled == ("--should_accept_fn" in more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(other, marks=pytest.mark.nightly) for other in (2, 3))]
)
async def test_ranks_that_die_change_nothing(tiny, tmp_path, seed):
    straight = await run(config_of(tmp_path / "a", tiny, *AHEAD))
    chance = random.Random(seed)
    # Calls of a rank: a step and the facts of its tokens, and after every second step also the two
    # of a checkpoint. The first death comes before there is any.
    calls = [chance.randint(1, 2), *chance.sample(range(14, 34), 3)]
    deaths = {call: chance.random() < 0.5 for call in calls}
    often = ("--checkpoint_every", "2", "--checkpoint_keep_last", "1")
    mended = await run(config_of(tmp_path / "b", tiny, *often, *AHEAD), deaths=deaths)
    assert_same_weights(mended, straight)
    assert numbers(tmp_path / "b" / "run") == numbers(tmp_path / "a" / "run")
    assert same_rollouts(tmp_path / "b" / "run", tmp_path / "a" / "run")
    restarts = RunFolder.open(tmp_path / "b" / "run").restarts()
    assert len(restarts) == 4
    assert all(one.step <= one.reached for one in restarts)
    assert [bool(one.checkpoint) for one in restarts] == [False, True, True, True]


@pytest.mark.slow
async def test_another_run_can_begin_at_a_checkpoint(tiny, tmp_path):
    short = ("--number_of_steps", "2", "--checkpoint_every", "1")
    with pytest.raises(Killed):
        await run(config_of(tmp_path, tiny, "--number_of_steps", "2"), killed_after=1)
    end_process(tmp_path / "run")
    # It had saved nothing, so a queue's second try begins again in its folder.
    await run(config_of(tmp_path, tiny, *short, "--resume_if_saved", "true"))
    assert RunFolder.open(tmp_path / "run").info().resumes[0].checkpoint == NOTHING_SAVED
    saved = tmp_path / "run" / "checkpoints" / "step-000001"
    fork = ("--name", "fork", "--resume_from_checkpoint", str(saved), "--learning_rate", "1e-4")
    config = config_of(tmp_path, tiny, "--number_of_steps", "2", *fork)
    point = point_of(config)
    assert point is not None
    assert not point.is_same_run
    assert point.changed == ("trainer.learning_rate: 0.001 -> 0.0001",)
    await run(config)
    rows = numbers(tmp_path / "fork")
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0] == numbers(tmp_path / "run")[0]
    assert len(RunFolder.open(tmp_path / "fork").rollouts()) == 2 * 4
    assert [row["step"] for row in numbers(tmp_path / "run")] == [1, 2]
    await _refusals(tmp_path, tiny, saved)


async def _refusals(tmp_path, tiny, saved) -> None:
    """What cannot be resumed says why, and what to do."""
    path = ("--resume_from_checkpoint", str(saved))
    for flags, message in [
        (("--name", "x", "--seed", "4", *path), r"run.seed: 0 -> 4"),
        (("--name", "x", "--model_dtype", "bfloat16", *path), "model.model_dtype"),
        (path, "is a checkpoint of this run"),
        (("--resume_from_checkpoint", "latest", "--number_of_steps", "2"), "raise number_of_steps"),
        (("--name", "x", "--resume_from_checkpoint", "latest"), "holds no complete checkpoint"),
        (("--name", "x", "--resume_from_checkpoint", str(tmp_path)), "holds no checkpoint"),
    ]:
        with pytest.raises(ConfigError, match=message):
            point_of(config_of(tmp_path, tiny, *flags))
    other = config_of(tmp_path, tiny, "--name", "x", *path)
    section = other.megatron.model_copy(update={"megatron_use_distributed_optimizer": False})
    with pytest.raises(ConfigError, match="megatron_use_distributed_optimizer: True -> False"):
        point_of(other.model_copy(update={"megatron": section}))
    manifest = json.loads((saved / "checkpoint.json").read_text())
    (saved / "checkpoint.json").write_text(json.dumps({**manifest, "has_training_state": False}))
    with pytest.raises(ConfigError, match="weights alone"):
        point_of(config_of(tmp_path, tiny, "--name", "x", *path))


def test_other_code_of_an_environment_is_refused_unless_allowed(tiny, tmp_path):
    entries = ("--environments", '[{"name": "resume_run:Digit"}]')
    saved = tmp_path / "other" / "step-000005"
    checkpoint_at(tmp_path / "other", 5)
    config = config_of(tmp_path, tiny, *entries, "--resume_from_checkpoint", str(saved))
    manifest = json.loads((saved / "checkpoint.json").read_text())
    manifest |= {"config": config.model_dump(mode="json")}
    record = {"id": "resume_run:Digit", "version": "0", "place": "importable"}
    manifest["environment_records"] = {"resume_run:Digit": record}
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    assert point_of(config).changed == ()
    record |= {"version": "9", "dependencies": ["six==1.16.0"]}
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"resume_run:Digit: version: 9 -> 0") as refused:
        point_of(config)
    assert "--allow-changed-environments" in str(refused.value)
    told = config_of(
        tmp_path,
        tiny,
        *(*entries, "--resume_from_checkpoint", str(saved), "--allow-changed-environments"),
    )
    manifest["config"] = told.model_dump(mode="json")
    (saved / "checkpoint.json").write_text(json.dumps(manifest))
    assert point_of(told).changed == ("environment resume_run:Digit: version: 9 -> 0",)


@pytest.fixture
def forked(tiny, tmp_path):
    """Return a function that begins another run at a checkpoint of step 5, with these flags."""
    checkpoint_at(tmp_path / "other", 5)
    saved = tmp_path / "other" / "step-000005"
    path = ("--resume_from_checkpoint", str(saved))
    settings = config_of(tmp_path, tiny, *path).model_dump(mode="json")
    manifest = json.loads((saved / "checkpoint.json").read_text())
    (saved / "checkpoint.json").write_text(json.dumps(manifest | {"config": settings}))
    return lambda *flags: point_of(config_of(tmp_path, tiny, *path, *flags))


OTHER_WEIGHTS = '[{"name": "digit", "weight": 3.0}, {"name": "endless", "weight": 1.0}]'

OTHER_SPLIT = (
    '[{"name": "digit", "weight": 2.0, "split": "eval"}, {"name": "endless", "weight": 1.0}]'
)


@pytest.mark.slow
def test_a_setting_of_an_entry_that_an_earlier_version_did_not_know_is_no_difference(
    tiny, tmp_path
):
    checkpoint_at(tmp_path / "other", 5)
    saved = tmp_path / "other" / "step-000005"
    evals = ("--evals", '[{"name": "digit", "eval_every": 2}]')
    path = (*evals, "--resume_from_checkpoint", str(saved))
    config = config_of(tmp_path, tiny, *path)
    settings = config.model_dump(mode="json")
    for entry in (*settings["environments"], *settings["evals"]["evals"]):
        del entry["split"]
    manifest = json.loads((saved / "checkpoint.json").read_text())
    (saved / "checkpoint.json").write_text(json.dumps(manifest | {"config": settings}))
    assert point_of(config).changed == ()
    with pytest.raises(ConfigError, match=r"environments\[0\].split: 'train' -> 'eval'"):
        point_of(config_of(tmp_path, tiny, *path, "--environments", OTHER_SPLIT))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        (("--seed", "4"), "run.seed: 0 -> 4"),
        (("--model_dtype", "bfloat16"), "model.model_dtype"),
        (("--optimizer", "adamw_bf16"), "trainer.optimizer"),
        (("--use_lora", "true"), "trainer.use_lora"),
        (("--environments", OTHER_WEIGHTS), "weight: 2.0 -> 3.0"),
        (("--environments", OTHER_SPLIT), "environments[0].split: 'train' -> 'eval'"),
    ],
)
def test_what_weights_and_place_in_the_data_depend_on_stays_the_same(forked, flags, changed):
    point = forked("--learning_rate", "1e-4")
    assert point.changed == ("trainer.learning_rate: 0.001 -> 0.0001",)
    with pytest.raises(ConfigError) as refused:
        forked("--learning_rate", "1e-4", *flags)
    assert changed in str(refused.value)
    assert "learning_rate" not in str(refused.value)


@pytest.mark.slow
def test_a_run_that_begins_at_a_checkpoint_has_a_step_to_take(forked):
    point = forked("--number_of_steps", "6")
    assert (point.checkpoint.step, point.is_at_last_step) == (5, False)
    for too_few in ("5", "4"):
        with pytest.raises(ConfigError, match="number_of_steps"):
            forked("--number_of_steps", too_few, "--warmup_steps", "1")


def test_ranks_that_die_go_back_to_a_checkpoint_of_their_own_run(tiny, tmp_path):
    config = config_of(tmp_path, tiny, *SAVED)
    folder = RunFolder.create(tmp_path / "run", config={}, name="run").path / "checkpoints"
    assert newest_to_go_on(config, None) is None
    checkpoint_at(folder, 5)
    assert newest_to_go_on(config, None).step == 5
    # Neither another run's nor one without what training needs.
    for step, field, value in (
        (6, "run", "other"),
        (7, "has_training_state", False),
        (8, "started_at", "2026-01-01T00:00:00+00:00"),
    ):
        checkpoint_at(folder, step)
        path = folder / f"step-{step:06d}" / "checkpoint.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
        assert newest_to_go_on(config, None).step == 5


def test_a_new_run_does_not_take_over_the_checkpoints_of_an_earlier_one(tiny, tmp_path):
    shared = ["--checkpoint_dir", str(tmp_path / "shared"), *SAVED]
    config = config_of(tmp_path, tiny, *shared)
    assert location_problems(config, None) == []
    own = tmp_path / "shared" / "run"
    checkpoint_at(own, 5, whole=False)
    (refused,) = location_problems(config, None)
    assert f"{str(own)!r} holds checkpoints of an earlier run (step-000005)" in refused
    shutil.rmtree(own)
    # One that began at the same time, and saves to the same place.
    RunFolder.create(tmp_path / "run", config={}, name="run").fail("stopped")
    checkpoint_at(own, 6, started_at="2026-01-01T00:00:00+00:00")
    with pytest.raises(ConfigError, match="another run of the name 'run', which began at 2026-01"):
        resume_point(config_of(tmp_path, tiny, *shared, *LATEST[2:]), {})


@pytest.mark.parametrize("begins", ["new", "again", "resumed"])
def test_a_folder_for_checkpoints_that_cannot_be_written_is_known_before(
    tiny, tmp_path, monkeypatch, begins
):
    """Not at the first checkpoint, at which everything since the start would be lost."""
    shared = tmp_path / "shared"
    config = config_of(tmp_path, tiny, "--checkpoint_dir", str(shared / "deep"), *SAVED)
    point = None
    if begins != "new":
        RunFolder.create(tmp_path / "run", config={}, name="run").fail("stopped")
        checkpoint_at(tmp_path / "run" / "checkpoints", 5)
        (checkpoint,) = complete_checkpoints(tmp_path / "run" / "checkpoints")
        point = ResumePoint(
            checkpoint=checkpoint, is_same_run=True, changed=(), is_at_last_step=False, notes=()
        )
    if begins == "again":
        section = config.checkpoint.model_copy(update={"resume_if_saved": True})
        config, point = config.model_copy(update={"checkpoint": section}), None
    assert location_problems(config, point) == []
    shared.write_text("")
    (refused,) = location_problems(config, point)
    assert f"{shared / 'deep' / 'run'} cannot be written: {shared} is a file" in refused
    assert "checkpoint_dir" in refused
    shared.unlink()
    shared.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != shared)
    (refused,) = location_problems(config, point)
    assert f"{shared} is not writable" in refused


@pytest.mark.parametrize("name", ["checkpoint_dir", "output_dir", "ray_address"])
def test_an_empty_text_is_no_place(tiny, tmp_path, name):
    with pytest.raises(ConfigError, match=name):
        config_of(tmp_path, tiny, f"--{name}", "")


@pytest.mark.parametrize("is_same_run", [True, False])
def test_what_the_weights_were_trained_on_is_known_while_their_run_is_there(tmp_path, is_same_run):
    source = RunFolder.create(tmp_path / "run", config={}, name="run")
    for step in (1, 2, 3):
        row = RolloutRow(
            step=step,
            environment="digit",
            example_id=f"train-{step}",
            group_id=f"{step}",
            index=0,
            status=RolloutStatus.KEPT,
        )
        source.write_rollouts(step, [row])
    checkpoint_at(source.checkpoints_path, 2)
    (checkpoint,) = complete_checkpoints(source.checkpoints_path)
    point = ResumePoint(
        checkpoint=checkpoint,
        is_same_run=is_same_run,
        changed=(),
        is_at_last_step=False,
        notes=(),
    )
    folder = source if is_same_run else RunFolder.create(tmp_path / "fork", config={})
    assert trained_before(point, folder) == {("digit", "train-1"), ("digit", "train-2")}
    if not is_same_run:
        away = replace(point, checkpoint=replace(checkpoint, path=tmp_path / "copies" / "a"))
        assert trained_before(away, folder) is None


def ended_with(folder: Path, config: TrainConfig, *, has_training_state: bool = True) -> RunFolder:
    """A run that was killed after its last checkpoint and before its summary."""
    run = RunFolder.create(folder, config={}, name="run")
    checkpoint_at(folder / "checkpoints", 10, name="final")
    path = folder / "checkpoints" / "final" / "checkpoint.json"
    manifest = json.loads(path.read_text()) | {"config": config.model_dump(mode="json")}
    path.write_text(json.dumps(manifest | {"has_training_state": has_training_state}))
    end_process(folder)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("has_training_state", [True, False])
def test_a_run_without_its_summary_has_only_that_left(tiny, tmp_path, has_training_state):
    config = config_of(tmp_path, tiny, "--resume_from_checkpoint", "latest")
    folder = ended_with(tmp_path / "run", config, has_training_state=has_training_state)
    point = point_of(config)
    assert point is not None
    assert point.is_at_last_step
    assert is_over(config, point.checkpoint)
    more = config_of(tmp_path, tiny, *LATEST, "--number_of_steps", "20")
    if has_training_state:
        assert not point_of(more).is_at_last_step
    else:
        with pytest.raises(ConfigError, match="weights alone"):
            point_of(more)
    folder.finish()
    with pytest.raises(
        ConfigError, match="nothing is left to do; raise number_of_steps"
    ) as refused:
        point_of(config)
    # Its process may have been killed while it wrote the report.
    assert f"telescope eval --report {folder.path} writes it" in str(refused.value)


def test_evals_that_a_run_did_not_get_to_are_left(tiny, tmp_path):
    evals = '[{"name": "digit", "eval_every": 5}, {"name": "endless", "eval_every": 0}]'
    flags = ("--evals", evals, "--resume_from_checkpoint", "latest", "--eval_after_training")
    config = config_of(tmp_path, tiny, *flags, "true")
    folder = ended_with(tmp_path / "run", config)
    (point, left) = point_of(config), ["digit-step-10", "digit-after", "endless-after"]
    while left:
        assert not is_over(config, point.checkpoint)
        assert len(evals_left(config, folder)) == len(left)
        played = EvalFolder.create(folder.evals_path / left.pop(), manifest={})
        played.finish(an_eval([("a", [1])]))
    assert is_over(config, point.checkpoint)
    without = config_of(tmp_path, tiny, *flags, "false", "--eval_before_training", "true")
    shutil.rmtree(folder.evals_path / "endless-after")
    assert is_over(without, point.checkpoint)
    assert not is_over(config, point.checkpoint)


def test_evals_after_training_are_kept_where_no_step_is_left(tmp_path):
    for step, left in [(10, ["digit-after", "digit-step-10"]), (5, [])]:
        path = tmp_path / str(step)
        run = RunFolder.create(path, config={}, name="run")
        for name in ("digit-after", "digit-step-10"):
            (run.evals_path / name).mkdir(parents=True)
        end_process(path)
        resume = Resume(at="now", step=step, checkpoint="")
        again = RunFolder.resume(path, config={}, resume=resume)
        assert len(again.eval_folders()) == 2, "nothing is lost before the first step"
        again.drop_after(step, keeps_evals_after=step == 10)
        assert [one.name for one in again.eval_folders()] == left


@pytest.mark.parametrize("status", [RolloutStatus.KEPT, RolloutStatus.FAILED])
def test_rollouts_that_wait_in_the_checkpoint_fit_in_seq_len(forked, tmp_path, status):
    tokens = sampled_tokens((1,) * 30, (2,) * 20, (-0.5,) * 20)
    said = Message(role="assistant", content="")
    completion = Completion(message=said, finish_reason="stop", tokens=tokens)
    rollout = Rollout(
        environment="digit",
        example_id="0",
        group_id="5.0",
        index=0,
        turns=(Turn(completion=completion, started_s=0.0, ended_s=1.0),),
        status=status,
    )
    group = Group(id="5.0", environment="digit", example_id="0", rollouts=(rollout,))
    batches = {5: SampledBatch(groups=(group,), duration_s=1.0)}
    state = SamplerState(next_batch=6, draw_position=2, batches=batches)
    write_sampler_state(tmp_path / "other" / "step-000005", state)
    assert forked("--seq_len", "50").changed == ("trainer.seq_len: 64 -> 50",)
    if status is RolloutStatus.FAILED:  # which no step trains on
        assert forked("--seq_len", "49") is not None
        return
    with pytest.raises(ConfigError, match=r"step-000005.*seq_len is 49; raise it to at least 50"):
        forked("--seq_len", "49")


def checkpoint_at(
    folder: Path, step: int, *, name: str = "", whole: bool = True, started_at: str = ""
) -> None:
    path = folder / (name or f"step-{step:06d}")
    (path / "state").mkdir(parents=True)
    manifest = CheckpointManifest(
        run="run",
        started_at=started_at,
        step=step,
        num_ranks=1,
        has_training_state=True,
        config={},
    )
    (path / "checkpoint.json").write_text(manifest.model_dump_json())
    write_sampler_state(path, SamplerState(next_batch=step, draw_position=0, batches={}))
    if whole:
        (path / "state" / ".metadata").write_text("")


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "never", "gone"),
    [
        (None, None, None, []),
        (1, None, None, [10, 20, 30, 40]),
        (2, None, None, [10, 20, 30]),
        (2, 20, None, [10, 30]),
        (1, None, 20, [10, 30, 40]),
        (9, None, None, []),
    ],
)
def test_retention_removes_complete_old_ones_alone(tmp_path, keep_last, keep_every, never, gone):
    for step in (10, 20, 30, 40, 50):
        checkpoint_at(tmp_path, step)
    checkpoint_at(tmp_path, 60, whole=False)
    checkpoint_at(tmp_path, 70, name=".step-000070.partial")
    checkpoint_at(tmp_path, 5, name="final")
    found = complete_checkpoints(tmp_path)
    assert [one.step for one in found] == [5, 10, 20, 30, 40, 50]
    removed = expendable(
        found,
        keep_last=keep_last,
        keep_every=keep_every,
        never=tmp_path / f"step-{never:06d}" if never else None,
    )
    assert [one.step for one in removed] == gone
    for one in removed:
        remove_folder(one.path)
    assert {one.step for one in complete_checkpoints(tmp_path)} == {5, 10, 20, 30, 40, 50} - {*gone}
    assert (tmp_path / "step-000060").is_dir()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == []


EVERY_2 = ["--checkpoint_every", "2"]
KEEP_LAST, KEEP_EVERY = ["--checkpoint_keep_last", "1"], ["--checkpoint_keep_every", "4"]


@pytest.mark.parametrize(
    ("flags", "facts", "fixed"),
    [
        (KEEP_LAST, "checkpoint_keep_last.*checkpoint_every", [*EVERY_2, *KEEP_LAST]),
        (
            KEEP_EVERY,
            "checkpoint_keep_every.*checkpoint_every",
            [*EVERY_2, *KEEP_LAST, *KEEP_EVERY],
        ),
        (
            [*EVERY_2, *KEEP_EVERY],
            "checkpoint_keep_every.*checkpoint_keep_last",
            [*EVERY_2, *KEEP_LAST, *KEEP_EVERY],
        ),
        (
            [*EVERY_2, *KEEP_LAST, "--checkpoint_keep_every", "3"],
            r"checkpoint_keep_every.*\b3\b.*checkpoint_every",
            [*EVERY_2, *KEEP_LAST, *KEEP_EVERY],
        ),
        (["--checkpoint_every", "11"], r"\b11\b.*\b10 steps", ["--checkpoint_every", "10"]),
        ([*LATEST, "--resume_if_saved", "true"], "resume_if_saved.*remove", LATEST),
    ],
)
def test_settings_without_effect_are_refused(tiny, tmp_path, flags, facts, fixed):
    with pytest.raises(ConfigError, match=facts):
        config_of(tmp_path, tiny, *flags)
    assert config_of(tmp_path, tiny, *fixed).run.number_of_steps == 10


async def test_a_checkpoint_that_cannot_be_written_stops_the_run(tiny, tmp_path):
    """The folder of the state is a file: whoever runs the test, it cannot be written in."""

    class Full:
        num_ranks = 1

        async def start_checkpoint(self, folder, *, with_training_state):
            """Nothing to write."""

        async def checkpoint_is_written(self):
            return True

        async def finish_checkpoint(self):
            raise TelescopeError("no space left")

    class Idle:
        async def settled(self, version):
            return SamplerState(
                next_batch=version,
                draw_position=0,
                batches={},
            )

    config = config_of(tmp_path, tiny, "--checkpoint_every", "1")
    checkpointer = Checkpointer(SavedRun.from_config(config, {}), Full(), Idle())
    await checkpointer.after_step(1)
    with pytest.raises(TelescopeError, match="no space left"):
        await checkpointer.after_step(2)
    await checkpointer.close()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


async def test_a_disk_that_is_full_keeps_the_checkpoint_before(tiny, tmp_path, monkeypatch):
    class Quick:
        num_ranks = 1

        async def start_checkpoint(self, folder, *, with_training_state):
            folder.mkdir()
            (folder / ".metadata").write_text("")

        async def checkpoint_is_written(self):
            return True

        async def finish_checkpoint(self):
            return {}

    def no_room(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tmp_path / "run" / "checkpoints"
    config = config_of(tmp_path, tiny, "--checkpoint_every", "1", "--checkpoint_keep_last", "1")
    checkpointer = Checkpointer(SavedRun.from_config(config, {}), Quick(), None)
    await checkpointer.after_step(1)
    await checkpointer.written()
    for place in ("write_manifest", "save_model_description", "put_in_place"):
        with monkeypatch.context() as full:
            full.setattr(saver, place, no_room)
            await checkpointer.after_step(2)
            with pytest.raises(NoRoomError, match=r"step-000002: the disk is full .* Make room"):
                await checkpointer.written()
        assert [path.name for path in folder.iterdir()] == ["step-000001"]
    await checkpointer.after_step(2)
    await checkpointer.written()
    assert [path.name for path in folder.iterdir()] == ["step-000002"]


def write(worker: TrainerWorker, folder: Path, *, with_training_state: bool) -> None:
    worker.start_checkpoint(folder, with_training_state=with_training_state)
    worker.finish_checkpoint()


@pytest.mark.slow
def test_training_goes_on_while_a_copy_is_written(tiny, tmp_path):
    config = config_of(tmp_path, tiny)
    worker = TrainerWorker(settings_of(config))
    try:
        before = {name: value.clone() for name, value in worker.export_weights()}
        worker.start_checkpoint(tmp_path / "state", with_training_state=True)
        with torch.no_grad():
            for parameter in worker.backend._policy.parameters():
                parameter.add_(1.0)
        worker.finish_checkpoint()
        worker.load_checkpoint(tmp_path / "state")
        for name, value in worker.export_weights():
            assert torch.equal(value, before[name])
        (tmp_path / "file").write_text("")
        with pytest.raises(NotWrittenError, match="could not be written"):
            write(worker, tmp_path / "file" / "state", with_training_state=True)
        write(worker, tmp_path / "weights", with_training_state=False)
        with pytest.raises(ConfigError, match="holds weights alone"):
            worker.load_checkpoint(tmp_path / "weights")
    finally:
        worker.close()
