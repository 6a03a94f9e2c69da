"""Sampled text is read as its family writes it, and nothing of it is lost."""

import json
import re

import pytest

from telescope_core.errors import UnknownNameError
from telescope_core.types import Message, ToolCall
from telescope_train.chat.formats import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ReplyFormat,
    choose_format,
    same_message,
)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "text": {"type": "string"}},
        },
    },
}
BAR, GAP = "\uff5c", "\u2581"


def deepseek(part: str) -> str:
    return f"<{BAR}tool{GAP}{part.replace(' ', GAP)}{BAR}>"


DEEPSEEK = (
    deepseek("calls begin")
    + deepseek("call begin")
    + "function"
    + deepseek("sep")
    + 'add\n```json\n{"a": 1}\n```'
    + deepseek("call end")
    + "\n"
    + deepseek("call begin")
    + "add"
    + deepseek("sep")
    + '{"a": 2}'
    + deepseek("call end")
    + deepseek("calls end")
)


def read(parser: str, text: str, tools=(ADD,)):
    reply = ReplyFormat(
        tool_calls=TOOL_CALL_PARSERS[parser], reasoning=REASONING_PARSERS["none"]
    ).parse(text, tools=tools)
    return reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]


WRITTEN = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
     '<tool_call>{"arguments":{"a":2},"name":"add"}'),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
     "</tool_call><tool_call><function=add><parameter=a>2</parameter></function></tool_call>"),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
     "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>"),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}; {"name":"add","parameters":{"a":2}}'),
    ("llama3_json", '<|python_tag|>[{"name": "add", "parameters": {"a": 1}}, '
     '{"name": "add", "arguments": {"a": 2}}]'),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
     '{"name": "add", "arguments": {"a": 2}}]'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 2}'),
    ("phi4_mini_json", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, '
     '{"name": "add", "arguments": {"a": 2}}]<|/tool_call|>'),
    ("phi4_mini_json", 'functools[{"name": "add", "arguments": {"a": 1}}, '
     '{"name": "add", "arguments": {"a": 2}}]'),
    ("command_r", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": '
     '{"a": 1}}, {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 2}}]'
     "<|END_ACTION|>"),
    ("deepseek", DEEPSEEK),
    ("seed_oss", "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
     "</seed:tool_call><seed:tool_call><function=add><parameter=a>2</parameter></function>"),
    ("functionary", '<function=add>{"a": 1}</function><function=add>{"a": 2}'),
    ("tool_calls", '<tool_calls>[{"name": "add", "arguments": {"a": 1}}, '
     '{"name": "add", "arguments": {"a": 2}}]</tool_calls>'),
    ("tool_calls", '<tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n'
     '{"name": "add", "arguments": {"a": 2}}\n</tool_calls>'),
    ("nemotron", '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, '
     '{"name": "add", "arguments": {"a": 2}}]</TOOLCALL>'),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
     '</invoke>\n<invoke name="add"><parameter name="a">2</parameter></invoke>\n'
     "</minimax:tool_call>"),
    ("deepseek_v32", f'<{BAR}DSML{BAR}tool_calls><{BAR}DSML{BAR}invoke name="add"><{BAR}DSML{BAR}'
     f'parameter name="a" string="false">1</{BAR}DSML{BAR}parameter></{BAR}DSML{BAR}invoke>'
     f'<{BAR}DSML{BAR}invoke name="add"><{BAR}DSML{BAR}parameter name="a" string="false">2'
     f"</{BAR}DSML{BAR}parameter></{BAR}DSML{BAR}invoke></{BAR}DSML{BAR}tool_calls>"),
    ("minicpm5", '<function name="add"><param name="a">1</param></function>\n'
     '<function name="add"><param name="a">2</param></function>'),
    ("pythonic", "[add(a=1), add(a=2)]"),
    ("pythonic", '<|python_start|>[add(a="1"),\n add(a=02)]<|python_end|>'),
    ("lfm2", "<|tool_call_start|>[add(a=1), add(a='2')]<|tool_call_end|>"),
    ("llama4_json", '{"name": "add", "parameters": {"a": 1}}{"name":"add","parameters":{"a":2}}'),
    ("xlam", '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]'),
    ("granite-20b-fc", '<function_call> {"name": "add", "arguments": {"a": 1}}<function_call> '
     '{"name": "add", "arguments": {"a": 2}}'),
    ("internlm", '<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1}}'
     '<|action_end|><|action_start|><|plugin|>{"name": "add", "parameters": {"a": 2}}'),
    ("gigachat3", '<|function_call|>{"name": "add", "arguments": {"a": 1}}<|function_call|>'
     '{"name": "add", "arguments": {"a": 2}}'),
    ("gemma4", "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:add{ a: 2}"),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0'
     '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>add:1'
     '<|tool_call_argument_begin|>{"a": 2}<|tool_call_end|><|tool_calls_section_end|>'),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument '
     'key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|open|>call '
     'tool="add" index="2"<|sep|><|open|>json type="object"<|sep|>{"a": 2}<|close|>json<|sep|>'
     "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"),
    ("harmony", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
     '<|call|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 2}'),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text"), WRITTEN)
