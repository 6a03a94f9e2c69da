"""Running evals: counts, failures apart, retries, resuming, group rewards."""

import asyncio
import gc
import math
from dataclasses import replace

import pytest
from tests.asking import lost_rollout

from telescope_core import (
    ConfigError,
    Example,
    ListSource,
    RolloutStatus,
    Sampling,
    SingleTurnEnvironment,
    Split,
    group_reward,
    metric,
    reward,
)
from telescope_core.base.collector import rare_collections
from telescope_core.base.retries import MAX_LOST
from telescope_core.errors import EndpointError, EnvironmentProcessError
from telescope_core.evals import EvalFolder, EvalSettings, EvalStoppedError, run_eval
from telescope_core.evals.comparison import compare_results
from telescope_core.evals.result import (
    counts_of,
    metric_lines,
    result_of,
    spent_in,
    success_measures,
)
from telescope_core.evals.runner import reusable
from telescope_core.evals.settings import check_split
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records.rows import RolloutRow, row_of
from telescope_core.scripted import ScriptedClient


class Echo(SingleTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id=f"{split}-{i}", prompt=str(i)) for i in range(6)])

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.prompt)

    @metric
    def length(self, rollout, example):
        return float(len(rollout.completion_text))


class Ranked(Echo):
    reward_max = 2.0

    @group_reward
    def shared(self, rollouts, example):
        return [sum(r.rewards["correct"] for r in rollouts) / len(rollouts)] * len(rollouts)


def settings(**changes):
    fields = {
        "num_examples": 4,
        "rollouts": 3,
        "ks": (1, 2),
        "sampling": Sampling(max_tokens=4),
        "concurrency": 5,
    }
    return EvalSettings(**{**fields, **changes})


def opened(environment=Echo):
    return InProcessEnvironment(environment(), name="echo", version="1.2")


def odd_fails(messages):
    text = messages[-1].content
    return text if int(text) % 2 == 0 else "no"


async def test_counts_and_estimates():
    rows = []
    result = await run_eval(
        opened(), ScriptedClient(odd_fails), settings(), model="m", on_rollout=rows.append
    )
    assert (result.num_tasks, result.num_rollouts, result.num_scored) == (4, 12, 12)
    assert result.reward.mean == 0.5
    assert result.pass_at[1].mean == result.pass_at[2].mean == result.pass_all[2].mean == 0.5
    assert result.pass_at[1].num_tasks == 4
    assert (result.environment_version, result.model, result.num_failed) == ("1.2", "m", 0)
    assert result.metrics == {"length": 1.5}
    assert len(rows) == 12
    assert {row.example_id for row in rows} == {f"eval-{i}" for i in range(4)}
    assert [task.num_solved for task in result.tasks] == [3, 0, 3, 0]


async def test_a_metric_that_some_rollouts_lack_says_of_how_many_it_is_the_mean():
    rows = []
    asked = settings(num_examples=2)
    await run_eval(opened(), ScriptedClient(odd_fails), asked, on_rollout=rows.append)
    rows = [replace(row, metrics={}) if row.index else row for row in rows]
    result = result_of(rows, asked, await opened().describe(), model="m", duration_s=1.0)
    assert metric_lines(result) == [("length", "of 2 rollouts", 1.5)]


class Voting(Echo):
    @reward
    def correct(self, rollout, example, episode):
        if rollout.completion_text:
            episode.tags["answer"] = rollout.completion_text
        return float(rollout.completion_text == example.prompt)


async def test_rollouts_vote_with_the_answers_that_they_tell():
    """Two of four are right and agree; the others do not. Silence is no answer, and no vote."""
    asked = settings(num_examples=2, rollouts=4, ks=(1, 2, 3, 4), concurrency=1)
    texts = iter(["0", "0", "8", "9", "7", "7", "", "1"])
    result = await run_eval(opened(Voting), ScriptedClient(lambda _: next(texts)), asked)
    assert [task.majority for task in result.tasks] == [
        # Without one of the two that agree, the others are a tie: of three answers, or of two.
        {3: pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4), 4: 1.0},
        {3: pytest.approx((0 + 0 + 1 / 2 + 1 / 2) / 4), 4: 0.0},
    ]
    assert list(result.majority_at) == [3, 4]
    assert result.majority_at[4].mean == 0.5
    assert result.majority_at[4].num_tasks == 2
    names = ["pass@1", "pass@2", "pass@3", "pass@4", "maj@3", "maj@4", "pass^2", "pass^3", "pass^4"]
    assert list(success_measures(result)) == names
    found = {one.measure: one for one in compare_results(result, result).differences}
    assert found["maj@4"].before == found["maj@4"].after == 0.5
    assert found["maj@4"].num_tasks == 2


