"""Sandboxes whose service does not answer when they are to be ended: none is forgotten."""

import pytest

from telescope_core.sandboxes import (
    EpisodeSandboxes,
    Limit,
    SandboxError,
    SandboxPool,
    SandboxSpec,
)
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
