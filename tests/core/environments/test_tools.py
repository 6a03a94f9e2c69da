"""`ToolEnvironment`: native and tagged calls, errors told to the policy, limits, state, counts."""

import asyncio
import json
import re
import threading
from dataclasses import replace

import pytest
from pydantic import BaseModel
from tests.asking import ask
from tests.core.one_rollout import wait_for_ever
from tests.core.pictures import png

from telescope_core import (
    Completion,
    Episode,
    Example,
    ListSource,
    McpServer,
    Message,
    RolloutStatus,
    StopReason,
    ToolCall,
    ToolConfig,
    ToolEnvironment,
    ToolError,
    message_of,
    reward,
    tool,
)
from telescope_core.environments.tool_calls import ToolFailure, tagged_calls, turn_calls
from telescope_core.errors import ConfigError, EndpointError, EnvironmentLoadError
from telescope_core.images import image_of, with_marks
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient

NEVER = threading.Event()


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


class Place(BaseModel):
    x: float
    y: list[int]
    is_far: bool | None = None


def move(to: Place) -> str:
    """Move."""
    return f"{to}"


async def look_up(title: str) -> dict[str, str]:
    """Look a title up."""
    if title == "nothing":
        raise ToolError("there is nothing of that title")
    return {"title": title}


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


@tool(timeout_s=0.05)
def hang() -> None:
    """Never return."""
    NEVER.wait()


@tool(timeout_s=0.05)
async def hang_too() -> None:
    """Never return either."""
    await asyncio.Event().wait()


def lose_the_judge() -> None:
    """Ask an endpoint that is gone."""
    raise EndpointError("the judge does not answer")


def half() -> str:
    """Return half of a surrogate pair."""
    return "\ud83d"


class Calculator(ToolEnvironment):
    max_turns = 4

    class Config(ToolConfig):
        tool_call_format: str = "native"
        max_tool_characters: int = 60

    def tools(self):
        return [add, move, look_up, divide, hang, hang_too, lose_the_judge, half]

    @tool
    def remember(self, text: str, episode: Episode) -> str:
        """Keep a note."""
        notes = episode.state.setdefault("notes", [])
        notes.append(text)
        return " ".join(notes)

    def examples(self, split):
        return ListSource([Example(id=f"{split}", prompt="What is 2+3?", answer="5")])

    @reward
    def right(self, rollout, example):
        return float(rollout.completion_text == example.answer)


class Tagged(Calculator):
    class Config(ToolConfig):
        pass

    system_prompt = "Be brief."


