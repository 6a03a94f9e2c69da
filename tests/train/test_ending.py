"""How a run ends before its last step: what its folder says, and what a person is told."""

import errno
import shutil
import signal
from pathlib import Path

import pytest

from telescope_core.base.interrupts import Interrupted
from telescope_core.errors import (
    ConfigError,
    NoRoomError,
    NotWrittenError,
    ProcessDiedError,
    TelescopeError,
)
from telescope_core.records import RunFolder, RunState
from telescope_core.records.room import room_for
from telescope_train.backends.protocol import GpuMemoryError, TransferMemoryError
from telescope_train.checkpoints.folders import CheckpointManifest, checkpoints_folder
from telescope_train.config.schema import TrainConfig
from telescope_train.ending import before_the_run, end_early


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run": {"name": "run", "output_dir": str(tmp_path), "number_of_steps": 9},
            "model": {"model": "a/b"},
            "environments": [{"name": "sums"}],
        }
    )


def begun(config: TrainConfig, *, saved: int | None) -> RunFolder:
    """Return the folder of a run that took 5 steps, with one half checkpoint."""
    folder = RunFolder.create(Path(config.run.output_dir) / "run", config={}, name="run")
    for step in range(1, 6):
        folder.log_metrics({"step": step})
    (checkpoints_folder(config) / ".step-000005.partial" / "state").mkdir(parents=True)
    if saved is not None:
        place = checkpoints_folder(config) / f"step-{saved:06d}"
        (place / "state").mkdir(parents=True)
        (place / "state" / ".metadata").touch()
        manifest = CheckpointManifest(
            run="run", step=saved, num_ranks=1, has_training_state=True, config={}
        )
        (place / "checkpoint.json").write_text(manifest.model_dump_json())
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("flag", ["resume_from_checkpoint", "resume_if_saved", None])
def test_a_signal_before_the_run_is_opened_says_what_is_kept(
    config: TrainConfig, number: int, flag: str | None
) -> None:
    folder = begun(config, saved=4)
    given = {} if flag is None else {flag: "latest" if flag.endswith("checkpoint") else True}
    changed = {"checkpoint": config.checkpoint.model_copy(update=given)}
    config = config.model_copy(update=changed)
    error = KeyboardInterrupt() if number == signal.SIGINT else Interrupted(number)
    with pytest.raises(Interrupted) as ended, before_the_run(config):
        raise error
    assert ended.value.exit_code == 128 + number
    text = f"interrupted by {signal.Signals(number).name} before the run "
    if flag is None:
        assert f"{ended.value}" == f"{text}began: nothing was written; give the same command again"
    else:
        saved = checkpoints_folder(config) / "step-000004"
        assert f"{ended.value}" == (
            f"{text}went on: nothing was changed; step 4 is saved in {saved}: "
            "continue with --resume"
        )
    assert folder.info().state is RunState.RUNNING


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_in_the_folder_and_in_the_words(config: TrainConfig, number: int) -> None:
    folder = begun(config, saved=4)
    error = KeyboardInterrupt() if number == signal.SIGINT else Interrupted(number)
    ended = end_early(config, folder, error)
    assert isinstance(ended, Interrupted)
    assert ended.exit_code == 128 + number
    info = folder.info()
    assert (info.state, info.ended_at is None) == (RunState.INTERRUPTED, False)
    assert info.reason == f"interrupted by {signal.Signals(number).name} at step 5"
    assert f"step 4 is saved in {checkpoints_folder(config) / 'step-000004'}" in str(ended)
    assert "--resume" in str(ended)
    assert [one.name for one in checkpoints_folder(config).iterdir()] == ["step-000004"]


def test_without_a_checkpoint_the_words_do_not_promise_one(config: TrainConfig) -> None:
    folder = begun(config, saved=None)
    text = str(end_early(config, folder, Interrupted(signal.SIGTERM)))
    assert "no checkpoint" in text
    assert "--resume-if-saved" in text
    assert "checkpoint_every" in text
    assert list(checkpoints_folder(config).iterdir()) == []


@pytest.mark.parametrize("kind", [ProcessDiedError, NoRoomError, NotWrittenError])
@pytest.mark.parametrize(
    ("saved", "advice"), [(4, ("step 4", "--resume")), (None, ("--resume-if-saved",))]
)
def test_an_end_that_is_nobodys_choice_says_where_the_run_stood_and_how_to_go_on(
    config: TrainConfig, kind, saved, advice
) -> None:
    folder = begun(config, saved=saved)
    ended = end_early(config, folder, kind("it broke"))
    assert type(ended) is kind
    assert folder.info().state is RunState.FAILED
    assert "it broke" in folder.info().reason
    for part in ("it broke", "step 5", *advice):
        assert part in str(ended)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/data/run/.final.partial"),
            NotWrittenError,
            "cannot use /data/run/.final.partial: Read-only file system. The run ended at step 5; ",
        ),
        (OSError(errno.EIO, "Input/output error"), NotWrittenError, "cannot use a file: Input/"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/a/b"), NotWrittenError, "cannot "),
        (OSError(errno.EDQUOT, "Quota exceeded", "/b"), NoRoomError, "cannot write /b: the quota "),
        (OSError(errno.ENOSPC, "No space left"), NoRoomError, "cannot write a file: No space left"),
    ],
)
def test_a_path_that_the_system_refuses_ends_the_run_like_a_full_disk(
    config: TrainConfig, error: OSError, kind: type[TelescopeError], text: str
) -> None:
    folder = begun(config, saved=4)
    ended = end_early(config, folder, error)
    assert (type(ended), kind.exit_code) == (kind, 1)
    assert str(ended).startswith(text)
    assert "The run ended at step 5; step 4 is saved in " in str(ended)
    assert folder.info().reason.startswith(f"stopped: {text[:10]}")


