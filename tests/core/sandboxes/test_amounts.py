"""Every limit of every provider, with amounts that make no sense or that it cannot hold."""

import os

import pytest

from telescope_core.errors import ConfigError
from telescope_core.sandboxes import (
    EpisodeSandboxes,
    Limit,
    Network,
    SandboxLimitError,
    SandboxPool,
    SandboxSpec,
    open_provider,
    provider_names,
)
from telescope_core.sandboxes.local.sandbox import LocalSandbox
from telescope_core.sandboxes.remote import RemoteSandbox

INFINITE, NO_NUMBER = float("inf"), float("nan")
MEMORY_MB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
NO_AMOUNTS = {
    "cpus": {
        "must be above 0": (0, -1, -0.5, NO_NUMBER),
        "must be finite": (INFINITE,),
        "must be a number": ("2", True, [1]),
    },
    "time_to_live_s": {
        "must be above 0": (0, -1, NO_NUMBER, -INFINITE),
        "must be finite": (INFINITE,),
        "must be a number": ("900", False, None),
    },
    **{
        name: {
            "must be above 0": (0, -1, -0.5, NO_NUMBER),
            "must be a whole number": (512.5, 512.0, "512", True, INFINITE),
        }
        for name in ("memory_mb", "disk_mb", "max_processes")
    },
    "max_output_bytes": {
        "must be a whole number from 0 to 1073741824": (-1, 1.5, "9", None, True, 10**30),
    },
    "network": {"must be one of none, endpoint, full": ("nonne", "", None, 0)},
    "image": {"must be the name of an image": ("", " ", 3)},
}
TOO_MUCH = {
    "cpus": (1e12, 10**30),
    "memory_mb": (10**15, 10**30),
    "disk_mb": (10**15, 10**30),
    "max_processes": (10**15, 10**30),
    "time_to_live_s": (1e18, 10**30),
}
HELD = {
    # provider, limit, amount, what is said of it
    ("local", "memory_mb", MEMORY_MB + 1, f"at most {MEMORY_MB}, the memory of this machine"),
    ("local", "memory_mb", 1, "at least 16, without which no program starts"),
    ("local", "disk_mb", MEMORY_MB + 1, f"at most {MEMORY_MB}, the memory of this machine"),
    ("docker", "cpus", 0.001, "at least 0.01, the least that a container can be given"),
    ("docker", "memory_mb", 1, "at least 16, without which no program starts"),
    ("docker", "max_processes", 1, "at least 8, which the script around each command needs"),
    ("docker", "max_processes", 1023, "at most 1022, as the containers of a service may share"),
    ("daytona", "cpus", 1.5, "only multiples of 1"),
    ("daytona", "memory_mb", 1500, "only multiples of 1024"),
    ("daytona", "disk_mb", 64, "only multiples of 1024"),
}
"""Amounts beyond what one provider holds, by a little."""


@pytest.mark.parametrize("name", NO_AMOUNTS)
def test_what_is_no_amount_at_all_is_refused_whoever_the_provider_is(name):
    for said, values in NO_AMOUNTS[name].items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{name} of a sandbox {said}"):
                SandboxSpec(**{name: value})


async def said_of(provider: str, name: str, *values: object) -> dict[object, str]:
    """Return what a provider says of each value that it refuses."""
    made, said = open_provider(provider), {}
    try:
        for value in values:
            with pytest.raises(SandboxLimitError) as refused:
                await made.create(SandboxSpec(**{name: value}))
            said[value] = str(refused.value)
    finally:
        await made.close()
    return said


@pytest.mark.parametrize("provider", provider_names())
async def test_far_too_much_is_refused_by_name_before_anything_is_asked_for(provider):
    limits = open_provider(provider).limits
    for name, values in TOO_MUCH.items():
        for value, said in (await said_of(provider, name, *values)).items():
            assert f"'{provider}' cannot give {name}={value!r}" in said
            assert ("(at most" in said) is (Limit(name) in limits), said


@pytest.mark.parametrize(("provider", "name", "value", "why"), sorted(HELD, key=str))
async def test_what_a_provider_cannot_hold_is_refused_with_what_it_can(provider, name, value, why):
    said = await said_of(provider, name, value)
    assert f"'{provider}' cannot give {name}={value!r} ({why}" in said[value]


async def test_the_processors_of_a_local_sandbox_are_those_of_the_machine():
    for value, why in ((0.001, "at least 0.01"), ((os.cpu_count() or 1) + 1, "at most")):
        said = (await said_of("local", "cpus", value))[value]
        is_given = Limit.CPUS in open_provider("local").limits
        assert (f"cpus={value!r} ({why}" in said) is is_given, said


async def test_the_least_of_everything_still_runs_a_program():
    provider = open_provider("local")
    least = SandboxSpec(memory_mb=16, disk_mb=1, max_processes=1, max_output_bytes=0)
    box = await provider.create(least)
    done = await box.run(["python3", "-c", "print(1)"])
    await provider.close()
    assert (done.exit_code, done.num_dropped_bytes) == (0, 2), done


def test_a_network_that_is_named_by_a_text_is_the_network_of_that_name():
    """Providers look with `is`; "none" must not leave the network on."""
    for network in Network:
        assert SandboxSpec(network=str(network.value)).network is network


@pytest.mark.parametrize("kind", [LocalSandbox, RemoteSandbox])
@pytest.mark.parametrize(
    ("timeout_s", "said"),
    [
        (0, "above 0"),
        (-1, "above 0"),
        (NO_NUMBER, "above 0"),
        (INFINITE, "finite"),
        ("9", "number"),
    ],
)
async def test_a_time_limit_of_a_command_that_is_none_is_refused(kind, timeout_s, said):
    with pytest.raises(ConfigError, match=f"timeout_s.*{said}"):
        await kind.run(None, ["true"], timeout_s=timeout_s)
    with pytest.raises(ConfigError, match=f"cpu_timeout_s.*{said}"):
        await kind.run(None, ["true"], cpu_timeout_s=timeout_s)


@pytest.mark.parametrize(
    "sizes",
    [{"max_open": 0}, {"max_open": 2.5}, {"max_open": True}, {"num_warm": -1}, {"num_warm": 20}],
)
def test_sizes_of_a_pool_are_refused_when_it_is_described_and_when_it_is_made(sizes):
    [(name, value)] = sizes.items()
    for kind in (EpisodeSandboxes, SandboxPool):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            kind("local", **sizes)


@pytest.mark.parametrize("timeout_s", [0, -1.0, INFINITE, NO_NUMBER])
def test_a_time_limit_of_a_tool_that_is_none_is_refused(timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        EpisodeSandboxes(timeout_s=timeout_s)
