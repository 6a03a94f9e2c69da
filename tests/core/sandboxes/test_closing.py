"""Sandboxes whose service does not answer when they are to be ended: none is forgotten."""

import errno
import os
import subprocess
import threading
from types import SimpleNamespace

import pytest

from telescope_core.sandboxes import (
    EpisodeSandboxes,
    Limit,
    SandboxError,
    SandboxPool,
    SandboxSpec,
)
from telescope_core.sandboxes.docker import DockerProvider
from telescope_core.sandboxes.local.bubblewrap import InnerLimits, Interpreter
from telescope_core.sandboxes.local.sandbox import LocalSandbox
from telescope_core.sandboxes.local.started import Ingredients, Template, start
from telescope_core.sandboxes.remote import CloudProvider


class Away:
    """A service that does not answer the first `num_failures` times that it is to end a sandbox."""

    def __init__(self, name: str, num_failures: int) -> None:
        self.id = name
        self.num_failures = num_failures
        self.num_asked = 0
        self.is_ended = False

    async def delete(self) -> None:
        self.num_asked += 1
        if self.num_asked <= self.num_failures:
            raise SandboxError(f"{self.id} is away")
        self.is_ended = True


class Services(CloudProvider):
    """A provider of such sandboxes: of the first, the service is away for a while."""

    name = "away"

    def __init__(self, num_failures: int) -> None:
        self.limits = dict.fromkeys((Limit.NETWORK_NONE, Limit.TIME_TO_LIVE), "the service")
        self.amounts = {}
        self._num_failures = num_failures
        self.made: list[Away] = []
        super().__init__()

    async def start(self, spec: SandboxSpec) -> Away:
        self.made.append(Away(f"box {len(self.made)}", 0 if self.made else self._num_failures))
        return self.made[-1]


async def test_a_sandbox_that_could_not_be_ended_is_tried_again():
    provider = Services(num_failures=2)
    box = await provider.create(SandboxSpec())
    for _ in range(2):
        with pytest.raises(SandboxError, match="box 0 is away"):
            await box.close()
        assert not box.is_alive
    await box.close()
    await box.close()
    await provider.close()
    assert (provider.made[0].is_ended, provider.made[0].num_asked) == (True, 3)


async def test_at_the_end_of_a_pool_one_failure_leaves_no_other_sandbox_open():
    provider = Services(num_failures=1)
    pool = SandboxPool(provider, max_open=3, num_warm=3)
    await pool.warm_up()
    with pytest.raises(SandboxError, match="box 0 is away"):
        await pool.close()
    assert [one.is_ended for one in provider.made] == [False, True, True]
    await provider.close()
    assert provider.made[0].is_ended


async def test_sandboxes_of_rollouts_end_with_their_provider(monkeypatch):
    provider = Services(num_failures=1)
    monkeypatch.setattr("telescope_core.sandboxes.tools.open_provider", lambda name: provider)
    sandboxes = EpisodeSandboxes("local", num_warm=2, max_open=2)
    await (await sandboxes._pool.get()).warm_up()
    with pytest.raises(SandboxError, match="box 0 is away"):
        await sandboxes.close()
    assert [one.is_ended for one in provider.made] == [True, True]


async def test_a_provider_of_containers_leaves_its_service_and_keeps_no_thread(monkeypatch):
    left = []
    service = SimpleNamespace(close=lambda: left.append(threading.current_thread()))
    provider = DockerProvider()
    monkeypatch.setattr(provider, "_connect", lambda: (service, {}))
    for number in (1, 2):
        await provider._connected()
        await provider.close()
        assert len(left) == number
        left[-1].join(60)
        assert not left[-1].is_alive()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def refusing(make, *, after: int):
    """Return `make`, which is refused once it was called `after` times."""
    left = iter(range(after))

    def refused(*arguments):
        if next(left, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make(*arguments)

    return refused


async def test_a_command_without_descriptors_keeps_none(monkeypatch):
    box = LocalSandbox(
        SimpleNamespace(pid=1, kill=lambda: None),
        None,
        SandboxSpec(),
        watched_bytes=0,
        environment={},
        measures={},
        on_closed=lambda box: None,
    )
    before = num_open_files()
    for after in (0, 1):
        monkeypatch.setattr(os, "pipe", refusing(os.pipe, after=after))
        with pytest.raises(OSError, match="Too many open files"):
            await box.run(["true"])
        monkeypatch.undo()
    assert num_open_files() == before
    box._expire()
    box._expiry.cancel()


GIVEN = Ingredients(
    program="/nowhere/bwrap",
    interpreter=Interpreter(path="/usr/bin/python3", prefix="/usr", package_folders=()),
    supervisor=b"",
    template=b"",
    filter=b"x",
    read_only=(),
)
LIMITS = InnerLimits(disk_bytes=1, max_processes=1, address_bytes=0, time_to_live_s=1)


async def test_a_sandbox_that_cannot_be_started_keeps_no_descriptor(monkeypatch):

    async def template() -> None:
        Template(GIVEN)

    before = num_open_files()
    for after in range(3):
        for begin in (lambda: start(GIVEN, LIMITS, lambda pid: None), template):
            monkeypatch.setattr(os, "memfd_create", refusing(os.memfd_create, after=after))
            with pytest.raises(OSError, match="Too many open files"):
                await begin()
            monkeypatch.undo()
    assert num_open_files() == before


async def test_a_template_that_has_ended_at_once_says_so_and_keeps_nothing(monkeypatch):
    started = []

    class Ended(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.wait()
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Ended)
    before = num_open_files()
    template = Template(GIVEN)
    with pytest.raises(SandboxError, match=r"the template of local sandboxes has ended .*nowhere"):
        await template.fork(LIMITS, lambda pid: None)
    await template.close()
    assert started[0].returncode
    assert num_open_files() == before
