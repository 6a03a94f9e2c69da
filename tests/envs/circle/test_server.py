"""The circle through a registry server, set up and run by its commands."""

import json

import pytest
from tests.e2e.cli_runs import TELESCOPE, finish
from tests.envs.circle.circle import Place, engine, go_round
from tests.envs.serving import hub_process

pytestmark = pytest.mark.engine
__all__ = ["engine"]


def test_the_circle_through_a_server(tmp_path, engine):
    data = ["--data", str(tmp_path / "hub")]
    hub = [*TELESCOPE, "hub"]
    finish([*hub, "namespace", "add", "acme", *data], tmp_path)
    made = [*hub, "token", "create", "acme's laptop", "--scope", "publish", "--namespace", "acme"]
    secret = json.loads(finish([*made, *data, "--json"], tmp_path))["token"]
    with hub_process(tmp_path / "hub") as (_, address):
        place = Place(address, address, variables={"TELESCOPE_HUB_TOKEN": secret})
        go_round(place, tmp_path, engine)