async def test_without_answers_there_is_no_vote():
    asked = settings(ks=(1, 3))
    rows = []
    result = await run_eval(opened(), ScriptedClient(odd_fails), asked, on_rollout=rows.append)
    assert not result.majority_at
    assert not any(task.majority for task in result.tasks)
    # One that tells nothing is wrong where others of the eval do tell.
    rows.sort(key=lambda row: (row.example_id, row.index))  # They came as they finished.
    rows[0] = replace(rows[0], tags={"answer": "0"})
    result = result_of(rows, asked, await opened().describe(), model="m", duration_s=1.0)
    assert sorted(task.majority[3] for task in result.tasks) == [0.0, 0.0, 0.0, 1.0]


class Parts(Echo):
    """Parts with weights whose plain sum is 0.9999999999999999."""

    @reward(weight=0.7)
    def correct(self, rollout, example):
        return 1.0

    @reward(weight=0.2)
    def brief(self, rollout, example):
        return 1.0

    @reward(weight=0.1)
    def polite(self, rollout, example):
        return 1.0


class Won(Echo):
    """Its plain sum of 0.8999999999999999 is also the number that is next to the exact one."""

    success_threshold = 0.9

    def compute_reward(self, rollout, example):
        return 0.7 + 0.2


class Shared(Echo):
    """The weights of the group rewards belong to the sum."""

    @reward(weight=0.7)
    def correct(self, rollout, example):
        return 1.0

    @group_reward(weight=0.2)
    def brief(self, rollouts):
        return [1.0] * len(rollouts)

    @group_reward(weight=0.1)
    def polite(self, rollouts):
        return [1.0] * len(rollouts)


@pytest.mark.parametrize(
    ("environment", "total"), [(Parts, 1.0), (Won, 0.8999999999999999), (Shared, 1.0)]
)
async def test_rounding_keeps_no_rollout_from_being_solved(environment, total):
    result = await run_eval(opened(environment), ScriptedClient(odd_fails), settings())
    assert result.reward.mean == total
    assert result.pass_at[1].mean == 1.0


async def test_failures_are_apart_and_never_zero():
    def reply(messages):
        return EndpointError("down") if messages[-1].content == "1" else messages[-1].content

    result = await run_eval(opened(), ScriptedClient(reply), settings())
    assert (result.num_scored, result.num_failed) == (9, 3)
    assert result.failures == {"EndpointError": 3}
    assert (result.reward.mean, result.reward.num_tasks) == (1.0, 3)
    assert result.reward_with_failures.mean == 0.75
    assert result.pass_at[2].num_tasks == 3


class Cancels(Echo):
    """Its even examples are stopped by something else than the eval."""

    async def play(self, episode):
        await episode.generate()
        if int(episode.example.prompt) % 2 == 0:
            raise asyncio.CancelledError


async def test_what_was_canceled_without_being_asked_is_a_failure_and_played_again():
    attempts = []
    result = await run_eval(
        opened(Cancels), ScriptedClient(odd_fails), settings(), on_attempt=attempts.append
    )
    assert (result.num_scored, result.num_failed) == (6, 6)
    assert result.failures == {"StrayCancelError": 6}
    assert len(attempts) == 6


async def test_rows_without_a_reward_are_failures_whatever_their_status():
    """Also those of another client, whose cancelled rollouts would be in no denominator."""
    rows = []
    environment = opened()
    await run_eval(environment, ScriptedClient(odd_fails), settings(), on_rollout=rows.append)
    lost = {"status": RolloutStatus.CANCELLED, "status_reason": "cancelled", "reward": None}
    rows[:3] = [replace(row, **lost) for row in rows[:3]]
    about = await environment.describe()
    result = result_of(rows, settings(), about, model="m", duration_s=1.0)
    assert (result.num_rollouts, result.num_scored, result.num_failed) == (12, 9, 3)
    assert result.failures == {"cancelled": 3}
    assert sum(task.num_failed for task in result.tasks) == 3


