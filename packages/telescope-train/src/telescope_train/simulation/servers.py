"""Simulated servers behind the real `ServerPool` and `WeightPublisher`, and policies over them.

The content of a request is in `Planned`, which takes the place of the ids of its prompt. One id
stands for `TOKENS_PER_ID` tokens, so that samples, packing and credit are real and cheap.
"""

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from telescope_core.base.chains import ChainRecorder
from telescope_core.base.errors import EndpointError
from telescope_core.base.types import (
    ChatEndpoint,
    Completion,
    JsonValue,
    Message,
    Sampling,
    Span,
    Turn,
)
from telescope_train.inference.generation import (
    Generation,
    Request,
    RequestAbortedError,
    ServerLostError,
    joined,
)
from telescope_train.inference.pool import RolloutServers, ServerPool
from telescope_train.inference.servers import (
    ALIVE_WITHIN_S,
    ANSWER_WITHIN_S,
    CONTROL_DEADLINE_S,
    MOST_AT_ONCE,
    ControlCall,
    OnAnswer,
    ServerClient,
    ServerLoad,
)
from telescope_train.inference.wire import PAUSE_AND_ABORT, PAUSE_AND_KEEP, PAUSE_PATH
from telescope_train.rollouts.attempts import Attempts, LimitedPool
from telescope_train.rollouts.slots import Reader
from telescope_train.simulation.engine import EngineAborted, EngineLost, SimulatedEngine

TOKENS_PER_ID = 64
"""Number of tokens for which one id stands."""
UPDATE_PATH = "/update_weights"


