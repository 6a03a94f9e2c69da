"""A pool of sandboxes: some kept ready, a limit on their number, and a record of their use.

A sandbox is used once, unless `max_uses` says more often; it is then emptied in between. One that
was cancelled, died, or could not be emptied is closed and never given out again.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from telescope_core.base.errors import ConfigError
from telescope_core.sandboxes.protocol import (
    WORK_FOLDER,
    Sandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
)

_LOGGER = logging.getLogger(__name__)
_EMPTY = (
    "chmod -R u+rwX /tmp /dev/shm 2>/dev/null; find /tmp /dev/shm -mindepth 1 -delete; "
    f'[ -z "$(find /tmp /dev/shm -mindepth 1)" ] && mkdir {WORK_FOLDER}'
)
_EMPTY_S = 30.0
_LEAST_LEFT_S = 0.5
"""Share of its time to live that a sandbox must have left when it is handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Counts of sandboxes that a pool has made, handed out and discarded so far."""

    num_created: int = 0
    num_failed: int = 0
    """Sandboxes that the provider failed to make."""
    num_taken: int = 0
    num_reused: int = 0
    """Number of times that an emptied sandbox was handed out again."""
    num_discarded: int = 0
    """Sandboxes that died, expired or could not be emptied before all their uses."""
    num_open: int = 0
    max_open: int = 0
    """Most sandboxes that were open at once."""
    waited_s: float = 0.0
    """Total seconds that takers waited."""
    open_s: float = 0.0
    """Total seconds that closed sandboxes were open, which is what providers charge for."""

    def metrics(self) -> dict[str, float]:
        """Return the counts under their names in logs."""
        return {f"sandboxes/{name}": float(getattr(self, name)) for name in self.__slots__}


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    sandbox: Sandbox
    max_uses: int
    began_s: float = field(default_factory=time.monotonic)
    num_uses: int = 0


def require_pool_sizes(max_open: int, num_warm: int, max_uses: int = 1) -> None:
    """Raise ConfigError unless these sizes are valid for a pool."""
    sizes: tuple[object, ...] = (max_open, num_warm, max_uses)
    are_whole = all(type(size) is int for size in sizes)
    if not are_whole or not 0 <= num_warm <= max_open or max_open < 1 or max_uses < 1:
        raise ConfigError(
            "expected whole numbers with max_open >= 1, max_uses >= 1 and 0 <= num_warm <= "
            f"max_open, got max_open={max_open!r}, max_uses={max_uses!r}, num_warm={num_warm!r}"
        )


class SandboxPool:
    """Sandboxes of one provider and one spec."""

    def __init__(
        self,
        provider: SandboxProvider,
        spec: SandboxSpec | None = None,
        *,
        max_open: int = 16,
        num_warm: int = 0,
        max_uses: int = 1,
    ) -> None:
        """`num_warm`: number that is kept ready besides those in use; `provider` stays open."""
        require_pool_sizes(max_open, num_warm, max_uses)
        self.provider = provider
        self._spec = spec or SandboxSpec()
        self._num_warm = num_warm
        self._max_uses = max_uses
        self._places = asyncio.Semaphore(max_open)
        self._max_open = max_open
        self._ready: deque[_Held] = deque()
        self._used: set[_Held] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_making = 0
        self._is_closed = False
        self._usage = PoolUsage()

    def usage(self) -> PoolUsage:
        """Return the use so far."""
        return replace(self._usage, num_open=self._num_open())

    async def warm_up(self) -> None:
        """Create the sandboxes that are kept ready; raises errors of the provider."""
        missing = self._num_warm - len(self._ready) - self._num_making
        made = await asyncio.gather(
            *(self._make() for _ in range(min(missing, self._room()))), return_exceptions=True
        )
        for one in made:
            if isinstance(one, _Held):
                await self._put_back(one)
        for one in made:
            if isinstance(one, BaseException):
                raise one

    @asynccontextmanager
    async def take(self, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox]:
        """Yield a sandbox for exclusive use; waits while `max_open` are in use.

        A sandbox that is created for a given `spec` is used once.

        Raises SandboxError when the provider cannot make one, and when the pool is closed.
        """
        began_s = time.monotonic()
        async with self._places:
            held = await self._next(spec)
            waited_s = time.monotonic() - began_s
            self._count(num_taken=1, num_reused=int(held.num_uses > 0))
            self._usage = replace(self._usage, waited_s=self._usage.waited_s + waited_s)
            held.num_uses += 1
            self._used.add(held)
            self._refill()
            is_whole = False
            try:
                yield held.sandbox
                is_whole = True
            finally:
                self._used.discard(held)
                await self._after_use(held, is_whole=is_whole)

    async def close(self) -> None:
        """Close every sandbox, also those in use, and log the use. Idempotent.

        Raises the first error once all were tried.
        """
        is_first, self._is_closed = not self._is_closed, True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        held = [*self._ready, *self._used]
        self._ready.clear()
        done = await asyncio.gather(*(self._close(one) for one in held), return_exceptions=True)
        if is_first and self._usage.num_created + self._usage.num_failed:
            used = " ".join(f"{name}={value:g}" for name, value in self.usage().metrics().items())
            _LOGGER.info("sandboxes of %s are closed: %s", self.provider.name, used)
        for error in done:
            if error is not None:
                raise error

    async def __aenter__(self) -> "SandboxPool":
        await self.warm_up()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _num_open(self) -> int:
        return len(self._ready) + len(self._used) + self._num_making

    def _room(self) -> int:
        return max(0, self._max_open - self._num_open())

    async def _next(self, spec: SandboxSpec | None) -> _Held:
        """Return a ready sandbox that is alive, or create one."""
        if self._is_closed:
            raise SandboxError("the pool of sandboxes is closed; no further one can be taken")
        if spec is not None:
            return await self._make(spec)
        while self._ready:
            held = self._ready.popleft()
            left_s = self._spec.time_to_live_s - (time.monotonic() - held.began_s)
            if held.sandbox.is_alive and left_s > _LEAST_LEFT_S * self._spec.time_to_live_s:
                return held
            self._count(num_discarded=1)
            await self._close(held)
        return await self._make()

    async def _make(self, spec: SandboxSpec | None = None) -> _Held:
        self._num_making += 1
        self._usage = replace(self._usage, max_open=max(self._usage.max_open, self._num_open()))
        try:
            sandbox = await self.provider.create(spec or self._spec)
        except Exception:
            self._count(num_failed=1)
            raise
        finally:
            self._num_making -= 1
        self._count(num_created=1)
        return _Held(sandbox=sandbox, max_uses=self._max_uses if spec is None else 1)

    async def _put_back(self, held: _Held) -> None:
        if self._is_closed:
            await self._close(held)
        else:
            self._ready.append(held)

    async def _after_use(self, held: _Held, *, is_whole: bool) -> None:
        """Prepare a sandbox for its next use, or close it."""
        is_again = is_whole and not self._is_closed and held.num_uses < held.max_uses
        if is_again:
            try:
                done = await held.sandbox.run(["sh", "-c", _EMPTY], timeout_s=_EMPTY_S)
                is_again = done.succeeded and held.sandbox.is_alive
            except SandboxError:
                is_again = False
            except BaseException:
                await self._close(held)
                raise
            if not is_again:
                self._count(num_discarded=1)
        if is_again:
            await self._put_back(held)
        else:
            await self._close(held)

    def _refill(self) -> None:
        """Start to create the missing ones of those that are kept ready."""
        missing = self._num_warm - len(self._ready) - self._num_making
        for _ in range(min(missing, self._room())):
            task = asyncio.create_task(self._make_ready())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _make_ready(self) -> None:
        # The next caller makes a sandbox itself, and gets the error if that fails.
        with contextlib.suppress(SandboxError):
            await self._put_back(await self._make())

    async def _close(self, held: _Held) -> None:
        await asyncio.shield(held.sandbox.close())
        open_s = time.monotonic() - held.began_s
        self._usage = replace(self._usage, open_s=self._usage.open_s + open_s)

    def _count(self, **more: int) -> None:
        changed = {name: getattr(self._usage, name) + number for name, number in more.items()}
        self._usage = replace(self._usage, **changed)
