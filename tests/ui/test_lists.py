"""The first page: runs, evals without a run, seeds, and what is read again when a file changes."""

import json
import os
import time
from pathlib import Path

import pytest
from tests.ui.recorded import MARKUP, write_standalone
from tests.ui.served import answered

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_ui.index.course import Course
from telescope_ui.index.runs import require_shown
from telescope_ui.pages.runs import seeds_of


@pytest.fixture
def evals(tmp_path):
    for at, (name, solved) in enumerate({"early": 6, "late": 4}.items()):
        write_standalone(tmp_path / "runs" / "evals" / name, solved=solved)
        about = tmp_path / "runs" / "evals" / name / "eval.json"
        fields = json.loads(about.read_text())
        fields["run"] |= {"state": "finished", "started_at": f"2026-01-0{at + 1}T00:00:00+00:00"}
        about.write_text(json.dumps(fields))
    return tmp_path / "runs"


@pytest.mark.parametrize("opened", [".", "evals", "evals/late"])
def test_an_eval_without_a_run_is_listed_wherever_it_is_opened(tmp_path, evals, opened):
    with answered([evals / opened], tmp_path / "cache") as ui:
        page = ui.get("/")
        assert page["runs"] == []
        late = next(one for one in page["evals"] if one["key"] == "late")
        assert (late["state"], late["environment"], late["model"]) == ("finished", "math", "m")
        assert (late["measure"], late["mean"], late["num_tasks"]) == ("pass@1", 0.5, 8)
        assert late["low"] < 0.5 < late["high"]


def test_an_eval_without_a_run_has_its_pages_and_is_compared_to_the_one_before(tmp_path, evals):
    with answered([evals], tmp_path / "cache") as ui:
        page = ui.get("/evals/late")
        assert (page["run"]["key"], page["against"], page["others"]) == ("late", "early", ["early"])
        assert page["verdicts"][0]["change"] == -0.25
        # Those that got worse come first.
        assert page["flips"]["columns"]["change"] == [-1.0, -1.0]
        assert (page["num_gained"], page["num_lost"]) == (0, 2)
        assert "hush" not in json.dumps(page)
        rollout = ui.get(page["flips"]["columns"]["address_after"][0])
        assert rollout["messages"][0]["content"] == MARKUP
        assert rollout["addresses"]["eval"] == "/evals/late"
        assert rollout["addresses"]["example"] is None
        assert ui.get("/evals/early")["against"] is None
        assert ui.get("/evals/late/logs")["page"] == "logs"
        message = ui.get("/evals/lat", status=404)["error"]["message"]
        assert "unknown eval 'lat'; did you mean 'late'" in message


def test_rollouts_of_an_eval_are_found_by_what_they_say(tmp_path, evals):
    path = evals / "evals" / "late" / "rollouts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"at": "Rome"}'},
    }
    rows[1]["messages"].append({"role": "assistant", "content": "", "reasoning_content": "IN ROME"})
    rows[2]["messages"].append({"role": "assistant", "content": "", "tool_calls": [call]})
    rows[3]["messages"][0]["content"] = f"{'so ' * 400}rome{' on' * 400}"
    rows[4]["messages"] = "of another form"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with answered([evals], tmp_path / "cache") as ui:
        found = ui.get("/evals/late/rollouts?q=Rome")
        assert found["columns"]["group_id"] == [rows[at]["group_id"] for at in (1, 2, 3)]
        in_thought, in_call, in_text = found["columns"]["excerpt"]
        assert (in_thought, "Rome" in in_call, "so rome on" in in_text) == ("IN ROME", True, True)
        assert len(in_text) <= 200
        assert found["search"] == {
            **{"next_cursor": None, "num_searched": 8, "num_rollouts": 8, "is_complete": True}
        }
        for address in found["columns"]["address"]:
            assert ui.get(address)["page"] == "rollout"
        first = ui.get("/evals/late/rollouts?q=rome&limit=2")
        cursor = first["search"]["next_cursor"]
        rest = ui.get(f"/evals/late/rollouts?q=rome&limit=2&cursor={cursor}")
        parts = [page["columns"]["group_id"] for page in (first, rest)]
        assert [*parts[0], *parts[1]] == found["columns"]["group_id"]
        assert (len(parts[0]), rest["search"]["is_complete"]) == (2, True)
        assert ui.get("/evals/late/rollouts?q=rome&cursor=99")["search"]["is_complete"]
        assert not ui.get("/evals/late/rollouts?q=nowhere")["columns"]["address"]


