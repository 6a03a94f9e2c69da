"""SWE small: each fix earns 1, no patch and every kind of tampering earn 0, in real sandboxes."""

import asyncio
import json

import pytest
from tests.asking import ask

from telescope_core import RolloutStatus, Sampling, Split
from telescope_core.errors import ConfigError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_swe_small import SweSmall
from telescope_env_telescope_swe_small.tasks import read_task, tasks

PAGES = tasks()["pages"]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def bash(command: str) -> str:
    return call("bash", command=command)


def edit(path: str, old: str, new: str) -> str:
    return call("edit", path=path, old=old, new=new)


FIX = [edit(one.path, one.old, one.new) for one in PAGES.fix]


@pytest.fixture
async def environment():
    made = SweSmall(SweSmall.Config(command_timeout_s=60.0, tool_timeout_s=90.0, memory_mb=256))
    yield made
    await made.close()


def place_of(environment: SweSmall, name: str) -> tuple[Split, int]:
    split = tasks()[name].split
    source = environment.examples(split)
    ids = [source.example(index).id for index in range(source.num_examples)]
    return split, ids.index(name)


async def play(environment, replies, *, name: str = "pages"):
    split, index = place_of(environment, name)
    request = ask(
        split=split, example_index=index, sampling=Sampling(max_tokens=16), deadline_s=600
    )
    client = InProcessEnvironment(environment, name="swe")
    rollout = await client.play(request, ScriptedClient([*replies, "Done."]).policy("r"))
    assert rollout.error is None
    return rollout


def told(rollout) -> list[str]:
    return [one.content for one in rollout.messages if "<tool_response>" in one.content]


@pytest.mark.slow
async def test_every_fix_earns_the_maximum_and_no_patch_nothing(environment):
    names = list(tasks())
    golds = []
    for name in names:
        split, index = place_of(environment, name)
        example = environment.examples(split).example(index)
        golds.append([bash("python3 -m unittest"), *environment.gold_answer(example)[:-1]])
    fixed = await asyncio.gather(
        *(play(environment, gold, name=name) for name, gold in zip(names, golds, strict=True))
    )
    assert {name: one.reward for name, one in zip(names, fixed, strict=True)} == dict.fromkeys(
        names, 1.0
    )
    assert all("OK" in told(one)[0] for one in fixed), "the tests that are seen pass with the bug"
    assert all(one.metrics["share_right"] == 1.0 for one in fixed)
    left = await asyncio.gather(*(play(environment, [bash("ls")], name=name) for name in names))
    assert {one.reward for one in left} == {0.0}
    assert all(one.metrics["share_right"] < 1.0 for one in left)


async def test_repositories_are_told_apart_and_say_nothing_of_their_checks():
    assert len(tasks()) == 16
    assert sum(one.split is Split.EVAL for one in tasks().values()) == 4
    assert len({one.issue for one in tasks().values()}) == 16
    for one in tasks().values():
        assert one.tests
        assert len(one.expected) >= 3
        shown = "".join((*one.files.values(), *one.files, one.issue))
        assert "check_" not in shown
        assert "run_check" not in shown


TAMPERING = {
    "deletes the tests": [bash("rm -r tests")],
    "empties a test": [bash(": > tests/test_pages.py")],
    "conftest.py": [
        bash("printf 'import os\\nos._exit(0)' > conftest.py; cp conftest.py tests/conftest.py")
    ],
    "sitecustomize": [bash("printf 'import os\\nos._exit(0)' > sitecustomize.py")],
    "a module for another": [
        bash("for m in pytest unittest json ast types; do printf 'x = 1' > $m.py; done")
    ],
    "a json of its own": [
        bash(
            "printf 'import sys\\ndef loads(t): sys.exit(0)\\ndef dump(v, f):"
            ' f.write(\\"[true, true, true, true]\\")\' > json.py'
        )
    ],
    "ends early": [bash("printf 'import os\\nos._exit(0)' > listing/__init__.py")],
    "prints a verdict": [
        bash("printf 'print(\"OK\")\\nraise SystemExit(0)' > listing/__init__.py")
    ],
    "equal to everything": [
        bash(
            "printf 'class A(int):\\n    def __eq__(s, o): return True\\n"
            "def page(*a): return A()\\nnum_pages = page' > listing/__init__.py"
        )
    ],
    "looks for the answers": [
        bash(
            "printf 'import gc\\ndef page(*a):\\n    return [o for o in gc.get_objects() if o =="
            " [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]]\\nnum_pages = page' > listing/__init__.py"
        )
    ],
    "leaves a process": [bash("(setsid sh -c 'while :; do :; done' &) ; rm -r listing")],
    "a pipe for a test": [bash("rm tests/test_pages.py; mkfifo tests/test_pages.py")],
    "deletes everything": [bash("rm -rf ../*/* ../*")],
}