async def test_what_failed_rollouts_used_is_in_the_totals():
    rows = []
    environment = opened()
    await run_eval(environment, ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    spent = {"num_prompt_tokens": 5, "num_completion_tokens": 2}
    cost = {"metrics": {"judge/calls": 1.0, "judge/cost": 0.25}}
    rows = [replace(row, **spent, **cost) for row in rows]
    lost = {"status": RolloutStatus.FAILED, "status_reason": "JudgeError", "reward": None}
    rows[0] = replace(rows[0], **lost)
    about = await environment.describe()

    def result():
        return result_of(rows, settings(), about, model="m", duration_s=1.0)

    assert (result().num_prompt_tokens, result().num_completion_tokens) == (60, 24)
    assert result().costs == {"judge/cost": 3.0}
    assert ("3", "judge/cost in all") in spent_in(result())
    large = replace(result(), costs={"judge/cost": 12345.678})
    assert ("12,345.68", "judge/cost in all") in spent_in(large)
    unknown = {"num_completion_tokens": None, "metrics": {"judge/calls": 1.0}}
    rows[0] = replace(rows[0], **unknown)
    assert (result().num_prompt_tokens, result().num_completion_tokens) == (60, None)
    assert result().costs == {"judge/cost": None}
    assert ("-", "completion tokens in all") in spent_in(result())
    assert ("-", "judge/cost in all") in spent_in(result())


async def test_a_failed_attempt_is_retried_and_flagged():
    class Flaky:
        def __init__(self):
            self.ids = []

        def policy(self, rollout_id, sampling=None):
            self.ids.append(rollout_id)
            broken = rollout_id == "eval-000000/1"
            return ScriptedClient([EndpointError("once") if broken else "0"]).policy(rollout_id)

        async def close(self):
            pass

    source = Flaky()
    rows = []
    result = await run_eval(opened(), source, settings(num_examples=1), on_rollout=rows.append)
    assert (result.num_scored, result.num_failed, result.num_retried) == (3, 0, 1)
    attempts = {row.index: row.tags.get("attempts") for row in rows}
    assert attempts == {0: None, 1: "2", 2: None}
    # A policy id names one token history, so the second attempt must not share the first one's.
    assert len(set(source.ids)) == 4


async def test_every_attempt_leaves_one_row(tmp_path):
    said: dict[str, int] = {}

    def hiccups(messages):
        text = messages[-1].content
        said[text] = said.get(text, 0) + 1
        return EndpointError("busy") if text != "0" and said[text] == 1 else text

    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    result = await run_eval(
        InProcessEnvironment(Echo(), name="echo"),
        ScriptedClient(hiccups),
        settings(num_examples=3, rollouts=1, ks=(1,), max_retries=1),
        on_rollout=folder.append,
        on_attempt=folder.append_attempt,
    )
    assert (result.num_rollouts, result.num_scored, result.num_retried) == (3, 3, 2)
    assert [row.attempt for row in sorted(folder.rows(), key=lambda row: row.group_id)] == [1, 2, 2]
    attempts = folder.attempts()
    assert {(row.attempt, row.error) for row in attempts} == {(1, "EndpointError: busy")}
    assert sorted(row.group_id for row in attempts) == ["eval-000001", "eval-000002"]


async def test_what_is_played_when_an_eval_is_stopped_leaves_a_row(tmp_path):
    started = asyncio.Event()

    class Hangs:
        def policy(self, rollout_id, sampling=None):
            return self

        endpoint = None

        async def complete(self, messages, sampling, *, tools=()):
            started.set()
            await asyncio.Event().wait()

    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    task = asyncio.create_task(
        run_eval(
            InProcessEnvironment(Echo(), name="echo"),
            Hangs(),
            settings(num_examples=1, rollouts=1, ks=(1,)),
            on_attempt=folder.append_attempt,
        )
    )
    async with asyncio.timeout(60):
        await started.wait()
    task.cancel()
    await asyncio.wait([task])
    (row,) = folder.attempts()
    assert (row.status, row.stop_reason) == ("cancelled", "cancelled")
    assert folder.rows() == []


@pytest.mark.parametrize(
    ("environment", "num_recorded", "attempts"),
    [(Echo, 3, {"cancelled"}), (Ranked, 2, {"kept", "cancelled"})],
)
async def test_an_unfinished_example_keeps_its_rollouts_but_for_group_rewards(
    tmp_path, environment, num_recorded, attempts
):
    """Of two examples with two rollouts each, the last rollout is not over at the end."""
    hangs = asyncio.Event()

    class Last(environment):
        async def play(self, episode):
            await episode.generate()
            if episode.example.prompt == "1" and len(client.requests) == 4:
                hangs.set()
                await asyncio.Event().wait()

    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    client = ScriptedClient(["0"])
    asked = settings(num_examples=2, rollouts=2, concurrency=1)
    on = {"on_rollout": folder.append, "on_attempt": folder.append_attempt}
    task = asyncio.create_task(run_eval(opened(Last), client, asked, **on))
    async with asyncio.timeout(60):
        await hangs.wait()
    task.cancel()
    await asyncio.wait([task])
    assert len(folder.rows()) == num_recorded
    assert {str(row.status) for row in folder.attempts()} == attempts
    # Also of the one that was cut off, as the other of its example has told it.
    assert {row.example_id for row in folder.attempts()} == {"eval-1"}
    client = ScriptedClient(["0"])
    result = await run_eval(opened(environment), client, asked, done=folder.rows(), **on)
    assert (result.num_scored, len(client.requests)) == (4, 4 - num_recorded)
    assert len(folder.rows()) == 4


async def test_deadlines_are_failures_and_not_retried():
    client = ScriptedClient(["0"], delay_s=30)
    result = await run_eval(opened(), client, settings(num_examples=1, deadline_s=0.05, ks=(1,)))
    assert result.failures == {"TimeoutError": 3}
    assert len(client.requests) == 3
    assert result.reward is None
    assert result.pass_at == {1: None}


@pytest.mark.parametrize("environment", [Echo, Ranked])
async def test_an_eval_where_all_fails_stops_early_with_the_result_so_far(environment):
    def first_only(messages):
        return "0" if messages[-1].content == "0" else EndpointError("gone")

    client, rows = ScriptedClient(first_only), []
    asked = settings(max_failures_in_a_row=2, concurrency=1)
    with pytest.raises(EvalStoppedError, match=r"2 rollouts failed in a row.*gone") as stopped:
        await run_eval(opened(environment), client, asked, on_rollout=rows.append)
    assert len(client.requests) == 3 + 4
    result = stopped.value.result
    assert (result.num_rollouts, result.num_scored, result.num_failed) == (12, 3, 2)
    assert result.failures == {"EndpointError": 2}
    assert (7, "missing") in counts_of(result)
    assert len(rows) == 5


async def test_an_eval_without_a_limit_of_failures_is_played_to_its_end():
    client = ScriptedClient([EndpointError("gone")])
    result = await run_eval(opened(), client, settings(max_failures_in_a_row=None))
    assert (result.num_failed, result.num_rollouts) == (12, 12)


async def test_concurrency_is_bounded_and_used():
    class Counting:
        now = most = 0

        def policy(self, rollout_id, sampling=None):
            return self

        async def complete(self, messages, sampling, *, tools=()):
            Counting.now += 1
            Counting.most = max(Counting.most, Counting.now)
            await asyncio.sleep(0.005)
            Counting.now -= 1
            return await ScriptedClient(["0"]).policy("").complete(messages, sampling)

        async def close(self):
            pass

    await run_eval(opened(), Counting(), settings(concurrency=3))
    assert Counting.most == 3


async def test_each_rollout_has_its_own_seed_however_many_there_are():
    class Seeds:
        def __init__(self):
            self.seen = []

        def policy(self, rollout_id, sampling=None):
            return self

        async def complete(self, messages, sampling, *, tools=()):
            self.seen.append(sampling.seed)
            return await ScriptedClient(["0"]).policy("").complete(messages, sampling)

        async def close(self):
            pass

    sampling = Sampling(max_tokens=4, seed=100)
    few, more = Seeds(), Seeds()
    await run_eval(opened(), few, settings(sampling=sampling))
    await run_eval(opened(), more, settings(sampling=sampling, rollouts=5, num_examples=5))
    assert len(set(few.seen)) == 12
    assert len(set(more.seen)) == 25
    assert set(few.seen) < set(more.seen)
    neighbor = Seeds()
    other = Sampling(max_tokens=4, seed=101)
    await run_eval(opened(), neighbor, settings(sampling=other, rollouts=5, num_examples=5))
    assert not set(neighbor.seen) & set(more.seen)
    assert max(more.seen) < 2**31  # some endpoints take no larger seed


async def test_group_rewards_are_in_the_rows():
    rows = []
    result = await run_eval(
        opened(Ranked), ScriptedClient(odd_fails), settings(), on_rollout=rows.append
    )
    assert {row.reward for row in rows} == {2.0, 0.0}
    assert result.reward.mean == 1.0


async def test_a_group_reward_that_raises_fails_its_group_only():
    class Broken(Ranked):
        @group_reward
        def shared(self, rollouts, example):
            if example.prompt == "1":
                raise KeyError("lost")
            return [0.0] * len(rollouts)

    result = await run_eval(opened(Broken), ScriptedClient(odd_fails), settings())
    assert result.failures == {"KeyError": 3}
    assert result.num_scored == 9


async def test_cancelling_the_eval_cancels_its_rollouts():
    class Hanging:
        def __init__(self):
            self.asked, self.cancelled = asyncio.Event(), 0

        def policy(self, rollout_id, sampling=None):
            return self

        async def complete(self, messages, sampling, *, tools=()):
            self.asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

        async def close(self):
            pass

    source = Hanging()
    task = asyncio.create_task(run_eval(opened(), source, settings(concurrency=1)))
    await asyncio.wait_for(source.asked.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert source.cancelled == 1


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"ks": (4,)}, ["k 4", "rollouts 3"]),
        ({"ks": (0,)}, ["k ", "got [0]"]),
        ({"ks": ()}, ["k ", "got []"]),
        ({"num_examples": 0}, ["examples", "got 0"]),
        ({"deadline_s": 0}, ["deadline_s"]),
        ({"deadline_s": math.inf}, ["deadline_s", "finite", "inf"]),
        ({"sampling": Sampling(max_tokens=4, temperature=math.nan)}, ["temperature", "finite"]),
        ({"sampling": Sampling(max_tokens=4, top_p=math.nan)}, ["top_p", "finite"]),
        ({"sampling": Sampling(max_tokens=4, temperature=-1)}, ["temperature", "-1"]),
        ({"sampling": Sampling(max_tokens=4, temperature="1")}, ["temperature", "a number", "'1'"]),
        ({"sampling": Sampling(max_tokens=4, top_p=2)}, ["top_p", "from 0 to 1", "2"]),
        ({"sampling": Sampling(max_tokens=4, top_p=0)}, ["top_p", "0"]),
        ({"sampling": Sampling(max_tokens=4, min_p="0")}, ["min_p", "a number", "'0'"]),
        ({"sampling": Sampling(max_tokens=4.5)}, ["max_tokens", "a whole number", "4.5"]),
        ({"num_examples": "3"}, ["examples", "a whole number", "'3'"]),
        ({"num_examples": 1.5}, ["examples", "a whole number", "1.5"]),
        ({"rollouts": True}, ["rollouts", "a whole number", "True"]),
        ({"deadline_s": "9"}, ["deadline_s", "a number", "'9'"]),
        ({"ks": ("1",)}, ["k must be", "whole numbers", "'1'"]),
    ],
)
def test_bad_settings_say_what_to_do(changes, facts):
    with pytest.raises(ConfigError) as refused:
        settings(**changes)
    assert all(fact in str(refused.value) for fact in facts), refused.value


