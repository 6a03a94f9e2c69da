"""Trainer backends, which hold the model; found through the entry points `telescope.backends`.

Importing this package does not import torch. Loading a backend does.
"""

from typing import TYPE_CHECKING

from telescope_core.base.entry_points import entry_points
from telescope_core.base.errors import unknown_name

if TYPE_CHECKING:
    from telescope_train.backends.protocol import BackendSettings
    from telescope_train.backends.trainer_backend import TrainerBackend
    from telescope_train.cluster.rank_layout import RankLayout

GROUP = "telescope.backends"


def known_backends() -> list[str]:
    """Return the names of all installed backends, without importing any."""
    return sorted(entry_points(group=GROUP).names)


def load_backend(name: str) -> "type[TrainerBackend]":
    """Return the class of backend `name`; raises UnknownNameError with the nearest names."""
    found = entry_points(group=GROUP, name=name)
    if not found:
        hint = f"(others are packages with an entry point in {GROUP!r})"
        raise unknown_name("train_backend", name, known_backends(), hint)
    return next(iter(found)).load()


def layout_of(settings: "BackendSettings") -> "RankLayout":
    """Return how the ranks in `settings` divide the work; ConfigError if they cannot."""
    backend = load_backend(settings.trainer.train_backend)
    return backend.rank_layout(settings, settings.trainer.trainer_num_workers)


__all__ = ["known_backends", "layout_of", "load_backend"]
