"""Algorithms: one page each, found through the entry points `telescope.algorithms`.

Importing this package does not import torch; loading an algorithm does.
"""

from telescope_train.algorithms.record import (
    Algorithm,
    LossSettings,
    known_algorithms,
    load_algorithm,
)

__all__ = ["Algorithm", "LossSettings", "known_algorithms", "load_algorithm"]