def native(*calls: tuple[str, str]) -> Completion:
    made = tuple(
        ToolCall(id=f"c{index}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate(calls)
    )
    message = Message(role="assistant", content="", tool_calls=made)
    return Completion(message=message, finish_reason="tool_calls")


def tag(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(environment, replies, *, group_id="g"):
    request = ask(group_id=group_id)
    client = InProcessEnvironment(environment, name="calculator")
    return await client.play(request, ScriptedClient(replies).policy("r"))


def counted(rollout) -> dict[str, float]:
    """Return the metrics that are not 0."""
    return {name: value for name, value in rollout.metrics.items() if value}


async def test_native_calls_are_answered_by_tool_messages():
    rollout = await play(Calculator(), [native(("add", '{"a": 2, "b": 3}')), "5"])
    assert rollout.status is RolloutStatus.KEPT
    assert rollout.reward == 1.0
    assert rollout.messages[2] == Message(role="tool", content="5", tool_call_id="c0")
    assert counted(rollout) == {"tool_calls": 1.0, "tool_calls/add": 1.0, "tools_used": 1.0}
    assert {f"tool_errors/{kind}" for kind in ToolFailure} < set(rollout.metrics)


async def test_native_tools_reach_the_policy_in_every_turn_and_tags_do_not():
    shown = []

    class Policy:
        endpoint = None

        async def complete(self, messages, sampling, *, tools=()):
            shown.append([one["function"]["name"] for one in tools])
            return Completion(
                message=Message(
                    role="assistant", content="5" if len(shown) % 2 == 0 else tag("add", a=1)
                ),
                finish_reason="stop",
            )

    request = ask()
    for environment in (Calculator(), Tagged()):
        await InProcessEnvironment(environment, name="calculator").play(request, Policy())
    assert shown[0] == shown[1]
    assert shown[0][:2] == ["remember", "add"]
    assert shown[2:] == [[], []]


async def test_tags_are_the_default_and_the_tools_stand_in_the_prompt():
    reply = f"Let me see. {tag('add', a=2, b=3)} {tag('look_up', title='x')}"
    rollout = await play(Tagged(), [reply, "5"])
    assert Tagged().config.tool_call_format == "xml"
    assert rollout.reward == 1.0
    assert rollout.messages[0].role == "system"
    assert rollout.messages[0].content.startswith("Be brief.")
    assert '"name": "add"' in rollout.messages[0].content
    assert "episode" not in rollout.messages[0].content
    answer = rollout.messages[3]
    assert answer.role == "user"
    assert "<tool_response>\n5\n</tool_response>" in answer.content
    assert '{"title": "x"}' in answer.content
    assert rollout.metrics["tool_calls"] == 2


WRONG = "error: wrong arguments for add"
MOVED = "error: wrong arguments for move, which takes to"


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "message"),
    [
        ("ad", "{}", "unknown_tool", "error: there is no tool 'ad'; there is add"),
        ("", "{}", "malformed", "error: a call must be a JSON object"),
        ("add", '{"b": 3}', "bad_arguments", "error: wrong arguments for add, which takes a, b: a"),
        ("add", '{"a": 1, "c": 3}', "bad_arguments", "error: wrong arguments for add"),
        ("add", '{"a": true, "b": 3}', "bad_arguments", f"{WRONG}, which takes a, b: a: Value e"),
        ("move", '{"to": {"x": 1, "y": [true]}}', "bad_arguments", f"{MOVED}: to.y.0: Value"),
        ("add", "not json", "bad_arguments", "error: wrong arguments for add"),
        ("look_up", '{"title": "nothing"}', "refused", "error: there is nothing of that title"),
        ("divide", '{"a": 1, "b": 0}', "raised", "error: ZeroDivisionError: float division"),
        ("hang", "{}", "timed_out", "error: hang did not return within 0.05 s"),
        ("hang_too", "{}", "timed_out", "error: hang_too did not return within 0.05 s"),
    ],
)
async def test_errors_are_told_to_the_policy_and_counted(name, arguments, kind, message):
    rollout = await play(Calculator(), [native((name, arguments)), "5"])
    assert rollout.status is RolloutStatus.KEPT
    assert rollout.messages[2].content.startswith(message[:60])
    errors = {name: value for name, value in counted(rollout).items() if "error" in name}
    assert errors == {"tool_errors": 1.0, f"tool_errors/{kind}": 1.0}
    assert ("tool_exception" in rollout.tags) == (kind == "raised")


async def test_half_of_a_surrogate_pair_in_a_result_is_told_as_an_escape():
    rollout = await play(Calculator(), [native(("half", "{}")), "5"])
    assert (rollout.status, rollout.reward) == (RolloutStatus.KEPT, 1.0)
    assert rollout.messages[2].content == r"\ud83d"


RED, GREEN = image_of(png(255)), image_of(png(0))
MARK = with_marks(message_of("user", RED))


def returning(result):
    class Returning(ToolEnvironment):
        class Config(ToolConfig):
            tool_call_format: str = "native"
            max_tool_characters: int = 9

        def examples(self, split):
            return [Example(id="1", prompt="What is 2+3?")]

        @tool
        def look(self):
            """Look."""
            return result

        @reward
        def right(self, completion):
            return 1.0

    return Returning()


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (RED, MARK),
        (["a ", RED, " b ", GREEN], f"a {MARK} b {MARK}"),
        (("\ud83d", RED), rf"\ud83d{MARK}"),
        (message_of("tool", "see ", RED, "!"), f"see {MARK}!"),
        (("long text", RED, " that is cut", RED), f"long text{MARK}{MARK} (cut: 21 characters)"),
    ],
)
async def test_pictures_that_a_tool_returns_are_pictures_of_its_message(result, seen):
    called = await play(returning(result), [native(("look", "{}")), "5"])
    tagged = await play(returning(result), [tag("look") + tag("look"), "5"])
    assert (called.messages[2].role, with_marks(called.messages[2])) == ("tool", seen)
    told = f"<tool_response>\n{seen}\n</tool_response>"
    assert (tagged.messages[2].role, with_marks(tagged.messages[2])) == ("user", f"{told}\n{told}")
    assert called.messages[2].images[0].data == RED.data


class Canvas:
    def __repr__(self):
        return "<some.Canvas size=1x1 at 0x7FC1AB>"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (object(), "<object object at 0x"),
        ({"it": [Canvas()]}, "returned <some.Canvas size=1x1 at 0x7FC1AB>, which says nothing"),
        ({"it": [RED]}, "returned a picture inside a dict"),
        ([1, RED], "returned a picture inside a list"),
        (replace(message_of("tool", RED), role="assistant"), "returned a picture inside a Message"),
        (replace(RED, data="no!"), "in its result, the data of an image is not base64"),
    ],
)
async def test_a_result_that_the_policy_could_not_read_is_told_to_the_author(result, said):
    rollout = await play(returning(result), [native(("look", "{}")), "5"])
    assert rollout.status is RolloutStatus.FAILED
    assert said in rollout.error
    assert "tool look" in rollout.error


