"""What the index answers is what a slow, obvious program finds in the rows of the run."""

import math
from dataclasses import replace
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ui.recorded import ENVIRONMENTS, row, write_run
from tests.ui.served import answered

from telescope_core.base.types import RolloutStatus
from telescope_core.records import RunFolder
from telescope_core.records.parquet import read_row, read_rows
from telescope_ui.files.database import Database
from telescope_ui.index.filters import Condition
from telescope_ui.index.queries import spread
from telescope_ui.index.runs import Runs
from telescope_ui.index.search import Cursor, Search

RUN = "/runs/first/rollouts"
SETTINGS = settings(max_examples=40)
FEWER = settings(max_examples=10)
"""For questions that take several answers."""
NUMBERS = ("reward", "advantage", "num_completion_tokens", "generate_s", "metrics/length", "step")
OPERATORS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@pytest.fixture(scope="module")
def rows(recorded_folder):
    """Every rollout of the run, and whether a later attempt replaced it."""
    run = RunFolder(recorded_folder / "first")
    kept = [(one, False) for one in run.rollouts()]
    replaced = [(one, True) for one in run.attempts()]
    assert len(kept) == 36
    assert len(replaced) == 1
    return kept + replaced


def value_of(one, name):
    kind, _, member = name.partition("/")
    return getattr(one, kind).get(member) if member else getattr(one, name)


def key_of(one):
    return one.group_id, one.index, one.attempt


CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "step_from": st.integers(0, 4),
        "step_to": st.integers(0, 4),
        "environment": st.sampled_from(["math", "a/b c", "other"]),
        "status": st.sampled_from(["kept", "failed"]),
        "reward_from": st.sampled_from([0.0, 0.25, 1.0]),
        "reward_to": st.sampled_from([0.0, 0.5]),
        "truncated": st.sampled_from(["true", "false"]),
        "version": st.integers(0, 4),
        "attempts": st.sampled_from(["last", "replaced", "all"]),
        "tag": st.sampled_from(["level", "level=1"]),
        "group": st.sampled_from(["mixed", "equal", "signal", "no_signal"]),
        "where": st.builds(
            lambda name, sign, value: f"{name}{sign}{value}",
            st.sampled_from(NUMBERS[:5]),
            st.sampled_from(list(OPERATORS)),
            st.sampled_from([0.0, 0.5, 20.0]),
        ),
    },
)


def meets(one, is_replaced, asked, rows):
    attempts = asked.get("attempts", "last")
    checks = [
        attempts == "all" or is_replaced == (attempts == "replaced"),
        one.step >= asked.get("step_from", -1),
        one.step <= asked.get("step_to", 99),
        one.environment == asked.get("environment", one.environment),
        one.status.value == asked.get("status", one.status.value),
    ]
    if "reward_from" in asked:
        checks.append(one.reward is not None and one.reward >= asked["reward_from"])
    if "reward_to" in asked:
        checks.append(one.reward is not None and one.reward <= asked["reward_to"])
    if "truncated" in asked:
        checks.append(one.is_truncated == (asked["truncated"] == "true"))
    if "version" in asked:
        checks.append(one.oldest_version <= asked["version"] <= one.newest_version)
    if "tag" in asked:
        value = one.tags.get("level")
        checks.append(value is not None and asked["tag"] in ("level", f"level={value}"))
    group = [other for other, gone in rows if not gone and other.group_id == one.group_id]
    if "signal" in asked.get("group", ""):
        is_taught = any(other.status is RolloutStatus.KEPT or other.advantage for other in group)
        is_compared = any(other.advantage is not None for other in group)
        checks.append(is_taught if asked["group"] == "signal" else is_compared and not is_taught)
    elif "group" in asked:
        rewards = {other.reward for other in group if other.reward is not None}
        checks.append(bool(rewards) and (len(rewards) > 1) == (asked["group"] == "mixed"))
    if "where" in asked:
        checks.append(holds(one, asked["where"]))
    return all(checks)


def holds(one, condition):
    sign = next(sign for sign in ("<=", ">=", "!=", "<", ">", "=") if sign in condition)
    name, _, number = condition.partition(sign)
    value = value_of(one, name)
    if value is None:
        return False
    return OPERATORS[sign](value, float(number))


@pytest.mark.slow
@SETTINGS
@given(
    asked=CONDITIONS,
    sort=st.sampled_from(NUMBERS),
    descending=st.booleans(),
    offset=st.integers(0, 10),
)
def test_pages_of_rollouts(ui, rows, asked, sort, descending, offset):
    found = [one for one, gone in rows if meets(one, gone, asked, rows)]
    query = {**asked, "sort": f"{'-' if descending else ''}{sort}", "limit": 7, "offset": offset}
    page = ui.get(f"{RUN}?{urlencode(query)}")
    assert page["total"] == len(found)
    sign = -1 if descending else 1

    def order(one):
        value = value_of(one, sort)
        rest = (-one.step, one.environment, *key_of(one))
        return (value is None, 0 if value is None else sign * value, *rest)

    expected = sorted(found, key=order)[offset : offset + 7]
    columns = page["columns"]
    keys = list(zip(columns["group_id"], columns["index"], columns["attempt"], strict=True))
    assert keys == [key_of(one) for one in expected]
    assert columns["reward"] == [one.reward for one in expected]
    assert columns["tags/level"] == [one.tags.get("level") for one in expected]


