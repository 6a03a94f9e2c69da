"""Older versions of the policy that play against it, each on a server of its own.

    begin              every server gets the weights that the run begins with
    after_step(v)      every `update_every` steps, the server with the oldest version gets v

A server keeps its version until its turn comes again, so `num_servers` servers hold the last
versions that were kept. The opponent of a rollout is chosen for its group, so that all its
rollouts play against the same one and can be compared.
"""

import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from telescope_core.base.types import WeightVersion
from telescope_core.records.servers import ServerState
from telescope_train.config.inference_section import InferenceSection
from telescope_train.inference.pool import ServerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersions:
    """The older versions that servers hold, and their servers."""

    num_servers: int
    """0 = none are."""
    update_every: int
    """Steps after which another version is kept."""

    @classmethod
    def from_settings(cls, section: InferenceSection) -> "KeptVersions":
        """Return the versions that these settings keep."""
        return cls(
            num_servers=section.opponent_num_servers, update_every=section.opponent_update_every
        )

    def at(self, step: int) -> list[WeightVersion]:
        """Return the version that each server holds after `step`; 0 = the first weights."""
        num_kept = step // self.update_every
        newest = [
            num_kept - (num_kept - 1 - server) % self.num_servers
            for server in range(self.num_servers)
        ]
        return [max(0, number) * self.update_every for number in newest]

    def server_of(self, step: int) -> int | None:
        """Return the number of the server that gets the weights of `step`; None = none does."""
        if not self.num_servers or not step or step % self.update_every:
            return None
        return (step // self.update_every - 1) % self.num_servers


class OpponentServers:
    """The servers with older versions; each is a pool of one, with a version of its own."""

    def __init__(self, pools: Sequence[ServerPool], kept: KeptVersions) -> None:
        self.pools = pools
        self.kept = kept

    def pool_of(self, group_id: str) -> ServerPool:
        """Return the server that plays in the rollouts of a group, as if drawn among them."""
        # A server that was lost comes back with other weights; until then the others play.
        pools = [one for one in self.pools if not one.is_down]
        pools = pools or [one for one in self.pools if not one.is_given_up] or self.pools
        return pools[zlib.crc32(group_id.encode()) % len(pools)]

    async def begin(self, send: Callable[[ServerPool], Awaitable[None]]) -> None:
        """Give all servers the weights that are live, by `send`."""
        for pool in self.pools:
            await send(pool)

    async def after_step(self, step: int, send: Callable[[ServerPool], Awaitable[None]]) -> None:
        """Give the weights of `step`, which are live, to the server whose turn it is.

        One that was lost and waits for weights gets them too: those that it held are gone.
        """
        due = self.kept.server_of(step)
        for number, pool in enumerate(self.pools):
            if number == due or pool.servers[0].state is ServerState.LOADING:
                await send(pool)
