"""From a rollout to training samples: one per chain of tokens, with ids and log-probs as sampled.

A chain is a token sequence that the server has seen. A turn whose prompt starts with a whole chain
extends it. The tokens between the chain and the completion come from the environment and are not
trained on. A turn whose history was rewritten, or that was sampled at another temperature, starts a
chain of its own. A token that is in several chains is trained on only where it was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from telescope_core.errors import EndpointError
from telescope_core.types import Completion, Rollout
from telescope_train.batches.batch import TrainingSample


@dataclass(slots=True)
class _Chain:
    temperature: float
    ids: bytes = b""
    """int32 token ids as bytes, so that comparing a prefix is one memcmp."""
    logprobs: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    """Consecutive pieces, nats; NaN where the policy did not write the token in this chain."""
    versions: list[int] = field(default_factory=list[int])
    """Oldest and newest weight version of each completion."""

    def add(self, prompt: bytes, completion: Completion) -> None:
        num_bridge = (len(prompt) - len(self.ids)) // 4
        self.logprobs.append(np.full(num_bridge, np.nan, dtype=np.float32))
        self.logprobs.append(np.asarray(completion.logprobs, dtype=np.float32))
        self.ids = prompt + _bytes(completion.completion_ids)
        self.versions += (completion.oldest_version, completion.newest_version)


def samples_from_rollout(
    rollout: Rollout, advantage: float, temperature: float
) -> list[TrainingSample]:
    """Return the samples of one rollout, in the order in which their chains began.

    `temperature` is for turns that record none of their own. Raises EndpointError if a turn lacks
    token ids or log-probs, which are never made up.
    """
    chains: list[_Chain] = []
    for number, turn in enumerate(rollout.turns):
        _check(rollout, number, turn.completion)
        prompt = _bytes(turn.completion.prompt_ids)
        sampled_at = temperature if turn.temperature is None else turn.temperature
        chain = _chain_of(prompt, sampled_at, chains)
        if chain is None:
            chains.append(chain := _Chain(sampled_at))
        chain.add(prompt, turn.completion)
    return [_sample(chain, rollout, advantage) for chain in chains]


def branched_fraction(samples: Sequence[TrainingSample], rollouts: Sequence[Rollout]) -> float:
    """Return the share of turns, without each rollout's first, that began a new sample."""
    num_later = sum(max(0, len(rollout.turns) - 1) for rollout in rollouts)
    num_first = sum(bool(rollout.turns) for rollout in rollouts)
    return (len(samples) - num_first) / max(1, num_later)


def num_cuts_continued(rollouts: Sequence[Rollout]) -> int:
    """Count the turns cut by `max_tokens` that the next turn continues.

    The tokens that end such a turn come from the chat template and are not trained on.
    """
    return sum(
        _bytes(after.completion.prompt_ids).startswith(
            _bytes(cut.completion.prompt_ids) + _bytes(cut.completion.completion_ids)
        )
        for rollout in rollouts
        for cut, after in pairwise(rollout.turns)
        if cut.completion.finish_reason == "length"
    )


def _bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype=np.int32).tobytes()


def _check(rollout: Rollout, number: int, completion: Completion) -> None:
    num_ids, num_logprobs = len(completion.completion_ids), len(completion.logprobs)
    if not completion.prompt_ids or not num_ids:
        problem = f"{len(completion.prompt_ids)} prompt ids and {num_ids} completion ids"
    elif num_logprobs != num_ids:
        problem = f"{num_logprobs} log-probs for {num_ids} completion ids"
    elif not np.isfinite(completion.logprobs).all():
        problem = "a log-prob that is not finite"
    else:
        return
    raise EndpointError(
        f"turn {number} of rollout {rollout.index} of group {rollout.group_id!r} "
        f"({rollout.environment}): expected prompt ids, completion ids and one log-prob for each, "
        f"got {problem}; train against a server that returns token ids with their log-probs"
    )


def _chain_of(prompt: bytes, temperature: float, chains: Sequence[_Chain]) -> _Chain | None:
    """Return the longest chain that the prompt starts with."""
    # A sample has one temperature, by which the trainer divides the logits of all its tokens.
    prefixes = [
        chain
        for chain in chains
        if chain.temperature == temperature and prompt.startswith(chain.ids)
    ]
    return max(prefixes, key=lambda chain: len(chain.ids), default=None)


def _sample(chain: _Chain, rollout: Rollout, advantage: float) -> TrainingSample:
    logprobs = np.concatenate(chain.logprobs)
    return TrainingSample(
        # A copy, because an array over bytes is read-only.
        token_ids=np.frombuffer(chain.ids, dtype=np.int32).copy(),
        mask=~np.isnan(logprobs),
        behavior_logprobs=logprobs,
        advantage=advantage,
        temperature=chain.temperature,
        oldest_version=min(chain.versions),
        newest_version=max(chain.versions),
        group_id=rollout.group_id,
        rollout_index=rollout.index,
        environment=rollout.environment,
    )