def test_two_calls_are_read(parser, text):
    assert read(parser, text) == ("", [("add", {"a": 1}), ("add", {"a": 2})])


@pytest.mark.parametrize(
    ("parser", "text"), [pair for pair in WRITTEN if pair[0] not in ("pythonic", "harmony")]
)
def test_text_in_front_of_calls_is_the_content(parser, text):
    front = "Let me see."
    content, calls = read(parser, f"{front}\n{text}")
    assert (content, len(calls)) == (front, 2)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>\nadd 1 and 2\n</tool_call> then"),
        ("hermes", '<tool_call>{"name": "add"'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>"),
        ("glm45", "<tool_call><arg_key>a</arg_key></tool_call>"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '<|python_tag|>search.call(query="x")'),
        ("llama3_json", 'It is {"x": 1}, or {"name": "add", "parameters": {"a": 1}}'),
        ("qwen3_coder", "call it with <function=add>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter><parameter=b>"),
        ("qwen3_coder", "<tool_call><function=add>what</function></tool_call>"),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "Look: [add(a=1)]"),
        ("pythonic", "[see(Table 1)]"),
        ("lfm2", "<|tool_call_start|>nothing<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS] what was it"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("phi4_mini_json", "<|tool_call|>add<|/tool_call|>"),
        ("deepseek", deepseek("calls begin") + "add(1)" + deepseek("calls end")),
        ("tool_calls", "<tool_calls>add(1)</tool_calls>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="add">1</invoke></minimax:tool_call>'),
        ("minicpm5", "<function>add</function>"),
        ("gemma4", "<|tool_call>add(1)<tool_call|>"),
        ("kimi_k2", "<|tool_calls_section_begin|>add(1)<|tool_calls_section_end|>"),
        ("none", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    ],
)
def test_what_is_no_call_stays_in_the_text(parser, text):
    content, calls = read(parser, text)
    assert (content, calls) == (text, [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1,}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1,}}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1,}'),
        ("phi4_mini_json", '<|tool_call|>[{"name": "add", "arguments": {"a": 1,}}]<|/tool_call|>'),
        ("deepseek", DEEPSEEK.partition(deepseek("call end"))[0].replace("1}", "1,}")),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 1,}'),
        ("functionary", '<function=add>{"a": 1,}</function>'),
        ("pythonic", '[add({"a": 1,})]'),
        ("tool_calls", '<tool_calls>[{"name": "add", "arguments": {"a": 1,}}]</tool_calls>'),
        ("gemma4", '<|tool_call>call:add{"a": 1,}<tool_call|>'),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            '<|tool_call_argument_begin|>{"a": 1,}<|tool_call_end|><|tool_calls_section_end|>',
        ),
    ],
)
def test_a_call_with_broken_arguments_reaches_the_tool_that_refuses_it(parser, text):
    reply = ReplyFormat(
        tool_calls=TOOL_CALL_PARSERS[parser], reasoning=REASONING_PARSERS["none"]
    ).parse(text, tools=[ADD])
    assert [(call.name, call.arguments) for call in reply.calls] == [("add", '{"a": 1,}')]


def test_a_closing_tag_inside_an_argument_ends_nothing():
    text = '<tool_call>{"name": "add", "arguments": {"text": "</tool_call>"}}</tool_call>'
    assert read("hermes", text) == ("", [("add", {"text": "</tool_call>"})])


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_values_are_typed_by_the_schema(parser):
    text = {
        "qwen3_coder": "<tool_call><function=add><parameter=a>7</parameter><parameter=text>7"
        "</parameter></function></tool_call>",
        "glm45": "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value><arg_key>text"
        "</arg_key><arg_value>7</arg_value></tool_call>",
    }[parser]
    assert read(parser, text) == ("", [("add", {"a": 7, "text": "7"})])


def test_values_of_gemma_4_are_read_as_they_are_nested():
    text = (
        '<|tool_call>call:add{a:-1.5e2,b:[true,null,[]],c:{d:<|"|>x, {y}<|"|>,e:{}},f:<|"|><|"|>}'
        "<tool_call|>"
    )
    assert read("gemma4", text) == (
        "",
        [("add", {"a": -150.0, "b": [True, None, []], "c": {"d": "x, {y}", "e": {}}, "f": ""})],
    )


