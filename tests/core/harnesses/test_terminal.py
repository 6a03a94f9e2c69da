"""The harness `terminal`: its screen, what it reads in answers, and rollouts in local sandboxes."""

import json

import pytest
from tests.core.harnesses.agents import Counted, playing

from telescope_core import RolloutStatus, StopReason
from telescope_core.errors import ConfigError
from telescope_core.harnesses import AgentConfig, open_harness
from telescope_core.harnesses.terminal_program import COLUMNS, ROWS, Screen, asked_in, shortened

DRAWN = [
    ("one\r\ntwo", "one\ntwo"),
    ("10%\r20%\r\n", "20%"),
    ("abc\b\bX", "aXc"),
    ("a\tb", "a       b"),
    ("\x1b[1;31mred\x1b[0m", "red"),
    ("\x1b]0;title\x07text", "text"),
    ("abcdef\x1b[3D\x1b[K", "abc"),
    ("abcdef\x1b[4G\x1b[1K", "    ef"),
    ("abcdef\x1b[2G\x1b[2P", "adef"),
    ("abc\x1b[2G\x1b[2@", "a  bc"),
    ("abc\x1b[2G\x1b[X", "a c"),
    ("a\r\nb\r\nc\x1b[2;1H\x1b[M", "a\nc"),
    ("a\r\nb\x1b[1;1H\x1b[Lz", "z\na\nb"),
    ("a\r\nb\x1b[1;1H\x1bMz", "z\na\nb"),
    ("a\x1b7\r\nb\x1b8c", "ac\nb"),
    ("\x1b[2;3Hx\x1b[Ay\x1b[Bz", "   y\n  x z"),
    ("a\r\nb\r\nc\x1b[1;2r\x1b[2;1H\nd", "a\nb\nd\nc"),
    ("a" * (COLUMNS + 1), "a" * COLUMNS + "\na"),
    ("a\x1b[99;1Hb", "a" + "\n" * (ROWS - 1) + "b"),
]


@pytest.mark.parametrize(("printed", "shown"), DRAWN, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_screen_shows_what_a_terminal_would(printed, shown, at_once):
    screen = Screen()
    for piece in [printed] if at_once else printed:
        screen.feed(piece)
    assert screen.news() == shown


def test_what_has_scrolled_away_is_shown_once():
    screen = Screen()
    screen.feed("$ ")
    assert screen.news() == "$"
    screen.feed("seq\r\n" + "".join(f"{n}\r\n" for n in range(3 * ROWS)) + "$ ")
    assert screen.news().splitlines() == ["$ seq", *map(str, range(3 * ROWS)), "$"]
    screen.feed("true\r\n$ ")
    assert screen.news() == "$ true\n$"
    screen.feed("\x1b[H\x1b[2Jclear")
    assert screen.news() == "clear"
    screen.feed("\r\n$ vi\r\n\x1b[?1049h\x1b[2J\x1b[Hdrawn")
    assert screen.news() == "drawn"
    screen.feed("\x1b[?1049l$ ")
    assert screen.news() == "clear\n$ vi\n$"


def test_the_shell_says_when_a_command_has_ended_and_how():
    screen = Screen()
    screen.feed("\x1b]133;C\x07out")
    assert not screen.is_waiting
    screen.feed("\x1b]133;D;13\x07$ ")
    assert (screen.is_waiting, screen.exit_code) == (True, 13)
    assert screen.news() == "out$"


def test_the_last_object_of_an_answer_counts():
    text = 'First {x} {"commands": []} then {"commands": [{"keys": "a\nb"}]} {"other": 1}'
    assert asked_in(text) == {"commands": [{"keys": "a\nb"}]}
    assert asked_in('{"done": true}') == {"done": True}


@pytest.mark.parametrize(
    "answer",
    [
        *("ls", "{", "[]", '{"keys": "ls"}', '{"commands": "ls"}', '{"commands": [{}]}'),
        *('{"commands": [{"keys": 3}]}', '{"commands": [{"keys": "a", "wait_s": "b"}]}'),
    ],
)
def test_an_answer_that_types_nothing_is_told_why(answer):
    with pytest.raises(ValueError, match=r"commands|wait_s"):
        asked_in(answer)


def test_long_output_loses_its_middle():
    assert shortened("ab") == "ab"
    text = shortened("a" * 20_000 + "z")
    assert len(text) < 13_000
    assert text[-1] == "z"
    assert "8001 characters left out" in text


@pytest.mark.parametrize("wait_s", [0, -1.0, 1000])
def test_a_time_that_cannot_be_waited_is_refused(wait_s):
    with pytest.raises(ConfigError, match="wait_s"):
        open_harness("terminal", wait_s=wait_s)


def typed(*keys: str, **more) -> str:
    return "I type. " + json.dumps({"commands": [{"keys": one} for one in keys], **more})


def environment(**config) -> Counted:
    return Counted(AgentConfig(harness="terminal", **config))


@pytest.mark.slow
async def test_a_rollout_is_played_in_one_shell_that_goes_on():
    async with playing(environment()) as play:
        rollout, policy = await play(
            typed("n=$(wc -l < words)\n"),
            "no object",
            json.dumps({"commands": [{"keys": "cat > seen\n", "wait_s": 0.1}]}),
            typed("x\n\u0004", "cat seen; echo $n > count; cat count; (exit 3)\n"),
            typed(done=True, answer="It has 3."),
        )
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0), rollout.info
    assert rollout.stop_reason is StopReason.COMPLETED
    assert rollout.completion_text == "It has 3."
    first, second, third, fourth, last = policy.asked
    assert first.startswith("How many lines does `words` have?")
    assert "the last one ended with 0" in second
    assert "no JSON object with commands" in third
    assert "a program is running" in fourth
    assert "\nx\n3\n" in last
    assert "the last one ended with 3" in last
    [said] = rollout.conversations
    assert [one.role for one in said] == ["system", *["user", "assistant"] * 5]


@pytest.mark.slow
async def test_its_turns_are_counted_and_an_ended_shell_begins_anew():
    async with playing(environment(max_turns=2)) as play:
        rollout, policy = await play(typed("exit 1\n"), typed("echo on\n"), "never")
    assert rollout.status is RolloutStatus.KEPT, rollout.error
    assert "the shell has ended" in policy.asked[1]
    assert (len(policy.asked), rollout.completion_text) == (2, "")
    assert rollout.stop_reason is StopReason.MAX_TURNS
