"""The nodes of the cluster: their resources, calls of a function on each, and what they start."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray._private.state import actors
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Found = TypeVar("Found")

ANSWER_S = 120.0
"""Longest wait in seconds for the answer of a node, which must first start a process."""
Result = TypeVar("Result")
LOOK_EVERY_S = 5.0
Stages = Callable[[], Hashable]
"""Returns a value that changes with the cluster's work for the run; may be slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster, as Ray reports it."""

    id: str
    address: str
    host: str
    """Its own host name."""
    is_alive: bool
    cpus: float
    gpus: float

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Node":
        """Return the node in a row of `ray.nodes()`."""
        resources = row["Resources"]
        return cls(
            id=row["NodeID"],
            address=row["NodeManagerAddress"],
            host=row["NodeManagerHostname"],
            is_alive=row["Alive"],
            cpus=resources.get("CPU", 0.0),
            gpus=resources.get("GPU", 0.0),
        )

    @property
    def label(self) -> str:
        """Its name in messages; host names alone are not unique, as with containers."""
        return f"{self.host} ({self.address})"


def all_nodes() -> list[Node]:
    """Return all nodes, including those that have gone."""
    return [Node.from_row(row) for row in ray.nodes()]


def living_nodes() -> list[Node]:
    """Return the nodes that are alive."""
    return [node for node in all_nodes() if node.is_alive]


def nodes_text() -> str:
    """Return the CPUs and GPUs of each living node, for messages."""
    return ", ".join(
        f"{node.label} with {node.cpus:g} CPUs and {node.gpus:g} GPUs" for node in living_nodes()
    )


def on_node(node_id: str) -> dict[str, Any]:
    """Return the options of a task or actor on a node that reserves no processor."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": place}


async def ask_nodes(
    nodes: Iterable[Node], function: Callable[..., Found], *arguments: Any
) -> dict[Node, Found]:
    """Return the result of `function` on each node that answers."""
    asked = list(nodes)
    remote: Any = ray.remote(function)
    answers: Sequence[Found | None] = await asyncio.gather(
        *(_in_time(remote, node, arguments) for node in asked)
    )
    pairs = zip(asked, answers, strict=True)
    return {node: answer for node, answer in pairs if answer is not None}


async def _in_time(remote: Any, node: Node, arguments: Sequence[Any]) -> Any:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await remote.options(max_retries=0, **on_node(node.id)).remote(*arguments)
    except (TimeoutError, RayError):
        return None  # whoever depends on it notices that it is gone


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
    """Return the result of `started`, for as long as there is any progress.

    Ray says how far each actor is: waiting for room, sent to a node, running. A node that is busy
    starts one after the other, so what becomes of any process is a sign for all of them. Raises
    TimeoutError after `silence_s` seconds in which `look` said nothing new.
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
