import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_train.config.sft_schema import load_sft_config
from telescope_train.sft import run_sft

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text(
        f"""
        model = "{tmp_path}/base"
        make_tiny_model = true
        output = "{tmp_path}/warm"
        number_of_steps = 40
        batch_size = 32
        num_examples = 200
        num_held_out = 20
        learning_rate = 3e-3
        loss_log_every = 20
        [[environments]]
        name = "toy_digits:LastDigit"
        """
    )
    return path


def test_sft_lowers_the_loss_and_learns(config_file, tmp_path):
    rows = []
    output = run_sft(load_sft_config([config_file]), on_row=rows.append)
    assert output == tmp_path / "warm"
    assert [row.step for row in rows] == [0, 20, 40]
    assert rows[-1].metrics["loss/total"] < 0.7 * rows[1].metrics["loss/total"]
    assert rows[0].accuracy < 0.01
    assert rows[-1].accuracy > 0.05
    lines = (tmp_path / "warm-log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 20, 40]
    assert json.loads(lines[-1])["accuracy/toy_digits:LastDigit"] == rows[-1].accuracy
    assert json.loads((tmp_path / "warm-log" / "config.json").read_text())["batch_size"] == 32
    assert len(AutoTokenizer.from_pretrained(output)) == 103
    assert AutoModelForCausalLM.from_pretrained(output).num_parameters() > 500_000


def test_it_stops_at_the_accuracy_that_is_enough(config_file):
    rows = []
    flags = ["--stop_at_accuracy", "1e-12", "--loss_log_every", "2"]
    run_sft(load_sft_config([config_file], flags), on_row=rows.append)
    assert [row.step for row in rows] == [0, 2]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("toy_digits:NoGold", ConfigError, "has no gold answers"),
        ("toy_digits:BadGold", EnvironmentLoadError, "below the success threshold"),
        ("nowhere", ConfigError, "unknown environment 'nowhere'"),
    ],
)
def test_environments_that_cannot_be_learnt_from(config_file, tmp_path, name, error, message):
    entry = json.dumps([{"name": name}])
    with pytest.raises(error, match=message):
        run_sft(load_sft_config([config_file], ["--environments", entry]))
    assert [path.name for path in tmp_path.iterdir()] == ["sft.toml"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rat", "1"], "learning_rate"),
        (["--batch_size", "0"], "batch_size"),
        (["--lr_scheduler", "none", "--warmup_steps", "3"], "no warm-up"),
        (["--warmup_steps", "41"], "must not exceed number_of_steps"),
        (["--environments", "[]"], "environments"),
    ],
)
def test_settings_that_cannot_be_used(config_file, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_sft_config([config_file], flags)


def test_an_example_longer_than_seq_len_is_refused(config_file):
    with pytest.raises(ConfigError, match="raise seq_len"):
        run_sft(load_sft_config([config_file], ["--seq_len", "6"]))
