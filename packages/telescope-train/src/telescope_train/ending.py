"""The end of a run before its last step: its record in the folder, and messages for people.

Only the first error is reported. Later errors caused by it, or raised while everything is closed,
are not.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from signal import SIGINT

from telescope_core.base import interrupts
from telescope_core.base.errors import (
    NoRoomError,
    NotWrittenError,
    ProcessDiedError,
    TelescopeError,
)
from telescope_core.base.interrupts import Interrupted
from telescope_core.base.secret_names import without_values
from telescope_core.records import RunFolder
from telescope_core.records.folders import sweep
from telescope_core.records.logs import SHOWN_AS
from telescope_core.records.room import not_written
from telescope_train.backends.protocol import GpuMemoryError, TransferMemoryError
from telescope_train.checkpoints.folders import checkpoints_folder
from telescope_train.checkpoints.resume import LATEST, newest_to_go_on
from telescope_train.config.inference_section import STORED
from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import smaller_rank

_LOGGER = logging.getLogger(__name__)


@contextmanager
def before_the_run(config: TrainConfig) -> Generator[None, None, None]:
    """Say, of a signal that ends the block, what is kept and how to go on.

    For the work before the run has its folder, in which a later signal is recorded.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, Interrupted) else SIGINT
        begun = f"interrupted by {number.name} before the run"
        section = config.checkpoint
        told = f"{begun} began: nothing was written; give the same command again"
        if section.resume_if_saved or section.resume_from_checkpoint == LATEST:
            # A checkpoint that cannot be read is said when it is to be loaded.
            with interrupts.held(), suppress(OSError, TelescopeError):
                told = f"{begun} went on: nothing was changed; {how_to_go_on(config)}"
        raise Interrupted(number, told) from error


def end_early(config: TrainConfig, folder: RunFolder, error: BaseException) -> BaseException:
    """Record the reason for the end of the run, and return the error to raise instead of `error`.

    A checkpoint that was being written is removed. No process of the run may write any more. Raises
    TelescopeError if the folder is gone.
    """
    error = _first(error)
    if isinstance(error, OSError):
        error = not_written(error) or error
    # It is printed, and may quote what code of an environment raised.
    error.args = without_values(error.args, folder.hide)
    # A full disk may be the failure: it must not be hidden by another one.
    with suppress(OSError, NoRoomError):
        sweep(checkpoints_folder(config))
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Interrupted) else SIGINT
        reason = f"interrupted by {number.name} at step {folder.last_step()}"
        _LOGGER.info("the run was %s", reason, extra={SHOWN_AS: "warning"})
        with suppress(OSError, TelescopeError):
            folder.interrupt(reason)
        return Interrupted(number, f"{reason}; {how_to_go_on(config)}")
    reason = _reason(error)
    _LOGGER.info("the run has failed: %s", reason, extra={SHOWN_AS: "error"})
    with suppress(OSError, NoRoomError):
        folder.fail(reason)
    if isinstance(error, ProcessDiedError | NotWrittenError):
        kind = ProcessDiedError if isinstance(error, ProcessDiedError) else type(error)
        return kind(f"{error}. {_ended(config, folder)}")
    if isinstance(error, GpuMemoryError):
        in_transfer, inference = isinstance(error, TransferMemoryError), config.inference
        advice = smaller_rank(
            config.trainer,
            config.megatron,
            shares_gpu=inference.shares_gpu,
            phase="transfer" if in_transfer else "step",
        )
        if in_transfer and (smaller := _smaller_transfer(config)):
            advice = f"{smaller}, or {advice}"
        if inference.colocate == "resident":
            share = f"gpu_memory_utilization below {inference.gpu_memory_utilization:g}"
            advice = f"set {share}, which leaves more to the trainer, or {advice}"
        return type(error)(f"{error}; {advice}. {_ended(config, folder)}")
    return error


def _smaller_transfer(config: TrainConfig) -> str:
    """Return the settings by which an update of weights alone needs less; "" if there are none."""
    weights, size_mb = config.weights, config.weights.weight_broadcast_bucket_mb
    found: list[str] = []
    if (
        config.trainer.train_backend == "megatron"
        and not weights.weight_broadcast_free_grad_buffers
    ):
        found.append("set weight_broadcast_free_grad_buffers = true")
    # Over TCP and in files, the buckets are in CPU memory.
    if size_mb and weights.weight_transport not in ("gloo", *STORED):
        found.append(f"set weight_broadcast_bucket_mb below {size_mb}")
    return ", or ".join(found)


def _ended(config: TrainConfig, folder: RunFolder) -> str:
    return f"The run ended at step {folder.last_step()}; {how_to_go_on(config)}"


def how_to_go_on(config: TrainConfig) -> str:
    """Return a text about what an ended run has kept, and how to continue it."""
    if (saved := newest_to_go_on(config, None)) is not None:
        return f"step {saved.step} is saved in {saved.path}: continue with --resume"
    every = config.checkpoint.checkpoint_every
    advice = "" if every else ", and set checkpoint_every, so that it can continue the next time"
    return f"no checkpoint was saved: begin again in the same folder with --resume-if-saved{advice}"


def _first(error: BaseException) -> BaseException:
    """Return the first NoRoomError, of which another `error` on closing may be the consequence."""
    found, at = error, error
    while isinstance(error, OSError | NoRoomError) and at is not None:
        found = at if isinstance(at, NoRoomError) else found
        at = at.__context__
    return found


def _reason(error: BaseException) -> str:
    if isinstance(error, TelescopeError):
        kind = "a process died" if isinstance(error, ProcessDiedError) else "stopped"
        return f"{kind}: {error}"
    return f"{type(error).__name__}: {error}"
