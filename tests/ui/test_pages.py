"""The data of each page, of a run that has everything and was killed."""

import json
import math
from dataclasses import replace
from urllib.parse import quote

import pytest
from tests.ui.recorded import BEGAN_S, ENVIRONMENTS, MARKUP, SERVERS, facts_of, row, write_run
from tests.ui.served import answered

from telescope_core.base.chains import ChainRecorder
from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.protocols import EnvironmentPlace
from telescope_core.records import RunFolder
from telescope_core.records.rows import RolloutStatus
from telescope_ui.pages.rollout_tokens import UNKNOWN, Training, tokens_of, training_of

RUN = "/runs/first"
GROUP = [row(2, 1, index) for index in range(4)]


def test_runs_are_listed_with_their_state_and_course(ui):
    page = ui.get("/")
    runs = {run["key"]: run for run in page["runs"]}
    assert set(runs) == {"first", "second"}
    first = runs["first"]
    assert (first["state"], first["step"], first["number_of_steps"]) == ("interrupted", 3, 10)
    assert first["curve"] == {
        **{"steps": [1, 2, 3], "is_thinned": False},
        "values": pytest.approx([0.1, 0.2, 0.3]),
    }
    assert first["error"] is None


def test_the_overview_has_curves_rewards_and_health(ui):
    page = ui.get(f"{RUN}?metric=entropy&metric=never/finite&from=2")
    assert page["curves"]["steps"] == [2, 3]
    assert page["curves"]["metrics"]["entropy"] == pytest.approx([1 / 2, 1 / 3])
    assert page["curves"]["metrics"]["never/finite"] == [None, None]
    assert {one["environment"] for one in page["rewards"]} == set(ENVIRONMENTS)
    entropy = next(tile for tile in page["tiles"] if tile["metric"] == "entropy")
    assert entropy["state"] == "good"
    assert [point["folder"] for point in page["eval_points"]] == ["math-before", "math-after"]
    assert page["restarts"][0]["reason"] == "a rank died"
    assert page["self_tests"][0]["name"] == "packing"
    assert page["summary"] is None


@pytest.mark.parametrize("is_discarding", [True, False])
def test_a_tile_its_link_and_the_environment_count_the_same_groups(tmp_path, is_discarding):
    """Groups without a signal have no advantages, whatever their rewards were before penalties."""
    settings = {"rollout": {"discard_group_zero_advantage": is_discarding}}
    run = RunFolder.create(tmp_path / "runs" / "r", config=settings)
    kept, discarded = RolloutStatus.KEPT, RolloutStatus.DISCARDED
    equal = (discarded, "all_equal") if is_discarding else (kept, "")
    groups = {
        "equal": ((0.5, 0.5), (0.0, 0.0), *equal),
        "told apart by a penalty": ((0.5, 0.5), (1.0, -1.0), kept, ""),
        "made equal by a penalty": ((0.5, 1.0), (0.0, 0.0), *equal),
        "mixed": ((0.0, 1.0), (-1.0, 1.0), kept, ""),
        "rejected, and no part of the batch": ((1.0, 1.0), (None, None), discarded, "all_equal"),
    }
    for step in range(1, 13):
        run.write_rollouts(
            step,
            [
                replace(
                    row(step, 0, index),
                    **{"group_id": f"{step} {name}", "reward": reward, "advantage": advantage},
                    **{"status": status, "status_reason": reason},
                )
                for name, (rewards, advantages, status, reason) in groups.items()
                for index, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True))
            ],
        )
        run.log_metrics(
            {
                **{"step": step, "groups/total": 4, "groups/discarded": 2 * is_discarding},
                **{"groups/all_equal": 2, "groups/all_at_minimum": 0, "groups/all_at_maximum": 0},
            }
        )
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r")
        (tile,) = page["tiles"]
        assert (tile["value"], tile["is_share"], tile["state"]) == (0.5, True, "good")
        assert [one["signal"] for one in page["rewards"]] == [0.5]
        for address, names in (
            (tile["address"], {"equal", "made equal by a penalty"}),
            ("/runs/r/rollouts?group=signal&step_from=3", {"mixed", "told apart by a penalty"}),
        ):
            listed = ui.get(address)
            assert listed["total"] == 10 * 2 * 2, "the rollouts of ten steps"
            assert {one.partition(" ")[2] for one in listed["columns"]["group_id"]} == names


