"""Paired comparison of two evals: the numbers, what is paired, and how often it is right."""

import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest

from telescope_cli.eval.compare import comparison_to_json
from telescope_core import ConfigError, Sampling, Split
from telescope_core.evals import EvalFolder, EvalSettings, compare_results
from telescope_core.evals.comparison import paired_difference
from telescope_core.evals.distributions import t_cdf, t_quantile
from telescope_core.evals.result import result_of
from telescope_core.evals.settings import as_played
from telescope_core.records.rows import RolloutRow
from telescope_core.reports.differences import cautions, paragraph, sentence
from telescope_core.types import EnvironmentDescription, RolloutStatus

DESCRIPTION = EnvironmentDescription(
    name="sums",
    version="0.1.0",
    reward_min=0.0,
    reward_max=1.0,
    success_threshold=1.0,
    num_examples={Split.EVAL: None},
    network="none",
)


def an_eval(rewards, ks=(1,), temperature=1.0, **changes):
    """Return the result of an eval with these rewards, by example id; None = a failed rollout."""
    rows = [
        RolloutRow(
            step=0,
            environment="sums",
            example_id=example_id,
            group_id=f"eval-{task:06d}",
            index=index,
            status=RolloutStatus.FAILED if one is None else RolloutStatus.KEPT,
            reward=one,
        )
        for task, (example_id, group) in enumerate(rewards)
        for index, one in enumerate(group)
    ]
    sampling = Sampling(max_tokens=8, temperature=temperature)
    rollouts = max(len(group) for _, group in rewards)
    settings = EvalSettings(num_examples=len(rewards), rollouts=rollouts, ks=ks, sampling=sampling)
    return replace(result_of(rows, settings, DESCRIPTION, model="m", duration_s=1.0), **changes)


def simulated(rng, chances, rollouts, level=0.0):
    chances = chances + level * (1.0 - chances)
    solved = rng.random((len(chances), rollouts)) < chances[:, None]
    return an_eval([(f"e{i}", [float(one) for one in row]) for i, row in enumerate(solved)])


def test_the_difference_is_that_of_a_bootstrap_with_half_a_task_at_each_end():
    before, after = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    one = paired_difference("pass@1", before, after)
    assert (one.before, one.after, one.change) == (1 / 3, 0.5, pytest.approx(1 / 6))
    # Six differences, and two imagined tasks, which single rollouts give half the weight of a task.
    values = [*(new - old for old, new in zip(before, after, strict=True)), -1.0, 1.0]
    rng = np.random.default_rng(0)
    shares = (1 + rng.dirichlet([1.0] * 6 + [0.5, 0.5], 200_000) @ np.array(values)) / 2
    # Student's t with 5 degrees of freedom is this much wider than a normal distribution.
    mean, variance = shares.mean(), shares.var() * (2.570581836 / 1.959963985) ** 2
    size = mean * (1 - mean) / variance - 1
    drawn = 2 * rng.beta(mean * size, (1 - mean) * size, 200_000) - 1
    assert [one.low, one.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.015)
    assert one.p == pytest.approx(2 * (drawn < 0).mean(), abs=0.015)
    assert not one.is_shown


def test_where_many_tasks_change_it_is_a_t_test():
    rng = np.random.default_rng(3)
    old, new = (rng.binomial(4, chance, 300) / 4 for chance in (0.4, 0.47))
    one, error = paired_difference("pass@1", old, new, rollouts=4), (new - old).std() / 300**0.5
    reach = t_quantile(0.975, 299) * error
    assert one.low == pytest.approx(one.change - reach, abs=0.02 * reach)
    assert one.high == pytest.approx(one.change + reach, abs=0.02 * reach)
    assert one.p == pytest.approx(2 * t_cdf(-one.change / error, 299), rel=0.1)
    assert one.detectable == pytest.approx(2.81 * error, rel=0.02)
    power = t_quantile(0.8, 299) / t_quantile(0.975, 299)
    assert one.detectable == pytest.approx((one.high - one.low) / 2 * (1 + power), rel=0.005)


SKEWED = [0.0, 0.75, 0.5, 1.0, 0.25, 0.75, 0.5, 1.0]
"""Gains are more than losses."""


@pytest.mark.parametrize("scale", [0.25, 3.0])
@pytest.mark.parametrize("after", [SKEWED, [0.5] * 8, [1.0] * 8])
def test_a_difference_has_the_unit_of_the_rewards_and_turns_round_with_the_evals(after, scale):
    before = [0.5, 0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.0] if after is SKEWED else [0.5] * 8
    numbers = ("change", "low", "high", "detectable", "p")

    def of(old, new, unit=1.0):
        old, new = ([unit * one for one in column] for column in (old, new))
        found = paired_difference("reward", old, new, span=unit, rollouts=4)
        return [getattr(found, name) for name in numbers]

    change, low, high, detectable, p = of(before, after)
    sizes = [scale * one if one is not None else None for one in (change, low, high, detectable)]
    assert of(before, after, scale) == pytest.approx([*sizes, p])
    assert of(after, before) == pytest.approx([-change, -high, -low, detectable, p])


def test_it_finds_what_intervals_with_values_in_common_do_not():
    rng = np.random.default_rng(5)
    chances = rng.beta(0.5, 0.5, 200)
    before, after = simulated(rng, chances, 4), simulated(rng, chances, 4, level=0.15)
    assert before.pass_at[1].high > after.pass_at[1].low
    main = compare_results(before, after).main
    assert main.is_shown
    assert main.p < 0.001


def test_no_difference_is_rarely_called_one_and_the_detectable_one_is_found():
    rng = np.random.default_rng(0)
    alarms = found = held = 0
    detectable = []
    for _ in range(400):
        chances = rng.beta(0.6, 0.6, 60)
        old, same, better = (
            rng.binomial(4, chances + level * (1 - chances)) / 4 for level in (0.0, 0.0, 0.11)
        )
        alarms += paired_difference("pass@1", old, same).is_shown
        difference = paired_difference("pass@1", old, better)
        found += difference.is_shown
        held += difference.low <= 0.055 <= difference.high
        detectable.append(difference.detectable)
    assert 0.02 <= alarms / 400 <= 0.08
    assert 0.92 <= held / 400 <= 0.98
    # The true difference is 0.055; at the detectable one, the chance of finding it is 0.8.
    assert np.mean(detectable) == pytest.approx(0.1, abs=0.03)
    assert 0.25 <= found / 400 <= 0.45


@pytest.mark.slow
@pytest.mark.parametrize("size", [20, 200])
def test_a_true_difference_as_large_as_the_detectable_one_is_found_4_times_in_5(size):
    rng = np.random.default_rng(1)
    old = np.zeros(size)
    noise = [rng.normal(0.0, 0.2, size) for _ in range(500)]

    def of(new):
        return paired_difference("x", old, new, rollouts=16)

    detectable = np.mean([of(one).detectable for one in noise])
    assert 2.8 * 0.2 / size**0.5 < detectable < 4.2 * 0.2 / size**0.5
    found = sum(of(one + detectable).is_shown for one in noise)
    assert found / 500 == pytest.approx(0.8, abs=0.12)


def few_solved(number, num_tasks):
    """Return the difference between an eval that solved nothing and one that solved a few."""
    solved = [1.0] * number + [0.0] * (num_tasks - number)
    return paired_difference("pass@1", [0.0] * num_tasks, solved)


@pytest.mark.parametrize("num_tasks", [20, 64, 100, 200])
def test_a_gain_of_few_tasks_is_in_the_interval(num_tasks):
    """Exactly, over the binomial distribution of tasks that are newly solved."""
    found = [few_solved(number, num_tasks) for number in range(num_tasks + 1)]
    assert [one.is_shown for one in found[:4]] == [False] * 4
    held, missed = [], []
    for gain in np.arange(0.01, 0.3, 0.005):
        chances = [
            math.comb(num_tasks, k) * gain**k * (1 - gain) ** (num_tasks - k)
            for k in range(num_tasks + 1)
        ]
        pairs = list(zip(chances, found, strict=True))
        held.append(sum(chance for chance, one in pairs if one.low <= gain <= one.high))
        # What is said of 0.05 is that such a gain is ruled out.
        if gain >= 0.05:
            missed.append(sum(c for c, one in pairs if one.low <= 0 and one.high < 0.05))
    assert np.mean(held) > 0.945
    assert min(held) > 0.885, "Student's t holds as little as 0.63 of them"
    assert max(missed) < 0.04
    # One task that is solved says no more against a gain than none does.
    assert found[0].high < found[1].high + 0.005 < found[2].high


@pytest.mark.slow
@pytest.mark.parametrize("rollouts", [1, 4, 16])
@pytest.mark.parametrize("num_tasks", [50, 200])
def test_gains_of_some_tasks_are_in_the_interval_whatever_the_others_do(num_tasks, rollouts):
    rng = np.random.default_rng(num_tasks + rollouts)
    held = shown = 0
    for _ in range(200):
        chances = rng.beta(0.4, 0.6, num_tasks)
        flips = rng.random(num_tasks) < 0.06
        old = rng.binomial(rollouts, chances) / rollouts
        new = rng.binomial(rollouts, np.where(flips, 1.0, chances)) / rollouts
        one = paired_difference("pass@1", old, new, rollouts=rollouts)
        held += one.low <= 0.06 * 0.6 <= one.high
        same = rng.binomial(rollouts, chances) / rollouts
        shown += paired_difference("pass@1", old, same, rollouts=rollouts).is_shown
    assert held / 200 >= 0.91
    assert shown / 200 <= 0.09


def test_rounding_does_not_make_two_tasks_a_proof():
    one = paired_difference("pass@1", [0.4, 0.2, 0.4, 0.2], [0.6, 0.4, 0.6, 0.4], rollouts=5)
    assert one.detectable is None, "all tasks changed by the same"
    assert one.p == pytest.approx(0.125)
    assert one.high - one.low > 0.5
    pair = paired_difference("pass@1", [0.4, 0.2], [0.6, 0.4], rollouts=5)
    assert not pair.is_shown


def test_examples_are_paired_by_id_and_the_others_are_told():
    before = an_eval([("a", [1, 0]), ("b", [0, 0]), ("c", [1, 1]), ("d", [None, None])])
    after = an_eval([("c", [1, 1]), ("b", [1, 0]), ("e", [0, 0]), ("d", [1, 1])])
    comparison = compare_results(before, after)
    assert (comparison.num_only_before, comparison.num_only_after) == (1, 2)
    assert (comparison.main.num_tasks, comparison.main.change) == (2, 0.25)
    assert cautions(comparison) == [
        "1 example is left out, because only the first eval scored them.",
        "2 examples are left out, because only the second eval scored them.",
        "Of 8 rollouts of the first eval, 2 failed; what has no reward is left out, which can "
        "change the means.",
    ]
    with pytest.raises(ConfigError, match="with no id in both"):
        compare_results(before, an_eval([("x", [1])]))


def test_failed_and_missing_rollouts_of_either_are_told():
    before = an_eval([("a", [1, 0, 1, None]), ("b", [0, 0, 1, 1])], ks=(1, 4))
    after = an_eval([("a", [1, 1, 1, 1]), ("b", [0, 0, 1, 1])], ks=(1, 4))
    assert cautions(compare_results(after, after)) == []
    comparison = compare_results(before, replace(after, num_rollouts=10))
    assert cautions(comparison) == [
        "Of 8 rollouts of the first eval, 1 failed; what has no reward is left out, which can "
        "change the means.",
        "Of 10 rollouts of the second eval, 2 are missing; what has no reward is left out, which "
        "can change the means.",
        "pass@4 is over 1 of 2 examples, pass^4 is over 1 of 2 examples, because the others have "
        "fewer scored rollouts than k.",
    ]
    told = comparison_to_json(comparison)
    counts = {"num_rollouts": 8, "num_scored": 7, "num_failed": 1, "num_missing": 0}
    assert told["before"] == {"model": "m", **counts}
    assert told["after"]["num_missing"] == 2