async def test_an_exception_is_tagged_with_where_it_was_raised():
    rollout = await play(Calculator(), [native(("divide", '{"a": 1, "b": 0}')), "5"])
    assert "divide: ZeroDivisionError" in rollout.tags["tool_exception"]
    assert "test_tools.py:" in rollout.tags["tool_exception"]


async def test_recovery_is_an_error_followed_by_a_call_that_works():
    bad, good = ("add", "{}"), ("add", '{"a": 1}')
    mixed = await play(Calculator(), [native(bad, good), "5"])
    assert mixed.metrics["tool_errors_recovered"] == 0
    after = await play(Calculator(), [native(bad), native(bad), native(good), "5"])
    assert after.metrics["tool_errors_recovered"] == 2
    assert after.metrics["tool_errors"] == 2
    never = await play(Calculator(), [native(good), native(bad), "5"])
    assert never.metrics["tool_errors_recovered"] == 0


async def test_what_the_rollout_depends_on_fails_it():
    rollout = await play(Calculator(), [native(("lose_the_judge", "{}"), ("add", '{"a": 1}')), "5"])
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == "EndpointError: the judge does not answer"
    assert rollout.reward is None


async def test_a_tool_that_runs_at_the_deadline_is_named():
    class Waiting(Calculator):
        @tool(timeout_s=999)
        async def wait(self):
            """Wait."""
            await wait_for_ever()

    rollout = await play(Waiting(), [native(("wait", "{}"), ("add", '{"a": 1}')), "5"])
    assert rollout.stop_reason is StopReason.TIMEOUT
    assert re.search(r"deadline of \d+ s while tool wait \(\S+test_tools.py:\d+\)", rollout.error)


async def test_calls_of_a_turn_run_at_once_and_are_answered_in_order():
    meet = threading.Barrier(3, timeout=60)

    class Meeting(Calculator):
        def tools(self):
            def wait(number: int) -> int:
                """Return once all three are here, the last one first."""
                meet.wait()
                return number

            return [wait]

    calls = [("wait", json.dumps({"number": number})) for number in range(3)]
    rollout = await play(Meeting(), [native(*calls), "5"])
    assert [message.content for message in rollout.messages[2:5]] == ["0", "1", "2"]


async def test_state_belongs_to_one_rollout():
    environment = Calculator()
    note = native(("remember", '{"text": "a"}'))
    rollouts = await asyncio.gather(
        *(play(environment, [note, note, "5"], group_id=str(index)) for index in range(8))
    )
    assert {rollout.messages[4].content for rollout in rollouts} == {"a a"}


async def test_a_thread_that_never_returns_holds_up_no_other_call():
    environment = Calculator()
    stuck = [native(*[("hang", "{}")] * 40), native(("add", '{"a": 4}')), "5"]
    rollout = await asyncio.wait_for(play(environment, stuck), 60)
    assert rollout.metrics["tool_errors/timed_out"] == 40
    assert rollout.messages[-2].content == "5"


async def test_long_results_are_cut_and_turns_are_limited():
    rollout = await play(Calculator(), [native(("look_up", json.dumps({"title": "y" * 99})))])
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert len(rollout.turns) == 4
    assert rollout.metrics["tool_calls"] == 3, "nobody would read the results of the last turn"
    assert "(cut: 112 characters)" in rollout.messages[2].content
    assert rollout.messages[-1].role == "assistant"


async def test_an_environment_may_answer_where_no_tool_is_called():
    class Insisting(Tagged):
        async def env_response(self, messages, episode):
            reply = await super().env_response(messages, episode)
            if reply is None and len(episode.turns) == 1:
                return "Are you sure?"
            return reply

    rollout = await play(Insisting(), ["6", "5"])
    answers = rollout.messages[2:]
    assert [message.role for message in answers] == ["assistant", "user", "assistant"]
    assert answers[1].content == "Are you sure?"


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "[1]",
        "[]",
        "[" * 5000,
        '{"arguments": {}}',
        '{"name": "note"}',
        '{"name": "note", "line": "hi"}',
        '{"name": null, "arguments": {}}',
        '[{"name": "note", "arguments": {}}, {"name": "note"}]',
        "<function=note>",
    ],
)
def test_a_malformed_tag_is_a_call_of_no_tool_that_says_what_was_written(body):
    (call,) = tagged_calls(f"<tool_call>{body}</tool_call>")
    assert (call.name, call.arguments) == ("", body)


