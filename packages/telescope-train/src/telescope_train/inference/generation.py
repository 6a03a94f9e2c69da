"""`Request` and `Generation`: a policy's request to servers, and the sampled result."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from telescope_core.base.chains import Routes
from telescope_core.base.errors import EndpointError, EndpointLostError
from telescope_core.base.seeds import derived_seed
from telescope_core.base.types import Sampling, Span, WeightVersion
from telescope_train.observability.calls import UNWATCHED, ServerTiming, Watching


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens that a server sampled, and the versions of its weights."""

    token_ids: "array[int]"
    """[T] int32, the end-of-turn token included if one was sampled."""
    logprobs: "array[float]"
    """[T] float32, nats: log-prob of each token under the distribution it was sampled from."""
    finish_reason: Literal["stop", "length"]
    spans: tuple[Span, ...]
    """At least one; they cover the tokens, in order."""
    timing: ServerTiming | None = field(default=None, compare=False)
    """Timing by the last server, if it has measured the request."""
    routes: Routes | None = field(default=None, compare=False)
    """Routes of the prompt and of these tokens from the last server; None = not reported."""
    is_joined: bool = field(default=False, compare=False)
    """Whether it was sampled in more than one request."""

    @property
    def oldest_version(self) -> WeightVersion:
        """Lowest weight version that sampled any of the tokens."""
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> WeightVersion:
        """Highest weight version that sampled any of the tokens."""
        return max(span.version for span in self.spans)


class QueuePosition(NamedTuple):
    """The rollout of a request, and its step: of equal priorities, the oldest step goes first."""

    rollout_id: str
    step: int
    """The step for whose batch the rollout was drawn, 1 first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One continuation to sample, on its way from a policy through a pool to a server."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    stop_token_ids: Sequence[int] = ()
    """Token ids of which the first to be sampled ends the answer and is part of it."""
    group_id: str = ""
    """Id of its group, whose requests share a prompt, and so a server."""
    priority: int = 0
    """Lower ones go first. A pool replaces it by `pool.server_priority`."""
    position: QueuePosition | None = None
    """Position of a rollout that holds a slot for the request; None = there is none."""
    watching: Watching = UNWATCHED
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes. A pool sets it."""
    begun: Generation | None = None
    """The part that another server has already sampled. A pool sets it."""


class ServerLostError(EndpointLostError):
    """The server of a request is gone, or does not answer any more."""

    def __init__(self, message: str, begun: Generation | None = None) -> None:
        """`begun`: the sampled part that had arrived; None = nothing."""
        super().__init__(message)
        self.begun = begun


class RequestAbortedError(EndpointError):
    """The server has ended a request, to be continued with another request."""

    def __init__(self, message: str, begun: Generation | None = None) -> None:
        """`begun`: the sampled part; None = nothing."""
        super().__init__(message)
        self.begun = begun


def joined(begun: Generation | None, rest: Generation) -> Generation:
    """Return two consecutive parts of a generation as one."""
    if begun is None:
        return rest
    return replace(
        rest,
        token_ids=array("i", begun.token_ids) + array("i", rest.token_ids),
        logprobs=array("f", begun.logprobs) + array("f", rest.logprobs),
        spans=in_a_row((*begun.spans, *rest.spans)),
        is_joined=True,
    )


def until_stop(
    generation: Generation, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Generation:
    """Return `generation` up to the token that completes the first of the stop texts.

    A server looks for stop texts only in the tokens that it samples. This finds a text that began
    in an earlier request of the same generation; the tokens after it are discarded.
    """
    if not generation.is_joined or not _has_any(stop, decode(generation.token_ids)):
        return generation
    lengths = range(1, len(generation.token_ids) + 1)
    # A longer beginning has every stop text that a shorter one has.
    shortest = bisect_left(
        lengths, True, key=lambda length: _has_any(stop, decode(generation.token_ids[:length]))
    )
    num_tokens = lengths[shortest]
    return replace(
        generation,
        token_ids=generation.token_ids[:num_tokens],
        logprobs=generation.logprobs[:num_tokens],
        spans=_first_tokens(generation.spans, num_tokens),
        finish_reason="stop",
    )


def in_a_row(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return `spans` with adjacent ones of the same version merged."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            span = Span(span.version, merged.pop().num_tokens + span.num_tokens)
        merged.append(span)
    return tuple(merged)


def ended(request: Request) -> Generation | None:
    """Return the finished part of `request` if nothing is left to sample."""
    begun = request.begun
    if begun is None:
        return None
    if begun.token_ids[-1] in request.stop_token_ids:
        return replace(begun, finish_reason="stop")
    if len(begun.token_ids) >= request.sampling.max_tokens:
        return replace(begun, finish_reason="length")
    return None


def sampling_after(begun: Generation | None, sampling: Sampling) -> Sampling:
    """Return sampling settings for the rest of a generation after `begun`.

    The seed becomes another one: a request with the same seed would begin with the draws that
    `begun` was made with.
    """
    if begun is None:
        return sampling
    num_begun = len(begun.token_ids)
    seed = None if sampling.seed is None else derived_seed(sampling.seed, num_begun)
    return replace(sampling, max_tokens=sampling.max_tokens - num_begun, seed=seed)


def _has_any(stop: Sequence[str], text: str) -> bool:
    return any(one in text for one in stop)


def _first_tokens(spans: Sequence[Span], num_tokens: int) -> tuple[Span, ...]:
    """Return the spans of the first `num_tokens` tokens."""
    kept: list[Span] = []
    for span in spans:
        left = num_tokens - sum(one.num_tokens for one in kept)
        if left > 0:
            kept.append(Span(span.version, min(span.num_tokens, left)))
    return tuple(kept)
