"""Read settings files and flags into a checked `TrainConfig`."""

from collections.abc import Sequence
from pathlib import Path

from telescope_core.settings.config import RecordedSettings, load_config
from telescope_train.algorithms.corrections import algorithm_in_use
from telescope_train.config.names import (
    FOREIGN_NAMES,
    NO_EQUAL_NAMES,
    REFUSED_NAMES,
    SUPERVISED_NAMES,
)
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.checks.config import check_config


def load_train_config(
    files: Sequence[Path | RecordedSettings], flags: Sequence[str] = ()
) -> TrainConfig:
    """Return settings that fit together; raises ConfigError that names those that do not."""
    config = load_config(
        TrainConfig,
        files,
        flags,
        foreign_names=FOREIGN_NAMES,
        refused_names=REFUSED_NAMES | NO_EQUAL_NAMES | SUPERVISED_NAMES,
    )
    check_config(config)
    return config.model_copy(update={"algorithm": algorithm_in_use(config)})
