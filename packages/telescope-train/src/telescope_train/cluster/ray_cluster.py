"""The Ray cluster of a run: join one or start one, and await the answers of its processes."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from telescope_core.errors import ConfigError, ProcessDiedError, TelescopeError
from telescope_train.cluster.placement import Bundle
from telescope_train.config.schema import RaySection

# Only batches, log-probs and answers pass through Ray; weights do not. By default Ray would take
# 30 % of the machine's memory for its store.
OBJECT_STORE_BYTES = 512 * 2**20
"""Size of Ray's object store on a cluster that is started here."""
ANSWER_DEADLINE_S = 1800.0
"""Longest that a single call of a rank or a server may take, in seconds; one step of a large model
fits."""


@contextmanager
def ray_cluster(section: RaySection, bundles: Sequence[Bundle], *, debug: bool) -> Iterator[None]:
    """Be connected to a cluster that can hold `bundles`, for as long as the context lasts."""
    # Ray reads these variables when it starts its processes, so they are set before `ray.init`.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Placement decides which GPUs a process sees. Ray must not hide them from one that has none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray gives its workers a lower priority than other processes, but here they are the main job.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": debug,
        "logging_level": "INFO" if debug else "ERROR",
    }
    if section.ray_address is None:
        # Ray only counts CPUs and does not bind processes to them. A machine with fewer cores than
        # the run has processes still works, so it is declared large enough for all of them.
        needed = sum(bundle.cpus for bundle in bundles)
        options["num_cpus"] = max(os.cpu_count() or 1, int(needed + 0.999))
        options["object_store_memory"] = OBJECT_STORE_BYTES
        # After a driver is killed, Ray's agents live on for as long as they try to reach its head
        # process again.
        options["_system_config"] = {"gcs_rpc_server_reconnect_timeout_s": 5}
    else:
        options["address"] = section.ray_address
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise ConfigError(
            f"cannot reach the Ray cluster at ray_address = {section.ray_address!r}: {error}; "
            "start it with `ray start --head`, or leave ray_address out to start one here"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


async def answer(reference: Any, *, process: str) -> Any:
    """Await an actor's answer. Its death or silence is raised as ProcessDiedError with `process`.

    An error of Telescope that the actor raised is raised as it is.
    """
    # Ray reports an actor's death by itself. The deadline is for an actor that lives but hangs.
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await reference
    except TimeoutError:
        raise ProcessDiedError(
            f"{process} gave no answer for {ANSWER_DEADLINE_S:g} s; see its log in the run folder"
        ) from None
    except ray.exceptions.RayActorError as error:
        raise ProcessDiedError(
            f"{process} died: {str(error).splitlines()[0]}; "
            "look for the cause in the run folder's logs/ and in the kernel log (out of memory?)"
        ) from None
    except ray.exceptions.RayTaskError as error:
        # Ray wraps an actor's error with its traceback. Users are shown a message of Telescope's
        # alone, and exit codes go by its class.
        if isinstance(error.cause, TelescopeError):
            raise error.cause from None
        raise