def num_ids(num_tokens: int) -> int:
    """Return the number of ids for `num_tokens` tokens; at least 1."""
    return max(1, -(-num_tokens // TOKENS_PER_ID))


class Planned(list[int]):
    """The ids of a prompt, and the length of the answer."""

    def __init__(self, ids: Sequence[int], *, rollout_id: str, num_tokens: int) -> None:
        super().__init__(ids)
        self.rollout_id = rollout_id
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """Delays of a server outside its engine, in seconds."""

    round_trip_s: float = 0.002
    """Seconds of a request or control call, without its work."""
    transfer_s: float = 0.5
    """Seconds to receive all weights."""
    error_rate: float = 0.0
    """Share of requests that are answered with an error."""


class SimulatedClient:
    """The client of one simulated server; see `inference.pool.ServerClient`."""

    def __init__(
        self, engine: SimulatedEngine, times: ServerTimes, sent: Callable[[], str] = lambda: ""
    ) -> None:
        """`sent` returns the digest of the weights that the trainer sends."""
        self.base_url = engine.name
        self.identity = ""
        self.num_in_flight = 0
        self.heard_s = 0.0
        self.engine = engine
        self.times = times
        self._sent = sent
        self._received = ""
        self.corrupts: Callable[[], bool] = lambda: False
        """Whether the next weights arrive corrupted."""
        self.loses_answer: Callable[[str], bool] = lambda path: False
        """Whether the answer to the next call of a path is lost, after the call took effect."""
        self._chance = random.Random(f"errors/{engine.name}")

    async def generate(self, request: Request) -> Generation:
        """Sample the planned answer, cut to `max_tokens`, after the part that has begun."""
        prompt_ids, begun = request.prompt_ids, request.begun
        assert isinstance(prompt_ids, Planned), "simulated servers take planned requests"
        num_begun = 0 if begun is None else TOKENS_PER_ID * len(begun.token_ids)
        num_tokens = min(prompt_ids.num_tokens, request.sampling.max_tokens)
        self.num_in_flight += 1
        try:
            await asyncio.sleep(self.times.round_trip_s)
            if self._chance.random() < self.times.error_rate:
                raise EndpointError(f"{self.base_url} answered HTTP 500, as planned")
            spans = await self.engine.generate(
                len(prompt_ids) * TOKENS_PER_ID + num_begun,
                num_tokens - num_begun,
                rollout_id=prompt_ids.rollout_id,
                salt=request.cache_salt,
                priority=request.priority,
            )
        except EngineAborted as error:
            # Only whole ids have arrived, and at least one of them is still to be sampled.
            arrived = sum(span.num_tokens for span in error.spans) // TOKENS_PER_ID
            ids = min(arrived, num_ids(num_tokens - num_begun) - 1)
            part = _generation(error.spans, ids, "length") if ids else None
            whole = begun if part is None else joined(begun, part)
            kind = ServerLostError if isinstance(error, EngineLost) else RequestAbortedError
            raise kind(str(error), whole) from None
        finally:
            self.num_in_flight -= 1
        reason = "stop" if num_tokens == prompt_ids.num_tokens else "length"
        return joined(begun, _generation(spans, num_ids(num_tokens - num_begun), reason))

    async def control(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        query: str = "",
        is_repeatable: bool = False,
        deadline_s: float | None = CONTROL_DEADLINE_S,
    ) -> Any:
        """Do the work of the server's route `path`, as far as it affects the engine."""
        try:
            async with asyncio.timeout(deadline_s):
                within_s = None if deadline_s is None else ANSWER_WITHIN_S
                return await self._controlled(path, body, query, within_s)
        except TimeoutError:
            raise ServerLostError(f"{path} did not answer within {deadline_s:g} s") from None

    async def _controlled(
        self, path: str, body: dict[str, Any] | None, query: str, within_s: float | None
    ) -> Any:
        await asyncio.sleep(self.times.round_trip_s)
        try:
            if path == UPDATE_PATH:
                self.engine.require_alive()
                await asyncio.sleep(self.times.transfer_s)
            answer = self.obey(path, body or {}, query)
        except EngineLost as error:
            raise ServerLostError(str(error)) from None
        await self._until_answered(path, within_s)
        return answer

    async def _until_answered(self, path: str, within_s: float | None) -> None:
        """Return when an answer arrives; after `within_s`, the call is repeated."""
        while self.loses_answer(path):
            # The connection stays open, until the server is ended.
            try:
                async with asyncio.timeout(within_s):
                    why = await self.engine.until_in_trouble()
            except TimeoutError:
                continue
            raise ServerLostError(f"no answer from {self.base_url}{path}: {why or 'it hangs'}")

    def obey(self, path: str, body: dict[str, Any], query: str) -> Any:
        """Simulate a call of `path`, in no time; raises EngineLost if the engine is dead."""
        self.engine.require_alive()
        if path == PAUSE_PATH:
            aborts = PAUSE_AND_ABORT in query
            self.engine.pause(clears_cache=PAUSE_AND_KEEP not in query, aborts=aborts)
        elif path == UPDATE_PATH:
            self._received = "something else" if self.corrupts() else self._sent()
        elif path == "/collective_rpc" and body["method"] == "received_digest":
            return {"results": [self._received]}
        elif path == "/collective_rpc" and body["method"] == "received_digests":
            return {"results": [{"weights": self._received}]}
        elif path == "/finish_weight_update":
            if "weight_version" in body:
                self.engine.update(int(body["weight_version"]))
        elif path == "/resume":
            self.engine.resume()
        elif path not in ("/init_weight_transfer_engine", "/start_weight_update"):
            raise EndpointError(f"{self.base_url}{path} answered HTTP 404: not simulated")
        return None

    async def is_alive(self, *, within_s: float = ALIVE_WITHIN_S) -> bool:
        """Return whether the engine would answer."""
        await asyncio.sleep(self.times.round_trip_s)
        return self.engine.is_alive

    async def drop(self, why: str) -> None:
        """Fail all requests."""
        self.engine.die(why)

    async def load(self) -> ServerLoad:
        """Return the load of the engine."""
        engine = self.engine
        return ServerLoad(
            cache_use=engine.cache_use,
            num_preemptions=engine.num_preemptions,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
        )

    async def close(self) -> None:
        """Do nothing."""


async def call_in_step(
    clients: Sequence[ServerClient], call: ControlCall, on_answer: OnAnswer
) -> None:
    """Do the same as `call_servers`, in one task, for servers with equal times.

    Each server sees the same at the same times.
    """
    simulated = [client for client in clients if isinstance(client, SimulatedClient)]
    assert len(simulated) == len(clients), "only simulated servers can be called in step"
    if not simulated:
        return
    times = simulated[0].times
    at_once = len(simulated) if call.is_collective else MOST_AT_ONCE
    for first in range(0, len(simulated), at_once):
        numbers = range(first, min(first + at_once, len(simulated)))
        await asyncio.sleep(times.round_trip_s)
        if call.path == UPDATE_PATH:
            lost = {number for number in numbers if simulated[number].engine.is_dead}
            for number in sorted(lost):
                on_answer(number, _answer_of(simulated[number], call, number))
            await asyncio.sleep(times.transfer_s)
            numbers = [number for number in numbers if number not in lost]
        for number in numbers:
            on_answer(number, _answer_of(simulated[number], call, number))


async def read_in_turn(readers: Sequence[Reader]) -> Sequence[ServerLoad | None]:
    """Do the same as `read_at_once`, without tasks: servers answer in no time."""
    return [await reader() for reader in readers]


def _answer_of(client: SimulatedClient, call: ControlCall, number: int) -> Any:
    try:
        return client.obey(call.path, call.body_of(number) or {}, call.query)
    except EngineLost as error:
        return ServerLostError(str(error))
    except EndpointError as error:
        return error


def _generation(spans: Sequence[Span], ids: int, reason: Literal["stop", "length"]) -> Generation:
    """Return `ids` ids, which stand for the first tokens of `spans`."""
    in_ids: list[Span] = []
    num_tokens = num_done = 0
    for span in spans:
        num_tokens += span.num_tokens
        end = ids if span is spans[-1] else min(ids, num_tokens // TOKENS_PER_ID)
        if end > num_done:
            in_ids.append(Span(span.version, end - num_done))
            num_done = end
    return Generation(
        token_ids=array("i", range(7, 7 + ids)),
        logprobs=array("f", [-1.0]) * ids,
        finish_reason=reason,
        spans=tuple(in_ids),
    )


class SimulatedPolicies:
    """Gives each rollout a policy that requests planned answers from the pool."""

    def __init__(self, pool: ServerPool, attempts: Attempts) -> None:
        self._pool = pool
        self._attempts = attempts

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> "SimulatedPolicy":
        """Return the policy of one rollout."""
        return SimulatedPolicy(LimitedPool(self._pool, self._attempts, rollout_id), rollout_id)

    async def close(self) -> None:
        """Do nothing: the creator of the pool closes it."""


class SimulatedPolicy:
    """One rollout's policy. The environment sets the length of each answer with `say`."""

    endpoint: ChatEndpoint | None = None

    def __init__(self, pool: RolloutServers, rollout_id: str) -> None:
        self.turns: list[Turn] = []
        self._pool = pool
        self._rollout_id = rollout_id
        self._ids: list[int] = []
        self._chains = ChainRecorder()

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        tools: Sequence[dict[str, JsonValue]] = (),
    ) -> Completion:
        """Raise: a simulated environment has no messages; it calls `say`."""
        raise TypeError("a simulated policy takes no messages; simulated environments call `say`")

    async def say(self, sampling: Sampling, *, num_new_tokens: int, num_tokens: int) -> Completion:
        """Return an answer of `num_tokens`, to a prompt with `num_new_tokens` more tokens."""
        clock = asyncio.get_running_loop()
        started_s = clock.time()
        self._ids += [3] * num_ids(num_new_tokens)
        generation = await self._pool.generate(
            Request(
                prompt_ids=Planned(self._ids, rollout_id=self._rollout_id, num_tokens=num_tokens),
                sampling=sampling,
                group_id=self._rollout_id.rpartition("/")[0],
                priority=-len(self.turns),
            )
        )
        tokens = self._chains.record(
            array("i", self._ids),
            generation.token_ids,
            generation.logprobs,
            temperature=sampling.temperature,
        )
        self._ids += generation.token_ids
        completion = Completion(
            message=Message(role="assistant", content=""),
            finish_reason=generation.finish_reason,
            tokens=tokens,
            oldest_version=generation.oldest_version,
            newest_version=generation.newest_version,
            spans=generation.spans,
            num_prompt_tokens=tokens.prompt_end,
            num_completion_tokens=min(num_tokens, sampling.max_tokens),
        )
        self.turns.append(
            Turn(
                completion=completion,
                started_s=started_s,
                ended_s=clock.time(),
                temperature=sampling.temperature,
            )
        )
        return completion
