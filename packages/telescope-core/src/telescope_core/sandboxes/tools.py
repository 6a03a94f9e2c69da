"""The tools `python` and `bash` of a `ToolEnvironment`: a sandbox for a rollout that uses them."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from telescope_core.environments.episode import Episode
from telescope_core.environments.tool_threads import OpenedOnce
from telescope_core.sandboxes.lookup import open_provider, require_provider
from telescope_core.sandboxes.pool import PoolUsage, SandboxPool, require_pool_sizes
from telescope_core.sandboxes.protocol import (
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    StopCause,
    require_amount,
)


@dataclass(slots=True, kw_only=True)
class _Place:
    """The sandbox of one rollout, if it has one."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    sandbox: Sandbox | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EpisodeSandboxes:
    """Sandboxes for the rollouts of an environment, each created on first use.

    The provider is opened when the first of them is.

    Return `python` and `bash` from `tools`, call `release` in a `@cleanup` and `close` in `close`.
    """

    def __init__(
        self,
        provider: str | SandboxProvider = "local",
        spec: SandboxSpec | None = None,
        *,
        max_open: int = 16,
        num_warm: int = 0,
        timeout_s: float = 20.0,
    ) -> None:
        """`timeout_s`: limit of one call; must be below the environment's `tool_timeout_s`."""
        require_amount("timeout_s of a sandbox tool", timeout_s)
        require_pool_sizes(max_open, num_warm)
        if isinstance(provider, str):
            require_provider(provider)
        self._given = provider
        self._spec = spec
        self._max_open = max_open
        self._num_warm = num_warm
        self._timeout_s = timeout_s
        self._pool = OpenedOnce(self._open)
        self._is_closed = False
        self._places: WeakKeyDictionary[Episode[Any], _Place] = WeakKeyDictionary()

    def usage(self) -> PoolUsage:
        """Return the use of sandboxes by all rollouts so far."""
        pool = self._pool.found
        return PoolUsage() if pool is None else pool.usage()

    async def python(self, code: str, episode: Episode[Any]) -> str:  # noqa: D417 - it is hidden
        """Run a Python program and return what it prints. Files stay; variables do not.

        Args:
            code: The program. Print what you want to see.
        """
        return await self._run(episode, ["python3", "-c", code])

    async def bash(self, command: str, episode: Episode[Any]) -> str:  # noqa: D417 - it is hidden
        """Run a bash command and return what it prints. Files stay; variables do not.

        Args:
            command: The command, or several lines of them.
        """
        return await self._run(episode, ["bash", "-c", command])

    async def sandbox(self, episode: Episode[Any], spec: SandboxSpec | None = None) -> Sandbox:
        """Return the sandbox of a rollout, for instance to put files in or to grade its content.

        `spec` replaces that of all rollouts when the sandbox is created. Raises SandboxError if the
        provider cannot create one, which fails the rollout.
        """
        place = self._places.setdefault(episode, _Place())
        async with place.lock:
            if place.sandbox is None:
                pool = await self._pool.get()
                place.sandbox = await place.stack.enter_async_context(pool.take(spec))
            return place.sandbox

    async def release(self, episode: Episode[Any]) -> None:
        """Close the sandbox of a rollout, if it has one. Idempotent."""
        place = self._places.pop(episode, None)
        if place is not None:
            async with place.lock:
                place.sandbox = None
                await place.stack.aclose()

    async def close(self) -> None:
        """Close all sandboxes, and the provider if it was opened by its name."""
        self._is_closed = True
        pool = self._pool.found
        if pool is not None:
            try:
                await pool.close()
            finally:
                if isinstance(self._given, str):
                    await pool.provider.close()

    def _open(self) -> SandboxPool:
        """Open the provider, which examines the machine; this is delayed until it is needed."""
        if self._is_closed:
            raise SandboxError("the sandboxes are closed; no further one can be made")
        given = self._given
        provider = open_provider(given) if isinstance(given, str) else given
        return SandboxPool(provider, self._spec, max_open=self._max_open, num_warm=self._num_warm)

    async def _run(self, episode: Episode[Any], argv: list[str]) -> str:
        sandbox = await self.sandbox(episode)
        done = await sandbox.run(argv, timeout_s=self._timeout_s)
        if done.stop is StopCause.SANDBOX_ENDED:
            await self.release(episode)
        return shown(done, self._timeout_s)


def shown(done: CommandResult, timeout_s: float) -> str:
    """Return the text about a command for a model: output, and an exit code other than 0."""
    parts = [done.text.rstrip("\n")]
    if done.stderr:
        parts.append(f"[standard error]\n{done.error_text.rstrip()}")
    if done.num_dropped_bytes:
        parts.append(f"[{done.num_dropped_bytes} bytes of output were dropped]")
    ends = {
        StopCause.TIMEOUT: f"[stopped after {timeout_s:g} s]",
        StopCause.MEMORY: "[stopped: out of memory]",
        StopCause.SANDBOX_ENDED: "[the sandbox has ended, and its files are gone]",
    }
    if done.stop in ends:
        parts.append(ends[done.stop])
    elif done.exit_code != 0:
        parts.append(f"[exit code {done.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"
