"""The tasks of reasoning-gym by name: settings, splits, verifiers, and every task once."""

import asyncio

import pytest

from telescope_core import Message, Rollout, Split
from telescope_core.errors import ConfigError
from telescope_core.playing.rollout import score_rollout
from telescope_env_telescope_reasoning_gym import ReasoningGym
from telescope_env_telescope_reasoning_gym.generate import BATCH, generated
from telescope_env_telescope_reasoning_gym.guards import (
    EVALUATES_ARITHMETIC,
    EVALUATES_LISTS,
    may_be_judged,
)
from telescope_env_telescope_reasoning_gym.tasks import task_names

WITHOUT_GOLD = {"boxnet", "rush_hour"}
QUICK = {
    "knight_swap": {"max_nodes": 6},
    "futoshiki": {"max_board_size": 4},
}
"""Options for tasks that take seconds for a question."""
ANYTHING_IS_NO = {"game_of_life_halting"}
"""Its verifier takes every answer but True for False."""


def gym(**settings) -> ReasoningGym:
    environment = ReasoningGym.from_settings(settings)
    assert isinstance(environment, ReasoningGym)
    return environment


async def score(environment: ReasoningGym, example, text: str) -> Rollout:
    messages = (Message(role="assistant", content=text),)
    rollout = Rollout(
        environment="g", example_id=example.id, group_id="g", index=0, messages=messages
    )
    return await score_rollout(environment, rollout, example)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"task": "chain_sums"}, ["'chain_sums'", "'chain_sum'"]),
        ({"task": "chain_sum,suduko"}, ["'suduko'", "'sudoku'"]),
        ({"task": "composite"}, ["'composite'", "'chain_sum,sudoku'"]),
        ({"task": " , "}, ["' , '"]),
        ({"task": "gcd,gcd"}, ["'gcd,gcd'", "once"]),
        ({"task": "chain_sum", "options": {"min_term": 2}}, ["'min_term'", "'min_terms'"]),
        ({"task": "chain_sum", "options": {"min_terms": 9}}, ["chain_sum", "'min_terms': 9"]),
        ({"task": "chain_sum", "options": {"seed": 9}}, ["chain_sum", "'seed'"]),
        ({"task": "chain_sum,gcd", "options": {"min_terms": 2}}, ["options", "one task"]),
    ],
)
def test_a_wrong_setting_is_named(settings, facts):
    with pytest.raises(ConfigError) as refused:
        gym(**settings)
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_options_are_those_of_the_task():
    short = gym(task="chain_sum", options={"min_terms": 2, "max_terms": 2}, instruction="")
    questions = [short.examples(Split.TRAIN).example(index).prompt for index in range(5)]
    assert all(question.count("+") + question.count(" - ") == 1 for question in questions)


def test_several_tasks_are_asked_in_turn():
    mixed = gym(task="gcd,lcm", instruction="")
    tasks = {mixed.examples(Split.TRAIN).example(index).info["task"] for index in range(8)}
    assert tasks == {"gcd", "lcm"}


async def test_the_answer_stands_in_tags_unless_nothing_asks_for_them():
    asked, plain = gym(), gym(instruction="")
    example = asked.examples(Split.EVAL).example(0)
    answer = plain.gold_answer(example)
    assert asked.gold_answer(example) == f"<answer>{answer}</answer>"
    assert (await score(asked, example, f"So <answer>7</answer><answer> {answer} </answer>")).reward
    told = f"I put it between <answer> tags.\n<answer>{answer}</answer>"
    assert (await score(asked, example, told)).reward == 1.0
    assert (await score(asked, example, answer)).reward == 0.0
    assert (await score(plain, example, f"\n{answer} ")).reward == 1.0


