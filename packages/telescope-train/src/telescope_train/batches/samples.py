"""From a rollout to training samples: one per chain of tokens, with ids and log-probs as sampled.

The policy has joined the turns to chains. The tokens between two completions of a chain come from
the environment and are not trained on, and a token that is in several chains is trained on only in
the chain where it was sampled. A policy that records each turn separately gives the same samples:
its turns are joined here if one begins with all of another and was sampled at the same temperature.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.chains import SampledTokens
from telescope_core.base.errors import EndpointError
from telescope_core.base.types import Completion, Rollout, Span, Turn
from telescope_train.batches.batch import TrainingSample, TurnPart


@dataclass(slots=True, kw_only=True)
class _Line:
    """Turns of which each continues the one before."""

    temperature: float
    places: list[SampledTokens]
    spans: list[Span]
    """Versions of the weights for the tokens of its completions."""
    turns: list[TurnPart]


def samples_from_rollout(
    rollout: Rollout, advantage: float, temperature: float
) -> list[TrainingSample]:
    """Return the samples of one rollout, in the order in which their chains began.

    `temperature` is for turns that record none of their own. Raises EndpointError if a turn lacks
    token ids or log-probs, which are never made up.
    """
    lines: list[_Line] = []
    for number, turn in enumerate(rollout.turns):
        place = _checked(rollout, number, turn.completion)
        sampled_at = temperature if turn.temperature is None else turn.temperature
        line = _line_of(place, sampled_at, lines)
        if line is None:
            lines.append(line := _Line(temperature=sampled_at, places=[], spans=[], turns=[]))
        line.places.append(place)
        line.spans += _spans(turn.completion, place)
        line.turns.append(TurnPart(number, place.num_completion_ids))
    return [_sample(line, rollout, advantage) for line in lines]


def branched_fraction(samples: Sequence[TrainingSample], rollouts: Sequence[Rollout]) -> float:
    """Return the share of turns that began a new sample, without the first of each agent."""
    # A sub-agent, or another seat of a match, has a history of its own from the beginning.
    num_first = sum(len({turn.agent for turn in rollout.turns}) for rollout in rollouts)
    num_later = sum(len(rollout.turns) for rollout in rollouts) - num_first
    return (len(samples) - num_first) / max(1, num_later)


def num_cuts_continued(rollouts: Sequence[Rollout]) -> int:
    """Count the turns cut by `max_tokens` that a later turn continues.

    The tokens that end such a turn come from the chat template and are not trained on.
    """
    # Turns of other agents, with histories of their own, may come in between.
    return sum(
        any(_continues(after, cut) for after in rollout.turns[number:])
        for rollout in rollouts
        for number, cut in enumerate(rollout.turns, start=1)
        if cut.completion.finish_reason == "length"
    )


def _continues(after: Turn, before: Turn) -> bool:
    """Return whether the prompt of `after` begins with the prompt and completion of `before`."""
    later, earlier = after.completion.tokens, before.completion.tokens
    if later is None or earlier is None:
        return False
    return later.chain is earlier.chain or _begin_with(later.prompt_ids, earlier)


def _begin_with(prompt_ids: "array[int]", earlier: SampledTokens) -> bool:
    """Return whether `prompt_ids` begin with the prompt and completion of `earlier`."""
    start, end = earlier.prompt_end, earlier.completion_end
    # Its last token first, which costs nothing, and then the completion, which is short: a history
    # that was rewritten differs there.
    if len(prompt_ids) < end or prompt_ids[end - 1] != earlier.last_id:
        return False
    return (
        prompt_ids[start:end] == earlier.completion_ids and prompt_ids[:start] == earlier.prompt_ids
    )


def _checked(rollout: Rollout, number: int, completion: Completion) -> SampledTokens:
    """Return the tokens of a turn; raises EndpointError if some were not recorded."""
    place = completion.tokens
    num_prompt_ids = place.prompt_end if place is not None else 0
    num_ids = place.num_completion_ids if place is not None else 0
    num_logprobs = place.num_logprobs if place is not None else 0
    if not num_prompt_ids or not num_ids:
        problem = f"{num_prompt_ids} prompt ids and {num_ids} completion ids"
    elif num_logprobs != num_ids:
        problem = f"{num_logprobs} log-probs for {num_ids} completion ids"
    elif place is None or not np.isfinite(place.logprobs).all():
        problem = "a log-prob that is not finite"
    else:
        return place
    raise EndpointError(
        f"turn {number} of rollout {rollout.index} of group {rollout.group_id!r} "
        f"({rollout.environment}): expected prompt ids, completion ids and one log-prob for each, "
        f"got {problem}; train against a server that returns token ids with their log-probs"
    )


def _line_of(place: SampledTokens, temperature: float, lines: Sequence[_Line]) -> _Line | None:
    """Return the longest line with which the prompt begins."""
    # A sample has one temperature, by which the trainer divides the logits of all its tokens.
    alike = [line for line in lines if line.temperature == temperature]
    # The turns of one chain are in order, so nothing is compared for them.
    before = [line for line in alike if line.places[-1].chain is place.chain]
    if alike and not before:
        prompt_ids = place.prompt_ids
        before = [line for line in alike if _begin_with(prompt_ids, line.places[-1])]
    return max(before, key=lambda line: line.places[-1].completion_end, default=None)


def _spans(completion: Completion, place: SampledTokens) -> Sequence[Span]:
    if completion.spans:
        return completion.spans
    # Only the ends are known. The tokens count as old ones.
    rest = Span(completion.newest_version, 0)
    return [Span(completion.oldest_version, place.num_completion_ids), rest]


def _sample(line: _Line, rollout: Rollout, advantage: float) -> TrainingSample:
    token_ids = np.array(line.places[-1].token_ids, dtype=np.int32)
    logprobs = np.full(len(token_ids), np.nan, dtype=np.float32)
    for place in line.places:
        logprobs[place.prompt_end : place.completion_end] = place.logprobs
    return TrainingSample(
        token_ids=token_ids,
        mask=~np.isnan(logprobs),
        behavior_logprobs=logprobs,
        advantage=advantage,
        temperature=line.temperature,
        oldest_version=min(span.version for span in line.spans),
        newest_version=max(span.version for span in line.spans),
        spans=tuple(line.spans),
        group_id=rollout.group_id,
        rollout_index=rollout.index,
        attempt=rollout.attempt,
        turns=tuple(line.turns),
        environment=rollout.environment,
        routes=_routes(line.places[-1]),
    )


def _routes(place: SampledTokens) -> NDArray[np.int16] | None:
    """Return [L, layers, chosen] the routes of a whole line, up to its last turn."""
    routes = place.routes
    if routes is None:
        return None
    shape = (-1, routes.num_layers, routes.num_chosen)
    return np.frombuffer(routes.experts, np.dtype("<i2")).reshape(shape)
