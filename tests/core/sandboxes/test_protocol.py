"""Specs, lookup by name, and refusals by name."""

import pytest

from telescope_core.errors import ConfigError, UnknownNameError
from telescope_core.sandboxes import (
    Limit,
    Network,
    SandboxLimitError,
    SandboxSpec,
    open_provider,
    provider_names,
)
from telescope_core.sandboxes.errors import require_limits


def test_an_unknown_provider_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown sandbox provider 'locl'.*'local'"):
        open_provider("locl")
    assert "local" in provider_names()


def test_a_setting_that_a_provider_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"'local'.*colour"):
        open_provider("local", colour="red")


def test_every_limit_that_is_missing_is_named():
    spec = SandboxSpec(cpus=2.0, memory_mb=64, network=Network.FULL)
    with pytest.raises(SandboxLimitError) as refused:
        require_limits("some", spec, {Limit.MEMORY, Limit.TIME_TO_LIVE})
    said = str(refused.value)
    assert "'some' cannot give cpus=2.0, network=full; they give: memory_mb, time_to_live_s" in said
    require_limits("some", SandboxSpec(), {Limit.TIME_TO_LIVE, Limit.NETWORK_NONE})


@pytest.mark.parametrize(
    "field", ["cpus", "memory_mb", "disk_mb", "max_processes", "time_to_live_s"]
)
def test_an_amount_that_is_not_above_0_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} of a sandbox must be above 0, got 0"):
        SandboxSpec(**{field: 0})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"network": "nonne"}, "must be one of none, endpoint, full, got 'nonne'"),
        ({"memory_mb": "512"}, "memory_mb of a sandbox must be a number, got '512'"),
        ({"cpus": True}, "cpus of a sandbox must be a number, got True"),
    ],
)
def test_what_is_misspelt_or_no_number_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        SandboxSpec(**wrong)


async def test_less_of_a_processor_than_a_control_group_takes_is_refused_before():
    provider = open_provider("local")
    said = "cannot give cpus" if Limit.CPUS not in provider.limits else "have at least cpus=0.01"
    with pytest.raises(SandboxLimitError, match=said):
        await provider.create(SandboxSpec(cpus=0.001))
    await provider.close()