async def test_a_number_of_examples_without_end_takes_no_time_to_check():
    many, description = settings(num_examples=10**18), await opened().describe()
    check_split(many, replace(description, num_examples={Split.EVAL: None}))
    rows = []
    await run_eval(opened(), ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    names = ("eval-000002", "eval-123456789", "another")
    rows = [replace(rows[0], group_id=name, index=0) for name in names]
    assert [row.group_id for row in reusable(rows, many)] == ["eval-000002", "eval-123456789"]
    assert [row.group_id for row in reusable(rows, settings(num_examples=3))] == ["eval-000002"]


async def test_more_examples_than_the_split_has_are_refused():
    rows = []
    with pytest.raises(ConfigError, match=r"6 examples.*9"):
        await run_eval(
            opened(), ScriptedClient(["0"]), settings(num_examples=9), on_rollout=rows.append
        )
    assert rows == []


async def test_a_split_the_environment_lacks_is_refused():
    class TrainOnly(Echo):
        def splits(self):
            return (Split.TRAIN,)

    with pytest.raises(ConfigError) as refused:
        await run_eval(opened(TrainOnly), ScriptedClient(["0"]), settings())
    assert all(split in str(refused.value) for split in ("eval", "train"))


async def test_a_split_without_examples_is_refused_by_that_name():
    class Empty(Echo):
        def examples(self, split):
            return [] if split is Split.EVAL else super().examples(split)

    with pytest.raises(ConfigError, match="eval split"):
        await run_eval(opened(Empty), ScriptedClient(["0"]), settings())


def test_row_of_an_eval_has_step_zero():
    from telescope_core.types import Rollout

    assert row_of(Rollout(environment="e", example_id="x", group_id="g", index=0)).step == 0


async def test_rollouts_lost_with_their_process_are_played_again():
    class Dying(InProcessEnvironment):
        lost = 0

        async def play(self, request, policy):
            if request.index == 1 and self.lost < MAX_LOST:
                self.lost += 1
                return lost_rollout(request)
            return await super().play(request, policy)

    rows = []
    await run_eval(
        Dying(Echo(), name="echo"),
        ScriptedClient(["0"]),
        settings(num_examples=1, max_retries=0),
        on_rollout=rows.append,
    )
    assert [row.reward for row in rows] == [1.0, 1.0, 1.0]
    (lost,) = (row for row in rows if row.index == 1)
    assert lost.tags["attempts"] == str(MAX_LOST + 1)


async def test_an_eval_ends_when_no_process_stays_alive():
    class Dead(InProcessEnvironment):
        async def play(self, request, policy):
            raise EnvironmentProcessError("no worker of echo stays alive")

    rows = []
    client = Dead(Echo(), name="echo")
    with pytest.raises(EnvironmentProcessError):
        await run_eval(client, ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    assert rows == []


def test_collections_are_rare_inside_and_as_before_outside():
    before = gc.get_threshold()
    with rare_collections():
        inside = gc.get_threshold()
        with rare_collections():
            assert gc.get_threshold() == inside
    assert gc.get_threshold() == before
    assert inside[0] > 10 * before[0]
    gc.set_threshold(0)
    try:
        with rare_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


async def test_each_attempt_has_its_own_seed_and_resuming_repeats_the_others():
    async def seeds(done=(), *, fails=False):
        seen, rows = [], []

        class Client(ScriptedClient):
            def policy(self, rollout_id, sampling=None):
                seen.append((rollout_id, sampling.seed))
                return super().policy(rollout_id, sampling)

        def answer(messages):
            if fails and len(seen) == 1:
                raise EndpointError("connection reset")
            return "0"

        asked = settings(
            sampling=Sampling(max_tokens=4, seed=7), num_examples=2, rollouts=2, concurrency=1
        )
        asked = replace(asked, max_retries=1)
        await run_eval(opened(), Client(answer), asked, done=done, on_rollout=rows.append)
        return dict(seen), rows

    whole, rows = await seeds()
    failed, _ = await seeds(fails=True)
    resumed, _ = await seeds(rows[:1])
    assert len(set(failed.values())) == 5
    assert failed.items() > whole.items()
    assert resumed == {name: seed for name, seed in whole.items() if name in resumed}
    assert len(resumed) == 3


async def test_the_parts_of_the_reward_are_means_over_examples_as_the_reward_is():
    description = await opened().describe()
    rows = [
        RolloutRow(
            step=0,
            environment="echo",
            example_id=str(task),
            group_id=f"eval-{task:06d}",
            index=index,
            status=RolloutStatus.FAILED if right is None else RolloutStatus.KEPT,
            reward=None if right is None else 0.5 * right + 0.5,
            rewards={} if right is None else {"right": right, "form": 1.0},
        )
        for task, group in enumerate([(1.0, 1.0, 1.0, 1.0), (0.0, None, None, None), (0.0, 1.0)])
        for index, right in enumerate(group)
    ]
    found = result_of(rows, settings(num_examples=3), description, model="m", duration_s=1.0)
    assert found.rewards == {"form": 1.0, "right": 0.5}
    assert found.reward.mean == 0.5 * found.rewards["right"] + 0.5 * found.rewards["form"]
