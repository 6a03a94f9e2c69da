"""Whole completions directly from the engine's thread, bypassing vLLM's output processor.

The output processor detokenizes, matches stop strings and keeps an object per token for its
log-prob. A request of the token plane without stop strings needs none of this: its tokens and
log-probs are written to columns as soon as they are sampled, with the version of the weights that
the step of the engine had: this decides which version a token has.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput

from telescope_train.inference.vllm_plugin.request_stats import MeasuredRequest, StepStats
from telescope_train.inference.wire import VersionSpan


@dataclass(slots=True)
class GrowingCompletion:
    """The sampled tokens of one request; grows with each step of the engine until it ends."""

    request_id: str
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    """[T] int32."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """[T] float32, nats: log-probs under the distribution that was sampled from."""
    versions: list[VersionSpan] = field(default_factory=list)
    """Versions of the weights for the tokens, in order."""
    finish_reason: str = ""
    """`stop`, `length`, `abort` or `error`; empty until the request ends."""
    measured: MeasuredRequest | None = None
    """The measurements; None = the server makes none."""

    def add(self, output: EngineCoreOutput, version: str | None) -> None:
        """Append the tokens that a step with weight version `version` sampled."""
        if output.new_token_ids:
            if version is not None and (not self.versions or self.versions[-1].version != version):
                self.versions.append(VersionSpan(version, len(self.token_ids)))
            self.token_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                # vLLM returns the sampled token's log-prob in the first column, even where the
                # token is not among the most likely ones.
                self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)


class GrowingCompletions:
    """The growing completions in an engine, by request id."""

    # Only the engine's thread uses this, so no lock is needed. A completion goes to the event loop
    # only after it has ended, and nothing writes to it any more.
    def __init__(self) -> None:
        self._growing: dict[str, GrowingCompletion] = {}
        self._ended: list[GrowingCompletion] = []

    def watch(self, completion: GrowingCompletion) -> None:
        """Collect the tokens of `completion` from now on."""
        self._growing[completion.request_id] = completion

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the completions of aborted requests."""
        for request_id in request_ids:
            self._growing.pop(request_id, None)

    def take(
        self,
        outputs: list[EngineCoreOutput],
        version: str | None,
        stats: StepStats | None = None,
    ) -> list[EngineCoreOutput]:
        """Take a step's outputs; returns those that belong to no completion.

        Those of measured completions are counted in `stats`.
        """
        others: list[EngineCoreOutput] = []
        for output in outputs:
            completion = self._growing.get(output.request_id)
            if completion is None:
                # It belongs to vLLM's own routes or has stop strings, so it goes to the output
                # processor.
                others.append(output)
                continue
            completion.add(output, version)
            if stats is not None and completion.measured is not None:
                stats.add(completion.measured, output)
            if completion.finish_reason:
                self._ended.append(self._growing.pop(output.request_id))
        return others

    def ended(self) -> list[GrowingCompletion]:
        """Return the completions that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended
