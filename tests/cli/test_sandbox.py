"""`telescope sandbox`: the list, the check, and its exit codes."""

import json
import sys

import pytest
from tests.ports import free_port

from telescope_cli.main import main
from telescope_core.sandboxes import check
from telescope_core.sandboxes.local.sandbox import LocalSandbox


@pytest.fixture
def two_checks(monkeypatch):
    """The quickest of the checks; the tests of each provider try all of them."""
    two = {name: check.CHECKS[name] for name in ("words are not interpreted", "files")}
    monkeypatch.setattr(check, "CHECKS", two)


def ran(capsys, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["sandbox", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_list_says_what_each_can_give(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = ran(capsys, "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert "network=none" in rows["local"]["limits"]
    assert "network=full" not in rows["local"]["limits"]
    code, out, _ = ran(capsys, "list")
    assert code == 0
    [line] = [line for line in out.splitlines() if "RLIMIT_NPROC" in line]
    assert "max_processes" in line, "each limit has its means beside it"
    assert "u001b" not in out, "styles would be escaped like all others"


@pytest.mark.slow
def test_a_check_that_passes(capsys, two_checks):
    code, out, _ = ran(capsys, "check", "local", "--json")
    found = json.loads(out)
    assert (code, found["passed"]) == (0, True), out
    assert [one["check"] for one in found["checks"]] == list(check.CHECKS)
    code, out, _ = ran(capsys, "check", "local")
    assert code == 0
    assert out.count("ok    ") == 2


@pytest.mark.slow
def test_all_that_every_sandbox_must_do_is_tried(capsys):
    code, out, _ = ran(capsys, "check", "local", "--json")
    found = json.loads(out)
    assert (code, found["passed"]) == (0, True), out
    assert [one["check"] for one in found["checks"]] == list(check.CHECKS)


def test_a_sandbox_that_does_something_else_is_told_with_exit_code_1(
    capsys, monkeypatch, two_checks
):
    plain = LocalSandbox.read

    async def wrong(self, path):
        return (await plain(self, path))[:-1]

    monkeypatch.setattr(LocalSandbox, "read", wrong)
    code, out, _ = ran(capsys, "check", "local")
    assert code == 1
    assert "FAILED files" in out
    assert out.count("ok    ") == 1
    assert "CheckFailedError: " in out


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


@pytest.mark.parametrize(
    ("cloud", "module"),
    [("daytona", "daytona"), ("e2b", "e2b"), ("modal", "modal"), ("prime", "prime_sandboxes")],
)
def test_a_cloud_without_its_sdk_says_what_to_install(capsys, monkeypatch, cloud, module):
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = ran(capsys, "check", cloud)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert f"pip install 'telescope-core[{cloud}]'" in err


@pytest.mark.parametrize("place", ["unix:///nowhere.sock", "nonsense", "http://127.0.0.1:PORT"])
def test_a_docker_that_does_not_answer_says_where_it_was_looked_for(capsys, place):
    place = place.replace("PORT", str(free_port()))
    code, out, err = ran(capsys, "check", "docker", "--set", f"base_url={place}")
    assert (code, out) == (2, "")
    assert f"no Docker answers at {place}: " in err


def test_an_image_without_a_name_is_refused(capsys):
    code, _, err = ran(capsys, "check", "docker", "--image", "")
    assert code == 2
    assert "image of a sandbox must be the name of an image" in err