def test_an_eval_of_which_nothing_was_scored_is_named():
    good, bad = an_eval([("a", [1, 0])]), an_eval([("a", [None, None])], model="other")
    for pair in ((good, bad), (bad, good)):
        with pytest.raises(ConfigError, match=r"other .*\(2 failed\)"):
            compare_results(*pair)


def test_rollouts_of_a_repeated_id_are_one_task():
    before = an_eval([("a", [1, 0]), ("a", [0, 0]), ("b", [1, 1])], ks=(1, 2))
    assert [(task.example_id, task.rewards) for task in before.tasks] == [
        *(("a", (1, 0, 0, 0)), ("b", (1, 1)))
    ]
    assert (before.num_tasks, before.pass_at[1].num_tasks, before.num_rollouts) == (2, 2, 6)
    assert (before.pass_at[1].mean, before.pass_at[2].mean) == (0.625, 0.75)
    assert compare_results(before, before).main.num_tasks == 2


def test_groups_that_failed_before_they_had_an_example_stay_apart():
    result = an_eval([("", [None, None]), ("", [None, None]), ("b", [1, 0])])
    assert (result.num_tasks, len(result.tasks)) == (3, 3)
    assert (result.num_failed, result.pass_at[1].num_tasks) == (4, 1)


def test_every_shared_measure_is_compared_and_the_number_of_rollouts_may_differ():
    before = an_eval([("a", [1, 0, 0, 0]), ("b", [1, 1, 1, 1])], ks=(1, 2, 4))
    after = an_eval([("a", [1, 0]), ("b", [1, 0])], ks=(1, 2))
    comparison = compare_results(before, after)
    names = [one.measure for one in comparison.differences]
    assert names == ["pass@1", "pass@2", "pass^2", "reward"]
    assert comparison.main.change == pytest.approx(-0.125)


def test_rewards_are_compared_over_the_range_of_both_evals():
    before = an_eval([("a", [1, 0]), ("b", [0, -1])], reward_min=-1.0)
    after = an_eval([("a", [1, 2]), ("b", [0, 1])], reward_max=2.0)
    for pair, columns in (
        ((before, after), ([0.5, -0.5], [1.5, 0.5])),
        ((after, before), ([1.5, 0.5], [0.5, -0.5])),
    ):
        found = compare_results(*pair).differences[-1]
        assert found == paired_difference("reward", *columns, span=3.0, rollouts=2)


def test_only_measures_of_both_are_compared():
    rewards = [("a", [1, 0]), ("b", [1, 1])]
    for ks in ((1,), (1, 2)), ((1, 2), (1,)):
        comparison = compare_results(*(an_eval(rewards, ks=one) for one in ks))
        assert [one.measure for one in comparison.differences] == ["pass@1", "reward"]


def test_tasks_of_one_id_in_an_old_result_are_compared_as_one():
    whole = an_eval([("a", [1, 0, 0, 0]), ("b", [1, 1])])
    (first, second) = (an_eval([("a", one)]).tasks[0] for one in ([1, 0], [0, 0]))
    after = an_eval([("a", [1, 1]), ("b", [1, 0])])
    old = replace(whole, tasks=(first, second, whole.tasks[1]))
    assert compare_results(old, after) == compare_results(whole, after)
    clusters = (first, *(replace(one, cluster="c") for one in (second, whole.tasks[1])))
    assert compare_results(replace(old, tasks=clusters), after).main.num_clusters == 1


