"""Settings of `telescope train`: schema, known names, checks. Imports no torch."""

from telescope_train.config.checks import check_config
from telescope_train.config.load import load_train_config
from telescope_train.config.schema import TrainConfig

__all__ = ["TrainConfig", "check_config", "load_train_config"]
