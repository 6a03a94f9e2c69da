"""`telescope export`: convert checkpoints to Hugging Face format and push them to the Hub."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from telescope_cli.progress import waiting
from telescope_cli.watch import find_run, run_names
from telescope_core.base.errors import ConfigError, nearest
from telescope_core.base.interrupts import raise_if_asked
from telescope_core.base.number_text import counted
from telescope_core.base.terminal import escaped

if TYPE_CHECKING:
    from telescope_train.checkpoints.export import Exported
    from telescope_train.checkpoints.folders import RunCheckpoint

DTYPES = ("float32", "bfloat16")


def export_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="Folder of a run or a checkpoint, or the name of a run in the folder `runs`.",
            autocompletion=run_names,
        ),
    ],
    output: Annotated[
        str | None, typer.Option(help="Folder to write to; by default `hf` in the checkpoint.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Steps to export, such as 100,200. By default the last.")
    ] = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Export every checkpoint of the run.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights; by default as they were trained.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of one weights file, in KB, MB or GB.")
    ] = "5GB",
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload to this model on the Hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the model private if it is new.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Convert checkpoints to Hugging Face format: one, several, or all of a run.

    Every file of a checkpoint is proved by its checksum before anything is written. With several
    checkpoints, --output gets one folder per checkpoint, and --push makes one commit per
    checkpoint, oldest first. --push uses the token in HF_TOKEN or from `hf auth login`.

    For example:

      telescope export quickstart

      telescope export runs/quickstart --steps 20,40 --dtype bfloat16 --output exports

      telescope export runs/quickstart/checkpoints/final --push my-name/my-model --private
    """
    _check_options(dtype, max_shard_size, push=push, private=private)
    folder = Path(source).expanduser()
    if folder.name == source and not folder.is_dir():
        folder = find_run(source)
    checkpoints = _chosen(folder, steps=steps, is_all=is_all)
    from telescope_train.checkpoints.export import export_checkpoint, hub_token
    from telescope_train.checkpoints.export import push as upload

    token = hub_token() if push is not None else ""
    written: list[dict[str, object]] = []

    def write(checkpoint: "RunCheckpoint") -> "Exported":
        target = checkpoint.export_path
        if output is not None:
            target = Path(output).expanduser()
            if len(checkpoints) > 1:
                target /= checkpoint.path.name
        with waiting(f"exporting {checkpoint.path.name}"):
            return export_checkpoint(
                checkpoint,
                target,
                dtype=dtype,
                max_shard_size=max_shard_size,
                tell=lambda line: _tell([line]),
            )

    is_named = steps is not None or checkpoints[0].path == folder
    for checkpoint, done in _each(checkpoints, write, run=None if is_named else folder):
        row: dict[str, object] = {**asdict(done), "path": str(done.path)}
        if push is not None:
            raise_if_asked()
            message = f"Step {done.step} of {checkpoint.manifest.run}"
            row["commit"] = upload(
                done.path, push, token=token, is_private=private, message=message
            )
        written.append(row)
        if not as_json:
            typer.echo(escaped(_line(done, row.get("commit"))))
    if as_json:
        typer.echo(json.dumps(written, indent=2))


def _each(
    checkpoints: "Sequence[RunCheckpoint]",
    write: "Callable[[RunCheckpoint], Exported]",
    *,
    run: Path | None,
) -> "Iterator[tuple[RunCheckpoint, Exported]]":
    """Yield each checkpoint with what `write` returned for it.

    `run`: folder of a run whose newest one takes the place of the last, if the run removes that
    meanwhile; None = the user has named them, so that nothing else is exported instead.
    """
    from telescope_train.checkpoints.folders import RemovedCheckpointError, unproved

    left = [*checkpoints]
    while left:
        checkpoint, *left = left
        # One that came while the last export was put in its place has not ended anything yet.
        raise_if_asked()
        _tell(unproved(checkpoint))
        try:
            done = write(checkpoint)
        except RemovedCheckpointError:
            if run is None:
                raise
            left = left or _chosen(run, steps=None, is_all=False)
            why = f"{checkpoint.path} was removed meanwhile, as its run goes on"
            _tell([f"{why}; {left[0].path.name} is exported"])
        else:
            yield checkpoint, done


def _check_options(dtype: str | None, size: str, *, push: str | None, private: bool) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", size):
        raise ConfigError(f"--max-shard-size takes a number and KB, MB or GB, got {size!r}")
    if private and push is None:
        raise ConfigError("--private has no effect without --push; add --push OWNER/NAME")
    if push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", push):
        raise ConfigError(f"--push takes OWNER/NAME, got {push!r}")


def _chosen(source: Path, *, steps: str | None, is_all: bool) -> "list[RunCheckpoint]":
    """Return the checkpoints to export, oldest first; prints incomplete ones on stderr."""
    from telescope_train.checkpoints.folders import find_checkpoints, read_checkpoint

    if steps is not None and is_all:
        raise ConfigError("--steps and --all cannot be combined; give only one of them")
    if (source / "checkpoint.json").is_file():
        if steps is not None or is_all:
            raise ConfigError(
                f"{str(source)!r} is one checkpoint; --steps and --all need the folder of a run"
            )
        return [read_checkpoint(source)]
    folder = _checkpoints_of(source)
    found = find_checkpoints(folder)
    broken = [f"{path} is not whole: {why}" for path, why in sorted(found.broken.items())]
    if not found.complete:
        raise ConfigError(
            f"{str(folder)!r} contains no complete checkpoint; one is written at the end of a run, "
            f"or every checkpoint_every steps{''.join(f'; {line}' for line in broken)}"
        )
    if steps is not None:
        if not re.fullmatch(r"\d+(,\d+)*", steps):
            raise ConfigError(f"--steps takes numbers separated by commas, got {steps!r}")
        numbers = sorted({int(step) for step in steps.split(",")})
        return [_at(found.complete, step, broken) for step in numbers]
    if is_all:
        _tell(broken)
        return found.complete
    newest = found.complete[-1]
    _tell(f"{line}; {newest.path.name} is exported" for line in found.broken_after(newest))
    return [newest]


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(escaped(f"note: {line}"), err=True)


def _checkpoints_of(run: Path) -> Path:
    from telescope_core.records import RunFolder

    if not run.is_dir():
        from telescope_train.checkpoints.folders import beside

        runs = [path.parent.name for path in run.parent.glob("*/run.json")]
        close = nearest(run.name, runs)
        advice = f"; did you mean {str(run.parent / close[0])!r}?" if close else ""
        raise ConfigError(
            f"{str(run)!r} is not a folder; expected the folder of a run or a checkpoint"
            f"{advice or beside(run)}"
        )
    settings = RunFolder.open(run).config()
    shared = settings.get("checkpoint", {}).get("checkpoint_dir")
    if shared is None:
        return run / "checkpoints"
    return Path(shared).expanduser() / settings["run"]["name"]


def _at(found: "list[RunCheckpoint]", step: int, broken: list[str]) -> "RunCheckpoint":
    for checkpoint in found:
        if checkpoint.step == step:
            return checkpoint
    known = ", ".join(str(checkpoint.step) for checkpoint in found)
    raise ConfigError(
        f"there is no whole checkpoint of step {step}; available steps: {known}"
        f"{''.join(f'; {line}' for line in broken)}"
    )


def _line(done: "Exported", commit: object) -> str:
    files = counted(done.num_files, "file")
    pushed = f", pushed: {commit}" if commit else ""
    return f"{done.path}: step {done.step}, {done.num_parameters:,} parameters, {files}{pushed}"