@pytest.mark.parametrize(
    "arguments", ["{a:1", "{a:}", "{a:[1}", "{:1}", "{a:1}}", "{a:" + "[" * 99]
)
def test_arguments_of_gemma_4_that_cannot_be_read_stay_as_written(arguments):
    form = ReplyFormat(tool_calls=TOOL_CALL_PARSERS["gemma4"], reasoning=REASONING_PARSERS["none"])
    (call,) = form.parse(f"<|tool_call>call:add{arguments}<tool_call|>", tools=[ADD]).calls
    assert (call.name, call.arguments) == ("add", arguments)


def test_half_a_surrogate_pair_stays_an_escape():
    text = '<tool_call>{"name": "add", "arguments": {"text": "\\ud800"}}</tool_call>'
    form = ReplyFormat(tool_calls=TOOL_CALL_PARSERS["hermes"], reasoning=REASONING_PARSERS["none"])
    (call,) = form.parse(text, tools=[ADD]).calls
    assert call.arguments.encode() == b'{"text": "\\ud800"}'


def test_calls_are_text_where_no_tools_are_offered():
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert read("hermes", text, tools=()) == (text, [])


@pytest.mark.parametrize(
    ("parser", "text", "opened", "thought", "rest"),
    [
        ("think", "<think>\nhm\n</think>\n\n4", False, "hm", "4"),
        ("think", "hm</think>4", True, "hm", "4"),
        ("think", "<think>\n\n</think>\n\n4", False, "", "4"),
        ("think", "<think>\nhm", False, "hm", ""),
        ("think", "hm", True, "hm", ""),
        ("think", "4", False, "", "4"),
        ("think", "so <think>hm</think>", False, "", "so <think>hm</think>"),
        ("mistral", "[THINK]hm[/THINK]4", False, "hm", "4"),
        ("gemma4", "<|channel>thought\nhm<channel|>4", False, "hm", "4"),
        ("seed_oss", "<seed:think>hm</seed:think>\n4", False, "hm", "4"),
        ("kimi_k3", "hm<|close|>think<|sep|>4", True, "hm", "4"),
        ("apriel", "hm\n[BEGIN FINAL RESPONSE]\n4", True, "hm", "4"),
        ("minimax_m3", "</mm:think>4", False, "", "4"),
        ("command_r", "<|START_THINKING|>hm<|END_THINKING|>4", False, "hm", "4"),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final"
         "<|message|>4", False, "hm", "<|start|>assistant<|channel|>final<|message|>4"),
        ("none", "<think>hm</think>4", False, "", "<think>hm</think>4"),
    ],
)  # fmt: skip
def test_thinking_is_set_apart(parser, text, opened, thought, rest):
    form = ReplyFormat(tool_calls=TOOL_CALL_PARSERS["none"], reasoning=REASONING_PARSERS[parser])
    reply = form.parse(text, opened=opened)
    assert (reply.reasoning, reply.content) == (thought, rest)


def test_harmony_says_final_and_commentary_to_the_user():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Looking.<|end|><|start|>assistant<|channel|>final<|message|>4"
    )
    reply = choose_format("<|channel|> analysis <|call|>").parse(text)
    assert (reply.reasoning, reply.content, reply.calls) == ("hm", "Looking.\n4", ())


def test_unknown_parsers_are_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'hermess'.*'hermes'"):
        choose_format("", tool_call_parser="hermess")
    with pytest.raises(UnknownNameError) as caught:
        choose_format("", reasoning_parser="xyz")
    words = re.findall(r"\w+", str(caught.value))
    assert set(REASONING_PARSERS) <= set(words), "where none is near, all are listed"


def called(arguments: str, **changes) -> Message:
    fields = {"content": "", "reasoning": "", "tool_call_id": None} | changes
    return Message(
        role="assistant", tool_calls=(ToolCall(id="c", name="f", arguments=arguments),), **fields
    )


@pytest.mark.parametrize(
    ("sent", "is_same"),
    [
        (called('{"a":1,"b":[true]}'), True),
        (called('{"b": [true], "a": 1.0}'), True),
        (called('{"b": [1], "a": 1}'), False),
        (called('{"a": 1, "b": [true]}', content=" \n"), True),
        (called('{"a": 1, "b": [true]}', content="x"), False),
        (called('{"a": 1, "b": [true]}', reasoning="hm"), False),
        (Message(role="assistant", content=""), False),
    ],
)
def test_messages_are_compared_by_what_they_say(sent, is_same):
    assert same_message(called('{"a": 1, "b": [true]}'), sent) is is_same


