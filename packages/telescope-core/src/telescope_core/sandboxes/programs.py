"""`ProgramEnvironment`: one turn in which the policy writes a program, graded in a sandbox."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from pydantic import Field

from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.environments.tool_threads import OpenedOnce
from telescope_core.environments.turns import SingleTurnEnvironment
from telescope_core.sandboxes.lookup import open_provider, require_provider
from telescope_core.sandboxes.pool import SandboxPool
from telescope_core.sandboxes.protocol import Sandbox, SandboxSpec


class ProgramConfig(EnvironmentConfig):
    """Sandbox settings for programs; subclass it to add your own settings."""

    sandbox: str = "local"
    """Name of the provider of sandboxes."""
    max_sandboxes: Annotated[int, Field(ge=1, le=1000)] = 16
    """Most sandboxes that are open at the same time; further rollouts wait."""
    test_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Most seconds of processor time for one test, and ten times as many on the clock."""
    memory_mb: Annotated[int, Field(ge=0)] = 512
    """Most memory of a program, MiB; 0 leaves it to the provider, as required by e2b."""


class ProgramEnvironment(SingleTurnEnvironment):
    """The policy writes one program. A subclass grades it in `sandbox()`, in its reward method.

    The provider is opened when the first program is graded. If the provider fails, the rollout
    fails and has no reward.
    """

    Config = ProgramConfig
    config: Any

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        require_provider(self.config.sandbox)
        # Two underscores: an author's own attributes must not replace these.
        self.__pool = OpenedOnce(self.__open)

    @asynccontextmanager
    async def sandbox(self) -> AsyncGenerator[Sandbox]:
        """Yield a sandbox for one program; waits while `max_sandboxes` are in use."""
        async with (await self.__pool.get()).take() as sandbox:
            yield sandbox

    def __open(self) -> SandboxPool:
        """Open the provider, which examines the machine; this is delayed until it is needed."""
        provider = open_provider(self.config.sandbox)
        self.on_close(provider.close)
        spec = SandboxSpec(memory_mb=self.config.memory_mb or None)
        pool = SandboxPool(provider, spec, max_open=self.config.max_sandboxes)
        self.on_close(pool.close)
        return pool
