"""Nothing that a command writes or prints holds the value of a secret, whichever way it came in."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ui.recorded import row, write_steps

from telescope_cli.main import main
from telescope_core.records import RunFolder
from telescope_core.records.identity import Resume
from telescope_core.reports.train_report import write_train_report
from telescope_core.types import TurnInfo
from telescope_ui.web.export import export_runs

SETTING, PASSWORD, VARIABLE = "setting-1-value", "address-2-pw", "variable-3-value"
ADDRESS = f"http://me:{PASSWORD}@10.0.0.5:8000/v1?api_key={SETTING}"


def left_in(folder: Path) -> dict[str, list[str]]:
    """Return the files of a folder that hold one of the secrets, with those."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert contents
    return {
        path.name: found
        for path, content in contents.items()
        if (found := [one for one in (SETTING, PASSWORD, VARIABLE) if one.encode() in content])
    }


@pytest.mark.slow
def test_the_folder_of_a_run_its_report_and_its_pages(tmp_path):
    config = {
        "run": {"name": "r", "number_of_steps": 4},
        "environments": [{"name": "math", "env": {"api_key": SETTING, "judge": {"url": ADDRESS}}}],
        "observability": {"otlp_export_endpoint": ADDRESS},
    }
    run = RunFolder.create(tmp_path / "runs" / "r", config=config)
    run.hide = {SETTING, PASSWORD, VARIABLE}
    write_steps(run, range(1, 3))
    said = f"it said {VARIABLE} to {ADDRESS}"
    told = replace(
        row(3, 0, 0),
        error=said,
        status_reason=f"Error_{VARIABLE}",
        tags={"key": said},
        info=(TurnInfo(turn=0, key="note", value=said),),
    )
    run.write_rollouts(3, [told])
    run.write_attempts(3, [told])
    run.log_metrics({"step": 3, "version": 3, "time_s": 3.0})
    run.fail(said)
    RunFolder.resume(
        run.path,
        config=config,
        resume=Resume(at="2026-01-01T00:00:00+00:00", step=3, checkpoint=""),
    ).fail("it ended")
    write_train_report(run)
    export_runs([tmp_path / "runs"], tmp_path / "page", num_rollouts=5)
    assert left_in(tmp_path) == {}
    written = json.loads((run.path / "config.json").read_text())["environments"][0]["env"]
    assert written == {
        "api_key": "(left out)",
        "judge": {"url": "http://10.0.0.5:8000/v1?api_key=(left out)"},
    }


@pytest.fixture
def keyed(tmp_path, monkeypatch):
    """An environment with a secret as a setting, and one that it declares."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIGITS_KEY", VARIABLE)
    (tmp_path / "keyed.py").write_text(
        "import logging\n"
        "from telescope_core import EnvironmentConfig\n"
        "from toy_digits import LastDigit\n\n\n"
        "class Keyed(LastDigit):\n"
        "    secrets = ('DIGITS_KEY',)\n\n"
        "    class Config(EnvironmentConfig):\n"
        "        api_key: str = ''\n"
        "        judge_url: str = ''\n\n"
        "    def __init__(self, config=None):\n"
        "        super().__init__(config)\n"
        "        print(self.config, self.secret('DIGITS_KEY'))\n"
        "        logging.getLogger('telescope_core').warning('%s', self.config)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "train")
    yield json.dumps([{"name": "keyed:Keyed", "env": {"api_key": SETTING, "judge_url": ADDRESS}}])
    sys.modules.pop("keyed", None)


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_a_dry_run(keyed, tmp_path, capfd):
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "r"\nnumber_of_steps = 1\n[model]\nmodel = "{tmp_path}/none"\n'
        f'[observability]\notlp_export_endpoint = "{ADDRESS}"\n'
    )
    for more in ((), ("--json",)):
        command("train", "run.toml", "--environments", keyed, "--dry-run", *more)
        said = capfd.readouterr()
        assert "DIGITS_KEY (set)" in said.err
        for secret in (SETTING, PASSWORD, VARIABLE):
            assert secret not in said.out + said.err


@pytest.mark.nightly
def test_supervised_training_that_goes_on_with_another_key(keyed, tmp_path, capfd):
    (tmp_path / "sft.toml").write_text(
        f'model = "{tmp_path}/base"\nmake_tiny_model = true\noutput = "{tmp_path}/out/warm"\n'
        "number_of_steps = 2\nbatch_size = 4\nnum_examples = 8\nnum_held_out = 4\n"
        "loss_log_every = 1\ncheckpoint_every = 1\nwarmup_steps = 0\n"
    )
    assert command("sft", "sft.toml", "--environments", keyed) == 0
    said = capfd.readouterr()
    assert "DIGITS_KEY (set)" in said.out + said.err
    for secret in (SETTING, PASSWORD, VARIABLE):
        assert secret not in said.out + said.err
    # Another key does not keep it from going on.
    again = keyed.replace(SETTING, "another-value")
    more = ("--number_of_steps", 3, "--resume_from_checkpoint", "latest")
    assert command("sft", "sft.toml", "--environments", again, *more) == 0, capfd.readouterr().err
    assert left_in(tmp_path / "out") == {}
    assert "(left out)" in (tmp_path / "out" / "warm-log" / "config.json").read_text()