TYPED = {
    "type": "function",
    "function": {
        "name": "act",
        "parameters": {
            "type": "object",
            "properties": {
                "int": {"type": "integer"},
                "number": {"type": "number"},
                "text": {"type": "string"},
                "flag": {"type": "boolean"},
                "list": {"type": "array", "items": {"type": "integer"}},
                "object": {"type": "object"},
                "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "either": {"type": ["string", "null"]},
                "mode": {"enum": ["a", "b"]},
                "any": {},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("key", "written", "read_as"),
    [
        ("int", "7", 7), ("int", "012", 12), ("int", "+5", 5), ("int", "5.0", 5.0),
        ("int", "x", "x"),
        ("number", "1.5", 1.5), ("number", "1e3", 1000), ("number", "nan", "nan"),
        ("flag", "False", False), ("flag", "true", True), ("flag", "1", True), ("flag", "no", "no"),
        ("text", "7", "7"), ("text", "null", "null"), ("text", " a ", " a "),
        ("text", "a\n\nb", "a\n\nb"), ("text", "</tool_call>", "</tool_call>"),
        ("list", "[1, 2]", [1, 2]), ("object", '{"a": 1}', {"a": 1}),
        ("maybe", "3", 3), ("maybe", "null", None), ("either", "null", None),
        ("either", "None", "None"), ("mode", "a", "a"), ("any", "[1]", "[1]"), ("other", "7", "7"),
    ],
)  # fmt: skip
def test_values_in_tags_have_the_types_that_vllm_0_32_gives_them(key, written, read_as):
    text = f"<tool_call>\n<function=act>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n"
    content, calls = read("qwen3_coder", f"{text}</tool_call>", tools=(TYPED,))
    assert (content, calls) == ("", [("act", {key: read_as})])
    assert type(calls[0][1][key]) in (type(read_as), int, float)


@pytest.mark.parametrize(
    ("key", "written", "read_as"),
    [
        ("list", "['1', 2]", ["1", 2]),
        ("object", "{'a': True}", {"a": True}),
        ("maybe", "None", None),
        ("text", "see </function> there", "see </function> there"),
    ],
)
def test_values_that_vllm_leaves_as_text_or_drops_are_read(key, written, read_as):
    text = f"<function=act><parameter={key}>{written}</parameter></function>"
    assert read("qwen3_coder", text, tools=(TYPED,)) == ("", [("act", {key: read_as})])


ONE, TWO = ("add", {"a": 1}), ("add", {"a": 2})
IN_JSON = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        ("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
         [ONE]),
        ("qwen3_coder", "So.\n<function=add><parameter=a>1</parameter></function>", [ONE]),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></function>"
         "<function=add><parameter=a>2</parameter></function></tool_call>", [ONE, TWO]),
        ("qwen3_coder", "<tool_call><function=add></function></tool_call>", [("add", {})]),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter></tool_call>", [ONE]),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1<parameter=text>x</parameter>"
         "</function></tool_call>", [("add", {"a": 1, "text": "x"})]),
        ("glm45", "<tool_call>add</tool_call>", [("add", {})]),
        ("llama3_json", f"I call it: {IN_JSON}", [ONE]),
        ("llama3_json", f"{IN_JSON} and more", [ONE]),
        ("llama3_json", f"```json\n{IN_JSON}\n```", [ONE]),
        ("llama3_json", f"a {{ b, {IN_JSON}", []),
        ("llama3_json", '{"name": "add", "parameters": {"x": {"name": "y", "parameters": {}}}}',
         [("add", {"x": {"name": "y", "parameters": {}}})]),
        ("pythonic", '[add(text="a\\nb", flag=true, x=None)]',
         [("add", {"text": "a\nb", "flag": True, "x": None})]),
        ("pythonic", "[add(x=-2.5, y=[1, (2, 3)], z={'k': 'v'})]",
         [("add", {"x": -2.5, "y": [1, [2, 3]], "z": {"k": "v"}})]),
        ("pythonic", "[add()]", [("add", {})]),
        ("pythonic", "[add(a=1)] done", []),
        ("lfm2", "<|tool_call_start|>[add(from=1, text='one\ntwo')]<|tool_call_end|>",
         [("add", {"from": 1, "text": "one\ntwo"})]),
    ],
)  # fmt: skip
def test_calls_are_those_that_vllm_0_32_reads(parser, text, calls):
    assert read(parser, text)[1] == calls
