"""Several simulations at once, each in its own process, with progress reports."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import TypeAlias, TypeVar

from telescope_train.models.threads import usable_cores

OnStep: TypeAlias = Callable[[int], None]
"""Called with the number of each step that ends."""
Result = TypeVar("Result")

_POLL_S = 0.5
_steps: "SimpleQueue[int] | None" = None
"""In a simulating process: the queue for steps. Set once, at its start."""


def all_of(
    works: Sequence[Callable[[OnStep], Result]],
    *,
    in_processes: bool,
    on_progress: Callable[[int], None],
) -> list[Result]:
    """Return the results of all `works`, in order; they must be picklable if processes are used.

    `on_progress` gets the number of steps that all of them have done: now and then, also while
    none is done.
    """
    if in_processes:
        return _in_processes(works, on_progress)
    num_done = 0

    def count(step: int) -> None:
        nonlocal num_done
        num_done += 1
        on_progress(num_done)

    return [work(count) for work in works]


def _in_processes(
    works: Sequence[Callable[[OnStep], Result]], on_progress: Callable[[int], None]
) -> list[Result]:
    context = multiprocessing.get_context("spawn")
    steps: SimpleQueue[int] = context.SimpleQueue()
    num_done = 0
    num_workers = min(len(works), usable_cores())
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_begin, initargs=(steps,)
    ) as processes:
        futures = [processes.submit(partial(work, _tell)) for work in works]
        left = set(futures)
        while left:
            left = wait(left, timeout=_POLL_S, return_when=FIRST_COMPLETED).not_done
            while not steps.empty():
                steps.get()
                num_done += 1
            on_progress(num_done)
        return [future.result() for future in futures]


def _begin(steps: "SimpleQueue[int]") -> None:
    global _steps
    _steps = steps


def _tell(step: int) -> None:
    assert _steps is not None, "the process was started without a queue"
    _steps.put(step)
