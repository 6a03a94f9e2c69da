"""The folder of each eval of a run, and the evals without a result."""

from collections.abc import Sequence
from pathlib import Path

from telescope_core.evals import read_results
from telescope_core.records import RunFolder
from telescope_core.reports.before_after import eval_folder_name
from telescope_train.config.schema import EvalEntry, TrainConfig

BEFORE = "before"
AFTER = "after"


def step_tag(step: int) -> str:
    """Return the tag of the evals after `step`."""
    return f"step-{step}"


def parts_of_folder_name(folder: str, environments: Sequence[str]) -> tuple[str, str]:
    """Return the environment and the tag of an eval's folder; the inverse of `eval_folder_name`.

    If it belongs to none of `environments`, the environment is `folder`, and the tag is empty.
    """
    for name in sorted(environments, key=len, reverse=True):
        if folder.startswith(start := eval_folder_name(name, "")):
            return name, folder.removeprefix(start)
    return folder, ""


def eval_path(folder: RunFolder, entry: EvalEntry, tag: str) -> Path:
    """Return the folder of an eval."""
    return folder.evals_path / eval_folder_name(entry.name, tag)


def due_evals(config: TrainConfig, step: int) -> list[EvalEntry]:
    """Return the evals that are due after `step`."""
    return [one for one in config.evals.evals if one.eval_every and step % one.eval_every == 0]


def eval_steps(config: TrainConfig, entry: EvalEntry) -> Sequence[int]:
    """Return the steps after which an eval is due."""
    if not entry.eval_every:
        return ()
    return range(entry.eval_every, config.run.number_of_steps + 1, entry.eval_every)


def missing_evals(entries: Sequence[EvalEntry], folder: RunFolder, tag: str) -> list[EvalEntry]:
    """Return those of `entries` that have no result of this `tag` that can be read."""
    known, _ = read_results(eval_path(folder, one, tag) for one in entries)
    return [one for one in entries if eval_path(folder, one, tag).name not in known]


def evals_left(config: TrainConfig, folder: RunFolder) -> list[EvalEntry]:
    """Return the evals that remain to be played after the last step of a run."""
    last = config.run.number_of_steps
    left = missing_evals(due_evals(config, last), folder, step_tag(last))
    if config.evals.eval_after_training:
        left += missing_evals(config.evals.evals, folder, AFTER)
    return left
