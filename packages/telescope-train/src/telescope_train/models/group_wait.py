"""How long ranks of a group wait for each other.

torch gives each new group 10 or 30 minutes, whatever the ranks agreed on when they met. A rank that
waits for another's long write would give up.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _set_pg_timeout,  # pyright: ignore[reportPrivateUsage]
)


def group_wait() -> timedelta:
    """Return the time limit of the group of all ranks, which every other group is to have."""
    world: Any = dist.group.WORLD
    return world._get_backend(world._device_types[0]).options._timeout


def wait_as_all(group: dist.ProcessGroup) -> None:
    """Give `group` that limit, if it was made by a function that takes none."""
    _set_pg_timeout(group_wait(), group)
