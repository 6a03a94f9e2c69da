"""Wait for processes that the cluster starts, as long as there is any progress.

Ray says how far each actor is: waiting for room, sent to a node, running. A node that is busy
starts one after the other, so what becomes of any process of the run is a sign for all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import ray
from ray._private.state import actors
from ray.exceptions import RayError

from telescope_train.cluster.nodes import living_nodes

Result = TypeVar("Result")
LOOK_EVERY_S = 5.0
Stages = Callable[[], Hashable]
"""Returns a value that changes with the cluster's work for the run; may be slow."""


def stages() -> Hashable:
    """Return the stages of all processes of the run, and the nodes; None = not known."""
    try:
        # The public API says the same by way of a dashboard, which a run does not start.
        rows = actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
        nodes = frozenset(node.id for node in living_nodes())
    except RayError:
        return None
    about = frozenset(
        (name, row["State"], row["Address"]["NodeID"], row["Pid"]) for name, row in rows.items()
    )
    return about, nodes


async def until_started(
    started: Awaitable[Result], *, silence_s: float, look: Stages = stages
) -> Result:
    """Return the result of `started`.

    Raises TimeoutError after `silence_s` seconds in which `look` said nothing new.
    """
    waiting, clock = asyncio.ensure_future(started), asyncio.get_running_loop()
    try:
        known, moved_s = await asyncio.to_thread(look), clock.time()
        while True:
            left_s = moved_s + silence_s - clock.time()
            await asyncio.wait([waiting], timeout=max(0.0, min(left_s, LOOK_EVERY_S)))
            if waiting.done():
                return waiting.result()
            now = await asyncio.to_thread(look)
            if now != known:
                known, moved_s = now, clock.time()
            elif left_s <= 0:
                raise TimeoutError(
                    f"the cluster did nothing for the run for {silence_s:g} s; what it waits for "
                    "is in Ray's own logs"
                )
    finally:
        waiting.cancel()