HI = {"line": "hi"}


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "note", "parameters": {"line": "hi"}}', [HI]),
        ('{"name": "note", "args": {"line": "hi"}}', [HI]),
        ('{"type": "function", "function": {"name": "note", "arguments": {"line": "hi"}}}', [HI]),
        ('{"name": "note", "arguments": null}', [{}]),
        ('{"name": "note", "arguments": "{\\"line\\": \\"hi\\"}"}', [HI]),
        ('[{"name": "note", "arguments": {}}, {"name": "note", "arguments": {"line": "hi"}}]',
         [{}, HI]),
        ('{"name": "note", "arguments": {}}\n{"name": "note", "arguments": {"line": "hi"}}',
         [{}, HI]),
        ('```json\n{"name": "note", "arguments": {"line": "hi"}}\n```', [HI]),
        ('{"name": "note", "arguments": {"line": "one\ntwo"}}', [{"line": "one\ntwo"}]),
        ('{"name": "note", "arguments": {"line": "<tool_call></tool_call> </think>"}}',
         [{"line": "<tool_call></tool_call> </think>"}]),
    ],
)  # fmt: skip
def test_what_models_write_as_calls_is_read_with_its_arguments(body, arguments):
    for text in (f"<tool_call>{body}</tool_call>", f"So:\n<tool_call>\n{body}\n"):
        calls = tagged_calls(text)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("note", one) for one in arguments
        ]


@pytest.mark.parametrize(
    "text",
    [
        "do not write `<tool_call>` here",
        "<tool_call>",
        "<tool_call></tool_call>",
        "put it between `<tool_call>` and `</tool_call>`, as in <tool_call>...</tool_call>",
        "<think>maybe <tool_call>{}</tool_call>",
    ],
)
def test_tags_that_are_only_mentioned_are_text(text):
    assert tagged_calls(text) == []


def test_a_call_whose_arguments_are_no_json_reaches_its_tool():
    (call,) = tagged_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>')
    assert (call.name, call.arguments) == ("add", '{"a": 1}}')


async def test_the_policy_is_told_what_it_wrote_in_place_of_a_call():
    rollout = await play(Tagged(), ['<tool_call>{"name": "add"}</tool_call>', "5"])
    assert """got '{"name": "add"}'""" in rollout.messages[-2].content
    assert rollout.metrics["tool_errors/malformed"] == 1


def test_tags_in_thinking_are_no_calls_and_the_last_may_be_open():
    thought = f"<think>{tag('add', a=1)}</think>{tag('add', a=2)[:-12]}"
    turn = turn_calls(Message(role="assistant", content=thought))
    assert [call.arguments for call in turn.calls] == ['{"a": 2}']


def test_settings_of_tools_are_settings_of_the_environment():
    for known in ("native", "xml"):
        config = Tagged.from_settings({"tool_call_format": known}).config
        assert config.tool_call_format == known
    with pytest.raises(ConfigError, match="'tool_call_format'"):
        Tagged.from_settings({"tool_call_fromat": "native"})
    with pytest.raises(ConfigError, match="'xml' or 'native'"):
        Tagged.from_settings({"tool_call_format": "json"})


def test_a_config_without_the_settings_of_tools_is_refused():
    from telescope_core import EnvironmentConfig

    with pytest.raises(EnvironmentLoadError, match=r"Config\(ToolConfig\)"):

        class Wrong(ToolEnvironment):
            class Config(EnvironmentConfig):
                pass


def test_an_environment_without_tools_and_one_with_two_of_a_name_are_refused():
    class Empty(ToolEnvironment):
        @reward
        def any(self):
            return 1

    class Twice(Empty):
        def tools(self):
            return [add, add]

    class TwiceOver(Calculator):
        @tool
        def add(self, a: int) -> int:
            """Add."""
            return a

    with pytest.raises(EnvironmentLoadError, match=r"Empty.*@tool"):
        Empty.from_settings({})
    with pytest.raises(EnvironmentLoadError, match=r"'add': .*test_tools.py"):
        Twice.from_settings({})
    with pytest.raises(EnvironmentLoadError, match="'add'"):
        TwiceOver.from_settings({})


def test_a_time_limit_of_nothing_is_refused():
    with pytest.raises(EnvironmentLoadError, match=r"timeout_s.*got 0"):
        tool(timeout_s=0)


def test_an_inherited_tool_is_taken_away():
    class Quiet(Calculator):
        remember = None

    assert "remember" not in [one.name for one in Quiet().function_tools()]


def test_a_server_is_a_program_or_an_address():
    for wrong in ({}, {"command": ("a",), "url": "http://b"}):
        with pytest.raises(ConfigError, match=r"command.*url"):
            McpServer(**wrong)
    with pytest.raises(ConfigError, match=r"\('python', "):
        McpServer(command="python server.py")
    with pytest.raises(ConfigError, match=r"headers.*url"):
        McpServer(command=("a",), headers={"a": "b"})