@pytest.mark.parametrize("kind", [TelescopeError, ValueError, ProcessDiedError])
def test_what_is_said_at_the_end_holds_no_secret(config: TrainConfig, kind) -> None:
    folder = begun(config, saved=4)
    folder.hide = {"hunter2-value"}
    ended = end_early(config, folder, kind("a reward raised with hunter2-value"))
    assert str(ended).startswith("a reward raised with (left out)")


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EPERM, "not permitted"), FileNotFoundError(errno.ENOENT, "no")]
)
def test_what_may_be_a_defect_stays_as_it_is(config: TrainConfig, error: OSError) -> None:
    folder = begun(config, saved=4)
    assert end_early(config, folder, error) is error


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"trainer": {"gradient_checkpointing": False}}, "set gradient_checkpointing = true"),
        ({"trainer": {"gradient_checkpointing": "auto"}}, "set activation_memory_gib, or"),
        ({"trainer": {"use_lora": True}}, "set fsdp_cpu_offload = true"),
        (
            {"inference": {"colocate": "resident", "gpu_memory_utilization": 0.5}},
            "set gpu_memory_utilization below 0.5, which leaves more to the trainer, or set opt",
        ),
    ],
)
def test_a_gpu_without_memory_says_what_needs_less(config: TrainConfig, settings, advice) -> None:
    changed = TrainConfig.model_validate(config.model_dump(exclude_unset=True) | settings)
    folder = begun(changed, saved=4)
    ended = end_early(changed, folder, GpuMemoryError("trainer rank 0 ran out of GPU memory"))
    assert isinstance(ended, GpuMemoryError)
    assert f"ran out of GPU memory; {advice}" in str(ended)
    assert ". The run ended at step 5; step 4 is saved in " in str(ended)
    assert folder.info().reason == "stopped: trainer rank 0 ran out of GPU memory"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "set weight_broadcast_bucket_mb below 256, or set optimizer_cpu_offload = true, "),
        ({"weights": {"weight_broadcast_bucket_mb": 0}}, "set optimizer_cpu_offload = true, "),
        ({"weights": {"weight_transport": "gloo"}}, "set optimizer_cpu_offload = true, "),
        ({"trainer": {"gradient_checkpointing": False}}, "set weight_broadcast_bucket_mb below "),
        (
            {
                "trainer": {"train_backend": "megatron"},
                "weights": {"weight_broadcast_free_grad_buffers": False},
            },
            "set weight_broadcast_free_grad_buffers = true, or set weight_broadcast_bucket_mb ",
        ),
        (
            {"inference": {"colocate": "resident", "gpu_memory_utilization": 0.5}},
            "set gpu_memory_utilization below 0.5, which leaves more to the trainer, or set weigh",
        ),
    ],
)
def test_an_update_of_weights_without_memory_names_what_it_needs(
    config: TrainConfig, settings, advice
) -> None:
    changed = TrainConfig.model_validate(config.model_dump(exclude_unset=True) | settings)
    full = TransferMemoryError.of("trainer rank 1", RuntimeError("full"))
    ended = end_early(changed, begun(changed, saved=4), full)
    assert isinstance(ended, TransferMemoryError)
    assert f"{full}; {advice}" in str(ended)
    for of_steps in ("gradient_checkpointing", "activation_memory_gib", "seq_len"):
        assert of_steps not in str(ended)


@pytest.mark.parametrize("error", [OSError("no such file"), NoRoomError("full"), TypeError("x")])
def test_a_removed_folder_is_told_instead_of_what_failed_without_it(
    config: TrainConfig, error
) -> None:
    folder = begun(config, saved=4)
    shutil.rmtree(folder.path)
    with pytest.raises(TelescopeError, match="is gone") as caught:
        end_early(config, folder, error)
    assert str(folder.path) in str(caught.value)
    assert isinstance(end_early(config, folder, Interrupted(signal.SIGTERM)), Interrupted)
    with pytest.raises(TelescopeError, match="is gone"):
        folder.finish()
    assert not folder.path.exists()


def test_what_is_closed_on_a_full_disk_does_not_hide_the_first_error(config: TrainConfig) -> None:
    def fail() -> None:
        try:
            with room_for(Path("/first"), needed_bytes=5 * 2**20):
                raise OSError(errno.ENOSPC, "no space")
        finally:
            raise OSError(errno.ENOSPC, "closing the logs")

    with pytest.raises(OSError, match="closing") as caught:
        fail()
    folder = begun(config, saved=4)
    ended = end_early(config, folder, caught.value)
    assert isinstance(ended, NoRoomError)
    assert "/first" in str(ended)
    assert "5.0 MiB are needed" in str(ended)
    assert "/first" in folder.info().reason


def test_another_error_is_raised_as_it_is(config: TrainConfig) -> None:
    folder = begun(config, saved=None)
    error = ConfigError("no room for a server")
    assert end_early(config, folder, error) is error
    assert folder.info().reason == "stopped: no room for a server"