@pytest.mark.slow
@SETTINGS
@given(asked=CONDITIONS, name=st.sampled_from(NUMBERS), bins=st.integers(2, 12))
def test_histograms_of_numbers(ui, rows, asked, name, bins):
    found = [one for one, gone in rows if meets(one, gone, asked, rows)]
    values = [value_of(one, name) for one in found if value_of(one, name) is not None]
    query = urlencode({**asked, "distribution": name, "bins": bins})
    page = ui.get(f"{RUN}?{query}")
    assert (page["total"], page["missing"]) == (len(found), len(found) - len(values))
    assert sum(page["bins"]["count"]) == len(values)
    if values:
        assert page["mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-6)
        assert page["minimum"] == pytest.approx(min(values), rel=1e-6)
        assert page["quantiles"]["0.5"] == pytest.approx(median(values), rel=1e-6, abs=1e-9)
    for low, high, count in zip(*(page["bins"][k] for k in ("low", "high", "count")), strict=True):
        slack = 1e-6 * max(1.0, abs(high))
        assert count >= sum(low + slack <= value <= high - slack for value in values)
        assert count <= sum(low - slack <= value <= high + slack for value in values)


def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def test_histograms_of_text_count_each_value(ui, rows):
    page = ui.get(f"{RUN}?distribution=tags/level")
    kept = [one for one, gone in rows if not gone]
    counts = dict(zip(page["bins"]["value"], page["bins"]["count"], strict=True))
    levels = [one.tags["level"] for one in kept if one.tags]
    assert counts == {level: levels.count(level) for level in set(levels)}
    assert page["missing"] == len(kept) - len(levels)


@pytest.mark.slow
@FEWER
@given(
    text=st.sampled_from(["STEP 2", "2 times 3", "<script>", "What is", "100%", "_", "nobody"]),
    limit=st.sampled_from([1, 3, 7, 20]),
    asked=CONDITIONS,
)
def test_search_finds_every_rollout_that_says_it_once(ui, rows, text, limit, asked):
    expected = {
        key_of(one)
        for one, gone in rows
        if meets(one, gone, asked, rows)
        and any(text.lower() in message.content.lower() for message in one.messages)
    }
    found, steps, cursor = [], [], ""
    for _ in range(100):
        query = urlencode({**asked, "q": text, "limit": limit, "cursor": cursor})
        page = ui.get(f"{RUN}?{query}")
        columns = page["columns"]
        found += zip(columns["group_id"], columns["index"], columns["attempt"], strict=True)
        steps += columns["step"]
        assert all(text.lower() in excerpt.lower() for excerpt in columns["excerpt"])
        cursor = page["search"]["next_cursor"]
        if cursor is None:
            break
    assert sorted(found) == sorted(expected)
    assert steps == sorted(steps, reverse=True)


def test_rollouts_of_a_server_are_those_whose_calls_it_answered(ui):
    page = ui.get(f"{RUN}?server=http://127.0.0.1:8001&limit=500")
    assert page["total"] == 18
    assert set(page["columns"]["index"]) == {1, 3}
    assert page["choices"]["server"] == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]


def test_the_interval_of_a_reward_is_over_groups(ui, rows):
    reward = next(one for one in ui.get("/runs/first")["rewards"] if one["environment"] == "math")
    for step, mean, low, high in zip(
        *(reward[name] for name in ("steps", "mean", "low", "high")), strict=True
    ):
        groups = {}
        for one, gone in rows:
            if (
                not gone
                and (one.step, one.environment) == (step, "math")
                and one.reward is not None
            ):
                groups.setdefault(one.group_id, []).append(one.reward)
        means = [math.fsum(values) / len(values) for values in groups.values()]
        # The curve is that of the metrics, as in all reports; its spread is known of the groups.
        assert mean == 0.2
        assert len(means) == 2
        # With two groups, the deviation of their means is their distance over the root of 2.
        reach = 12.7062 * abs(means[0] - means[1]) / 2
        assert (low, high) == (
            pytest.approx(mean - reach, abs=1e-3),
            pytest.approx(mean + reach, abs=1e-3),
        )


def test_the_interval_of_a_reward_stays_within_its_range(tmp_path):
    run = write_run(tmp_path / "runs" / "ranged")
    run.note_reward_ranges(dict.fromkeys(ENVIRONMENTS, (0.0, 1.0)))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        rewards = ui.get("/runs/ranged")["rewards"]
    ends = [
        (low, mean, high)
        for one in rewards
        for low, mean, high in zip(one["low"], one["mean"], one["high"], strict=True)
        if low is not None
    ]
    assert len(ends) == 3
    for low, mean, high in ends:
        assert 0 <= low <= mean <= high <= 1
        assert low < high


