"""Math reasoning: generated problems and settings."""

from random import Random

import pytest

from telescope_core import Split
from telescope_core.errors import ConfigError
from telescope_env_telescope_math_reasoning import MathReasoning
from telescope_env_telescope_math_reasoning.competition import draw_competition
from telescope_env_telescope_math_reasoning.grade_school import draw_grade_school


@pytest.mark.parametrize("level", ["grade-school", "competition"])
def test_the_answer_is_never_a_number_of_the_question(level):
    environment = MathReasoning.from_settings({"level": level})
    source = environment.examples(Split.TRAIN)
    for index in range(300):
        example = source.example(index)
        words = str(example.prompt).replace("$", " ").replace(".", " ").replace(",", " ").split()
        assert example.answer not in words
        assert "{" not in str(example.prompt) or level == "competition"


@pytest.mark.parametrize("draw", [draw_grade_school, draw_competition])
def test_templates_hold_for_thousands_of_draws(draw):
    problems = [draw(Random(seed)) for seed in range(4000)]
    assert all(problem.question and problem.answer for problem in problems)
    assert len({problem.key for problem in problems}) > 2500


def test_competition_has_answers_that_are_not_numbers():
    environment = MathReasoning.from_settings({"level": "competition"})
    source = environment.examples(Split.TRAIN)
    answers = {source.example(index).answer for index in range(200)}
    assert any("sqrt" in answer for answer in answers)
    assert any("frac" in answer for answer in answers)
    assert any("x" in answer for answer in answers)


def test_a_digit_prompt_without_instruction_is_only_the_problem():
    environment = MathReasoning.from_settings({"level": "digit", "instruction": ""})
    example = environment.examples(Split.TRAIN).example(3)
    prompt = environment.format_prompt(example)
    assert prompt.endswith("=")
    assert set(prompt) <= set("0123456789+-=")
    assert environment.gold_answer(example) == example.answer


@pytest.mark.parametrize("operation", "+-*/")
def test_digit_answers_are_right(operation):
    environment = MathReasoning.from_settings(
        {"level": "digit", "instruction": "", "operations": operation, "max_digits": 2}
    )
    source = environment.examples(Split.TRAIN)
    for index in range(100):
        example = source.example(index)
        assert eval(str(example.prompt).rstrip("=")) == int(example.answer)


def test_mirrored_sums_are_one_problem():
    environment = MathReasoning.from_settings(
        {"level": "digit", "max_digits": 1, "operations": "+"}
    )
    prompts = {
        split: {str(environment.examples(split).example(i).prompt) for i in range(60)}
        for split in Split
    }
    mirrored = {f"{p.rstrip('=')[2]}+{p[0]}=" for p in prompts[Split.EVAL]}
    assert not mirrored & prompts[Split.TRAIN]


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"level": "university"}, ["env.level", "'university'"]),
        ({"operations": "^"}, ["env.operations", "'^'"]),
        ({"max_digits": 0}, ["env.max_digits"]),
        ({"dataset": "some/thing"}, ["some/thing", "env.dataset_revision"]),
    ],
)
def test_bad_settings_are_named(given, facts):
    with pytest.raises(ConfigError) as refused:
        MathReasoning.from_settings(given)
    assert all(fact in str(refused.value) for fact in facts), refused.value
