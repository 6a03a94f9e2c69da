"""A whole run of the real command, its evals, its export and its pages hold no secret."""

import sys
from pathlib import Path

import pytest
from tests.ports import free_port

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import TELESCOPE, finish, train_command

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

SETTING, PASSWORD, VARIABLE, HOST = "setting-1-key", "address-2-pw", "variable-3-db", "host-4-key"
KEYED = """
import logging
from telescope_core import EnvironmentConfig, Example, ListSource, SingleTurnEnvironment, reward

class Keyed(SingleTurnEnvironment):
    secrets = ("KEYED_DATABASE",)

    class Config(EnvironmentConfig):
        api_key: str = ""
        judge_url: str = ""

    def __init__(self, config=None):
        super().__init__(config)
        self.known = f"{self.config} {self.secret('KEYED_DATABASE')}"
        print(self.known)
        logging.getLogger("telescope_core.keyed").warning(self.known)

    def examples(self, split):
        return ListSource([Example(id=f"{split}-{n}", prompt=f"{split[0]}{n}=") for n in range(32)])

    @reward
    def has_digit(self, rollout, example):
        if len(rollout.completion_text) % 7 == 3:
            raise ValueError(self.known)
        return float(any(one.isdigit() for one in rollout.completion_text))
"""
RUN = """
environments = [{{ name = "keyed:Keyed", env = {env} }}]
[run]
name = "keyed"
number_of_steps = 2
[rollout]
discard_group_zero_advantage = false
[checkpoint]
checkpoint_every = 1
[evals]
eval_before_training = true
[[evals.evals]]
name = "keyed:Keyed"
env = {env}
num_samples = 8
pass_k = [1]
"""


def test_a_run_its_evals_its_export_and_its_pages(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "keyed.py").write_text(KEYED)
    address = f"http://me:{PASSWORD}@10.0.0.5:8000/v1"
    env = f'{{ api_key = "{SETTING}", judge_url = "{address}" }}'
    command = train_command(tmp_path, tiny_model, RUN.format(env=env))
    variables = {"PYTHONPATH": str(tmp_path), "KEYED_DATABASE": VARIABLE, "OTHER_API_KEY": HOST}
    said = finish(command, tmp_path, **variables)
    assert "keyed:Keyed may read these environment variables: KEYED_DATABASE (set)" in said
    # Another key comes with the settings, and the run goes on.
    more = (tmp_path / "run.toml").read_text().replace(SETTING, "another-5-key")
    (tmp_path / "run.toml").write_text(more.replace("number_of_steps = 2", "number_of_steps = 3"))
    port = ("--inference_base_port", str(free_port()))
    said += finish([*command, "--resume", *port], tmp_path, **variables)
    said += finish([*TELESCOPE, "export", "runs/keyed", "--output", "runs/model"], tmp_path)
    said += finish([*TELESCOPE, "ui", "runs/keyed", "--export", "runs/page"], tmp_path)
    secrets = (SETTING, PASSWORD, VARIABLE, HOST, "another-5-key")
    left = {
        str(path.relative_to(tmp_path)): found
        for path in (tmp_path / "runs").rglob("*")
        if path.is_file()
        and (found := [one for one in secrets if one.encode() in path.read_bytes()])
    }
    assert left == {}
    assert [one for one in secrets if one in said] == []
    logs = [path.read_text() for path in (tmp_path / "runs/keyed/logs").glob("environment*")]
    assert any("(left out)" in log for log in logs)
