"""A model of one inference engine with continuous batching, in virtual time.

All running requests advance together, one token per decode step. The time of a step grows with the
number of requests and with the tokens in the cache. The engine counts decode steps, and a request
that joins at step s with n tokens to write ends at step s + n, so an event costs the logarithm of
the number of requests, whatever their lengths. Prompts that are not cached delay the steps of all,
as a prefill does. Requests that find no slot or no room in the cache wait, by priority.
"""

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from telescope_core.base.errors import EndpointError
from telescope_core.base.types import Span, WeightVersion

_SLACK = 1e-6
"""Decode steps by which rounding may miss the end of a request."""
_MAX_PREFIXES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """Speeds of an engine. The defaults are roughly those of an 8B model on one H100."""

    slots: int = 256
    """Most requests that run at once."""
    cache_tokens: int = 1_000_000
    """Capacity of the cache, in tokens."""
    step_s: float = 0.008
    """Seconds of an empty decode step."""
    step_per_request_s: float = 4e-5
    """Seconds that each running request adds to a step."""
    step_per_cached_token_s: float = 1.5e-8
    """Seconds that each token in the cache adds to a step."""
    prefill_tokens_per_s: float = 40_000.0
    """Prompt tokens per second."""


class EngineAborted(Exception):
    """A request was ended early, with the tokens that it has."""

    def __init__(self, message: str, spans: Sequence[Span]) -> None:
        """`spans`: the tokens of the request so far."""
        super().__init__(message)
        self.spans = tuple(spans)


class EngineLost(EngineAborted):
    """The engine died before or during a request."""


@dataclass(slots=True, eq=False)
class Job:
    """One request, and its progress in the engine."""

    num_prompt_tokens: int
    num_tokens: int
    """Number of tokens that it will write."""
    group: str
    """Id of its group, whose requests share the prompt of the first turn."""
    rollout: str
    """Id of its rollout, whose requests share everything before their own turn."""
    salt: str
    """Salt of the cache: requests share cached tokens only with others of the same salt."""
    priority: int
    number: int
    """Order of arrival."""
    future: "asyncio.Future[list[Span]]"
    num_done: int = 0
    """Number of tokens when it last left the batch or was counted by an update."""
    started_at: float = 0.0
    """Decode step at which it joined the batch, minus `num_done`."""
    spans: list[Span] = field(default_factory=list[Span])

    @property
    def ends_at(self) -> float:
        """Decode step at which its last token is written."""
        return self.started_at + self.num_tokens


