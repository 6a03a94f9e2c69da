import json
import subprocess
import sys
from pathlib import Path

import pytest

TOY = Path(__file__).parents[1] / "train"


def telescope_sft(*arguments, folder):
    code = "from telescope_cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "sft", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": str(TOY), "OMP_NUM_THREADS": "1", "HOME": str(folder)},
    )


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text(
        'model = "base"\nmake_tiny_model = true\noutput = "warm"\nnumber_of_steps = 4\n'
        "warmup_steps = 1\nbatch_size = 8\nnum_examples = 20\nnum_held_out = 4\n"
        '[[environments]]\nname = "toy_digits:LastDigit"\n'
    )
    return path


@pytest.mark.engine
def test_sft_prints_where_the_model_is_and_its_accuracy(config_file, tmp_path):
    done = telescope_sft(config_file, "--loss_log_every", "2", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout)
    assert last["step"] == 4
    assert 0 <= last["accuracy"] <= 1
    assert last["loss/total"] > 0
    assert (tmp_path / "warm" / "config.json").is_file()


@pytest.mark.engine
def test_a_dataset_is_learnt_and_what_was_cut_is_said(tmp_path):
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
    done = telescope_sft("chat.toml", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "longer than seq_len: 1 truncated, 0 dropped" in done.stdout
    assert (tmp_path / "warm" / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a settings file"),
        (["sft.toml", "--batchsize", "3"], "batch_size"),
        (["none.toml"], "none.toml"),
    ],
)
def test_mistakes_are_one_message_and_write_nothing(config_file, tmp_path, arguments, message):
    done = telescope_sft(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".cache"] == ["sft.toml"]