async def test_an_answer_that_the_verifier_cannot_read_earns_nothing_and_is_counted():
    environment = gym(task="prime_factorization")
    example = environment.examples(Split.EVAL).example(0)
    junk = await score(environment, example, "<answer>seven</answer>")
    assert (junk.reward, junk.metrics["readable"]) == (0.0, 0.0)
    gold = await score(environment, example, environment.gold_answer(example))
    assert (gold.reward, gold.metrics["readable"]) == (1.0, 1.0)


PROGRAMS = [
    "open('mark', 'w')",
    "[open('mark', 'w') for _ in '1']",
    "__import__('os').mkdir('mark')",
    "9**9**9**9",
    "((9**99)**99)**99",
    "factorial(10**9)",
    "x**(10**9)",
    "(x+1)**5000",
    "[9]*10**10",
    "(" * 5000,
    "9" * 5000,
]


@pytest.mark.parametrize("task", ["countdown", "string_insertion"])
async def test_an_answer_is_never_run_as_a_program(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = gym(task=task)
    example = environment.examples(Split.EVAL).example(0)
    for program in PROGRAMS:
        async with asyncio.timeout(120):
            verdict = await score(environment, example, f"<answer>{program}</answer>")
        assert verdict.reward == 0.0, program
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", sorted(EVALUATES_ARITHMETIC | EVALUATES_LISTS))
def test_no_program_reaches_a_verifier_that_evaluates(task):
    harmless = {"9" * 5000} if task in EVALUATES_LISTS else set()
    judged = {program for program in PROGRAMS if may_be_judged(task, program)}
    assert judged == harmless


@pytest.mark.slow
async def test_putting_the_question_back_is_no_answer():
    environment = gym(task="intermediate_integration")
    source = environment.examples(Split.TRAIN)
    golds = [environment.gold_answer(source.example(index)) for index in range(4)]
    assert not [gold for gold in golds if "Integral" in gold]
    question = source.example(0)
    integrand = environment._entries.entry(question.info["position"])["metadata"]["integrand"]
    verdict = await score(environment, question, f"<answer>Integral({integrand}, x)</answer>")
    assert (verdict.reward, verdict.metrics["readable"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "is_judged"),
    [
        ("3*x**2 - 5*x/2 + sin(2*x)*exp(-x)", True),
        ("(1 + 2) * 7.5 + x**(1/2) + C", True),
        ("x**500", True),
        ("x**513", False),
        ("2 * 1e400", False),
        ("-1e400", False),
        ("x**1e400", False),
        ("1" * 400, False),
        ("x.real", False),
        ("x if y else z", False),
        ("lambda: 1", False),
        ("3 +", False),
    ],
)
def test_what_counts_as_bounded_arithmetic(answer, is_judged):
    assert may_be_judged("simple_integration", answer) is is_judged
    assert may_be_judged("chain_sum", answer)


def test_examples_go_on_past_the_tables_that_tasks_make():
    environment = gym(task="letter_counting")
    last = environment.examples(Split.TRAIN).example(1200)
    assert last.info["position"] > 1000


@pytest.mark.slow
def test_tasks_that_are_unsteady_ask_the_same_in_every_process(monkeypatch):
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        made.append([entry["question"] for entry in generated("isomorphic_strings", {}, seed=3)])
    assert made[0] == made[1]
    assert len(set(made[0])) > BATCH / 2


@pytest.mark.slow
@pytest.mark.parametrize("task", task_names())
async def test_every_task_gives_the_maximum_for_gold_and_disjoint_splits(task):
    environment = gym(task=task, options=QUICK.get(task, {}))
    ids = set()
    for split in Split:
        example = environment.examples(split).example(0)
        ids.add(example.id)
        gold = environment.gold_answer(example)
        assert (gold is None) == (task in WITHOUT_GOLD)
        if gold is not None:
            assert (await score(environment, example, gold)).reward == 1.0
        assert (await score(environment, example, "no tags")).reward == 0.0
        verdict = await score(environment, example, "<answer>I do not know.</answer>")
        assert 0.0 <= verdict.reward <= (1.0 if task in ANYTHING_IS_NO else 0.1)
    assert len(ids) == 2