class SimulatedEngine:
    """One engine. Everything happens on the running event loop."""

    def __init__(self, speed: EngineSpeed, *, name: str = "engine") -> None:
        self.speed = speed
        self.name = name
        self.version: WeightVersion = 0
        self.num_preemptions = 0
        self.num_tokens_written = 0
        self.busy_s = 0.0
        """Seconds in which at least one request was running."""
        self._clock = asyncio.get_running_loop()
        self._steps = 0.0
        self._seen_s = self._clock.time()
        self._stalled_until_s = 0.0
        self._running: dict[int, Job] = {}
        self._ends: list[tuple[float, int]] = []
        self._waiting: list[tuple[int, int, Job]] = []
        self._cached: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._salt = ""
        """Salt of the newest request."""
        self._context = 0.0
        self._number = 0
        self._is_paused = False
        self._is_hung = False
        self._dead: str | None = None
        self._trouble = asyncio.Event()
        """Set while it is dead or hangs."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_running(self) -> int:
        """Number of requests in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a place in the batch."""
        return sum(not job.future.done() for _, _, job in self._waiting)

    @property
    def busy_until_now_s(self) -> float:
        """`busy_s`, with time that has not been added to it yet."""
        if not self._running or self._is_paused or self._is_hung:
            return self.busy_s
        return self.busy_s + self._clock.time() - self._seen_s

    @property
    def cache_use(self) -> float:
        """Share of the cache that running requests fill, 0 to 1."""
        self._advance()
        return self._context / self.speed.cache_tokens

    async def generate(
        self,
        num_prompt_tokens: int,
        num_tokens: int,
        *,
        rollout_id: str,
        salt: str,
        priority: int = 0,
    ) -> list[Span]:
        """Return the versions of the tokens' weights; raises EngineLost if the engine dies.

        `rollout_id` is `group/index`: a group shares its first prompt, a rollout its whole past.
        """
        self.require_alive()
        if num_prompt_tokens + num_tokens > self.speed.cache_tokens:
            raise EndpointError(
                f"{self.name} has room for {self.speed.cache_tokens} tokens in its cache, and a "
                f"request needs {num_prompt_tokens + num_tokens}"
            )
        self._number += 1
        job = Job(
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=max(1, num_tokens),
            group=rollout_id.rpartition("/")[0],
            rollout=rollout_id,
            salt=salt,
            priority=priority,
            number=self._number,
            future=self._clock.create_future(),
        )
        self._salt = salt
        self._advance()
        heapq.heappush(self._waiting, (priority, job.number, job))
        self._admit()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._advance()
            if self._running.pop(job.number, None) is not None:
                self._context -= self._size(job)
            self._admit()
            raise

    def pause(self, *, clears_cache: bool, aborts: bool = False) -> None:
        """Stop between two steps; running requests keep their tokens, or end with EngineAborted."""
        self.require_alive()
        self._advance()
        self._is_paused = True
        if aborts:
            self._end_all(lambda job: EngineAborted("a pause has ended it", job.spans))
        if clears_cache:
            self._cached.clear()
        if clears_cache and self._running:
            # Their tokens so far are computed again when the engine goes on.
            self._stall(sum(self._size(job) for job in self._running.values()))
        self._wake()

    def resume(self) -> None:
        """Continue."""
        self.require_alive()
        self._advance()
        self._is_paused = False
        self._admit()

    def update(self, version: WeightVersion) -> None:
        """Write further tokens with `version`; the engine must be paused."""
        self.require_alive()
        self._advance()
        for job in self._running.values():
            self._close_span(job)
        self.version = version
        # Prefixes that no request has used since the last update are never used again.
        for key in [key for key in self._cached if key[0] != self._salt]:
            del self._cached[key]

    def die(self, why: str) -> None:
        """Fail every request, now and later."""
        self._advance()
        self._dead = why
        self._trouble.set()
        self._end_all(lambda job: EngineLost(f"lost the inference server: {why}", job.spans))
        self._cached.clear()

    def _end_all(self, failure: "Callable[[Job], Exception]") -> None:
        for job in self._running.values():
            self._close_span(job)
        jobs = [*self._running.values(), *(job for _, _, job in self._waiting)]
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        self._context = 0.0
        self._wake()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(failure(job))

    def start_again(self) -> None:
        """Reset to the initial state: version 0 and an empty cache."""
        self._advance()
        self._dead, self._is_paused, self._is_hung = None, False, False
        self._stalled_until_s = 0.0
        self._trouble.clear()
        self.version = 0

    @property
    def is_dead(self) -> bool:
        """Whether every call fails."""
        return self._dead is not None

    @property
    def is_alive(self) -> bool:
        """Whether it would answer a health check."""
        return self._dead is None and not self._is_hung

    def hang(self) -> None:
        """Stop answering, without an error."""
        self._advance()
        self._is_hung = True
        self._trouble.set()
        self._wake()

    async def until_in_trouble(self) -> str:
        """Wait until it dies or hangs; returns the reason for death, or nothing if it hangs."""
        await self._trouble.wait()
        return self._dead or ""

    def require_alive(self) -> None:
        """Raise EngineLost if it has died."""
        if self._dead is not None:
            raise EngineLost(f"lost the inference server: {self._dead}", [])

    @property
    def _step_s(self) -> float:
        speed = self.speed
        return (
            speed.step_s
            + speed.step_per_request_s * len(self._running)
            + speed.step_per_cached_token_s * self._context
        )

    def _size(self, job: Job) -> float:
        """Return the tokens of `job` in the cache; it is running."""
        return job.num_prompt_tokens + min(self._steps - job.started_at, job.num_tokens)

    def _advance(self) -> None:
        """Update the number of steps to the present time."""
        now_s = self._clock.time()
        if self._running and not (self._is_paused or self._is_hung):
            begin_s = max(self._seen_s, min(self._stalled_until_s, now_s))
            steps = (now_s - begin_s) / self._step_s
            self._steps += steps
            self._context += steps * len(self._running)
            self.busy_s += now_s - self._seen_s
        self._seen_s = now_s

    def _stall(self, num_tokens: float) -> None:
        """Delay the batch for the prefill of `num_tokens`."""
        start_s = max(self._clock.time(), self._stalled_until_s)
        self._stalled_until_s = start_s + num_tokens / self.speed.prefill_tokens_per_s

    def _admit(self) -> None:
        """Fill the batch from waiting requests, and set the timer."""
        speed = self.speed
        while self._waiting and not (self._is_paused or self._is_hung):
            if len(self._running) >= speed.slots:
                break
            _, _, job = self._waiting[0]
            if not job.future.done():
                size = job.num_prompt_tokens + job.num_done
                if self._running and self._context + size > speed.cache_tokens:
                    break
                self._join(job, size)
            heapq.heappop(self._waiting)
        self._wake()

    def _join(self, job: Job, size: int) -> None:
        of_group = self._cached.get((job.salt, job.group))
        known = max(of_group or 0, self._cached.get((job.salt, job.rollout), 0))
        self._stall(size - min(known, size - 1))
        if of_group is None:
            self._keep((job.salt, job.group), job.num_prompt_tokens)
        job.started_at = self._steps - job.num_done
        self._running[job.number] = job
        self._context += size
        heapq.heappush(self._ends, (job.ends_at, job.number))

    def _wake(self) -> None:
        """Set the timer to the next end of a request, or to a full cache."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._running or self._is_paused or self._is_hung:
            return
        while not self._is_current(*self._ends[0]):
            heapq.heappop(self._ends)
        steps = max(0.0, self._ends[0][0] - self._steps)
        room = self.speed.cache_tokens - self._context
        if len(self._running) > 1:
            steps = min(steps, max(1.0, room / len(self._running)))
        wait_s = max(0.0, self._stalled_until_s - self._clock.time()) + steps * self._step_s
        self._timer = self._clock.call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._advance()
        for job in self._ended():
            self._close_span(job)
            del self._running[job.number]
            self._context -= job.num_prompt_tokens + job.num_tokens
            self.num_tokens_written += job.num_tokens
            self._keep((job.salt, job.rollout), job.num_prompt_tokens + job.num_tokens)
            if not job.future.done():
                job.future.set_result(job.spans)
        while len(self._running) > 1 and self._context > self.speed.cache_tokens:
            self._preempt()
        self._admit()

    def _ended(self) -> Iterator[Job]:
        while self._ends and self._ends[0][0] <= self._steps + _SLACK:
            end, number = heapq.heappop(self._ends)
            if self._is_current(end, number):
                yield self._running[number]

    def _is_current(self, end: float, number: int) -> bool:
        """Return whether request `number` still runs, and ends at decode step `end`.

        One that was cancelled does not; one that was taken out and came back ends later.
        """
        job = self._running.get(number)
        return job is not None and job.ends_at == end

    def _keep(self, key: tuple[str, str], num_tokens: int) -> None:
        """Record that these tokens are cached; the least recently used ones are evicted."""
        self._cached[key] = num_tokens
        self._cached.move_to_end(key)
        while len(self._cached) > _MAX_PREFIXES:
            self._cached.popitem(last=False)

    def _preempt(self) -> None:
        """Put the newest request back in the queue; its tokens are computed again."""
        job = self._running.pop(max(self._running))
        self._context -= self._size(job)
        self._close_span(job)
        heapq.heappush(self._waiting, (job.priority, job.number, job))
        self.num_preemptions += 1

    def _close_span(self, job: Job) -> None:
        """Record the version for the tokens since the last span."""
        written = job.num_tokens - job.num_done
        written = min(written, max(0, round(self._steps - job.started_at) - job.num_done))
        if written:
            job.spans.append(Span(self.version, written))
            job.num_done += written
