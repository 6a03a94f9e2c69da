"""What an eval writes down of its environment's code, and what a changed one means for it."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import endpoint, serve_app
from tests.envs.projects import TOY

from telescope_core.evals import read_result

__all__ = ["endpoint", "serve_app"]
NUMBERS = TOY.replace('id=f"{split}-0", prompt="yes?"', 'id=f"{split}-0", prompt="2"')


@pytest.mark.slow
def test_an_eval_says_which_code_it_measured(telescope, make_project, endpoint):
    address, _ = endpoint
    project = make_project(code=NUMBERS)
    assert telescope("env", "link", str(project))[0] == 0
    command = ["eval", "toy", "--base-url", address, "--examples", "1", "--rollouts", "2"]
    command += ["--output", "out"]
    code, _, err = telescope(*command)
    assert code == 0, err
    result = read_result(Path("out"))
    assert result is not None
    record = result.environment_record
    assert record is not None
    assert (record.id, record.version, record.place) == ("acme/toy", "0.1.0", "linked")
    assert len(record.lock_digest) == 64
    assert json.loads(Path("out/eval.json").read_text())["manifest"]["environment_code"] == {
        "id": "acme/toy",
        "version": "0.1.0",
        "wheel_sha256": "",
        "lock_digest": record.lock_digest,
    }
    assert record.text in Path("out/report.html").read_text()
    (project / "telescope_env_acme_toy" / "more.py").write_text("")
    code, _, err = telescope(*command, "--resume")
    assert code == 2
    assert "environment_code.lock_digest: " in err
    assert "use the same" in err


def test_a_missing_environment_is_answered_with_the_command(telescope, published):
    for verb in (["eval", "toy", "--base-url", "http://127.0.0.1:9/v1"], ["env", "tree", "toy"]):
        code, _, err = telescope(*verb)
        assert code == 3
        assert "environment 'toy' is not installed; run: telescope env install toy" in err
    code, _, err = telescope("eval", "toyy", "--base-url", "http://127.0.0.1:9/v1")
    assert (code, "did you mean 'toy'" in err) == (2, True)
