"""What every first-party environment must keep: ids, splits, gold answers, the floor, the range."""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.asking import ask

from telescope_core import (
    Environment,
    Example,
    Message,
    Rollout,
    Split,
)
from telescope_core.errors import ConfigError
from telescope_core.finding.locate import load_environment_class
from telescope_core.in_process import InProcessEnvironment
from telescope_core.playing.rollout import score_rollout
from telescope_core.records.rows import rollout_of, row_of
from telescope_core.scripted import ScriptedClient

MATH = "telescope_env_telescope_math_reasoning:MathReasoning"
COUNTDOWN = "telescope_env_telescope_countdown:Countdown"
WORDLE = "telescope_env_telescope_wordle:Wordle"
CALCULATOR = "telescope_env_telescope_tool_calculator:ToolCalculator"
GYM = "telescope_env_telescope_reasoning_gym:ReasoningGym"
REVERSE = "telescope_env_telescope_reverse_text:ReverseText"
PYTHON = "telescope_env_telescope_python_tool:PythonTool"
CALLS = "telescope_env_telescope_tool_calls:ToolCalls"
SHORT = {"min_numbers": 3, "max_numbers": 3, "max_number": 9, "instruction": ""}
ALPHABET = "telescope_env_telescope_alphabet_sort:AlphabetSort"
WIKI = "telescope_env_telescope_wiki_search:WikiSearch"
DEEPDIVE = "telescope_env_telescope_deepdive:DeepDive"
GAMES = "telescope_env_telescope_text_games:TextGames"
CASES = [
    (MATH, {"level": "digit", "instruction": ""}),
    (MATH, {"level": "digit", "instruction": "", "max_digits": 3, "operations": "+-*/"}),
    (MATH, {"level": "digit"}),
    (MATH, {"level": "grade-school"}),
    (MATH, {"level": "competition", "seed": 7}),
    (COUNTDOWN, SHORT),
    (COUNTDOWN, {}),
    (COUNTDOWN, {"use_all": False, "operations": "+*"}),
    (WORDLE, {}),
    (WORDLE, {"max_guesses": 1, "instruction": ""}),
    (CALCULATOR, {}),
    (CALCULATOR, {"tool_call_format": "native", "num_steps": 1, "max_number": 99}),
    (GYM, {"task": "chain_sum"}),
    (GYM, {"task": "letter_counting,gcd,count_bits"}),
    (REVERSE, {}),
    (REVERSE, {"num_sentences": 3, "instruction": ""}),
    (PYTHON, {"size": 200}),
    (CALLS, {}),
    (CALLS, {"tool_call_format": "xml", "min_calls": 3}),
]
INTERACTIVE = [
    (ALPHABET, {}),
    (ALPHABET, {"max_rounds": 5, "sort_by": "last", "power": 1.0}),
    (WIKI, {}),
    (WIKI, {"tool_call_format": "native", "max_results": 1}),
    (DEEPDIVE, {}),
    (GAMES, {}),
]
"""Those that answer the policy, which `test_interactive` plays."""
NUM_EXAMPLES = 40
each = pytest.mark.parametrize(("factory", "settings"), CASES)


def opened(factory: str, settings: dict) -> Environment:
    return load_environment_class(factory).from_settings(settings)


def examples(environment: Environment, split: Split, count: int = NUM_EXAMPLES) -> list[Example]:
    source = environment.examples(split)
    return [source.example(index) for index in range(count)]


async def reward_of(environment: Environment, example: Example, text: str) -> float:
    messages = (*environment.initial_messages(example), Message(role="assistant", content=text))
    rollout = Rollout(
        environment="it", example_id=example.id, group_id="g", index=0, messages=messages
    )
    scored = await score_rollout(environment, rollout, example)
    assert scored.reward is not None
    return scored.reward


def ids_here(cases: list[tuple[str, dict]]) -> list[list[list[str]]]:
    """Return the ids of every case and split."""
    made = [opened(factory, settings) for factory, settings in cases]
    return [[[one.id for one in examples(env, split)] for split in Split] for env in made]


