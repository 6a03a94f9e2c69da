"""Tool calls: what is right up to order, what is not up to type, and the questions of BFCL."""

import json
from pathlib import Path

import pytest
from tests.asking import ask

from telescope_core import Completion, Message, Sampling, Split, ToolCall
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.scripted import ScriptedClient
from telescope_env_telescope_tool_calls import ToolCalls
from telescope_env_telescope_tool_calls.catalog import FUNCTIONS
from telescope_env_telescope_tool_calls.matching import WantedCall, share_right

TYPES = {
    "city": "string",
    "days": "integer",
    "size": "number",
    "open": "boolean",
    "tags": "array",
    "box": "object",
}


def wanted(**arguments) -> WantedCall:
    return WantedCall(
        name="rent", arguments={key: [value] for key, value in arguments.items()}, types=TYPES
    )


def call(name: str = "rent", **arguments) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=json.dumps(arguments))


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"city": "New York", "days": 3, "size": 2.5}, True),
        ({"size": 2.5, "days": 3, "city": "new york."}, True),
        ({"city": "New York", "days": "3", "size": 2.5}, False),
        ({"city": "New York", "days": 3.0, "size": 2.5}, False),
        ({"city": "New York", "days": True, "size": 2.5}, False),
        ({"city": "New York", "days": 3, "size": "2.5"}, False),
        ({"city": "New York", "days": 3, "size": 2.5, "more": 1}, False),
        ({"city": "New York", "days": 3}, False),
        ({"city": ["New York"], "days": 3, "size": 2.5}, False),
        ({"city": "Newark", "days": 3, "size": 2.5}, False),
        ({"city": None, "days": 3, "size": 2.5}, False),
        ({}, False),
    ],
)
def test_values_types_and_extra_arguments(given, right):
    assert share_right([call(**given)], [wanted(city="New York", days=3, size=2.5)]) == right


@pytest.mark.parametrize(
    ("argument", "listed", "right", "wrong"),
    [
        ("city", [2], [2], [2.0, "2", True, None]),
        ("city", [True], [True], [1, "true"]),
        ("days", ["", None], [None], [0, "", "None", False]),
        ("days", ["any", 3], ["any", 3], [3.0, "3"]),
        ("days", [1], [1], [True, 1.0]),
        ("open", [None, True], [None, True], [1, False]),
        ("tags", ["data"], ["data"], [["data"]]),
    ],
)
def test_a_listed_value_is_accepted_in_its_own_type(argument, listed, right, wrong):
    accepted = [value for value in listed if value != ""]
    one = WantedCall(name="rent", arguments={argument: accepted}, types=TYPES)
    for value in right:
        assert share_right([call(**{argument: value})], [one]) == 1.0, value
    for value in wrong:
        assert share_right([call(**{argument: value})], [one]) == 0.0, value


def test_whole_numbers_lists_and_objects():
    assert share_right([call(size=3)], [wanted(size=3.0)]) == 1.0
    assert share_right([call(open=1)], [wanted(open=True)]) == 0.0
    assert share_right([call(tags=["a", "b"])], [wanted(tags=["a", "b"])]) == 1.0
    assert share_right([call(tags=["b", "a"])], [wanted(tags=["a", "b"])]) == 0.0
    box = wanted(box={"wide": [1, 2], "note": ["x", ""]})
    assert share_right([call(box={"wide": 2})], [box]) == 1.0
    assert share_right([call(box={"wide": 2, "more": 1})], [box]) == 0.0
    assert share_right([call(box={"note": "x"})], [box]) == 0.0


def test_the_order_of_calls_is_free_and_each_counts_once():
    first, second = wanted(days=1), wanted(days=2)
    assert share_right([call(days=2), call(days=1)], [first, second]) == 1.0
    assert share_right([call(days=1)], [first, second]) == 0.5
    assert share_right([call(days=1), call(days=1)], [first, second]) == 0.5
    assert share_right([call(days=1), call(days=2), call(days=3)], [first, second]) == 2 / 3
    either = WantedCall(name="rent", arguments={"days": [1, 2]}, types=TYPES)
    assert share_right([call(days=1), call(days=2)], [either, first]) == 1.0
    assert share_right([call(days=1)] * 101, [first]) == 0.0


@pytest.mark.parametrize("arguments", ["", "null", "[]", "{", "[" * 9000, '{"days": NaN}', "3"])
def test_arguments_that_are_no_object(arguments):
    one = ToolCall(id="c", name="rent", arguments=arguments)
    assert share_right([one], [wanted(days=1)]) == 0.0


async def play(environment, reply, *, index=0, split=Split.EVAL):
    request = ask(split=split, example_index=index, sampling=Sampling(max_tokens=16))
    client = ScriptedClient([reply])
    rollout = await InProcessEnvironment(environment, name="calls").play(
        request, client.policy("r")
    )
    return rollout, client.requests


