"""Specs, lookup by name, and refusals by name."""

import re
from pathlib import Path

import pytest

from telescope_core import sandboxes
from telescope_core.errors import ConfigError, UnknownNameError
from telescope_core.sandboxes import (
    Limit,
    Network,
    SandboxLimitError,
    SandboxSpec,
    open_provider,
    provider_names,
)
from telescope_core.sandboxes.protocol import require_limits


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
    missing, _, given = said.partition(";")
    assert all(one in missing for one in ("'some'", "cpus=2.0", "network=full")), said
    assert "memory_mb" not in missing
    assert all(one in given for one in ("memory_mb", "time_to_live_s")), said
    require_limits("some", SandboxSpec(), {Limit.TIME_TO_LIVE, Limit.NETWORK_NONE})


def test_the_reference_names_all_that_is_public():
    page = Path(__file__).parents[3] / "docs" / "reference" / "sandboxes.md"
    missing = set(sandboxes.__all__) - set(re.findall(r"\w+", page.read_text()))
    assert missing == set()
