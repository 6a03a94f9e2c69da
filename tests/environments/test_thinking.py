"""Thinking that is left in a reply: what stands in it is graded by no first-party environment."""

import inspect
import json
from types import SimpleNamespace

import pytest

from telescope_core import Message, Rollout, Split
from telescope_env_telescope_alphabet_sort import AlphabetSort
from telescope_env_telescope_countdown import Countdown
from telescope_env_telescope_deepdive import DeepDive
from telescope_env_telescope_gpqa_diamond import GpqaDiamond
from telescope_env_telescope_humaneval.problems import problems, program_of
from telescope_env_telescope_ifeval import IFEval
from telescope_env_telescope_math_datasets import MathDatasets
from telescope_env_telescope_math_reasoning import MathReasoning
from telescope_env_telescope_python_tool import PythonTool
from telescope_env_telescope_reasoning_gym import ReasoningGym
from telescope_env_telescope_reverse_text import ReverseText
from telescope_env_telescope_tool_calculator import ToolCalculator
from telescope_env_telescope_wiki_search import WikiSearch
from telescope_env_telescope_wordle import Wordle

GENERATED = [
    (AlphabetSort, {"min_rounds": 1, "max_rounds": 1}, "in_order"),
    (Countdown, {}, "correct"),
    (Countdown, {}, "well_formed"),
    (Countdown, {}, "uses_tags"),
    (DeepDive, {}, "correct"),
    (MathReasoning, {}, "correct"),
    (MathReasoning, {}, "uses_boxed"),
    (PythonTool, {}, "correct"),
    (ReasoningGym, {}, "verified"),
    (ReasoningGym, {}, "readable"),
    (ReverseText, {}, "exact"),
    (ReverseText, {"instruction": ""}, "exact"),
    (ToolCalculator, {}, "correct"),
    (WikiSearch, {}, "correct"),
    (Wordle, {}, "solved"),
]


async def earned(environment, name, example, text: str) -> float:
    messages = (Message(role="assistant", content=text),)
    rollout = Rollout(environment="r", example_id="", group_id="", index=0, messages=messages)
    method = getattr(environment, name)
    # An episode is given to the rewards that note the answer that they read.
    takes_episode = "episode" in inspect.signature(method).parameters
    more = (SimpleNamespace(tags={}),) if takes_episode else ()
    found = method(rollout, example, *more)
    return await found if inspect.isawaitable(found) else found


async def require_no_thinking_is_graded(environment, name, example, gold: str) -> None:
    other = "I give up."
    for thought, said, wanted in [
        ("", gold, 1.0),
        (f"<think>It is {gold}</think>\n\n", other, 0.0),
        (f"It is {gold}</think>\n\n", other, 0.0),
        (f"<think>It is {gold}\n", other, 0.0),
        (f"<think>It is {gold} no {'x' * 120_000}\n{gold}", "", 0.0),
        (f"<think>{other}</think>", gold, 1.0),
        (f"{other}</think>\n", gold, 1.0),
    ]:
        assert await earned(environment, name, example, f"{thought}{said}") == wanted, thought[:80]


@pytest.mark.parametrize(("kind", "settings", "name"), GENERATED)
async def test_an_answer_in_thinking_earns_nothing(kind, settings, name):
    environment = kind.from_settings(settings)
    example = environment.examples(Split.TRAIN).example(0)
    gold = environment.gold_answer(example)
    await require_no_thinking_is_graded(
        environment, name, example, gold if isinstance(gold, str) else gold[-1]
    )
    await environment.close()


@pytest.mark.parametrize(
    ("kind", "settings", "name", "row", "gold"),
    [
        (
            MathDatasets,
            {"dataset": "gsm8k"},
            "correct",
            {"question": "How many?", "answer": "so\n#### 18"},
            "\\boxed{18}",
        ),
        (
            GpqaDiamond,
            {},
            "correct",
            {
                "Question": "Which?",
                "Correct Answer": "w",
                **{f"Incorrect Answer {number}": str(number) for number in (1, 2, 3)},
            },
            None,
        ),
        (
            IFEval,
            {},
            "follows",
            {
                "key": 1,
                "prompt": "Say it.",
                "instruction_id_list": ["keywords:existence"],
                "kwargs": [{"keywords": ["photon"]}],
            },
            "A photon.",
        ),
    ],
)
async def test_an_answer_of_a_row_in_thinking_earns_nothing(
    tmp_path, kind, settings, name, row, gold
):
    path = tmp_path / "rows.jsonl"
    rows = [
        {key: f"{value} {n}" if key == "question" else value for key, value in row.items()}
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    environment = kind.from_settings({**settings, "path": str(path)})
    example = environment.examples(Split.EVAL).example(0)
    text = gold or environment.gold_answer(example)
    await require_no_thinking_is_graded(environment, name, example, text)
    await environment.close()


def test_no_program_is_made_of_thinking():
    problem = problems()[10]
    for code in (problem.solution, f"```python\n{problem.prompt}{problem.solution}\n```"):
        assert problem.solution.strip() not in program_of(problem, f"<think>\n{code}")
        program = program_of(problem, f"<think>hm</think>{code}")
        assert program == program_of(problem, code)