def test_every_row_is_found_again_by_its_place(recorded_folder):
    path = recorded_folder / "first" / "rollouts" / "step-000002.parquet"
    rows = list(read_rows([path]))
    assert [read_row(path, at) for at in range(len(rows))] == rows


@pytest.mark.parametrize("num", [0, 1, 3, 6, 12, 13, 500])
def test_rollouts_of_all_steps_are_spread(recorded_folder, tmp_path, rows, num):
    database = Database(tmp_path / "cache")
    runs = Runs([recorded_folder], database)
    index = runs.get("first").index
    index.refresh(60.0)
    found = spread(index, num)
    keys = list(zip(found["step"], found["environment"], found["reward"], strict=True))
    runs.close()
    database.close()
    kept = [one for one, is_replaced in rows if not is_replaced]
    pairs = {(one.step, one.environment) for one in kept}
    assert len(keys) <= num + 2
    assert [step for step, _, _ in keys] == sorted((step for step, _, _ in keys), reverse=True)
    shown = {(step, environment) for step, environment, _ in keys}
    if num:
        assert max(one.step for one in kept) in found["step"]
    if num >= len(pairs):
        assert shown == pairs
    are_best: set[bool] = set()
    for step, environment in shown:
        rewards = [
            one.reward
            for one in kept
            if (one.step, one.environment) == (step, environment) and one.reward is not None
        ]
        own = [one[2] for one in keys if one[:2] == (step, environment)]
        if rewards and len(own) > 1:
            assert {min(rewards), max(rewards)} <= {*own}
        elif rewards and min(rewards) < max(rewards):
            assert own[0] in (min(rewards), max(rewards))
            are_best.add(own[0] == max(rewards))
    # Of the best of each step alone, a run would seem to have no failure.
    assert num != len(pairs) or are_best == {True, False}


def test_a_search_that_has_met_nothing_goes_on_in_large_parts(
    recorded_folder, tmp_path, monkeypatch
):
    """A machine with much to do would else spend its time on beginning again."""
    monkeypatch.setattr("telescope_ui.index.search._FIRST_FILES", 1)
    database = Database(tmp_path / "cache")
    runs = Runs([recorded_folder], database)
    run = runs.get("first")
    run.index.refresh(60.0)
    every = Condition(sql="true", values=())
    search = Search(run.index, run.path, condition=every, text="of nobody")
    searched, cursor = [], None
    while not searched or cursor is not None:
        found = search.page(limit=10, cursor=cursor, limit_s=0.0).search
        searched.append(found["steps_searched"])
        cursor = found["next_cursor"] and Cursor.from_text(found["next_cursor"])
    runs.close()
    database.close()
    assert searched == [[3, 3], [1, 2]]


@pytest.mark.parametrize("name", [*NUMBERS, "num_turns"])
def test_what_a_bar_counts_is_what_lies_between_its_least_and_its_most(ui, name):
    bins = ui.get(f"{RUN}?distribution={name}&bins=12")["bins"]
    for least, most, count in zip(*(bins[k] for k in ("least", "most", "count")), strict=True):
        if count:
            asked = [("where", f"{name}>={least!r}"), ("where", f"{name}<={most!r}")]
            assert ui.get(f"{RUN}?{urlencode(asked)}")["total"] == count


def test_a_bar_of_tenths_leads_to_its_rollouts(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    rewards = [number / 10 for number in range(-10, 11)]
    rows = [replace(row(1, 0, at), reward=reward) for at, reward in enumerate(rewards)]
    run.write_rollouts(1, rows)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        bins = ui.get("/runs/r/rollouts?distribution=reward")["bins"]
        found = []
        for least, most, count in zip(*(bins[k] for k in ("least", "most", "count")), strict=True):
            if count:
                asked = f"reward_from={least!r}&reward_to={most!r}"
                columns = ui.get(f"/runs/r/rollouts?{asked}&sort=reward")["columns"]
                assert len(columns["reward"]) == count
                found += columns["reward"]
    assert found == rewards


def test_names_with_signs_can_be_compared(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    names = ("pass@k=1", "p<0.5", "a>=b")
    rows = [
        replace(row(1, 0, at), metrics=dict.fromkeys(names, float(at)), tags={"a=b": f"{at}=x"})
        for at in range(4)
    ]
    run.write_rollouts(1, rows)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        for name in names:
            asked = urlencode({"where": f"metrics/{name}>=2", "sort": "index"})
            assert ui.get(f"/runs/r/rollouts?{asked}")["columns"]["index"] == [2, 3]
        for tag, found in (("a=b", [0, 1, 2, 3]), ("a=b=2=x", [2])):
            asked = urlencode({"tag": tag, "sort": "index"})
            assert ui.get(f"/runs/r/rollouts?{asked}")["columns"]["index"] == found


def test_every_value_of_a_distribution_can_be_asked_for(ui, rows):
    kept = [one for one, gone in rows if not gone]
    asked = urlencode({"error": "TimeoutError: late"})
    assert ui.get(f"{RUN}?{asked}")["total"] == sum(one.error is not None for one in kept)
    assert ui.get(f"{RUN}?where=is_truncated=1")["total"] == sum(one.is_truncated for one in kept)
