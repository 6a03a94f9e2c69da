"""`telescope doctor`: the verdict, what is wrong, and the exit code that programs ask for."""

import json

import pytest
from tests.core.diagnosis.test_rules import healthy, rising
from tests.core.reports.test_reports import an_eval

from telescope_cli.main import main
from telescope_core.evals import read_result, write_result
from telescope_core.records import RunFolder


def doctor(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *map(str, arguments)])
    return int(ended.value.code or 0), capsys.readouterr().out


def a_run(path, **changes):
    run = RunFolder.create(path, config={})
    for row in healthy(60, **changes):
        run.log_metrics(row)
    run.finish()
    return path


def test_a_run_that_learned_is_said_to_have(tmp_path, capsys):
    path = a_run(tmp_path / "well", **{"task_reward/mean": rising(0.2, 0.6, at=20)})
    code, text = doctor(capsys, path)
    assert code == 0
    assert text.startswith("well: Learned: training reward rose from 0.200")
    assert "none of" in text.lower()
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_wrong_has_the_verdict_before_it_and_an_exit_code(tmp_path, capsys):
    path = a_run(tmp_path / "ill", **{"task_reward/mean": rising(0.4, 0.0, at=20)})
    code, text = doctor(capsys, path)
    assert code == 1
    assert text.startswith("ill: Collapsed since step 2")
    assert text.index("Collapsed") < text.index("collapse (since step 2")
    code, text = doctor(capsys, path, "--json")
    told = json.loads(text)
    assert code == 1
    assert told["verdict"]["outcome"] == "collapsed"
    assert "collapse" in {one["rule"] for one in told["findings"]}


def test_how_a_run_ended_and_how_it_goes_on_is_said(tmp_path, capsys):
    full, killed = a_run(tmp_path / "full"), a_run(tmp_path / "killed")
    assert "Why it ended" not in doctor(capsys, full)[1]
    RunFolder.open(full).fail("stopped: the disk is full")
    about = json.loads((killed / "run.json").read_text())
    gone = {"state": "running", "ended_at": None, "process_started": "0"}
    (killed / "run.json").write_text(json.dumps({**about, **gone}))
    for path, why in (
        (full, "stopped: the disk is full"),
        (killed, f"process {about['pid']} ended without finishing"),
    ):
        text = doctor(capsys, path)[1]
        assert f"Why it ended: {why}\nTo go on: " in text
        assert "--resume" in text
        told = json.loads(doctor(capsys, path, "--json")[1])
        assert told["reason"] == why


def test_damaged_results_and_lines_are_named_and_qualify_the_verdict(tmp_path, capsys):
    path = a_run(tmp_path / "copied")
    for folder, level in (("up-before", 0.2), ("up-after", 0.7), ("sums-before", 0.5)):
        write_result(path / "evals" / folder, an_eval(folder.partition("-")[0], level, 1))
    metrics, torn = path / "metrics.jsonl", path / "evals" / "sums-after" / "results.json"
    _, whole = doctor(capsys, path, "--json")
    assert json.loads(whole)["problems"] == []
    lines = metrics.read_text().splitlines(keepends=True)
    others = ("{}\n", '{"step": "abc"}\n', "null\n", '{"step": 31, "loss": NaN}\n')
    # The last line, without its end, is still being written.
    metrics.write_text(
        "".join([*lines[:30], lines[30][:50] + "\n", *others, *lines[31:-1], lines[-1][:50]])
    )
    write_result(torn.parent, read_result(torn.parent.with_name("sums-before")))
    torn.write_text(torn.read_text()[:500])
    (path / "config.json").write_text("{")
    for name in ("servers.jsonl", "restarts.jsonl", "eval_points.jsonl"):
        (path / name).write_text('{"time_s": "late"}\n{"time_s": 1')
    told = json.loads(doctor(capsys, path, "--json")[1])
    assert told["verdict"]["outcome"] == "learned"
    assert told["verdict"]["text"].startswith("Learned, as far as evals can be read: ")
    assert "sums-after cannot be read" in told["verdict"]["text"]
    for named, said in zip(
        (
            "metrics.jsonl has 4 damaged lines",
            *("servers.jsonl has a", "restarts.jsonl has a", "eval_points.jsonl has a"),
            *("config.json is damaged", f"{torn} is damaged"),
        ),
        told["problems"],
        strict=True,
    ):
        assert named in said
    assert doctor(capsys, path)[1].count("Note: ") == 6
    with pytest.raises(SystemExit):
        main(["eval", "compare", str(path / "evals" / "sums-before"), str(torn.parent)])
    said = capsys.readouterr().err
    assert "results.json is damaged" in said
    assert "--resume" not in said


def test_the_folder_of_an_eval_leads_to_what_shows_it(tmp_path, capsys):
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    assert ended.value.code == 2
    assert f"telescope eval --report {tmp_path}" in capsys.readouterr().err
