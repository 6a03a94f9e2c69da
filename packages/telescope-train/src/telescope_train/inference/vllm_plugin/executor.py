"""The executor of a server of several processes; vLLM imports it in the process of its engine.

vLLM's own stops reading at the first worker that fails. What the others have answered stays in
their queues, and is taken for their answer to the next call, and so on for as long as the server
lives: after one broken transfer it could never again show that its weights are the right ones.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

# Under vLLM's name, after which the cause of a death is looked for in the output.
_LOGGER = logging.getLogger("vllm.v1.executor.multiproc_executor")


class Answer(NamedTuple):
    """The outcome of a call in one worker."""

    result: Any
    error: str | None = None
    """The text of the exception that ended the call; None = it has a result."""


def answer(worker: Any, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Answer:
    """Call a method of a worker, in its process."""
    try:
        return Answer(getattr(worker, method)(*arguments, **named))
    except Exception as error:
        # As vLLM does it: the engine decides what follows.
        _LOGGER.exception("WorkerProc hit an exception.")
        return Answer(None, str(error) or type(error).__name__)


class EveryAnswer(MultiprocExecutor):
    """Reads what each worker answers, also where some have failed."""

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Call all workers; raises RuntimeError if one fails, once all have answered."""
        # Steps of the model have one worker that answers, and functions are of vLLM's own start.
        if options or not isinstance(method, str):
            return super().collective_rpc(method, timeout, args, kwargs, **options)
        answers = super().collective_rpc(answer, timeout, (method, args, kwargs or {}))
        for one in answers:
            if one.error is not None:
                raise RuntimeError(
                    f"Worker failed with error '{one.error}', please check the stack trace above "
                    "for the root cause"
                )
        return [one.result for one in answers]
