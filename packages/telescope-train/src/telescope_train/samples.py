"""A rollout becomes training samples: one per chain of tokens, ids and log-probs as sampled.

A chain is a prefix the server has seen. A turn whose prompt starts with a whole chain extends it,
and what stands between is the environment's: not trained. A turn whose history was rewritten starts
a chain of its own. A token that stands in several chains is trained only where it was sampled.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from telescope_core.errors import EndpointError
from telescope_core.types import Completion, Rollout
from telescope_train.batch import TrainingSample


@dataclass(slots=True)
class _Chain:
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """NaN where the policy did not write the token in this chain."""
    versions: list[int] = field(default_factory=list[int])

    def add(self, completion: Completion) -> None:
        bridge = completion.prompt_ids[len(self.token_ids) :]
        self.token_ids += (*bridge, *completion.completion_ids)
        self.logprobs += (*[math.nan] * len(bridge), *completion.logprobs)
        self.versions += (completion.oldest_version, completion.newest_version)


def samples_from_rollout(
    rollout: Rollout, advantage: float, temperature: float
) -> list[TrainingSample]:
    """Return the samples of one rollout, in the order in which their chains began.

    Raises EndpointError where a turn lacks ids or log-probs: they are never made up.
    """
    chains: list[_Chain] = []
    for number, turn in enumerate(rollout.turns):
        _check(rollout, number, turn.completion)
        chain = _chain_of(turn.completion.prompt_ids, chains)
        if chain is None:
            chains.append(chain := _Chain())
        chain.add(turn.completion)
    return [_sample(chain, rollout, advantage, temperature) for chain in chains]


def _check(rollout: Rollout, number: int, completion: Completion) -> None:
    num_ids, num_logprobs = len(completion.completion_ids), len(completion.logprobs)
    if not completion.prompt_ids or not num_ids:
        problem = f"{len(completion.prompt_ids)} prompt ids and {num_ids} completion ids"
    elif num_logprobs != num_ids:
        problem = f"{num_logprobs} log-probs for {num_ids} completion ids"
    elif not all(map(math.isfinite, completion.logprobs)):
        problem = "a log-prob that is not finite"
    else:
        return
    raise EndpointError(
        f"turn {number} of rollout {rollout.index} of group {rollout.group_id!r} "
        f"({rollout.environment}): expected prompt ids, completion ids and one log-prob for each, "
        f"got {problem}; train against a server that returns token ids with their log-probs"
    )


def _chain_of(prompt_ids: tuple[int, ...], chains: list[_Chain]) -> _Chain | None:
    """Return the longest chain that the prompt starts with."""
    prefixes = [c for c in chains if list(prompt_ids[: len(c.token_ids)]) == c.token_ids]
    return max(prefixes, key=lambda chain: len(chain.token_ids), default=None)


def _sample(
    chain: _Chain, rollout: Rollout, advantage: float, temperature: float
) -> TrainingSample:
    logprobs = np.array(chain.logprobs, dtype=np.float32)
    return TrainingSample(
        token_ids=np.array(chain.token_ids, dtype=np.int32),
        mask=~np.isnan(logprobs),
        behavior_logprobs=logprobs,
        advantage=advantage,
        temperature=temperature,
        oldest_version=min(chain.versions),
        newest_version=max(chain.versions),
        group_id=rollout.group_id,
        rollout_index=rollout.index,
        environment=rollout.environment,
    )
