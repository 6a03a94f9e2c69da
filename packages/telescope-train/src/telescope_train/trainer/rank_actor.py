"""One trainer rank as a Ray actor, which answers while its process still imports torch.

This module therefore does not import torch. The function that opens the rank is an argument of a
call: Ray imports it then, while a thread reports the progress.
"""

import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from telescope_core.base.collector import rare_collections
from telescope_core.records.logs import Logs, telling_failure
from telescope_train.cluster.network import Network
from telescope_train.cluster.ports import HeldPort
from telescope_train.observability.timeline import TakenSpans
from telescope_train.trainer.progress import RankProgress

if TYPE_CHECKING:
    from telescope_train.trainer.worker import TrainerWorker

_LOGGER = logging.getLogger(__name__)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that set up torch's allocator, which reads them when torch is imported."""
WATCHING = "watching"
"""Name of a rank's thread that answers questions about its progress."""


class RankPlace(NamedTuple):
    """Place of a rank."""

    node: str
    """Ray's id of the node."""
    gpus: tuple[int, ...]
    """Numbers of its GPUs on that node; empty on CPU."""


class RankActor:
    """One trainer rank in its own process."""

    def __init__(self, logs: Logs, network: Network, *, owns_gpu: bool = False) -> None:
        """`owns_gpu`: whether no server is on the GPU of this rank."""
        if owns_gpu and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
            # Rows have many lengths, and blocks of a fixed size would leave gaps between them. A
            # server on the same GPU could not map such memory.
            os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        self._logs = logs
        self._network = network
        self._worker: TrainerWorker | None = None
        self._progress = RankProgress(activity="importing its libraries")
        self._held_port = HeldPort()
        # Importing libraries and loading a model make millions of objects that stay.
        self._loading = ExitStack()
        self._loading.enter_context(rare_collections())

    # In a thread of its own, so that it answers while a call computes.
    @ray.method(concurrency_group=WATCHING)
    def signs_of_life(self) -> int:
        """Return a number that changes with every finished batch, tensor, file and module."""
        done = self._progress.count + len(sys.modules)
        if self._worker is not None:
            return done
        # Libraries of gigabytes are read page by page.
        return done + resource.getrusage(resource.RUSAGE_SELF).ru_majflt

    @ray.method(concurrency_group=WATCHING)
    def taken_spans(self) -> TakenSpans:
        """Return the spans of the rank since the last call."""
        if self._worker is None:
            return TakenSpans(time.monotonic(), [])
        return self._worker.spans.take()

    @ray.method(concurrency_group=WATCHING)
    def activity(self) -> str:
        """Return what the rank does before it is open; "" if it waits, or is open."""
        return self._progress.activity if self._worker is None else ""

    def prepare(self, opens: Callable[..., "TrainerWorker"]) -> None:
        """Import what `open` needs, which reading the argument does, and wait to be opened."""
        self._progress.activity = ""

    def place(self) -> RankPlace:
        """Return the place of this rank."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        # A GPU of a divided card has a name and no number; then Ray's order has to do.
        return RankPlace(context.get_node_id(), tuple(int(one) for one in gpus if one.isdecimal()))

    def address(self) -> tuple[str, int]:
        """Return (host, port) of this node, with the port reserved from now on."""
        host = self._network.address()
        return host, self._held_port.hold(host)

    def open(self, number: int, opens: Callable[..., "TrainerWorker"]) -> None:
        """Load the model as rank `number`, by `opens`, a partial `TrainerWorker`."""
        with suppress(OSError):
            # Another machine than the driver's may not have it yet.
            self._logs.folder.mkdir(parents=True, exist_ok=True)
        self._logs.begin("trainer", f"rank {number}")
        self._network.apply()
        with telling_failure(_LOGGER, "loading the model"):
            self._worker = opens(progress=self._progress, held_port=self._held_port)
        self._loading.close()
        for test in self._worker.self_tests:
            _LOGGER.info("self-test passed: %s", test.text)

    def ask(self, question: Callable[["TrainerWorker"], Any]) -> Any:
        """Return the result of `question`, a function of the rank."""
        assert self._worker is not None, "open comes first"
        return question(self._worker)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the method `name` of the rank."""
        assert self._worker is not None, "open comes first"
        with telling_failure(_LOGGER, name):
            return getattr(self._worker, name)(*arguments)
