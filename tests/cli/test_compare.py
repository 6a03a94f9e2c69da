"""`telescope compare RUN FORK`: what a person and a program are told, and what is refused."""

import json
from pathlib import Path

import pytest
from tests.core.reports.test_run_comparison import CONFIG, a_run, solved

from telescope_cli.main import main
from telescope_core.evals import EvalFolder
from telescope_core.records import Resume, RunFolder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, RunFolder]:
    """A run of long names, and a fork of it with another rate and one environment more."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    other = json.loads(json.dumps(CONFIG)) | {"trainer": {"learning_rate": 1e-4}}
    other["environments"].append({"name": "maze", "weight": 1.0})
    name = "a-run-whose-name-is-rather-long"
    evals = [{"sums-step-2": solved(0.3), "sums-after": solved(chance)} for chance in (0.2, 0.8)]
    steps = [[{"x": [0.0]}] * 3, [{"x": [1.0]}] * 3]
    run = a_run(Path("runs") / name, steps[0], evals[0])
    fork = a_run(Path("runs") / f"{name}-fork-2", steps[1], evals[1], config=other)
    changed = ("trainer.learning_rate: 0.001 -> 0.0001",)
    fork.note_resume(Resume(at="", step=2, checkpoint="c", run=str(run.path), changed=changed))
    return run, fork


def compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_a_person_reads_settings_then_pairs_then_the_verdict(runs, capsys):
    run, fork = (one.path.name for one in runs)
    code, said, _ = compare(capsys, run, fork)
    assert code == 0
    assert max(len(line) for line in said.splitlines()) <= 80
    in_order = [
        "after goes on from step 2 of before",
        "trainer.learning_rate: 0.001 -> 0.0001",
        'environments.maze.name: not there -> "maze"',
        "sums after step 2",
        "sums after step 3",
        "training on sums, steps 1 to 3",
        "is better than",
    ]
    places = [said.replace("\n", " ").index(one) for one in in_order]
    assert places == sorted(places)
    assert "environments.maze.weight" not in said


def test_a_program_gets_all_of_it(runs, capsys):
    code, said, _ = compare(capsys, *(str(one.path) for one in runs), "--json")
    found = json.loads(said)
    assert code == 0
    assert found["outcome"] == "better"
    assert found["fork"] == {"step": 2, "changed": ["trainer.learning_rate: 0.001 -> 0.0001"]}
    (rate,) = (one for one in found["settings"] if one["name"] == "trainer.learning_rate")
    assert (rate["before"], rate["after"], rate["follows"]) == (1e-3, 1e-4, False)
    assert [one["step"] for one in found["evals"]] == [2, 3]
    assert found["evals"][1]["differences"][0]["is_shown"]
    (training,) = found["training"]
    assert training["difference"]["change"] == 1.0
    assert (found["before"]["folder"], found["before"]["steps"]) == (str(runs[0].path), 3)


def test_what_is_no_pair_of_runs_is_refused(runs, capsys, tmp_path):
    run = runs[0].path.name
    EvalFolder.create(tmp_path / "eval", manifest={})
    (tmp_path / "empty").mkdir()
    for other, fact in [
        (run, "one folder"),
        (f"{run}x", f"unknown run '{run}x'"),
        ("eval", "telescope eval compare"),
        ("empty", "no run.json"),
    ]:
        code, said, error = compare(capsys, run, other)
        assert (code, said) == (2, "")
        assert fact in error
    assert compare(capsys, run)[0] == 2
