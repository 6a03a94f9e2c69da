"""What a shell is offered for the words of a command line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from telescope_cli import main as cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def offers(capsys, monkeypatch, tmp_path):
    """Return what bash is offered after a line, whose last word may be empty."""
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(ROOT / "registry"))
    monkeypatch.chdir(tmp_path)

    def run(line):
        monkeypatch.setenv("_TELESCOPE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit):
            cli.main(())
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.split()

    return run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("telescope ev", ["eval"]),
        ("telescope eval com", ["compare"]),
        ("telescope eval compare a b --js", ["--json"]),
        ("telescope eval reverse", ["reverse-text"]),
        ("telescope env validate reverse", ["reverse-text"]),
        ("telescope rescore runs/one --env reverse", ["reverse-text"]),
        ("telescope train run.toml --group_s", ["--group_size"]),
        ("telescope train run.toml --group-s", ["--group-size"]),
        ("telescope train run.toml --rollout.group_s", ["--rollout.group_size"]),
        ("telescope train run.toml --group_size 4 --group_s", []),
        ("telescope train run.toml --use_tis ", ["true", "false"]),
        ("telescope train run.toml --algorithm gs", ["gspo"]),
        ("telescope simulate run.toml --group_s", ["--group_size"]),
        ("telescope sft run.toml --too_long tr", ["truncate"]),
        ("telescope eval countdown --env.use", ["--env.use_all"]),
        ("telescope eval countdown --env.use_all t", ["true"]),
        ("telescope eval math-reasoning --env.level gr", ["grade-school"]),
        ("telescope rescore runs/one --env countdown --env.use", ["--env.use_all"]),
        ("telescope eval countdown rev", ["reverse-text"]),
        ("telescope eval countdown --env.use_all true reverse-text count", []),
        ("telescope rescore runs/one --env countdown rev", []),
        ("telescope eval no-such-environment --env.", []),
        ("telescope eval --env.", []),
    ],
)
def test_a_shell_is_offered_what_goes_on_so(offers, line, expected):
    assert offers(line) == expected


def test_no_code_runs_that_is_not_installed(offers, tmp_path):
    (tmp_path / "own.py").write_text("open('ran', 'w').close()\n")
    assert offers("telescope eval own.py:Own --env.") == []
    assert not (tmp_path / "ran").exists()


def test_runs_are_offered_to_what_reads_them(offers, tmp_path):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "run.json").write_text("{}")
    for verb in ("rescore", "watch", "doctor", "compare", "export"):
        assert offers(f"telescope {verb} quick") == ["quickstart"], verb


@pytest.mark.slow
def test_it_is_set_up_with_one_command(tmp_path):
    command = shlex.join([str(Path(sys.executable).with_name("telescope")), "--install-completion"])
    done = subprocess.run(
        # Not the last command, or bash would become it, and no shell would be found above it.
        ["bash", "-c", f"{command} && . ~/.bashrc && complete -p telescope"],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout.splitlines()[-1]
