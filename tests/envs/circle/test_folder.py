"""The circle through a registry that is a folder."""

import pytest
from tests.envs.circle.circle import Place, engine, go_round
from tests.envs.projects import write_registry

pytestmark = pytest.mark.engine
__all__ = ["engine"]


def test_the_circle_through_a_folder(tmp_path, engine):
    folder = tmp_path / "registry"
    write_registry(folder)
    go_round(Place(str(folder), str(folder)), tmp_path, engine)
