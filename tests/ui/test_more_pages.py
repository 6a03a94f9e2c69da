"""Queues and workers, diagnoses, examples of several runs, searches in thoughts and tools."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from tests.ui.recorded import BEGAN_S, STEP_S, kill, row, write_eval, write_steps
from tests.ui.served import answered

from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.files import append_json_line
from telescope_core.records.restarts import Restart
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_core.types import Message, ToolCall

RUN = "/runs/first"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "r", config={})


def test_queues_and_workers_are_on_the_page_of_machines(tmp_path, run):
    for step in (1, 2):
        row_ = {"queue/rollouts_waiting": 5.0 * step, "queue/groups_ready": 1.0}
        workers = {"workers/a/b c/restarts": step - 1.0, "workers/a/b c/loop_lag_s": 0.5}
        run.log_metrics({"step": step, **row_, **workers, "workers/math/restarts": 0.0})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/infra")
    assert page["queues"]["metrics"] == {
        "queue/groups_ready": [1.0, 1.0],
        "queue/rollouts_waiting": [5.0, 10.0],
    }
    assert [one["environment"] for one in page["workers"]] == ["a/b c", "math"]
    assert page["workers"][0]["latest"] == {"restarts": 1.0, "loop_lag_s": 0.5}
    assert page["workers"][0]["curves"]["metrics"]["workers/a/b c/restarts"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("end", "states"),
    [
        (None, ["serving", "lost", "given up"]),
        (RunFolder.finish, ["ended", "lost", "given up"]),
        (kill, ["ended", "lost", "given up"]),
    ],
)
def test_servers_end_with_their_run(tmp_path, run, end, states):
    for at, state in enumerate((ServerState.SERVING, ServerState.LOST, ServerState.GIVEN_UP)):
        about = {"role": ServerRole.ROLLOUT, "life": 1, "state": state, "version": 0}
        run.log_server(ServerEvent(time_s=BEGAN_S, server=f"http://127.0.0.1:{at}", **about))
    if end is not None:
        end(run)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        servers = ui.get("/runs/r/infra")["servers"]
    assert [one["state"] for one in servers] == states
    assert servers[1]["since_s"] == BEGAN_S
    assert (servers[0]["since_s"] is None) == (end is kill)


def test_evals_named_by_a_file_have_one_point_each_with_numbers_and_version(tmp_path, run):
    name = "./envs.py:Big"
    for tag, version, solved in (("before", 0, 2), ("step-2", 2, 5)):
        folder = f"envs.py-Big-{tag}"
        write_eval(run, tag, version=version, solved=solved, name=name, folder=folder)
    skipped = EvalPoint(
        **{"time_s": BEGAN_S, "name": name, "tag": "step-4", "version": 4},
        **{"state": EvalPointState.SKIPPED, "reason": "late", "folder": "envs.py-Big-step-4"},
    )
    run.log_eval_point(skipped)
    (run.evals_path / "envs.py-Big-step-6").mkdir()  # the eval that is going on
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        (shown,) = ui.get("/runs/r/evals")["evals"]
        assert shown["name"] == name
        assert [(one["tag"], one["mean"], one["version"]) for one in shown["points"]] == [
            *(("before", 0.25, 0), ("step-2", 0.625, 2), ("step-4", None, 4)),
            ("step-6", None, None),
        ]
        addresses = [one["address"] for one in shown["points"]]
        assert addresses[2] is None
        page = ui.get(addresses[1])
        assert (page["version"], page["against"]) == (2, "envs.py-Big-before")
        ui.get(addresses[3])
        noted = ui.get("/runs/r")["eval_points"]
        assert [one["folder"] for one in noted] == [
            *("envs.py-Big-before", "envs.py-Big-step-2"),
            None,
        ]
        seen = ui.get("/runs/r/examples/math/e0")["evals"]
    assert [(one["folder"], one["version"]) for one in seen] == [
        ("envs.py-Big-before", 0),
        ("envs.py-Big-step-2", 2),
    ]


def test_what_is_wrong_with_the_run_is_on_its_overview(tmp_path, run):
    for step in range(1, 8):
        run.log_metrics({"step": step, "groups/total": 4, "groups/discarded": 4, "entropy": 1.0})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        found = {one["rule"]: one for one in ui.get("/runs/r")["diagnoses"]}
        nothing = found["nothing trained"]
        assert (nothing["kind"], nothing["first_step"], nothing["is_over"]) == ("broken", 1, False)
        assert nothing["cause"].startswith("No optimizer step was taken in 7 steps")
        # Only curves that are there can be asked for.
        assert nothing["metrics"] == ["groups/discarded"]
        ui.get("/runs/r?metric=groups/discarded")


def test_all_terms_of_the_loss_are_drawn_where_no_metric_is_asked_for(tmp_path, run):
    run.log_metrics({"step": 1, "loss/total": 1.0, "loss/kl": 0.5, "loss/mine": 0.1, "other": 1.0})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert list(ui.get("/runs/r")["curves"]["metrics"]) == [
            *("loss/total", "loss/kl", "loss/mine")
        ]
        assert list(ui.get("/compare?run=r")["curves"]) == ["loss/total", "loss/kl", "loss/mine"]


def test_examples_of_two_runs_lie_beside_each_other(ui):
    page = ui.get("/compare/examples?run=first&run=second")
    assert {(one["environment"], one["example_id"]) for one in page["examples"]} == {
        *(("math", "x/0?&#"), ("math", "x/2?&#"), ("a/b c", "x/1?&#"))
    }
    spans = []
    for one in page["examples"]:
        first, second = one["runs"]["first"], one["runs"]["second"]
        spans.append(abs(first["mean"] - second["mean"]))
        assert ui.get(first["address"])["example_id"] == one["example_id"]
        sides = [quote(side["side"], safe="") for side in (first, second)]
        difference = ui.get(f"/difference?left={sides[0]}&right={sides[1]}")
        assert difference["left"]["row"]["example_id"] == one["example_id"]
        assert difference["right"]["row"]["example_id"] == one["example_id"]
        assert difference["left"]["row"]["step"] == 3
        assert difference["right"]["row"]["step"] == 2
    assert spans == sorted(spans, reverse=True)
    only = ui.get("/compare/examples?run=first&run=second&environment=math&limit=1")
    assert [one["environment"] for one in only["examples"]] == ["math"]


def test_search_looks_into_thoughts_calls_of_tools_and_their_results(tmp_path, run):
    said = {
        "content": Message(role="assistant", content="the word is Zebra"),
        "reasoning": Message(role="assistant", content="", reasoning="I think of a zebra here"),
        "tool": Message(role="tool", content="the tool answers zebra", tool_call_id="1"),
        "call": Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="1", name="look_up", arguments='{"animal": "zebra"}'),),
        ),
        "other": Message(role="assistant", content="a horse"),
    }
    rows = [
        replace(row(1, 0, at), messages=(Message(role="user", content="?"), message))
        for at, message in enumerate(said.values())
    ]
    run.write_rollouts(1, rows)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        columns = ui.get("/runs/r/rollouts?q=ZEBRA")["columns"]
        assert columns["index"] == [0, 1, 2, 3]
        assert all("zebra" in excerpt.lower() for excerpt in columns["excerpt"])
        assert ui.get("/runs/r/rollouts?q=look_up")["columns"]["index"] == [3]


def test_a_rollout_of_an_eval_leads_to_its_moment(ui):
    address = f"{RUN}/evals/math-after/rollouts/eval-2/0"
    page = ui.get(address)
    assert ui.get(f"{address}?tokens=false")["row"] == page["row"]
    shown = ui.get(page["addresses"]["timeline"])
    addresses = [one for row_ in shown["rows"] for one in row_["bars"]["columns"]["address"]]
    assert address in addresses
    without = ui.get(f"{RUN}/evals/math-after/rollouts/eval-3/0")
    assert without["addresses"]["timeline"] is None


def test_a_reward_is_the_sum_of_its_weighted_parts_where_it_is_one(tmp_path, run):
    run.note_reward_ranges({}, weights={"math": {"correct": 0.9, "form": 0.1}})
    parts = {"correct": 0.0, "form": 1.0}
    rows = [
        replace(row(1, 0, index), reward=reward, rewards=parts, environment="math")
        for index, reward in enumerate((0.1, 0.5))
    ]
    run.write_rollouts(1, [*rows, replace(row(1, 1, 0), environment="other")])
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        found = [ui.get(f"/runs/r/rollouts/1.0/{index}/1")["reward_parts"] for index in (0, 1)]
        other = ui.get("/runs/r/rollouts/1.1/0/1")["reward_parts"]
    assert found[0] == [
        {"name": "correct", "weight": 0.9, "value": 0.0},
        {"name": "form", "weight": 0.1, "value": 1.0},
    ]
    # A total that is not the sum, as of `compute_reward`, and an environment without weights.
    assert (found[1], other) == ([], [])


def test_restarts_lost_servers_and_the_first_step_without_training_are_what_happened(tmp_path, run):
    begin = {"groups/total": 4.0, "loss/total": 0.5}
    run.log_metrics({"step": 1, "time_s": BEGAN_S + 1, **begin})
    for step in (2, 3):
        none = {"groups/total": 4.0, "loss/total": None}
        run.log_metrics({"step": step, "time_s": BEGAN_S + step, **none})
    about = {"server": "http://127.0.0.1:1", "role": ServerRole.ROLLOUT, "version": 1}
    for at, (life, state) in enumerate(
        [(1, "starting"), (1, "serving"), (1, "lost"), (2, "starting"), (2, "given up")]
    ):
        state = ServerState(state)
        run.log_server(ServerEvent(time_s=BEGAN_S + 10 + at, life=life, state=state, **about))
    restart = Restart(time_s=BEGAN_S + 5, reason="a rank died", reached=3, step=1, checkpoint="")
    append_json_line(run.path / "restarts.jsonl", asdict(restart))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        found = ui.get("/runs/r")["happened"]
    assert [(one["kind"], one["time_s"]) for one in found if one["kind"] != "run"] == [
        *(("server", BEGAN_S + 14), ("server", BEGAN_S + 13), ("server", BEGAN_S + 12)),
        *(("restart", BEGAN_S + 5), ("step", BEGAN_S + 2)),
    ]
    step = next(one for one in found if one["kind"] == "step")
    assert "until step 3" in step["text"]
    assert step["address"] == "/runs/r/rollouts?step_from=2&step_to=2"
    assert next(one["why"] for one in found if one["kind"] == "restart") == "a rank died"


def test_a_timeline_ends_with_its_records_whatever_the_clock_is_set_to_meanwhile(tmp_path, run):
    """As after a night in which the laptop slept: the machine's clock writes only the end."""
    write_steps(run, range(1, 4), groups=1)
    run.finish()
    info = run.path / "run.json"
    began = datetime.fromtimestamp(BEGAN_S, UTC).isoformat()
    info.write_text(json.dumps({**json.loads(info.read_text()), "started_at": began}))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        found = ui.get("/runs/r/timeline")["extent"]
        assert found == {"from": BEGAN_S, "to": BEGAN_S + 3 * STEP_S}
        (run.path / "metrics.jsonl").unlink()
        found = ui.get("/runs/r/timeline")["extent"]
        assert found["to"] - found["from"] > 3 * STEP_S, "without records the whole life is shown"