def test_an_eval_that_goes_on_says_how_far_it_is(tmp_path, evals):
    (evals / "evals" / "late" / "results.json").unlink()
    with answered([evals], tmp_path / "cache") as ui:
        page = ui.get("/evals/late")
        assert page["result"] is None
        assert page["so_far"] == {"num_rollouts": 8, "num_scored": 8, "reward": 0.5}
        columns = page["tasks"]["columns"]
        assert sum(columns["num_rollouts"]) == 8
        assert set(columns["num_solved"]) == {None}
        assert ui.get(columns["address"][0])["page"] == "rollout"
        late = next(one for one in ui.get("/")["evals"] if one["key"] == "late")
        assert (late["measure"], late["num_scored"]) == (None, 8)


@pytest.mark.parametrize(
    ("place", "hint"),
    [
        *(("models", "telescope eval"), ("runs/r/checkpoints", "telescope ui")),
        *(("page", "index.html"), ("base-log", "telescope sft")),
    ],
)
def test_a_folder_with_something_else_in_it_is_refused(tmp_path, place, hint):
    RunFolder.create(tmp_path / "runs" / "r", config={})
    for name in (
        "models/a.txt",
        "runs/r/checkpoints/b",
        "page/export.js",
        "base-log/metrics.jsonl",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="is a run or an eval") as refused:
        require_shown(tmp_path / place)
    assert hint in str(refused.value)
    require_shown(tmp_path / "runs")


def test_an_empty_folder_may_get_runs(tmp_path):
    (tmp_path / "runs").mkdir()
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/")["runs"] == []
        RunFolder.create(tmp_path / "runs" / "sweep" / "r", config={})
        assert [run["key"] for run in ui.get("/")["runs"]] == ["r"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lr3-seed2", "lr3-seed*"),
        ("a_seed_12", "a-seed*"),
        ("b.seed=1", "b-seed*"),
        ("seed7", "sweep/seed*"),
        ("seedling", None),
        ("quickstart", None),
    ],
)
def test_names_that_differ_in_their_seed_have_one_in_common(name, found):
    assert seeds_of(name, Path("runs/sweep") / name) == found


def test_runs_of_several_seeds_have_a_mean_and_a_spread(tmp_path):
    for seed, last in enumerate((0.2, 0.4, 0.9)):
        run = RunFolder.create(tmp_path / "runs" / f"a-seed{seed}", config={})
        run.log_metrics({"step": 1, "task_reward/mean": 0.0, "reward/mean": 5.0})
        run.log_metrics({"step": 2, "task_reward/mean": 2 * last})
    RunFolder.create(tmp_path / "runs" / "alone-seed1", config={})
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/")
    (seeds,) = page["seeds"]
    assert (seeds["name"], seeds["runs"]) == ("a-seed*", ["a-seed0", "a-seed1", "a-seed2"])
    assert seeds["recent_reward"] == {
        **{"count": 3, "mean": pytest.approx(0.5), "minimum": 0.2, "maximum": 0.9},
        "deviation": pytest.approx(0.13**0.5),
    }


def test_a_row_is_made_again_when_a_file_of_it_changes_and_only_then(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path / "runs" / "r", config={"model": {"model": "m"}})
    run.log_metrics({"step": 1, "reward/mean": 0.5})
    asked = []
    whole = Course.reward
    monkeypatch.setattr(Course, "reward", lambda self: asked.append(1) or whole(self))
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        for _ in range(3):
            (row,) = ui.get("/")["runs"]
        assert (row["step"], row["reward"], row["model"], len(asked)) == (1, 0.5, "m", 1)
        run.log_metrics({"step": 2, "reward/mean": 0.25})
        (row,) = ui.get("/")["runs"]
        assert (row["step"], row["reward"], row["recent_reward"], len(asked)) == (2, 0.25, 0.375, 2)
        run.finish()
        assert ui.get("/")["runs"][0]["state"] == "finished"


