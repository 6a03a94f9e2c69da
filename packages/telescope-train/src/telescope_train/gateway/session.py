"""`Session`: one rollout at the gateway, from the first request to the end of the rollout."""

import asyncio
import weakref

from telescope_core.protocols import Policy
from telescope_core.types import ChatEndpoint, Completion, Sampling
from telescope_train.gateway.refusal import Refusal
from telescope_train.gateway.request import ChatRequest


class Session:
    """What is asked at one endpoint goes to one policy.

    The policy holds its session and not the other way round: a policy that nobody holds any more
    has no endpoint.
    """

    def __init__(self, policy: Policy, sampling: Sampling, endpoint: ChatEndpoint) -> None:
        self._policy = weakref.ref(policy)
        self._asking: set[asyncio.Task[Completion]] = set()
        self.sampling = sampling
        """What requests leave out."""
        self.endpoint = endpoint
        self.is_open = True

    async def complete(self, request: ChatRequest) -> Completion:
        """Answer `request`; cancelling the caller frees the server's slot, and so does `end`."""
        policy = self._policy()
        if policy is None or not self.is_open:
            raise ended()
        task = asyncio.create_task(
            policy.complete(request.messages, request.sampling, tools=request.tools)
        )
        self._asking.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ended() from None
        finally:
            self._asking.discard(task)

    def end(self) -> None:
        """Cancel what is being asked and take no more. Idempotent."""
        self.is_open = False
        for task in self._asking:
            task.cancel()


def ended() -> Refusal:
    """Build the answer to requests for a rollout that is over, or that never was."""
    return Refusal(
        "no rollout is being played at this address: it has ended, or the address is wrong; use "
        "episode.endpoint of the rollout at hand, and let a program end with its rollout",
        code="rollout_not_found",
        status=404,
    )