def test_other_code_and_other_settings_are_told():
    before = an_eval([("a", [1]), ("b", [0])])
    after = an_eval(
        [("a", [1]), ("b", [0])],
        temperature=0.5,
        environment_version="0.2.0",
    )
    text = paragraph(compare_results(before, after))
    assert "not comparable, because the environment's code changed" in text
    assert "sums 0.1.0 -> sums 0.2.0" in text
    assert "temperature: 1 -> 0.5" in text
    compared = compare_results(before, after)
    changed = replace(compared, code_changes=tuple(f"file {n}.py" for n in range(9)))
    assert "file 2.py and 6 more." in paragraph(changed)


OTHER = {
    "temperature": None,
    "max_tokens": 16,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop": ("END",),
    "include_stop_str_in_output": True,
    "seed": 7,
    "extra": {"reasoning_effort": "low"},
}


@pytest.mark.parametrize("name", [one.name for one in fields(Sampling)])
def test_every_setting_of_sampling_that_differs_is_told(name):
    before = an_eval([("a", [1]), ("b", [0])])
    sampling = replace(before.settings.sampling, **{name: OTHER[name]})
    after = replace(before, settings=replace(before.settings, sampling=sampling))
    (change,) = compare_results(before, after).setting_changes
    assert change == {
        "temperature": "temperature: 1 -> left to the endpoint",
        "stop": "stop: not set -> ['END']",
        "seed": "seed: not set -> 7",
        "extra": "reasoning_effort: not set -> low",
    }.get(name, f"{name}: {getattr(before.settings.sampling, name)} -> {OTHER[name]}")
    assert change in " ".join(cautions(compare_results(before, after)))


UNSET = dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"))


def test_a_setting_that_was_left_to_the_endpoint_differs_from_its_usual_value():
    before = an_eval([("a", [1]), ("b", [0])])
    sampling = replace(before.settings.sampling, **UNSET)
    unset = replace(before, settings=replace(before.settings, sampling=sampling))
    given = replace(sampling, extra={"top_p": 1.0})
    after = replace(before, settings=replace(before.settings, sampling=given))
    assert compare_results(unset, unset).setting_changes == ()
    assert compare_results(unset, after).setting_changes == ("top_p: not set -> 1.0",)
    assert as_played(sampling) == before.settings.sampling


def test_old_evals_at_an_endpoint_have_null_for_what_was_not_sent(tmp_path):
    result = an_eval([("a", [1])])
    old = {"base_url": "http://127.0.0.1:1/v1", "sampling": asdict(result.settings.sampling)}
    folder = EvalFolder.create(tmp_path / "eval", manifest=old)
    folder.finish(result)
    sampling = folder.result().settings.sampling
    assert {name: getattr(sampling, name) for name in UNSET} == UNSET
    now = {**old["sampling"], **UNSET}
    EvalFolder.resume(folder.path, manifest={**old, "sampling": now}).finish(result)
    other = {**now, "extra": {"top_p": 1.0}}
    with pytest.raises(ConfigError, match=r"sampling.extra.top_p: None then, 1.0 now"):
        EvalFolder.resume(folder.path, manifest={**old, "sampling": other})
    of_training = EvalFolder.create(tmp_path / "trained", manifest={"tag": "before"})
    of_training.finish(result)
    assert of_training.result().settings.sampling.top_p == 1.0


def test_the_environment_s_own_settings_that_differ_are_told():
    before = an_eval([("a", [1])], environment_settings={"size": 9, "style": "loud"})
    after = an_eval([("a", [1])], environment_settings={"size": 12})
    assert compare_results(before, after).setting_changes == (
        "env.size: 9 -> 12",
        "env.style: loud -> not given",
    )
    unknown = an_eval([("a", [1])], environment_settings=None)
    assert compare_results(before, unknown).setting_changes == ()


