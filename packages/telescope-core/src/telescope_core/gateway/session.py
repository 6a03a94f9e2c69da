"""`Session`: one rollout at the gateway, from its first request to the end of the rollout."""

import asyncio
import weakref
from typing import Protocol

from telescope_core.base.types import ChatEndpoint, Completion, Sampling
from telescope_core.gateway.refusal import Refusal
from telescope_core.gateway.request import ChatRequest


class Answering(Protocol):
    """Answers the requests that arrive at one endpoint."""

    async def answer(self, request: ChatRequest) -> Completion:
        """Answer `request`; cancelling the caller cancels it."""
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`; raises Refusal."""
        ...


class Session:
    """Passes the requests at one endpoint to one policy.

    The policy holds its session, and the session refers to the policy only weakly. The endpoint of
    a policy that is no longer used therefore disappears with it.
    """

    def __init__(
        self,
        policy: Answering,
        sampling: Sampling,
        endpoint: ChatEndpoint,
        *,
        has_older: bool = False,
    ) -> None:
        """`has_older`: whether the policy also answers requests that name `OLDER_VERSION`."""
        self._policy = weakref.ref(policy)
        self._asking: set[asyncio.Task[Completion]] = set()
        self.sampling = sampling
        """The values of all parameters that a request leaves out."""
        self.endpoint = endpoint
        self.has_older = has_older
        self.is_open = True

    async def complete(self, request: ChatRequest) -> Completion:
        """Answer `request`; canceling the caller frees the server's slot, and so does `end`.

        Raises Refusal if the rollout has ended, before or during the request.
        """
        policy = self._policy()
        if policy is None or not self.is_open:
            raise ended()
        # A task of its own, because `end` has to cancel the request without canceling the HTTP
        # handler that waits for it: the handler still has to tell the client why.
        task = asyncio.get_running_loop().create_task(_answered(policy, request))
        self._asking.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            # Two causes look the same here. If the client went away, the handler itself is being
            # canceled, which must go on. If only the task was canceled, the rollout has ended.
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ended() from None
        finally:
            self._asking.discard(task)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens of `request`; raises Refusal."""
        policy = self._policy()
        if policy is None or not self.is_open:
            raise ended()
        return await policy.count_tokens(request)

    def end(self) -> None:
        """Cancel the requests in progress and accept no more. Idempotent."""
        # First, so that a handler that runs before the cancellations take effect starts nothing.
        self.is_open = False
        for task in self._asking:
            task.cancel()


async def _answered(policy: Answering, request: ChatRequest) -> Completion:
    return await policy.answer(request)


def ended() -> Refusal:
    """Build the answer to requests for a rollout that has ended or never existed."""
    return Refusal(
        "no rollout is being played at this address: it has ended, or the address is wrong; use "
        "episode.endpoint of the present rollout, and let a program end with its rollout",
        code="rollout_not_found",
        status=404,
    )
