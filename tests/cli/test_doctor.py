"""`telescope doctor`: the verdict, what is wrong, and the exit code that programs ask for."""

import json

import pytest
from tests.core.diagnosis.test_rules import healthy, rising

from telescope_cli.main import main
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
