"""Check that cluster nodes have everything their processes need. Pure, except `look_here`.

Markers are files with a random text that the driver writes into folders of the run: a node that
reads the same text shares the folder, and one that has another folder of that name does not.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from telescope_train.config.schema import TrainConfig
from telescope_train.models.device import torch_has_cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Requirements on a node."""

    model: str | None
    """Folder of the model; None = it is on a hub."""
    reference: str | None = None
    """Folder of `reference_model`; None = there is none, or it is on a hub."""
    run_marker: str
    checkpoint_marker: str
    text: str
    """Text of both markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The state of a node."""

    has_model: bool
    has_reference: bool
    shares_run: bool
    """Whether it has the run folder of the driver."""
    shares_checkpoints: bool
    has_cuda: bool
    """Whether its torch can use GPUs."""
    version: str
    """Version of telescope-train."""


@contextmanager
def markers(
    run_folder: Path, checkpoints: Path, model: str, reference: str | None = None
) -> Iterator[Wanted]:
    """Create markers in both folders until the context ends."""
    text = secrets.token_hex(16)
    name = f".seen-by-nodes-{text[:8]}"
    paths = [run_folder.absolute() / name, checkpoints.absolute() / name]
    try:
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        yield Wanted(
            model=_absolute_folder(model),
            reference=_absolute_folder(reference) if reference else None,
            run_marker=str(paths[0]),
            checkpoint_marker=str(paths[1]),
            text=text,
        )
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        # A run that could not start has none.
        with suppress(OSError):
            paths[1].parent.rmdir()


def _absolute_folder(model: str) -> str | None:
    """Return the absolute path of a model's folder; None = it is on a hub."""
    return str(Path(model).absolute()) if Path(model).is_dir() else None


def with_absolute_model(config: TrainConfig) -> TrainConfig:
    """Return `config` with absolute paths of its models, which are valid in any process."""
    sections: dict[str, Any] = {}
    if path := _absolute_folder(config.model.model):
        sections["model"] = config.model.model_copy(update={"model": path})
    other = config.algorithm.reference_model
    if other and (path := _absolute_folder(other)):
        sections["algorithm"] = config.algorithm.model_copy(update={"reference_model": path})
    return config.model_copy(update=sections)


def look_here(wanted: Wanted) -> Seen:
    """Return the state of this machine."""
    return Seen(
        has_model=_is_model(wanted.model),
        has_reference=_is_model(wanted.reference),
        shares_run=_reads(wanted.run_marker, wanted.text),
        shares_checkpoints=_reads(wanted.checkpoint_marker, wanted.text),
        has_cuda=torch_has_cuda(),
        version=own_version(),
    )


def _is_model(folder: str | None) -> bool:
    return folder is None or (Path(folder) / "config.json").is_file()


def own_version() -> str:
    """Return the installed version of telescope-train."""
    try:
        return version("telescope-train")
    except PackageNotFoundError:
        return "unknown"


def node_problems(
    seen: Mapping[str, Seen],
    wanted: Wanted,
    *,
    servers: Collection[str],
    ranks: Collection[str],
    device: str,
) -> Iterator[str]:
    """Yield reasons why processes cannot run on the nodes that were chosen for them.

    `seen` is by the name of a node; `servers` and `ranks` are the names of the nodes that have some
    of them.
    """
    for name in sorted({*servers, *ranks}):
        if name not in seen:
            yield (
                f"node {name} did not answer: look at its Ray with `ray status`, or take it out of "
                "the cluster"
            )
            continue
        found = seen[name]
        if found.version != own_version():
            yield (
                f"node {name} has telescope-train {found.version}, and this machine "
                f"{own_version()}; install the same version on all nodes"
            )
        if not found.has_model:
            yield (
                f"node {name} has no model at {wanted.model}; copy it there, or give model a "
                "folder that all nodes share"
            )
        if device == "cuda" and not found.has_cuda:
            yield (
                f"node {name} has GPUs, but its torch computes on CPU only; install the GPU build "
                "there, or start its Ray with --num-gpus 0"
            )
        if name in ranks and not found.has_reference:
            yield (
                f"node {name} would train and has no model at {wanted.reference}; copy it there, "
                "or give reference_model a folder that all nodes share"
            )
        if name in ranks and not found.shares_checkpoints:
            folder = Path(wanted.checkpoint_marker).parent
            yield (
                f"node {name} would train and does not share the folder for checkpoints, {folder}; "
                "set checkpoint_dir to a folder that all nodes share"
            )


def _reads(path: str, text: str) -> bool:
    try:
        return Path(path).read_text() == text
    except OSError:
        return False