@pytest.mark.slow
async def test_tampering_earns_nothing(environment):
    ended = {kind: await play(environment, replies) for kind, replies in TAMPERING.items()}
    assert {kind: one.reward for kind, one in ended.items()} == dict.fromkeys(TAMPERING, 0.0)
    assert {one.status for one in ended.values()} == {RolloutStatus.KEPT}


@pytest.mark.slow
@pytest.mark.parametrize("program", ["while True: pass", 'while True: print("x" * 65536)'])
async def test_a_program_without_an_end_earns_nothing(program):
    environment = SweSmall(SweSmall.Config(command_timeout_s=0.3, memory_mb=256))
    path = "listing/__init__.py"
    rollout = await play(environment, [bash(f": > {path}"), edit(path, "", program)])
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 0.0)
    await environment.close()


TESTS_CHANGED = (
    "rm tests/test_pages.py",
    "echo >> tests/test_pages.py",
    "rm tests/test_pages.py; mkfifo tests/test_pages.py",
    "rm tests/test_pages.py; mkdir tests/test_pages.py",
)


@pytest.mark.slow
async def test_a_fix_with_other_tests_earns_nothing_and_says_why(environment):
    for command in TESTS_CHANGED:
        rollout = await play(environment, [*FIX, bash(command)])
        seen = (rollout.reward, *map(rollout.metrics.get, ("share_right", "changed_tests")))
        assert seen == (0.0, 1.0, 1.0), command


async def test_a_fix_with_a_further_test_is_a_fix(environment):
    more = bash("cp tests/test_pages.py tests/test_more.py; python3 -m unittest")
    rollout = await play(environment, [*FIX, more])
    assert (rollout.reward, rollout.metrics["changed_tests"]) == (1.0, 0.0)
    assert "Ran 2 tests" in told(rollout)[-1]


async def test_edits_that_cannot_be_made_are_told(environment):
    path = PAGES.fix[0].path
    rollout = await play(
        environment,
        [
            call("edit", path="no/such", old="a", new="b"),
            call("edit", path=path, old="return", new="b"),
            call("edit", path=path, old="not there", new="b"),
            call("edit", path="listing", old="a", new="b"),
            call("edit", path="new/file.py", old="", new="x = 1\n"),
            bash("cat new/file.py; printf '\\377' > raw"),
            call("edit", path="raw", old="a", new="b"),
            call("edit", path="huge", old="", new="x" * 300_000),
            call("edit", path="/usr/x", old="", new="x"),
        ],
    )
    replies = told(rollout)
    assert "no/such cannot be read" in replies[0]
    assert "it occurs 3 times" in replies[1] or "it occurs 2 times" in replies[1]
    assert "it occurs 0 times" in replies[2]
    assert "listing cannot be read" in replies[3]
    assert "new/file.py was changed" in replies[4]
    assert "x = 1" in replies[5]
    assert "raw is no text" in replies[6]
    assert "a file may have 200000 characters" in replies[7]
    assert "/usr/x cannot be written" in replies[8]
    assert rollout.reward == 0.0


async def test_without_a_tool_call_there_is_no_sandbox(environment):
    rollout = await play(environment, [])
    assert (rollout.reward, rollout.metrics["share_right"]) == (0.0, 0.0)


def test_a_command_must_end_before_its_call_does():
    with pytest.raises(ConfigError, match=r"command_timeout_s.*\b30\b"):
        SweSmall.from_settings({"command_timeout_s": 30})


def test_a_repository_is_read_from_its_sections():
    task = read_task(
        "x",
        "split: eval\nissue: It: fails.\n== file a.py\nx = 1\n\n== file tests/t.py\n== fix a.py\n"
        "x = 1\n== by\nx = 2\ny = 3\n== hidden\ndef check_a():\n    return 1\n"
        "== expected\ncheck_a: [1, (2,)]\n",
    )
    assert (task.split, task.issue) == (Split.EVAL, "It: fails.")
    assert task.files == {"a.py": "x = 1\n\n", "tests/t.py": ""}
    assert [(one.path, one.old, one.new) for one in task.fix] == [("a.py", "x = 1", "x = 2\ny = 3")]
    assert task.expected == {"check_a": [1, (2,)]}
    assert "check_a" in task.program
