"""`ToolEnvironment`: schemas from functions, native and tagged calls, errors told to the policy."""

import json

import pytest

from telescope_core import (
    Completion,
    Example,
    ListSource,
    Message,
    RolloutStatus,
    Sampling,
    Split,
    StopReason,
    ToolCall,
    ToolEnvironment,
    ToolError,
    reward,
)
from telescope_core.environments.tool_functions import tagged_calls, tool_from
from telescope_core.errors import EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient


def add(a: int, b: int = 1) -> int:
    """Add two
    numbers.

    Not shown to the policy.

    Args:
        a: The first number.
        b (int): The second number.
    """
    return a + b


async def look_up(title: str) -> dict[str, str]:
    """Look a title up."""
    if title == "nothing":
        raise ToolError("there is nothing of that title")
    return {"title": title}


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


def defect() -> None:
    """Break."""
    raise AssertionError("a defect")


class Calculator(ToolEnvironment):
    max_turns = 4
    max_tool_characters = 30

    def tools(self):
        return [add, look_up, divide, defect]

    def examples(self, split):
        return ListSource([Example(id=f"{split}", prompt="What is 2+3?", answer="5")])

    @reward
    def right(self, rollout, example):
        return float(rollout.completion_text == example.answer)


class Tagged(Calculator):
    tool_style = "tags"
    system_prompt = "Be brief."


def native(name: str, arguments: str, id: str = "c1") -> Completion:
    call = ToolCall(id=id, name=name, arguments=arguments)
    message = Message(role="assistant", content="", tool_calls=(call,))
    return Completion(message=message, finish_reason="tool_calls")


def tag(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(environment, replies):
    request = PlayRequest(
        split=Split.TRAIN,
        example_index=0,
        group_id="g",
        index=0,
        sampling=Sampling(max_tokens=8),
        deadline_s=10,
    )
    client = InProcessEnvironment(environment, name="calculator")
    return await client.play(request, ScriptedClient(replies).policy("r"))


def test_a_schema_comes_from_signature_and_docstring():
    assert tool_from(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "default": 1, "description": "The second number."},
                },
                "required": ["a"],
            },
        },
    }
    parameters = tool_from(look_up).schema["function"]["parameters"]
    assert parameters["properties"] == {"title": {"type": "string"}}


@pytest.mark.parametrize("function", [lambda a: a, print, lambda: 0])
def test_a_function_without_types_or_docstring_is_refused(function):
    with pytest.raises(EnvironmentLoadError):
        tool_from(function)


async def test_native_calls_are_answered_by_tool_messages():
    rollout = await play(Calculator(), [native("add", '{"a": 2, "b": 3}', id="x7"), "5"])
    assert rollout.status is RolloutStatus.KEPT
    assert rollout.reward == 1.0
    assert rollout.messages[2] == Message(role="tool", content="5", tool_call_id="x7")
    assert rollout.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


async def test_tagged_calls_are_answered_and_tools_described():
    reply = f"Let me see. {tag('add', a=2, b=3)} {tag('look_up', title='x')}"
    rollout = await play(Tagged(), [reply, "5"])
    assert rollout.reward == 1.0
    assert rollout.messages[0].role == "system"
    assert rollout.messages[0].content.startswith("Be brief.")
    assert '"name": "add"' in rollout.messages[0].content
    answer = rollout.messages[3]
    assert answer.role == "user"
    assert "<tool_response>\n5\n</tool_response>" in answer.content
    assert '{"title": "x"}' in answer.content
    assert rollout.metrics["tool_calls"] == 2


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ad", "{}", "error: there is no tool 'ad'; there is add"),
        ("add", '{"b": 3}', "error: wrong arguments for add"),
        ("add", '{"a": 1, "c": 3}', "error: wrong arguments for add"),
        ("add", "not json", "error: wrong arguments for add"),
        ("look_up", '{"title": "nothing"}', "error: there is nothing of tha"),
        ("divide", '{"a": 1, "b": 0}', "error: ZeroDivisionError("),
    ],
)
async def test_errors_are_told_to_the_policy_and_counted(name, arguments, message):
    rollout = await play(Calculator(), [native(name, arguments), "5"])
    assert rollout.status is RolloutStatus.KEPT
    assert rollout.messages[2].content.startswith(message[:30])
    assert rollout.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}


async def test_a_defect_in_a_tool_fails_the_rollout():
    rollout = await play(Calculator(), [native("defect", ""), "5"])
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reward is None
    assert rollout.error == "AssertionError: a defect"


async def test_long_results_are_cut_and_turns_are_limited():
    rollout = await play(Calculator(), [native("look_up", json.dumps({"title": "y" * 99}))])
    assert rollout.stop_reason is StopReason.MAX_TURNS
    assert len(rollout.turns) == 4
    assert "(cut: 112 characters)" in rollout.messages[2].content
    assert rollout.messages[-1].role == "assistant"


@pytest.mark.parametrize("body", ["", "not json", "[1]", "[" * 5000, '{"arguments": {}}'])
def test_a_malformed_tag_is_a_call_of_no_tool(body):
    (call,) = tagged_calls(f"<tool_call>{body}</tool_call>")
    assert call.name == ""
