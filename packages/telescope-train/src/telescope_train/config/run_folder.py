"""The folder that a run is written to, and whether it can be created."""

from pathlib import Path

from telescope_core.base.folders import why_not_writable
from telescope_train.config.schema import TrainConfig


def run_folder(config: TrainConfig) -> Path:
    """Return the folder that holds everything the run writes."""
    return Path(config.run.output_dir) / config.run.name


def run_folder_problems(config: TrainConfig, *, go_on: str) -> list[str]:
    """Return why the run folder cannot be created; empty when it can.

    `go_on`: what to add to go on with the run that is in it, if anything does.
    """
    folder = run_folder(config)
    if (folder / "run.json").is_file():
        return [
            f"the run folder {folder} is not empty; {go_on and f'add {go_on}, '}give another "
            "--name, or move the folder"
        ]
    if folder.is_dir() and any(folder.iterdir()):
        return [f"the run folder {folder} is not empty; give another --name, or move the folder"]
    if why := why_not_writable(folder):
        return [f"the run folder {folder} cannot be created: {why}"]
    return []
