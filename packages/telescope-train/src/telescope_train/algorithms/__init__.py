"""The algorithms, one module each, found through the entry points `telescope.algorithms`.

Importing this package or loading a built-in algorithm does not import torch. Computing does.
"""

from telescope_train.algorithms.objective import (
    loss_function,
    objective,
    resolved,
)
from telescope_train.algorithms.policy_gradient import policy_gradient
from telescope_train.algorithms.record import Algorithm, known_algorithms, load_algorithm
from telescope_train.algorithms.terms import Terms, TokenLoss, log_ratios, sequence_mean

__all__ = [
    "Algorithm",
    "Terms",
    "TokenLoss",
    "known_algorithms",
    "load_algorithm",
    "log_ratios",
    "loss_function",
    "objective",
    "policy_gradient",
    "resolved",
    "sequence_mean",
]