def test_runs_are_compared_with_the_settings_that_differ(ui):
    page = ui.get("/compare?run=first&run=second&metric=entropy")
    assert [one["run"] for one in page["curves"]["entropy"]] == ["first", "second"]
    assert page["settings"] == [
        {
            **{"name": "run.name", "values": {"first": "first", "second": "second"}},
            **{"is_place": True, "follows": False},
        }
    ]
    assert page["num_equal_settings"] == 6


def test_one_rollout_has_its_text_tokens_calls_and_stages(ui):
    page = ui.get(f"{RUN}/rollouts/2.0/1/1")
    recorded = row(2, 0, 1)
    assert page["row"]["reward"] == recorded.reward
    assert page["row"]["metrics"] == pytest.approx(dict(recorded.metrics))
    assert page["messages"][1]["content"] == recorded.messages[1].content
    assert MARKUP in page["messages"][1]["content"]
    assert page["messages"][1]["reasoning"] == "hm"
    (chain,) = page["tokens"]["chains"]
    assert chain["ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert chain["is_sampled"] == [False, False, False, True, True, False, True]
    assert chain["logprobs"] == [None, None, None, -0.5, -1.5, None, -0.25]
    assert chain["turns"] == [None, None, None, 0, 0, None, 1]
    assert chain["versions"] == [None, None, None, 1, 2, None, 2]
    assert page["calls"]["columns"]["server"] == [SERVERS[1]]
    assert page["calls"]["columns"]["queue_s"] == [0.5]
    assert page["events"]["columns"]["stage"] == [
        *("drawn", "environment", "generating", "scoring", "done")
    ]
    assert page["addresses"]["next"] == f"{RUN}/rollouts/2.0/2/1"
    assert ui.get(page["addresses"]["timeline"])["rows"]
    without = ui.get(f"{RUN}/rollouts/2.0/1/1?tokens=false")
    assert without == {**page, "tokens": {**page["tokens"], "chains": []}}


NOTHING = [None, None, None]


def test_tokens_have_what_the_trainer_found_of_them(ui):
    """Of a kept one; a failed one and a replaced attempt were not trained on."""
    kept = next(one for one in GROUP if one.status == "kept")
    page = ui.get(f"{RUN}/rollouts/{kept.group_id}/{kept.index}/1")
    (chain,) = page["tokens"]["chains"]
    assert chain["mask"] == [*NOTHING, 1, 1, None, 1]
    assert set(chain["columns"]) == {"trainer log-prob", "entropy", "ratio", "effect", "weight"}
    assert chain["columns"]["trainer log-prob"] == [*NOTHING, -0.5, -1.0, None, -0.5]
    assert chain["columns"]["entropy"] == [*NOTHING, 0.5, 1.5, None, 0.25]
    ratios = [*NOTHING, 1.0, math.exp(0.5), None, math.exp(-0.25)]
    assert chain["columns"]["ratio"] == pytest.approx(ratios)
    assert chain["columns"]["effect"] == [*NOTHING, 1.0, 0.0, None, -0.5]
    assert chain["columns"]["weight"] == [*NOTHING, 0.25, 0.25, None, 0.25]
    every = [
        row(step, group, index) for step in (1, 2, 3) for group in range(3) for index in range(4)
    ]
    failed = next(one for one in every if one.status == "failed")
    for group_id, index, attempt in ((failed.group_id, failed.index, 1), ("1.0", 0, 2)):
        page = ui.get(f"{RUN}/rollouts/{group_id}/{index}/{attempt}")
        (chain,) = page["tokens"]["chains"]
        assert chain["mask"] == [*NOTHING, 0, 0, None, 0]
        assert chain["columns"] == {}


def test_what_is_not_known_of_tokens_is_left_out(tmp_path):
    """A run that did not record facts, one whose file is damaged, and the rollout of an eval."""
    kept = next(one for one in GROUP if one.status == "kept")
    unknown = tokens_of(tmp_path, replace(kept, version_spans=()))["chains"][0]
    assert (unknown["mask"], unknown["columns"], unknown["versions"]) == (None, {}, None)
    of_one = replace(kept, version_spans=(), oldest_version=7, newest_version=7)
    assert tokens_of(tmp_path, of_one)["chains"][0]["versions"] == [*NOTHING, 7, 7, None, 7]
    assert training_of(tmp_path, kept) == UNKNOWN
    assert training_of(tmp_path, replace(kept, status="discarded")).turns == []
    (tmp_path / "token_facts").mkdir()
    (tmp_path / "token_facts" / f"step-{kept.step:06d}.parquet").write_bytes(b"PAR1 torn")
    damaged = training_of(tmp_path, kept)
    assert damaged.turns is None
    assert "is not a readable file of token facts" in damaged.problems[0]


def test_branches_share_their_beginning(tmp_path):
    recorder = ChainRecorder()
    turns = (recorder.record([1, 2], [3], [-1.0]), recorder.record([1, 9], [8], [-2.0]))
    found = tokens_of(tmp_path, replace(row(1, 0, 0), tokens=turns))
    assert [chain["ids"] for chain in found["chains"]] == [[1, 2, 3], [1, 9, 8]]
    assert [chain["parent"] for chain in found["chains"]] == [None, 0]
    assert found["chains"][1]["num_shared"] == 1
    assert found["chains"][1]["logprobs"] == [None, None, -2.0]
    # Turn 1 was trained on, turn 0 was not; what they share was written by neither.
    training = Training([replace(facts_of(row(1, 0, 0))[1], turn=1)])
    first, second = tokens_of(tmp_path, replace(row(1, 0, 0), tokens=turns), training)["chains"]
    assert (first["mask"], second["mask"]) == ([None, None, 0], [None, None, 1])
    assert first["columns"] == {}
    assert second["columns"]["trainer log-prob"] == [None, None, -0.5]


def test_a_group_and_an_example_lead_to_their_rollouts(ui):
    page = ui.get(f"{RUN}/groups/2.1")
    rewards = [one.reward for one in GROUP if one.reward is not None]
    assert page["reward"]["count"] == len(rewards)
    assert page["reward"]["mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert [one["row"]["index"] for one in page["rollouts"]] == [0, 1, 2, 3]
    address = f"{RUN}/examples/{quote('a/b c', safe='')}/{quote('x/1?&#', safe='')}"
    example = ui.get(address)
    assert example["columns"]["step"] == [3] * 4 + [2] * 4 + [1] * 4
    rollout = ui.get(example["columns"]["address"][0])
    assert rollout["addresses"]["example"] == address
    assert ui.get(f"{RUN}/examples/math/e1")["evals"][0]["folder"] == "math-before"


def test_two_rollouts_of_two_runs_are_laid_beside_each_other(ui):
    page = ui.get("/difference?left=first%2F2.0%2F1%2F1&right=second%2F2.0%2F1%2F1")
    assert page["left"]["row"]["group_id"] == page["right"]["row"]["group_id"] == "2.0"
    assert [one["name"] for one in page["settings"]] == ["run.name"]
    error = ui.get("/difference?left=first%2F2.0&right=second%2F2.0%2F1%2F1", status=400)
    assert "expected RUN/GROUP/INDEX/ATTEMPT, got 'first/2.0'" in error["error"]["message"]


def test_the_timeline_has_ranks_servers_and_environments(ui):
    page = ui.get(f"{RUN}/timeline?from={BEGAN_S}&to={BEGAN_S + 10}")
    rows = {one["source"]: one for one in page["rows"]}
    waiting = "environment math: waiting"
    assert set(rows) == {"rank 0", *SERVERS, "environment math", waiting, "evals"}
    assert set(rows[waiting]["bars"]["columns"]["name"]) == {"drawn"}
    rank = rows["rank 0"]["bars"]["columns"]
    assert rank["name"] == ["train", "forward", "backward"]
    assert rank["lane"] == [0, 1, 1]
    server = rows[SERVERS[0]]
    calls = [name for name in server["bars"]["columns"]["name"] if name == "call"]
    assert len(calls) == 6
    assert server["num_lanes"] == 6
    assert "updating" in server["bars"]["columns"]["name"]
    assert server["bars"]["columns"]["address"][0] == f"{RUN}/rollouts/1.0/0/1"
    assert {mark["kind"] for mark in page["marks"]} == {"restart", "eval"}
    assert page["sources"] == ["timeline", "calls", "events", "servers"]


def test_what_is_too_narrow_for_a_bar_is_a_density(ui):
    page = ui.get(f"{RUN}/timeline?from={BEGAN_S - 5000}&to={BEGAN_S + 5000}&width=100")
    row_ = next(one for one in page["rows"] if one["source"] == SERVERS[0])
    assert "call" not in row_["bars"]["columns"]["name"]
    total_s = sum(row_["density"]["busy"]) * page["bucket_s"]
    assert total_s == pytest.approx(18 * 2.0, rel=0.01)
    assert set(row_["density"]["name"]) == {"call"}


def test_the_timeline_opens_in_perfetto(ui):
    events = ui.get(f"{RUN}/timeline/trace.json")["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert "rank 0" in names
    call = next(event for event in events if event["name"] == "call")
    assert call["dur"] == 2e6
    assert call["args"]["rollout"].startswith(f"{RUN}/rollouts/")


def test_meters_are_thinned_and_outliers_are_named(ui):
    page = ui.get(f"{RUN}/infra?points=10")
    assert [one["source"] for one in page["series"]] == [f"node n gpu {at}" for at in range(4)]
    assert len(page["series"][0]["mean"]) <= 11
    assert [one["source"] for one in page["outliers"]] == ["node n gpu 3"]
    chosen = ui.get(f"{RUN}/infra?source=node%20n%20gpu%203&name=gpu/utilization")["series"]
    assert [one["source"] for one in chosen] == ["node n gpu 3"]
    assert chosen[0]["mean"] == pytest.approx([0.1] * len(chosen[0]["mean"]))


def test_evals_have_intervals_and_paired_verdicts(ui):
    (points,) = [one["points"] for one in ui.get(f"{RUN}/evals")["evals"]]
    assert [(one["tag"], one["mean"]) for one in points] == [("before", 0.25), ("after", 0.75)]
    assert points[1]["low"] < 0.75 < points[1]["high"]
    assert points[1]["versus_first"]["change"] == 0.5
    page = ui.get(points[1]["address"])
    assert page["against"] == "math-before"
    assert (page["num_gained"], page["num_lost"]) == (4, 0)
    assert page["flips"]["columns"]["example_id"] == ["e2", "e3", "e4", "e5"]
    rollout = ui.get(page["flips"]["columns"]["address_after"][0])
    assert rollout["row"]["example_id"] == "e2"
    assert rollout["messages"][0]["content"] == MARKUP
    assert rollout["calls"]["columns"]["server"] == [SERVERS[1]]
    page = ui.get(f"{RUN}/timeline?from={BEGAN_S}&to={BEGAN_S + 10}")
    bars = next(one["bars"]["columns"] for one in page["rows"] if one["source"] == SERVERS[1])
    assert f"{RUN}/evals/math-after/rollouts/eval-2/0" in bars["address"]
    error = ui.get(f"{RUN}/evals/math-afer", status=404)["error"]["message"]
    assert "unknown eval 'math-afer'; did you mean 'math-after'" in error


def test_logs_are_merged_by_time_and_read_in_both_directions(ui):
    page = ui.get(f"{RUN}/logs")
    messages = page["lines"]["columns"]["message"]
    assert messages[:2] == ["at 0", "starting"] or messages[0] == "at 0"
    assert messages[-1].endswith("ERROR lost a request")
    assert page["lines"]["columns"]["time_s"] == sorted(page["lines"]["columns"]["time_s"])
    seen, cursor = [], ""
    for _ in range(20):
        part = ui.get(f"{RUN}/logs?limit=2&cursor={cursor}")
        seen = part["lines"]["columns"]["message"] + seen
        if part["older"] is None:
            break
        cursor = part["older"]
    assert seen == messages
    errors = ui.get(f"{RUN}/logs?level=error")["lines"]["columns"]["message"]
    assert len(errors) == 1
    found = ui.get(f"{RUN}/logs?q=AT%203&component=driver&source=rank%200")["lines"]["columns"]
    assert found["message"] == ["at 3"]


def settings_of(ui, run):
    return {one["name"]: one for one in ui.get(f"{run}/config")["settings"]}


def test_the_settings_tell_what_was_set_from_what_is_so_by_default(ui):
    found = settings_of(ui, RUN)
    expected = {
        "run.number_of_steps": (10, True, True),
        "environments.math.weight": (1.0, True, False),
        "rollout.group_size": (4, False, False),
    }
    for name, facts in expected.items():
        one = found[name]
        assert (one["value"], one["is_set"], one["is_default"]) == facts, name
    assert found["rollout.group_size"]["default"] == 8


def test_the_files_that_a_run_read_are_named_with_their_digests(tmp_path):
    run = write_run(tmp_path / "runs" / "r")
    record = EnvironmentRecord(
        id="env:Math", version="0", place=EnvironmentPlace.IMPORTABLE, files={"env.py": "ab" * 32}
    )
    run.note_environments({"math": record})
    run.note_inputs({"model.model: ./tiny": "cd" * 32})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/config")
    assert page["environments"]["math"]["files"] == {"env.py": "ab" * 32}
    assert page["inputs"] == {"model.model: ./tiny": "cd" * 32}


def test_of_a_run_that_did_not_record_what_was_set_it_is_not_known(tmp_path):
    run = write_run(tmp_path / "runs" / "older")
    name = "rollout.group_size"
    (run.path / "settings.json").write_text(json.dumps({"chosen": [name], "defaults": {name: 8}}))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        one = settings_of(ui, "/runs/older")[name]
        assert (one["value"], one["is_set"], one["is_default"]) == (4, None, False)
        (run.path / "settings.json").unlink()
        one = settings_of(ui, "/runs/older")[name]
        assert (one["value"], one["is_set"], one["is_default"]) == (4, None, None)


def test_a_setting_that_differs_and_that_no_run_set_is_told_as_one_that_follows(tmp_path):
    for name, more in (("a", 0), ("b", 1)):
        run = write_run(tmp_path / "runs" / name)
        of_run = {"rollout": {"group_size": 4 + more, "top_k": more}, "env": {"size": {"x": more}}}
        (run.path / "config.json").write_text(json.dumps(of_run))
        origin = {"set": ["rollout.group_size", "env.size"], "chosen": [], "defaults": {}}
        (run.path / "settings.json").write_text(json.dumps(origin))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/compare?run=a&run=b")
        follows = {one["name"]: one["follows"] for one in page["settings"]}
        assert follows.pop("rollout.top_k")
        assert follows == {"rollout.group_size": False, "env.size.x": False}
        (run.path / "settings.json").unlink()
        page = ui.get("/compare?run=a&run=b")
        assert not any(one["follows"] for one in page["settings"]), "of one run it is not known"


def test_an_address_gives_the_page_to_a_browser_and_its_data_to_a_program(ui):
    token = {"authorization": f"Bearer {ui.token}"}
    page = ui.ask(RUN, accept="text/html,*/*", **token)
    assert page.headers["content-type"].startswith("text/html")
    data = ui.ask(f"{RUN}?format=json", accept="text/html,*/*", **token)
    assert data.json["page"] == "overview"
    assert ui.ask(f"{RUN}?format=xml", **token).json["error"]["message"] == (
        "format: expected one of html, json, got 'xml'"
    )


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("/runs/frst", 404, "unknown run 'frst'; did you mean 'first'?"),
        (f"{RUN}?metric=entropi", 404, "unknown metric 'entropi'; did you mean 'entropy'?"),
        (f"{RUN}/rollouts?sotr=x", 400, "unknown parameter 'sotr'; did you mean 'sort'"),
        (f"{RUN}/rollouts?sort=rewrd", 400, "unknown column 'rewrd'; did you mean 'reward'"),
        (f"{RUN}/rollouts?limit=501", 400, "limit: Input should be less than or equal to 500"),
        (f"{RUN}/rollouts?cursor=x&q=y", 400, "expected next_cursor of an answer, got 'x'"),
        (f"{RUN}/rollouts/2.0/9/1", 404, "no rollout 9, attempt 1, of a group '2.0'"),
        (f"{RUN}/timeline?from=5&to=4", 400, "expected a time after from"),
        (f"{RUN}/logs?cursor=!", 400, "expected older or newer of an answer"),
        (f"{RUN}/nothing", 404, "unknown page 'nothing'; known: "),
        ("/live?run=first&run=frst", 404, "unknown run 'frst'; did you mean 'first'?"),
    ],
)
def test_errors_say_what_was_expected(ui, address, status, message):
    assert message in ui.get(address, status=status)["error"]["message"]
