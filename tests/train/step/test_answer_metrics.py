"""What a step says of its answers: alike, in a loop, and what their rewards follow."""

from array import array
from dataclasses import replace

import pytest

from telescope_core.base.chains import sampled_tokens
from telescope_core.types import Completion, Group, Message, Rollout, Turn
from telescope_train.rollouts.held_out import question_of
from telescope_train.step.metrics import answer_metrics, ends_in_loop, reward_metrics

PROMPT = (1, 2)


def rollout(ids, reward, *, cut=False) -> Rollout:
    completion = Completion(
        message=Message(role="assistant", content=""),
        finish_reason="length" if cut else "stop",
        tokens=sampled_tokens(PROMPT, ids, (-0.5,) * len(ids)),
        num_completion_tokens=len(ids),
    )
    return Rollout(
        environment="toy",
        example_id="e",
        group_id="g",
        index=0,
        turns=(Turn(completion=completion, started_s=0.0, ended_s=1.0),),
        reward=reward,
        score_s=0.5,
    )


def group(*rollouts: Rollout, example="e") -> Group:
    played = tuple(replace(one, example_id=example) for one in rollouts)
    return Group(id="g", environment="toy", example_id=example, rollouts=played)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([9, 9, 9, 9, 9, 9, 9, 9], True),
        ([9, 9, 9, 9, 9, 9, 9], False),
        ([5, 6, 1, 2, 1, 2, 1, 2, 1, 2], True),
        ([1, 2, 1, 2, 1, 2, 1, 2, 7], False),
        ([*range(5)] * 3, False),
        ([*range(16)] * 4, True),
        ([*range(17)] * 4, False),
        ([], False),
    ],
)
def test_a_loop_is_at_the_end_and_repeats_four_times(ids, expected):
    assert ends_in_loop(array("i", ids)) is expected


def test_a_metric_called_mean_does_not_take_the_place_of_the_mean_reward():
    played = replace(rollout([3], 0.5), metrics={"mean": 70.0, "size": 3.0})
    metrics = reward_metrics([group(played)])
    assert metrics["reward/toy/mean"] == 0.5
    assert metrics["reward/toy/size"] == 3.0


def test_examples_and_answers_that_are_the_same_are_counted():
    a, b = rollout([3], 1.0), rollout([4], 0.0)
    failed = Group(id="f", environment="toy", example_id="", rollouts=())
    metrics = answer_metrics([group(a, a), group(a, b), group(b, b, example="other"), failed])
    assert metrics["groups/repeated"] == 1.0
    assert metrics["answers/most_common"] == pytest.approx(0.5)
    assert metrics["answers/looping"] == 0.0
    assert metrics["time/score_s"] == 0.5
    assert answer_metrics([failed]) == {}


def test_only_rollouts_that_said_something_and_were_scored_have_answers():
    failed, silent = rollout([4], None), replace(rollout([4], 1.0), turns=())
    said = group(rollout([3], 1.0), rollout([5] * 8, 0.0))
    assert answer_metrics([said, group(failed, silent), group(failed)]) == answer_metrics([said])
    assert answer_metrics([group(failed, silent)]) == {}


def test_what_is_asked_and_what_is_right_make_an_example_not_its_id():
    def asked(example, answer):
        return group(replace(rollout([3], 1.0), golden_answers={"answer": answer}), example=example)

    groups = [asked("a", "1"), asked("b", "1"), asked("c", "2")]
    assert answer_metrics(groups)["groups/repeated"] == 1.0


def test_groups_that_ask_what_evals_ask_are_counted_whatever_their_ids():
    few_shots = (Message(role="user", content="1 + 1?"), Message(role="assistant", content="2"))

    def asked(question, answer, example):
        messages = (*few_shots, Message(role="user", content=question))
        said = Message(role="assistant", content="5")
        golden = {"answer": answer} if answer else {}
        one = replace(rollout([3], 1.0), messages=(*messages, said), golden_answers=golden)
        return group(one, example=example)

    def question(one):
        first = one.rollouts[0]
        return question_of(first.messages, 1, first.golden_answers)

    evals = {question(asked("2 + 3?", "5", "of the evals"))}
    groups = [
        *(asked("2 + 3?", "5", "a"), asked("2 + 3?", "6", "b"), asked("3 + 2?", "5", "c")),
        *(asked("2 + 3?", "", "d"), group(rollout([3], 1.0))),
    ]
    assert answer_metrics(groups, evals)["groups/held_out"] == 1.0
    assert question(groups[3]) is None, "without a right answer, words alone decide nothing"
    assert "groups/held_out" not in answer_metrics(groups), "nothing was evaluated yet"


def test_a_reward_that_follows_the_length_alone_has_an_order_of_one():
    by_length = [rollout([3] * n, n / 10) for n in range(1, 10)]
    assert answer_metrics([group(*by_length)])["reward/length_order"] == 1.0
    against = [rollout([3] * n, -n / 10) for n in range(1, 10)]
    assert answer_metrics([group(*against)])["reward/length_order"] == -1.0
    # Equal lengths with different rewards say that it is not the length.
    same = [rollout([n, 3, 3], float(n % 2)) for n in range(12)]
    assert answer_metrics([group(*same)])["reward/length_order"] == 0.0
    # Of fewer than 30 pairs nothing is said. The length of a cut answer is that of the settings.
    parts = [group(*by_length[:8]), *[group(*by_length[:2])] * 2]
    assert "reward/length_order" not in answer_metrics(parts[:2])
    assert answer_metrics(parts)["reward/length_order"] == 1.0
    cut = [rollout([n] * 9, 0.0, cut=True) for n in range(10)]
    assert "reward/length_order" not in answer_metrics([group(*cut, rollout([3], 1.0))])


def test_noise_is_what_equal_answers_differ_by():
    lottery = [rollout([3], float(n % 2)) for n in range(10)]
    assert answer_metrics([group(*lottery)])["reward/noise"] == pytest.approx(1.0)
    fair = [rollout([3 + n % 2], float(n % 2)) for n in range(20)]
    assert answer_metrics([group(*fair)])["reward/noise"] == 0.0
    # No two answers are the same, or all rewards are: nothing is known.
    assert "reward/noise" not in answer_metrics([group(*(rollout([n], n) for n in range(10)))])
    assert "reward/noise" not in answer_metrics([group(*[rollout([3], 1.0)] * 10)])


def test_an_answer_is_all_that_was_said_also_what_the_last_turn_does_not_see():
    """Two agents with prompts of their own; the reward follows what the first one says."""
    last = rollout([5], 0.0).turns[0]
    played = [
        replace(one, turns=(*one.turns, last)) for one in (rollout([3], 0.0), rollout([4], 1))
    ]
    assert answer_metrics([group(*played * 10)])["reward/noise"] == 0.0


def test_rewards_that_differ_by_rounding_are_equal_to_metrics_over_pairs():
    sums = [rollout([3] * n, 0.3 if n % 2 else 0.1 + 0.2) for n in range(1, 11)]
    assert "reward/length_order" not in answer_metrics([group(*sums)])
    said = [rollout([3], 0.0 if n % 2 else 0.1 + 0.2 - 0.3) for n in range(10)]
    assert "reward/noise" not in answer_metrics([group(*said)])
