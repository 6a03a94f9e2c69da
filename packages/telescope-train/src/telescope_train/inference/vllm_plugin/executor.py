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
    """The outcome of a call in one worker: its result, or the text of an exception."""

    result: Any
    error: str | None = None


def answer(worker: Any, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Answer:
    """Call a method of a worker, in its process."""
    try:
        return Answer(getattr(worker, method)(*arguments, **named))
    except Exception as error:  # as in vLLM: the engine decides what follows
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
        errors = [one.error for one in answers if one.error is not None]
        if errors:
            raise RuntimeError(f"Worker failed with error '{errors[0]}'; its traceback is above")
        return [one.result for one in answers]
