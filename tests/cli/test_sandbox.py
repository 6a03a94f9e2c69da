"""`telescope sandbox`: the list, the check, and its exit codes."""

import json

import pytest

from telescope_cli.main import main
from telescope_core.sandboxes.local.sandbox import LocalSandbox


def ran(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sandbox", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_list_says_what_each_can_give(capsys):
    code, out, _ = ran(capsys, "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert "network=none" in rows["local"]["limits"]
    assert "network=full" not in rows["local"]["limits"]
    code, out, _ = ran(capsys, "list")
    assert code == 0
    [line] = [line for line in out.splitlines() if "RLIMIT_NPROC" in line]
    assert "max_processes" in line, "each limit has its means beside it"


def test_a_check_that_passes(capsys):
    code, out, _ = ran(capsys, "check", "local", "--json")
    found = json.loads(out)
    assert (code, found["passed"]) == (0, True), out
    assert len(found["checks"]) >= 15
    code, out, _ = ran(capsys, "check", "local")
    assert code == 0
    assert out.count("ok    ") == len(found["checks"])


def test_a_sandbox_that_does_something_else_is_told_with_exit_code_1(capsys, monkeypatch):
    plain = LocalSandbox.read

    async def wrong(self, path):
        return (await plain(self, path))[:-1]

    monkeypatch.setattr(LocalSandbox, "read", wrong)
    code, out, _ = ran(capsys, "check", "local")
    assert code == 1
    assert "FAILED files" in out
    assert "CheckFailedError: expected the bytes that were written" in out


def test_where_there_are_no_sandboxes_the_exit_code_is_2(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = ran(capsys, "check", "local")
    assert code == 2
    assert "apt-get install bubblewrap" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "locl"), "unknown sandbox provider 'locl'; did you mean 'local'"),
        (("check", "local", "--set", "python"), "--set: expected NAME=VALUE, got 'python'"),
        (("check", "local", "--set", "color=red"), "unexpected keyword argument 'color'"),
        (("chek", "local"), "unknown command 'chek'; did you mean 'check'"),
    ],
)
def test_mistakes_are_refused_with_what_is_right(capsys, words, said):
    code, _, err = ran(capsys, *words)
    assert code == 2
    assert said in err
