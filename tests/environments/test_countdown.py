"""Countdown: its parser, its canonical solutions, its rewards."""

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core import Message, Rollout, Split
from telescope_core.errors import ConfigError
from telescope_core.playing.rollout import score_rollout
from telescope_env_telescope_countdown import Countdown
from telescope_env_telescope_countdown.environment import extract_expression
from telescope_env_telescope_countdown.expression import ExpressionError, parse_expression
from telescope_env_telescope_countdown.solver import Puzzle, draw_puzzle, solve


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("10-4-3", 3),
        ("12/4/3", 1),
        ("7/2", Fraction(7, 2)),
        (" 2 * ( 3 + 4 ) ", 14),
        ("((((5))))", 5),
        ("-3+5", 2),
        ("-(3-5)", 2),
        ("5*-3+20", 5),
        ("8--3", 11),
        ("+1", 1),
        ("-6/-3*2", 4),
        ("7 \u2212 8 \u00f7 2 \u00d7 3", -5),
        ("1\t+\n1\u00a0+\u20091", 3),
    ],
)
def test_expressions_have_their_usual_worth(text, value):
    assert parse_expression(text).value == value


@pytest.mark.parametrize(
    "text",
    [
        "", "+", "1+", "-", "1-", "1 2", "(1+2", "1+2)", "()", "2**3", "2^3", "1//2", "1.5", "1e3",
        "0x1", "a", "__import__('os')", "1,2", "1%2", "1=1", "\u0663", "\uff11", "5/-0", "5/0",
        "5/(3-3)", "-*1", "1\u200b+1", "-" * 40 + "1", "(" * 40 + "1" + ")" * 40, "1+" * 200 + "1",
        "1234567890123",
    ],
)  # fmt: skip
def test_everything_else_is_refused(text):
    with pytest.raises(ExpressionError):
        parse_expression(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
@settings(max_examples=200)
def test_the_parser_agrees_with_python_on_what_it_accepts(text):
    try:
        expression = parse_expression(text)
    except ExpressionError:
        return
    exact = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text))
    assert eval(exact, {"Fraction": Fraction}) == expression.value


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for character in text.replace(" ", ""):
        if character.isdigit() and parts and parts[-1].isdigit():
            parts[-1] += character
        else:
            parts.append(character)
    return [part.lstrip("0") or "0" if part.isdigit() else part for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("use_all", [True, False])
def test_every_drawn_puzzle_has_a_canonical_solution(use_all):
    for seed in range(20):
        puzzle = draw_puzzle(
            Random(seed),
            num_numbers=(2, 4),
            max_number=12,
            max_target=60,
            operations="+-*/",
            use_all=use_all,
        )
        solution = solve(puzzle, operations="+-*/", use_all=use_all)
        assert solution is not None
        expression = parse_expression(solution)
        assert expression.value == puzzle.target
        assert solution == solve(puzzle, operations="+-*/", use_all=use_all)
        if use_all:
            assert tuple(sorted(expression.numbers)) == puzzle.numbers


@pytest.mark.parametrize(
    ("numbers", "target", "solution"),
    [((3, 5, 8), 16, "3+5+8"), ((3, 4, 4), 28, "4*(3+4)"), ((2, 3, 4), 14, "2+3*4")],
)
def test_solutions_are_short_and_without_needless_parentheses(numbers, target, solution):
    found = solve(Puzzle(numbers=numbers, target=target), operations="+-*/", use_all=True)
    assert found == solution


def test_an_unsolvable_puzzle_has_no_solution():
    assert solve(Puzzle(numbers=(1, 1), target=50), operations="+-*/", use_all=True) is None


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3+5+8", 1.0),
        ("3+5+8=16", 1.0),
        ("I think\n8+5+3", 1.0),
        ("<answer> 3 + 5 + 8 </answer> is it", 1.0),
        ("<answer>3+5+8</answer><answer>3*5+8</answer>", 0.1),
        ("3*5+8", 0.1),
        ("3+5", 0.0),
        ("3+5+8+0", 0.0),
        ("3+5+5+3", 0.0),
        ("16", 0.0),
        ("-(0-16)", 0.0),
        ("8--3+5", 1.0),
        ("8\u00a0+ -3*-1\t+ 5", 0.0),
        ("3 5 8=16", 0.0),
        ("3+5+8=16\nthat is my answer", 0.0),
    ],
)
async def test_rewards(completion, reward):
    environment = Countdown.from_settings({"instruction": "", "max_numbers": 3})
    source = environment.examples(Split.TRAIN)
    example = type(source.example(0))(
        id="3 5 8=16", prompt="3 5 8=16", info={"numbers": (3, 5, 8), "target": 16}
    )
    rollout = Rollout(
        environment="countdown",
        example_id=example.id,
        group_id="g",
        index=0,
        messages=(Message(role="assistant", content=completion),),
    )
    assert (await score_rollout(environment, rollout, example)).reward == pytest.approx(reward)


def test_a_sign_is_an_operation_that_must_be_allowed_and_makes_no_expression_alone():
    environment = Countdown.from_settings({"operations": "+*", "use_all": False})
    example = environment.examples(Split.TRAIN).example(0)
    example = type(example)(id="3 8=8", prompt="3 8=8", info={"numbers": (3, 8), "target": 8})
    rollout = Rollout(environment="countdown", example_id="3 8=8", group_id="g", index=0)
    for text, is_legal in [("3+8", 1.0), ("-3*8", 0.0), ("+8", 0.0), ("8", 0.0)]:
        said = (Message(role="assistant", content=text),)
        assert environment.well_formed(replace(rollout, messages=said), example) == is_legal, text


def test_the_short_prompt_is_only_the_puzzle():
    environment = Countdown.from_settings({"instruction": "", "max_numbers": 3})
    example = environment.examples(Split.TRAIN).example(0)
    assert environment.format_prompt(example) == example.id
    assert set(example.id) <= set("0123456789 =")


def test_extraction_takes_the_last_tag():
    last = extract_expression("<answer>1</answer> <answer>2+3 = 5</answer>")
    assert last == "2+3"


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"operations": "+%"}, ["env.operations"]),
        ({"operations": ""}, ["env.operations"]),
        ({"min_numbers": 5, "max_numbers": 3}, ["min_numbers", "max_numbers", "5 and 3"]),
        ({"max_number": "many"}, ["env.max_number", "'many'"]),
    ],
)
def test_bad_settings_are_named(given, facts):
    with pytest.raises(ConfigError) as refused:
        Countdown.from_settings(given)
    assert all(fact in str(refused.value) for fact in facts), refused.value
