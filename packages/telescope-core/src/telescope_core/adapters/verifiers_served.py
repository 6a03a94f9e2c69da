"""The old import path of `telescope_adapters.serving.verifiers_served`."""

from typing import Any

from telescope_core.adapters import moved_to


def __getattr__(name: str) -> Any:
    return getattr(moved_to("telescope_adapters.serving.verifiers_served"), name)
