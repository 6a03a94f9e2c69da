"""Which request goes first at a server: a later turn, an older batch, one that is sent again."""

import asyncio
import itertools
from typing import Any

import msgspec
from tests.train.inference.test_servers import World, in_world

from telescope_core.types import Sampling
from telescope_train.evals.servers import BEHIND_ROLLOUTS, EvalServers
from telescope_train.inference.generation import Request
from telescope_train.inference.pool import MOST_STEPS, server_priority
from telescope_train.inference.wire import TokenRequest
from telescope_train.rollouts.attempts import AttemptKey, Attempts, LimitedPool
from telescope_train.simulation.servers import TOKENS_PER_ID, Planned


def test_the_order_is_by_turn_then_batch_then_what_has_waited() -> None:
    turns, steps = range(4), (1, 2, 3, 50_000)
    order = [(-turn, step, again) for turn in turns for step in steps for again in (True, False)]
    wished = sorted(order, key=lambda one: (one[0], one[1], not one[2]))
    found = sorted(order, key=lambda one: server_priority(one[0], one[1], is_again=one[2]))
    assert found == wished
    numbers = [server_priority(p, s, is_again=a) for p, s, a in wished]
    assert all(a < b for a, b in itertools.pairwise(numbers))


def test_no_rollout_stands_behind_an_eval_and_numbers_fit_on_the_wire() -> None:
    last_rollout = server_priority(0, 10 * MOST_STEPS, is_again=False)
    first_eval = server_priority(BEHIND_ROLLOUTS - 1000, 0, is_again=True)
    assert last_rollout < first_eval < 2**62
    # A run that is longer than anybody's keeps its turns apart.
    assert server_priority(-1, 10 * MOST_STEPS, is_again=False) < server_priority(
        0, 0, is_again=True
    )
    wired = TokenRequest(0, b"", msgspec.Raw(b"\x80"), cache_salt="", priority=first_eval)
    content = msgspec.msgpack.encode(wired)
    assert msgspec.msgpack.decode(content, type=TokenRequest).priority == first_eval


def sent_priorities(world: World) -> list[int]:
    sent: list[int] = []
    for client in world.clients:
        generate = client.generate

        async def noting(request: Request, generate=generate) -> Any:
            sent.append(request.priority)
            return await generate(request)

        client.generate = noting  # type: ignore[method-assign]
    return sent


def test_a_request_goes_on_elsewhere_before_those_of_its_kind() -> None:
    async def main(world: World) -> None:
        sent = sent_priorities(world)
        asked = world.sample("a", 100)
        await asyncio.sleep(1.0)
        world.engines[0].die("killed")
        await asked
        assert len(sent) == 2
        assert sent[1] < sent[0] < server_priority(0, 1, is_again=True)

    in_world(main)


def request(rollout_id: str) -> Request:
    return Request(
        prompt_ids=Planned([3], rollout_id=rollout_id, num_tokens=TOKENS_PER_ID),
        sampling=Sampling(max_tokens=10**6),
        group_id=rollout_id.partition("/")[0],
        priority=-2,
    )


def test_the_batch_of_an_attempt_is_part_of_it() -> None:
    async def main(world: World) -> None:
        class Log:
            def add(self, event: Any) -> None:
                """Keep nothing."""

        sent = sent_priorities(world)
        attempts = Attempts(4, Log())  # type: ignore[arg-type]

        async def ask(step: int) -> None:
            rollout_id = f"{step}/0"
            key = AttemptKey(step=step, environment="one", group_id=f"{step}", index=0, attempt=1)
            async with attempts.running(rollout_id, key, attempts.for_group(), (0, 0, 0)):
                await LimitedPool(world.pool, attempts, rollout_id).generate(request(rollout_id))

        await ask(7)
        await ask(3)
        assert sent == [server_priority(-2, step, is_again=False) for step in (7, 3)]
        await EvalServers(world.pool).generate(request("e/0"))
        assert sent[-1] > max(sent[:-1])

    in_world(main)
