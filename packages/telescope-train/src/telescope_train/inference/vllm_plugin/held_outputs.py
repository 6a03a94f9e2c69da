"""Keep tokens from vLLM's output processor for requests that need only a final output."""

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists


class HeldOutputs:
    """Holds the tokens of a request that needs only its final output until it ends.

    The API server processes every output it gets, and one output with all tokens costs it little
    more than one with a single token. A change of the weight version releases the tokens that
    were sampled before it, so that each token keeps its version.
    """

    # Only the engine's thread calls this class, so no lock is needed.

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}
        self._version: str | None = None

    def watch(self, request: EngineCoreRequest) -> None:
        """Hold the outputs of `request`, unless its tokens are streamed."""
        params = request.sampling_params
        # Stop strings are matched by the output processor, which then aborts the request. If it
        # got the tokens only at the end, the engine would go on sampling past the stop string.
        if params is None or params.stop or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return
        self._parts[request.request_id] = []

    def forget(self, request_ids: list[str]) -> None:
        """Drop the held tokens of aborted requests."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)

    def release(self, step: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        """Take a step's outputs; returns those to be passed on now."""
        earlier: list[EngineCoreOutputs] = []
        # vLLM notes one weight version for all tokens of an `EngineCoreOutputs`. Tokens of two
        # versions must therefore not travel in the same one.
        if step.weight_version != self._version:
            earlier = self._flush()
            self._version = step.weight_version
        passed: list[EngineCoreOutput] = []
        for output in step.outputs:
            parts = self._parts.get(output.request_id)
            if parts is None:
                passed.append(output)
                continue
            parts.append(output)
            if output.finish_reason is not None:
                passed.append(merge(parts))
                del self._parts[output.request_id]
        step.outputs = passed
        return [*earlier, step]

    def _flush(self) -> list[EngineCoreOutputs]:
        held = [merge(parts) for parts in self._parts.values() if parts]
        for parts in self._parts.values():
            parts.clear()
        return [EngineCoreOutputs(outputs=held, weight_version=self._version)] if held else []


def merge(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return one output with the tokens and log-probs of successive `parts` of one request.

    The last part is changed in place: only it carries the reason why the request ended.
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    # vLLM attaches these to the first output after the prompt was computed, not to the last.
    last.prefill_stats = next((one.prefill_stats for one in parts if one.prefill_stats), None)
    last.new_token_ids = [token for one in parts for token in one.new_token_ids]
    last.events = [event for one in parts for event in one.events or ()] or None
    columns = [one.new_logprobs for one in parts if one.new_logprobs is not None]
    if columns:
        last.new_logprobs = LogprobsLists(
            np.concatenate([one.logprob_token_ids for one in columns]),
            np.concatenate([one.logprobs for one in columns]),
            np.concatenate([one.sampled_token_ranks for one in columns]),
        )
    return last
