"""`telescope sft`: what it trains, writes and prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from telescope_cli.main import main

TOY = Path(__file__).parents[1] / "train"


@pytest.fixture
def telescope(tmp_path, monkeypatch, capsys):
    """Run the command in a folder of its own; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(TOY)

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["sft", *map(str, arguments)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text(
        'model = "base"\nmake_tiny_model = true\noutput = "warm"\nnumber_of_steps = 4\n'
        "warmup_steps = 1\nbatch_size = 8\nnum_examples = 20\nnum_held_out = 4\n"
        '[[environments]]\nname = "toy_digits:LastDigit"\n'
    )
    return path


@pytest.mark.slow
def test_sft_prints_where_the_model_is_and_its_accuracy(config_file, telescope, tmp_path):
    code, out, err = telescope(config_file, "--loss_log_every", "2", "--json")
    assert code == 0, err
    last = json.loads(out)
    assert last["step"] == 4
    assert 0 <= last["accuracy"] <= 1
    assert last["loss/total"] > 0
    assert (tmp_path / "warm" / "config.json").is_file()


def test_a_dry_run_shows_what_is_learned_and_starts_nothing(config_file, telescope, tmp_path):
    code, out, err = telescope(config_file, "--dry-run")
    assert code == 0, err
    assert "4 steps of 8 samples on base: each sample 1.6 times" in out
    assert "\n  | " in out, "what is learned"
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = telescope(config_file, "--dry-run", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert (plan["num_samples"], plan["num_held_out"]) == (20, 4)
    assert plan["num_learned_tokens"] == 20 * 2, "a digit and the end token"
    assert [path.name for path in tmp_path.iterdir()] == ["sft.toml"]
    code, _, err = telescope(config_file, "--dry_run")
    assert code == 2
    assert "did you mean '--dry-run'" in err


@pytest.mark.slow
def test_a_dataset_is_learnt_and_what_was_cut_is_said(telescope, tmp_path):
    (tmp_path / "chat.toml").write_text(
        'model = "base"\nmake_tiny_model = true\noutput = "warm"\nnumber_of_steps = 2\n'
        'warmup_steps = 1\nbatch_size = 4\nnum_held_out = 2\nseq_len = 40\ndataset = "other"\n'
    )
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]}
        for text in ["b", "c", "d", "e" * 60, "f", "g"]
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "conversations.jsonl").write_text(lines)
    flags = ("--dataset", "conversations.jsonl", "--too_long", "truncate")
    code, out, err = telescope("chat.toml", *flags)
    assert code == 0, err
    assert "1 truncated, 0 dropped" in out
    assert (tmp_path / "warm" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["sft.toml", "--batchsize", "3"], "batch_size"),
        (["none.toml"], "none.toml"),
    ],
)
def test_mistakes_are_one_message_and_write_nothing(
    config_file, telescope, tmp_path, arguments, fact
):
    code, out, err = telescope(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert fact in err
    assert telescope()[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sft.toml"]
