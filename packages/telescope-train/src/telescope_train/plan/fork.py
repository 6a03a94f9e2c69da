"""Settings of `telescope train --fork RUN --at N`: a run that continues from a step of another.

The settings of RUN replace a settings file, and its checkpoint of step N replaces
`resume_from_checkpoint`; `resume` does the rest. RUN is only read. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from telescope_core.base.errors import ConfigError
from telescope_core.base.secret_names import names_left_out
from telescope_core.records import RunFolder
from telescope_core.records.files import read_json
from telescope_core.records.run_folder import SETTINGS_FILE
from telescope_core.settings.config import RecordedSettings
from telescope_train.checkpoints.folders import RunCheckpoint, find_checkpoints
from telescope_train.config.earlier import in_names_of_today, names_of_today
from telescope_train.config.origin import chosen_settings, origin_of
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.load import load_train_config

OWN = frozenset(
    {
        "run.name",
        "run.output_dir",
        "checkpoint.resume_from_checkpoint",
        "checkpoint.resume_if_saved",
        "checkpoint.allow_changed_environments",
    }
)
"""Settings that a fork does not take from the run: its name, and how it began."""


def load_fork(
    run: RunFolder, step: int, files: Sequence[Path] = (), flags: Sequence[str] = ()
) -> TrainConfig:
    """Return the settings of a run that continues from `step` of `run`, with those of `flags`.

    All settings that `files` and `flags` leave open are as in `run`, even if this version has other
    defaults. Raises ConfigError if there is no such checkpoint, or if settings are missing or do
    not fit.
    """
    config, known = in_names_of_today(run.config()), read_json(run.path / SETTINGS_FILE) or {}
    if not config or "set" not in known:
        raise ConfigError(
            f"{run.path} lacks {SETTINGS_FILE} or config.json, which say how the run was started; "
            "give its settings file, and the checkpoint with --resume_from_checkpoint"
        )
    place = _place(run, _checkpoint_at(run, config, step))

    def load(names: set[str]) -> TrainConfig:
        settings = RecordedSettings(
            str(run.path / "config.json"), chosen_settings(config, names - OWN)
        )
        return load_train_config([settings, *files, place], flags)

    given = names_of_today(known["set"], run.config())
    loaded = load(given)
    defaults = origin_of(loaded).defaults
    moved = {
        name
        for name, value in known["defaults"].items()
        if name in defaults and defaults[name] != value
    }
    if moved - given - OWN:
        loaded = load(given | moved)
    if hidden := list(names_left_out(loaded.model_dump(mode="json"))):
        raise ConfigError(
            f"{', '.join(hidden)}: a secret, which {run.path} does not hold; give it again, or the "
            "settings file of the run before the flags: telescope train run.toml --fork ..."
        )
    return loaded


def _place(run: RunFolder, checkpoint: RunCheckpoint) -> RecordedSettings:
    """Return the settings that give a fork its own folder beside that of `run`."""
    path = run.path if run.path.name not in ("", "..") else run.path.resolve()
    own: dict[str, Any] = {
        "run": {
            "name": f"{run.info().name}-fork-{checkpoint.step}",
            "output_dir": str(path.parent),
        },
        "checkpoint": {"resume_from_checkpoint": str(checkpoint.path)},
    }
    return RecordedSettings("--fork", own)


def _checkpoint_at(run: RunFolder, config: Mapping[str, Any], step: int) -> RunCheckpoint:
    name, shared = run.info().name, config.get("checkpoint", {}).get("checkpoint_dir")
    folder = Path(shared).expanduser() / name if shared else run.checkpoints_path
    found = find_checkpoints(folder)
    of_run = [
        one
        for one in found.complete
        if one.manifest.run == name and one.manifest.has_training_state
    ]
    for one in of_run:
        if one.step == step:
            return one
    broken = [f"{path.name} is not whole: {why}" for path, why in sorted(found.broken.items())]
    said = "; ".join([f"{run.path} has no checkpoint of step {step}", *broken])
    if not step:
        said += (
            ", at which it began: train its settings file again, with another --name and the change"
        )
    elif of_run:
        steps = sorted({one.step for one in of_run})
        said += (
            f"; give --at one of {', '.join(map(str, steps))}"
            if steps[1:]
            else f"; training can go on only from step {steps[0]}: give --at {steps[0]}"
        )
    else:
        said += (
            f", and no other from which training can go on (in {folder}); a run saves them with "
            "--checkpoint_every"
        )
    raise ConfigError(said)