def test_a_list_is_shown_before_all_of_it_is_read_and_each_request_reads_on(
    tmp_path, evals, monkeypatch
):
    later_s = time.time() + 100
    for at, name in enumerate(("old", "new-seed1")):
        run = RunFolder.create(evals / name, config={"model": {"model": "m"}})
        run.log_metrics({"step": 1, "reward/mean": 0.5})
        run.finish()
        for path in run.path.iterdir():
            os.utime(path, (later_s + at, later_s + at))
    monkeypatch.setattr("telescope_ui.web.app._LIST_S", 1e-9)
    with answered([evals], tmp_path / "cache") as ui:
        headers = {"authorization": f"Bearer {ui.token}", "accept": "application/json"}
        first, second, _, last, again = (ui.ask("/", **headers).json for _ in range(5))
    assert [one["index"]["files_done"] for one in (first, second, last)] == [1, 2, 4]
    assert [one["index"]["is_complete"] for one in (first, second, last)] == [False, False, True]
    assert [row["key"] for row in first["runs"]] == ["new-seed1", "old"]
    new, old = first["runs"]
    assert (new["reward"], new["seeds"]) == (0.5, "new-seed*")
    assert (old["name"], old["state"], old["error"]) == ("old", "finished", None)
    assert (old["reward"], old["curve"]) == (None, None)
    assert [row["reward"] for row in last["runs"]] == [0.5, 0.5]
    assert [row["mean"] for row in first["evals"]] == [None, None]
    assert sorted(row["mean"] for row in last["evals"]) == [0.5, 0.75]
    assert again == last


@pytest.mark.parametrize("content", ["{}", '{"run": {"name": 3}}', '{"manifest": '])
def test_an_eval_whose_manifest_is_damaged_says_so_and_the_others_are_shown(
    tmp_path, evals, content
):
    (evals / "evals" / "late" / "eval.json").write_text(content)
    with answered([evals], tmp_path / "cache") as ui:
        rows = {one["key"]: one for one in ui.get("/")["evals"]}
        assert (rows["early"]["error"], rows["late"]["state"]) == (None, "unreadable")
        assert "eval.json is damaged" in rows["late"]["error"]
        assert "eval.json is damaged" in ui.get("/evals/late", status=409)["error"]["message"]
        assert ui.get("/evals/early")["run"]["state"] == "finished"


def test_supervised_training_has_a_row_and_a_page_with_its_accuracy(tmp_path):
    folder = tmp_path / "runs" / "warm-log"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"model": "m", "number_of_steps": 40, "environments": [{"name": "math"}]})
    )
    run = RunFolder.begin(folder, name="warm")
    for step in range(0, 41, 20):
        accuracy = 0.1 + step / 100
        row = {"step": step, "accuracy": accuracy, "accuracy/math": accuracy, "loss/total": 1.0}
        run.log_metrics(row)
    run.finish()
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        (listed,) = ui.get("/")["runs"]
        assert (listed["name"], listed["state"], listed["algorithm"]) == ("warm", "finished", "sft")
        assert (listed["step"], listed["number_of_steps"], listed["model"]) == (40, 40, "m")
        assert listed["reward"] == 0.5
        page = ui.get("/runs/warm-log")
        assert page["reward"]["mean"] == [0.1, pytest.approx(0.3), 0.5]
        assert [one["environment"] for one in page["rewards"]] == ["math"]
        assert page["verdict"]["outcome"] == "learned"
        assert "accuracy" in page["usual"]
        assert page["diagnoses"] == []
        for name in ("rollouts", "timeline", "evals", "logs", "config"):
            assert ui.get(f"/runs/warm-log/{name}")["page"] == name


def test_runs_of_the_same_name_are_told_apart_by_their_own_folders(tmp_path, monkeypatch):
    for group in ("group1", "group2"):
        for seed in (1, 2):
            RunFolder.create(tmp_path / "runs" / group / f"same-seed{seed}", config={})
    monkeypatch.chdir(tmp_path)
    with answered([Path("runs")], tmp_path / "cache") as ui:
        page = ui.get("/")
        folders = {one["key"]: one["folder"] for one in page["runs"]}
        assert sorted(folders.values()) == [
            f"runs/group{group}/same-seed{seed}" for group in (1, 2) for seed in (1, 2)
        ]
        for key, folder in folders.items():
            assert ui.get(f"/runs/{key}")["identity"]["folder"] == folder
    # Seeds are taken together wherever they lie in what was opened.
    assert [len(one["runs"]) for one in page["seeds"]] == [4]
    with answered([Path("runs/group1/same-seed1")], tmp_path / "cache") as ui:
        assert ui.get("/")["runs"][0]["folder"] == "runs/group1/same-seed1"
