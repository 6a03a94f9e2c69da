"""The tokens so far of a running request, read between two steps of the event loop.

Nothing is recorded for it: the tokens are where the engine puts them anyway.
"""

from array import array
from itertools import islice
from typing import Any, NamedTuple

from vllm.v1.engine.async_llm import AsyncLLM

from telescope_train.inference.vllm_plugin.completions import GrowingCompletion
from telescope_train.inference.wire import VersionSpan


class Part(NamedTuple):
    """The tokens of a completion from some position on."""

    token_ids: "array[int]"
    """[T] int32."""
    logprobs: "array[float]"
    """[T] float32, nats."""
    versions: tuple[VersionSpan, ...]
    """Versions for the whole completion, from its first token on."""


def part_of_completion(completion: GrowingCompletion, start: int) -> Part:
    """Return the tokens from the engine's thread, from token `start` on."""
    # That thread may be between two of its three appends: the log-probs come last, and the version
    # before the tokens. What has a log-prob is therefore complete.
    end = len(completion.logprobs)
    return Part(
        completion.token_ids[start:end],
        completion.logprobs[start:end],
        tuple(span for span in completion.versions if span.start < end),
    )


def part_of_output(engine: AsyncLLM, request_id: str, start: int) -> Part:
    """Return the tokens from vLLM's output processor, from token `start` on."""
    processor = engine.output_processor
    internal = processor.external_req_ids.get(request_id)
    state: Any = processor.request_states.get(internal[0]) if internal else None
    logprobs = None if state is None else state.logprobs_processor.logprobs
    if state is None or logprobs is None:
        return Part(array("i"), array("f"), ())
    starts = logprobs.start_indices
    end = len(starts)
    return Part(
        array("i", islice(state.detokenizer.output_token_ids, start, end)),
        array("f", (logprobs.logprobs[one] for one in islice(starts, start, end))),
        tuple(VersionSpan(*span) for span in state.weight_version_starts if span[1] < end),
    )
