"""Tests of a GPU are only collected where there is one."""

from collections.abc import Sequence

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a CUDA device on a machine without one."""
    left_out: Sequence[pytest.Item] = [one for one in items if one.get_closest_marker("gpu")]
    if not left_out:
        return
    import torch

    if not torch.cuda.is_available():
        items[:] = [one for one in items if one not in left_out]
        config.hook.pytest_deselected(items=left_out)
