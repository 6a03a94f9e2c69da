"""Every group of ranks waits as long as the group of all ranks, and not torch's default time."""

import ast
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import telescope_train
from telescope_train.backends.fsdp import sharding
from telescope_train.cluster.rank_layout import RankLayout

SOURCES = Path(telescope_train.__file__).parent
LIMITS = {
    "new_group": "timeout",
    "init_process_group": "timeout",
    "ProcessGroupGloo": "timeout",
    "initialize_model_parallel": "distributed_timeout_minutes",
}
"""Function that makes groups -> its argument for the limit."""


def test_no_group_is_made_without_a_limit():
    seen, without = set(), []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in LIMITS:
                seen.add(name)
                if LIMITS[name] not in [given.arg for given in node.keywords]:
                    without.append(f"{path.name}:{node.lineno}")
    assert not without
    assert seen == set(LIMITS)


@pytest.fixture
def limit():
    """A group of one rank that waits 77 s."""
    found = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=found)
    yield found
    dist.destroy_process_group()


def test_the_groups_of_a_mesh_wait_as_all_do(limit, monkeypatch):
    """The function of torch that makes them takes no limit."""
    group = dist.new_group([0])
    made = SimpleNamespace(get_all_groups=lambda: [group])
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *_, **__: made)
    sharding.weight_mesh(RankLayout(), torch.device("cpu"))
    assert group._get_backend(torch.device("cpu")).options._timeout == limit