def ids_in_another_process(cases: list[tuple[str, dict]]) -> list[list[list[str]]]:
    """Return the ids of every case and split as one other process makes them."""
    program = (
        "import json, sys; from telescope_core import Split; "
        "from telescope_core.finding.locate import load_environment_class as load; "
        "cases = json.loads(sys.argv[1]); opened = [load(f).from_settings(s) for f, s in cases]; "
        f"print(json.dumps([[[e.examples(s).example(i).id for i in range({NUM_EXAMPLES})] "
        "for s in Split] for e in opened]))"
    )
    command = [sys.executable, "-c", program, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_ids_are_equal_in_another_process():
    """With settings; without any, `test_all_first_party` compares two processes."""
    cases = [case for case in [*CASES, *INTERACTIVE] if case[1]]
    elsewhere = ids_in_another_process(cases)
    for case, here, there in zip(cases, ids_here(cases), elsewhere, strict=True):
        assert there == here, case


@each
def test_examples_do_not_depend_on_the_order_of_asking(factory, settings):
    forwards = examples(opened(factory, settings), Split.TRAIN, 20)
    source = opened(factory, settings).examples(Split.TRAIN)
    backwards = [source.example(index) for index in reversed(range(20))]
    assert forwards == backwards[::-1]


@pytest.mark.slow
@each
def test_ids_are_unique_and_splits_disjoint_over_seeds(factory, settings):
    ids: dict[Split, set[str]] = {split: set() for split in Split}
    for seed in range(3):
        environment = opened(factory, {**settings, "seed": seed})
        for split in Split:
            own = {example.id for example in examples(environment, split)}
            assert len(own) == NUM_EXAMPLES, (split, seed)
            ids[split] |= own
    assert not ids[Split.TRAIN] & ids[Split.EVAL]


@each
async def test_gold_earns_the_maximum(factory, settings):
    environment = opened(factory, settings)
    for example in examples(environment, Split.EVAL, 20):
        gold = environment.gold_answer(example)
        assert gold is not None
        assert await reward_of(environment, example, gold) == pytest.approx(environment.reward_max)


@pytest.mark.parametrize(("factory", "settings"), [*CASES, (ALPHABET, {}), (GAMES, {}), (WIKI, {})])
async def test_a_saved_rollout_is_graded_as_it_was(factory, settings):
    """By the same version, for answers that are right, wrong, and no answers at all."""
    client = InProcessEnvironment(opened(factory, settings), name="it", asks_models=False)
    for index in range(3):
        example = await client.example(Split.TRAIN, index)
        gold = opened(factory, settings).gold_answer(example)
        replies = [gold] if isinstance(gold, str) else [*(gold or ())]
        for answers in (replies, ["<answer>7</answer>"], ["..."]):
            request = ask(example_index=index, deadline_s=60.0)
            played = await client.play(request, ScriptedClient(answers).policy("r"))
            saved = rollout_of(row_of(played))
            nobody = ScriptedClient([]).policy("nobody")
            again = await client.play(replace(request, saved=saved), nobody)
            assert (again.reward, again.error) == (played.reward, played.error)
            assert (again.rewards, again.metrics) == (played.rewards, played.metrics)
            assert again.tags == played.tags
    await client.close()


@pytest.mark.slow
@each
async def test_junk_stays_at_the_floor(factory, settings):
    environment = opened(factory, settings)
    rng = random.Random(0)
    for example in examples(environment, Split.EVAL, 3):
        prompt = environment.initial_messages(example)[-1].content
        noise = "".join(chr(rng.randrange(32, 127)) for _ in range(400))
        question = str(example.prompt).rstrip("=")
        junk = [
            "",
            "   \n\t ",
            prompt,
            question,
            f"\\boxed{{{question}}}",
            f"\\boxed{{{prompt}}}",
            f"<answer>{prompt}</answer>",
            noise,
            "\\boxed{}",
            "<answer></answer>",
            "\u0663\u0664\u0665 \u2603 \u200b\U0001f600",
            "\\boxed{\u0663}",
            "(" * 50_000,
            "9" * 50_000,
            "\\boxed{" + "x^" * 60 + "}",
            "\\(" * 20_000,
            "I do not know.",
        ]
        for text in junk:
            reward = await reward_of(environment, example, text)
            assert reward == environment.reward_min, f"{example.id}: {text[:80]!r}"


@each
async def test_rewards_stay_in_range_for_other_answers(factory, settings):
    environment = opened(factory, settings)
    chosen = examples(environment, Split.TRAIN, 8)
    golds = [environment.gold_answer(example) or "" for example in chosen]
    rewards = [await reward_of(environment, example, gold) for example in chosen for gold in golds]
    assert all(environment.reward_min <= reward <= environment.reward_max for reward in rewards)
    assert sum(reward >= environment.success_threshold for reward in rewards) < len(rewards) / 3


@pytest.mark.parametrize(
    "factory", sorted({*(factory for factory, _ in CASES), ALPHABET, WIKI, DEEPDIVE, GAMES})
)
def test_a_misspelt_setting_names_the_nearest(factory):
    known = next(iter(load_environment_class(factory).Config.model_fields))
    with pytest.raises(ConfigError, match=f"{known}s.*'{known}'"):
        opened(factory, {f"{known}s": "x"})
