"""Metrics of what is answered and of what the rewards follow, for the rules of diagnosis. Pure.

Answers are compared by their tokens. Letters: G scored rollouts of one group.
"""

from array import array
from collections import Counter
from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from telescope_core.base.types import Group, Rollout
from telescope_train.rollouts.held_out import question_of

FEWEST_PAIRS = 30
"""Least number of pairs of rollouts for a mean over pairs, so that one group does not decide."""
LONGEST_PERIOD, FEWEST_REPEATS, SHORTEST_LOOP = 16, 4, 8
"""Longest period of a loop, its least number of repetitions, and its least length in tokens."""


def answer_metrics(groups: Sequence[Group], held_out: Set[int] = frozenset()) -> dict[str, float]:
    """Return metrics of the scored rollouts of a step; what they cannot tell is absent.

    `held_out`: `question_of` of the examples that evals play.
    """
    scored = [[r for r in one.rollouts if r.reward is not None and r.turns] for one in groups]
    scored = [rollouts for rollouts in scored if rollouts]
    everything = [rollout for rollouts in scored for rollout in rollouts]
    if not everything:
        return {}
    examples = {_example(rollouts[0]) for rollouts in scored}
    said = Counter(
        hash(tuple(turn.completion.completion_ids.tobytes() for turn in rollout.turns))
        for rollout in everything
    )
    asked = [
        question_of(one.messages, len(one.turns), one.golden_answers)
        for one in (rollouts[0] for rollouts in scored)
    ]
    loops = [ends_in_loop(one.turns[-1].completion.completion_ids) for one in everything]
    return {
        "groups/repeated": float(len(scored) - len(examples)),
        **({"groups/held_out": float(sum(one in held_out for one in asked))} if held_out else {}),
        "answers/most_common": max(said.values()) / len(everything),
        "answers/looping": float(np.mean(loops)),
        "time/score_s": float(np.mean([rollout.score_s for rollout in everything])),
        **_pair_metrics([_pairs(rollouts) for rollouts in scored]),
    }


def _example(rollout: Rollout) -> tuple[object, ...]:
    """Return an identity of a rollout's example: its prompt and its right answer.

    If no right answer is known, it is the example's id: some environments always ask the same text
    and keep the subject to themselves.
    """
    if not rollout.golden_answers:
        return rollout.environment, rollout.example_id
    asked = rollout.turns[0].completion.prompt_ids.tobytes()
    return rollout.environment, asked, *sorted(rollout.golden_answers.items())


def ends_in_loop(ids: "array[int]") -> bool:
    """Return whether the last tokens repeat the same few again and again."""
    for period in range(1, LONGEST_PERIOD + 1):
        num_tokens = max(SHORTEST_LOOP, FEWEST_REPEATS * period)
        end = ids[-num_tokens:]
        if len(end) == num_tokens and end[period:] == end[:-period]:
            return True
    return False


def _pairs(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """Return [3, 2] sums over pairs of the rollouts, and the number of pairs in each.

    The sums are: 1 where the longer rollout got more and -1 where it got less, over pairs that both
    ended by themselves and have different rewards; the squared difference of rewards, over all
    pairs; and the same over pairs with equal tokens, prompts included.
    """
    rewards_G = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    # One that was cut has the length that the settings gave it.
    ended_G = np.array([not rollout.is_truncated for rollout in rollouts])
    lengths_G = np.array([rollout.num_completion_tokens for rollout in rollouts])
    last = [rollout.turns[-1].completion for rollout in rollouts]
    seen_G = np.array(
        [hash(one.prompt_ids.tobytes() + one.completion_ids.tobytes()) for one in last]
    )
    pair_GG = np.triu(np.ones((len(rollouts), len(rollouts)), dtype=bool), 1)
    gain_GG = rewards_G[:, None] - rewards_G
    order_GG = np.sign(gain_GG) * np.sign(lengths_G[:, None] - lengths_G)
    ordered_GG = pair_GG & ended_G[:, None] & ended_G & (gain_GG != 0.0)
    equal_GG = pair_GG & (seen_G[:, None] == seen_G)
    chosen = ((order_GG, ordered_GG), (gain_GG**2, pair_GG), (gain_GG**2, equal_GG))
    return np.array([(values[which].sum(), which.sum()) for values, which in chosen])


def _pair_metrics(pairs: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    totals, counts = np.sum(pairs, axis=0).T
    is_known = counts >= FEWEST_PAIRS
    order, every, equal = totals / np.maximum(counts, 1.0)
    return {
        **({"reward/length_order": float(order)} if is_known[0] else {}),
        **({"reward/noise": float(equal / every)} if is_known[2] and every > 0 else {}),
    }
