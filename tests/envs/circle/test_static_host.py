"""The circle through a registry that is rendered and lies on a static host."""

import pytest
from tests.e2e.cli_runs import TELESCOPE, finish
from tests.envs.circle.circle import Place, engine, go_round
from tests.envs.projects import write_registry
from tests.envs.static_host import static_host

pytestmark = pytest.mark.engine
__all__ = ["engine"]


def test_the_circle_through_a_static_host(tmp_path, engine):
    folder, shown = tmp_path / "registry", tmp_path / "shown"
    write_registry(folder)

    def render() -> None:
        finish([*TELESCOPE, "hub", "render", str(folder), str(shown)], tmp_path)

    render()
    with static_host(shown) as host:
        go_round(Place(str(folder), host.address, refresh=render), tmp_path, engine)