@pytest.mark.slow
async def test_native_calls_are_offered_and_judged():
    environment = ToolCalls()
    assert environment.offers_tools
    for index in range(20):
        example = environment.examples(Split.EVAL).example(index)
        calls = tuple(
            ToolCall(id=f"c{at}", name=one["name"], arguments=json.dumps(arguments))
            for at, one in enumerate(reversed(example.info["calls"]))
            for arguments in [{key: values[0] for key, values in one["arguments"].items()}]
        )
        message = Message(role="assistant", content="", tool_calls=calls)
        reply = Completion(message=message, finish_reason="tool_calls")
        rollout, requests = await play(environment, reply, index=index)
        assert rollout.reward == 1.0
        assert (rollout.metrics["calls"], rollout.metrics["right_names"]) == (len(calls), 1.0)
        assert [message.role for message in requests[0]] == ["user"]


async def test_tags_are_asked_for_where_templates_have_no_tools():
    environment = ToolCalls(ToolCalls.Config(tool_call_format="xml"))
    example = environment.examples(Split.EVAL).example(0)
    rollout, requests = await play(environment, environment.gold_answer(example))
    assert rollout.reward == 1.0
    system, user = requests[0]
    assert system.content.count('"type": "function"') == 6
    assert user.content == example.prompt
    wrong = environment.gold_answer(example).replace('"arguments": {', '"arguments": {"extra": 1, ')
    rollout, _ = await play(environment, wrong)
    assert (rollout.reward, rollout.metrics["right_names"]) == (0.0, 1.0)


def test_there_are_fifty_functions_with_schemas():
    assert len({function.name for function in FUNCTIONS}) == 50
    for function in FUNCTIONS:
        schema = function.schema["function"]
        assert set(schema["parameters"]["required"]) <= set(schema["parameters"]["properties"])
        for one in function.parameters:
            assert f"{{{one.name}}}" in function.request


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ConfigError) as refused:
        ToolCalls.from_settings({"max_calls": 4, "num_functions": 3})
    assert all(fact in str(refused.value) for fact in ("max_calls", "num_functions", "4 and 3"))


ASKED = {
    "id": "multiple_0",
    "question": [[{"role": "user", "content": "Move the red box 3.5 m north."}]],
    "function": [
        {
            "name": "crane.move",
            "description": "Move a box.",
            "parameters": {
                "type": "dict",
                "properties": {
                    "box": {"type": "string", "description": "Which."},
                    "meters": {"type": "float", "description": "How far."},
                    "speed": {"type": "any", "optional": True},
                },
                "required": ["box", "meters"],
            },
        }
    ],
}
ANSWER = {
    "id": "multiple_0",
    "ground_truth": [{"crane.move": {"box": ["red", "red box"], "meters": [3.5], "speed": [""]}}],
}
ACCEPTS_NOTHING = {
    "id": "multiple_1",
    "ground_truth": [{"crane.move": {"box": [], "meters": [3.5], "speed": [""]}}],
}


@pytest.fixture
def bfcl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the files of bfcl-eval: one good question, and one without an answer."""
    data = tmp_path / "bfcl_eval" / "data"
    (data / "possible_answer").mkdir(parents=True)
    (tmp_path / "bfcl_eval" / "__init__.py").write_text("raise ImportError('never imported')\n")
    rows = {
        data / "BFCL_v4_multiple.json": [ASKED, {**ASKED, "id": "multiple_1"}],
        data / "BFCL_v4_parallel_multiple.json": [],
        data / "possible_answer" / "BFCL_v4_multiple.json": [ANSWER, ACCEPTS_NOTHING],
    }
    for path, lines in rows.items():
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.syspath_prepend(tmp_path)
    return data


async def test_questions_of_bfcl_are_read_from_its_files(bfcl):
    environment = ToolCalls.from_settings({"questions": "bfcl-multiple"})
    assert environment.splits() == (Split.EVAL,)
    source = environment.examples(Split.EVAL)
    assert source.num_examples == 1, "a question that accepts no value is left out"
    example = source.example(0)
    (function,) = example.info["functions"]
    parameters = function["function"]["parameters"]
    assert function["function"]["name"] == "crane_move"
    assert parameters["type"] == "object"
    assert parameters["properties"]["meters"]["type"] == "number"
    assert parameters["properties"]["speed"] == {}
    for text, reward in [
        ('{"box": "Red Box", "meters": 3.5}', 1.0),
        ('{"box": "red", "meters": "3.5"}', 0.0),
        ('{"box": "red", "meters": 3.5, "speed": 1}', 0.0),
    ]:
        reply = f'<tool_call>{{"name": "crane_move", "arguments": {text}}}</tool_call>'
        assert (await play(environment, reply))[0].reward == reward


def test_missing_files_are_told(bfcl, monkeypatch):
    with pytest.raises(EnvironmentLoadError, match="BFCL_v"):
        ToolCalls.from_settings({"questions": "bfcl-parallel"}).examples(Split.EVAL)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentLoadError, match="--no-deps bfcl-eval"):
        ToolCalls.from_settings({"questions": "bfcl-simple"}).examples(Split.EVAL)
