"""Parsers: what they find, what they refuse, and properties that hold for any text."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from telescope_core.parsers import (
    after_thinking,
    as_model,
    boxed_answer,
    code_block,
    code_blocks,
    follows_xml_format,
    json_values,
    last_json,
    split_thinking,
    without_thinking,
    xml_fields,
    xml_tag,
)

PLAIN = st.text(st.characters(exclude_characters='<>{}[]\\"$', exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, no: \boxed{ 2 }", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed  {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\boxed 5 apples", "5"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        (r"\boxedfoo", None),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_boxed(text, answer):
    assert boxed_answer(text) == answer


@given(PLAIN, PLAIN)
def test_whatever_is_boxed_is_found(before, inside):
    assert boxed_answer(f"{before}\\boxed{{{inside}}}") == inside.strip()


@given(st.text())
def test_boxed_takes_any_text(text):
    found = boxed_answer(text)
    assert found is None or found in text


@pytest.mark.parametrize(
    ("text", "thinking", "answer", "is_closed"),
    [
        ("<think>hm</think>yes", "hm", "yes", True),
        ("hm</think>\n\nyes", "hm", "yes", True),
        ("yes", "", "yes", True),
        ("<think>hm", "hm", "", False),
        ("<think>a</think>b</think>c", "a</think>b", "c", True),
        ("<think>a</think>b<think>c", "a</think>b<think>c", "", False),
        ("Well. <think>a</think>b", "Well. a", "b", True),
        ("b. <think>c", "b. c", "", False),
        ("<think>a</think>\nb\n<think>c", "a</think>\nb\n<think>c", "", False),
        ("", "", "", True),
        ("<think></think>", "", "", True),
        ('<think>is it "it"</think>"4"', 'is it "it"', '"4"', True),
        ('<think>5" wide</think>So "4"', '5" wide', 'So "4"', True),
        ("<think>use `<think>`</think>4", "use `<think>`", "4", True),
        ("<think>\n```python\nx\n</think>\n```\ny\n```", "```python\nx", "```\ny\n```", True),
    ],
)
def test_thinking(text, thinking, answer, is_closed):
    split = split_thinking(text)
    assert (split.thinking, split.answer, split.is_closed) == (thinking, answer, is_closed)


@pytest.mark.parametrize(
    "text",
    [
        "The tag <think> opens it: \\boxed{4}",
        "Models write `<think>` and `</think>`. \\boxed{4}",
        "`<think>` is \\boxed{4}",
        '```python\nre.sub(r"<think>.*?</think>", "", text)\n```',
        "```python\ntext.split('</think>')[1]\n```",
        "Such as\n```\n<think>\nhm\n</think>\nyes\n```\nso \\boxed{4}",
        "Such as\n```\n<think>\nhm\n```\nso \\boxed{4}",
    ],
)
def test_a_mark_that_is_only_mentioned_is_no_thinking(text):
    assert without_thinking(text) == text
    assert without_thinking(f"<think>hm</think>{text}") == text
    assert code_block(text) is None or code_block(text) in text


@pytest.mark.parametrize(
    ("thought", "is_closed"),
    [("<think>{}</think>\n", True), ("{}</think>\n", True), ("<think>{}", False)],
)
def test_what_is_thought_is_no_answer(thought, is_closed):
    guesses = "\\boxed{1} <answer>1</answer>\n```python\n1\n```\nor"
    text = thought.format(guesses)
    for read in (boxed_answer, code_block, lambda one: xml_tag(one, "answer")):
        assert read(text) is None
        said = "\\boxed{2} <answer>2</answer>\n```python\n2\n```"
        assert read(f"{text}{said}") == ("2" if is_closed else None)
    assert xml_fields("<think>1</think><answer>2</answer>", ["think", "answer"]) == {
        "think": "1",
        "answer": "2",
    }


def test_code_keeps_its_white_space_after_thinking():
    assert after_thinking("<think>hm</think>    return 1\n") == "    return 1\n"


@given(PLAIN, PLAIN)
def test_what_was_thought_and_answered_is_told_apart(thought, answer):
    split = split_thinking(f"<think>{thought}</think>{answer}")
    assert (split.thinking, split.answer) == (thought.strip(), answer.strip())
    assert without_thinking(f"[{thought}/]{answer}", opening="[", closing="/]") == answer.strip()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<answer>1</answer>", "1"),
        ("<answer>1</answer> <answer> 2 </answer>", "2"),
        ("<answer><answer>1</answer></answer>", "1"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>a < b</answer>", "a < b"),
        ("<answer></answer>", ""),
        ("</answer><answer>", None),
        ("<answers>1</answers>", None),
        ("", None),
    ],
)
def test_xml_tag(text, content):
    assert xml_tag(text, "answer") == content


def test_xml_fields_leaves_out_what_is_absent():
    text = "<a>1</a><b>2</b>"
    assert xml_fields(text, ["a", "b", "c"]) == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<answer>b</answer><think>a</think>", False),
        ("Well: <think>a</think><answer>b</answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> done", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<answer>b</think></answer>", False),
        ("<answer>b</answer>", False),
        ("", False),
    ],
)
def test_xml_format(text, follows):
    assert follows_xml_format(text, ["think", "answer"]) is follows


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_what_is_written_in_tags_is_read_from_them(contents):
    names = [f"tag{index}" for index in range(len(contents))]
    text = "\n".join(f"<{n}>{c}</{n}>" for n, c in zip(names, contents, strict=True))
    assert follows_xml_format(text, names)
    assert list(xml_fields(text, names).values()) == [content.strip() for content in contents]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"a": 1}', [{"a": 1}]),
        ('Sure:\n```json\n{"a": [1, 2]}\n```\nDone.', [{"a": [1, 2]}]),
        ('{"a": 1} then [2, {"b": 3}]', [{"a": 1}, [2, {"b": 3}]]),
        ('{not json} {"a": "}"}', [{"a": "}"}]),
        ("[1, NaN] [2]", [[2]]),
        ('{"a": 1', []),
        ("42", []),
        ("[" * 5000 + ' {"a": 1}', [{"a": 1}]),
        (r"\frac{1}{2} " * 3000 + '{"a": 1}', [{"a": 1}]),
        ("", []),
    ],
)
def test_json_values(text, values):
    assert json_values(text) == values
    assert last_json(text) == (values[-1] if values else None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@pytest.mark.slow
@given(PLAIN, st.dictionaries(st.text(), JSON, max_size=4), PLAIN)
def test_an_object_is_found_wherever_it_stands(before, value, after):
    assert last_json(f"{before}{json.dumps(value)}{after}") == value


class Verdict(BaseModel):
    score: float
    reason: str = ""


def test_the_last_object_that_fits_is_read():
    text = '{"score": 1} or rather {"score": 0.5, "reason": "late"} {"other": 1}'
    assert as_model(text, Verdict) == Verdict(score=0.5, reason="late")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("very good", ["score, reason", "'very good'"]),
        ('{"scor": 1}', ["score: ", "required"]),
        ('{"score": "high"}', ["score: ", "number"]),
    ],
)
def test_what_does_not_fit_is_said(text, facts):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the facts are below
        as_model(text, Verdict)
    assert all(fact in str(refused.value) for fact in facts), refused.value


@pytest.mark.slow
def test_hostile_text_takes_no_time():
    size = 50_000
    texts = [
        *("\\boxed{" * size, "\\boxed{" + "{" * size, "{" * size, "[" * size, '{"a":' * size),
        *("<answer>" * size, "</answer>" * size, "<think>" * size, "</think>" * size, '"' * size),
        *("```a\n<think>\n" * size, "`<think>" * size, "\n " * size + "<think>", "x`\n" * size),
    ]
    started_s = time.thread_time()
    for text in texts:
        boxed_answer(text)
        split_thinking(text)
        xml_tag(text, "answer")
        without_thinking(text)
        follows_xml_format(text, ["think", "answer"])
        json_values(text)
    assert time.thread_time() - started_s < 3.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("a\n```py\nx\n```\nb\n```py\ny\nz\n```\nc", "y\nz"),
        ("```Python3 \nx\n  ```", "x"),
        ("```python\nx\n```\n```sh\nls\n```", "x"),
        ("```python\nx = '''\n```js\n'''\n```", "x = '''\n```js\n'''"),
        ("```python\nx\ny", "x\ny"),
        ("```sh\nls", None),
        ("<think>```python\nx\n```</think>no", None),
        ("x = ```1```", None),
        ("", None),
        ("```python\n```", ""),
        ("````python\nx = '```'\n```\ny\n````", "x = '```'\n```\ny"),
        ("```python\nx\n`````", "x"),
        ("```x```\n```\ny\n```", "y"),
        ("```python title='a'\nx\n```", "x"),
        ("```python\nx\n```\nIt prints\n```\n3\n```", "x"),
        ("```\nx\n```\nIt prints\n```text\n3\n```", "x"),
        ("~~~python\nx\n~~~", "x"),
        ("~~~\nx\n```\n~~~~", "x\n```"),
        ("1. Code:\n\n   ```python\n   if x:\n       y\n\n  z\n   ```\n2. b", "if x:\n    y\n\nz"),
        ("\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n\ty"),
        (
            '```python\ndef f():\n    """\n    ```\n    """\n```',
            'def f():\n    """\n    ```\n    """',
        ),
        ("```{.python}\nx\n```\n```json\n{}\n```", "x"),
    ],
)
def test_the_last_block_of_python_is_the_code(text, code):
    assert code_block(text) == code


def test_blocks_say_their_language_and_those_of_other_languages_are_left_out():
    blocks = code_blocks("```Py\na\n```\n```sh\nb\n```\n```\nc\n```")
    assert [(one.language, one.code, one.is_python) for one in blocks] == [
        ("py", "a", True),
        ("", "c", False),
    ]


@pytest.mark.parametrize("name", ["python3.11", "PyPy3", "py3", "pypy"])
def test_names_of_pythons_are_python(name):
    assert code_block(f"```{name}\nprint(1)\n```") == "print(1)"