def test_results_of_before_they_held_it_have_the_settings_of_their_folder(tmp_path):
    result = an_eval([("a", [1])])
    folder = EvalFolder.create(tmp_path / "eval", manifest={"env": {"size": 9}})
    folder.finish(result)
    assert folder.result() == replace(result, environment_settings={"size": 9})


def test_no_difference_is_shown_between_results_that_are_not_comparable():
    before, after = (an_eval([(f"e{i}", [one]) for i in range(40)]) for one in (0, 1))
    assert compare_results(before, after).main.is_shown
    comparison = compare_results(before, replace(after, environment="other"))
    assert not any(one.is_shown for one in comparison.differences)
    assert sentence(comparison.main) == (
        "pass@1: from 0.000 to 1.000 (+1.000, 40 examples), which shows nothing, because the two "
        "results are not comparable"
    )
    assert comparison_to_json(comparison)["differences"][0]["is_shown"] is False


def test_an_interval_that_ends_at_zero_shows_no_difference():
    one = paired_difference("pass@1", [0.0] * 8, [1.0] * 8)
    shown = {(0.1, 0.5), (-0.5, -0.1)}
    for low, high in (*shown, (0.0, 0.5), (-0.5, 0.0), (-0.5, 0.5), (None, None)):
        assert replace(one, low=low, high=high).is_shown == ((low, high) in shown)


def test_another_chat_template_is_told():
    before, after = an_eval([("a", [1])]), an_eval([("a", [1])], chat_template="0123456789ab")
    [change] = compare_results(before, after).setting_changes
    assert change.startswith("chat template: ")
    assert change.endswith(" 0123456789ab")


def test_tasks_that_all_change_alike_have_a_bound_and_not_a_point():
    same = paired_difference("pass@1", [0.5] * 20, [0.5] * 20)
    bound = 1 - 0.025 ** (1 / 20)
    assert (same.low, same.high, same.p) == (pytest.approx(-bound), pytest.approx(bound), 1.0)
    assert same.detectable is None
    assert "all examples changed by the same" in sentence(same)
    risen = paired_difference("pass@1", [0.0] * 8, [1.0] * 8)
    assert risen.is_shown
    assert (risen.high, risen.p) == (1.0, pytest.approx(2 / 256))


@pytest.mark.parametrize(
    ("before", "after", "rollouts"),
    [
        ([0, 0], [1, -0.5], 1),
        ([0, 0], [1, -1], 1),
        ([0, 0, 0], [1, -1, 1], 8),
        ([0, 0, 0], [1, 0, 0], 1),
        ([0, 0, 0], [50, 0, 0], 1),
    ],
)
def test_tasks_too_few_for_any_difference_are_called_that(before, after, rollouts):
    one = paired_difference("reward", before, after, rollouts=rollouts)
    assert (one.detectable, one.is_alike) == (None, False)
    most = max(1.0, *map(abs, after))
    assert -most <= one.low <= one.high <= most
    assert 0.0 <= one.p <= 1.0
    assert "; too few steps to find even the largest difference" in sentence(one, unit="step")


def test_sentences_say_what_was_shown_and_what_could_have_been():
    risen = paired_difference("pass@1", [0.0, 0.5] * 20, [0.5, 1.0] * 19 + [0.5, 0.5])
    assert "pass@1 rose" in sentence(risen)
    numbers = ("0.250", "0.738", "+0.488", "+0.4", "p < 0.001", "40 examples")
    assert [number in sentence(risen) for number in numbers] == [True] * 6
    unsure = paired_difference("pass@1", [0.0, 1.0, 0.5, 0.5], [0.5, 0.5, 0.5, 1.0])
    assert sentence(unsure).startswith("pass@1: no difference shown, from 0.500 to 0.625")
    assert "would be found 4 times in 5" in sentence(unsure)
    single = paired_difference("pass@1", [0.0], [1.0])
    assert "on a single example" in sentence(single)
