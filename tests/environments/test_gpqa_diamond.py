"""GPQA Diamond: choices and letters, and the gated dataset over a loopback Hub."""

import csv
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.environments.dataset_runs import (
    ENVIRONMENTS,
    run_cases,
    same_in_another_process,
    unplayed,
)

from telescope_core import Message, Rollout, Split
from telescope_core.errors import ConfigError
from telescope_env_telescope_gpqa_diamond import GpqaDiamond
from telescope_env_telescope_gpqa_diamond.choices import LETTERS, letter_in, question_of
from telescope_env_telescope_gpqa_diamond.source import example_of
from telescope_envs.validation.fixture_hub import (
    TOKEN,
    FixtureHub,
)

FACTORY = "telescope_env_telescope_gpqa_diamond:GpqaDiamond"
ROWS = ENVIRONMENTS / "gpqa-diamond" / "fixture-rows"
TABLE = ROWS / "Idavidrein/gpqa/gpqa_diamond.csv"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What two processes with different hash seeds saw, and the paths that were asked for."""
    with FixtureHub(ROWS, token=TOKEN) as hub:
        variables = {**hub.environ(tmp_path_factory.mktemp("home")), "HF_TOKEN": TOKEN}
        [first], [second] = same_in_another_process([[FACTORY, {}]], variables)
    return (first, second), hub.requested


@pytest.mark.slow
def test_gold_reaches_the_maximum_and_cheats_stay_at_the_floor(seen):
    examples = seen[0][0]["splits"]["eval"]
    assert len(examples) == 14
    following = [*examples[1:], examples[0]]
    for one, other in zip(examples, following, strict=True):
        earned = {kind: found["reward"] for kind, found in one["earned"].items()}
        assert earned.pop("gold") == 1.0
        assert earned.pop("other") == float(one["answer"] == other["answer"])
        assert set(earned.values()) == {0.0}, one


@pytest.mark.slow
def test_two_processes_see_the_same_choices(seen):
    (first, second), _ = seen
    assert unplayed(first) == second
    assert list(first["splits"]) == ["eval"]


@pytest.mark.slow
def test_a_branch_is_read_at_its_commit_which_is_recorded(seen):
    (first, _), requested = seen
    (commit,) = first["revisions"].values()
    assert len(commit) == 40
    resolved = [path for path in requested if "/resolve/" in path and path.endswith(".csv")]
    assert resolved
    assert all(f"/resolve/{commit}/" in path for path in resolved)


@pytest.mark.slow
def test_without_a_token_it_refuses_and_says_what_to_do(tmp_path):
    with FixtureHub(ROWS, token=TOKEN) as hub:
        (told,) = run_cases([[FACTORY, {}]], hub.environ(tmp_path))
    assert "is a gated dataset: accept its terms" in told["error"]
    assert "export it as HF_TOKEN" in told["error"]
    assert hub.requested == []


@pytest.mark.slow
def test_a_token_without_access_is_one_message(tmp_path):
    with FixtureHub(ROWS, token=TOKEN) as hub:
        variables = {**hub.environ(tmp_path), "HF_TOKEN": "hf_of_somebody_else"}
        found = run_cases([[FACTORY, {}], [FACTORY, {"revision": "a" * 40}]], variables)
    for told in found:
        assert "Idavidrein/gpqa" in told["error"]
        assert "gated" in told["error"] or "token" in told["error"]


@pytest.mark.slow
def test_a_local_file_needs_no_token(tmp_path):
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    (told,) = run_cases([[FACTORY, {"path": str(TABLE)}]], offline)
    assert len(told["splits"]["eval"]) == 14
    assert told["revisions"] == {}


def test_the_right_choice_stands_at_each_place_equally_often():
    counts = Counter(
        question_of(f"question {n}?", "right", [f"wrong {k}" for k in range(3)]).letter
        for n in range(4000)
    )
    # Four standard deviations of a binomial of 4000 and 1/4 are 110.
    assert all(abs(counts[letter] - 1000) < 110 for letter in LETTERS)


def test_the_order_depends_on_the_row_alone():
    one = question_of("q?", "a", ["b", "c", "d"])
    assert question_of("q?", "a", ["b", "c", "d"]) == one
    assert sorted(one.choices) == ["a", "b", "c", "d"]
    assert one.choices[LETTERS.index(one.letter)] == "a"
    orders = {question_of(f"q{n}?", "a", ["b", "c", "d"]).choices for n in range(300)}
    assert len(orders) == 24


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        *(("Answer: C", "C"), ("answer: (b) no, Answer: (D)", "D"), ("The answer is B.", "B")),
        *(("**Answer: A**", "A"), ("Answer: **A**", "A"), ("\\boxed{D}", "D"), ("B", "B")),
        *(("\\boxed{\\text{C}}", "C"), ("Answer: \\boxed{B}", "B"), ("(C)", "C"), ("D.", "D")),
        *(("Answer: $\\text{C}$", "C"), ("ANSWER: D", "D"), ("Answer:\nB", "B")),
        *(("Answer: X", ""), ("Answer: Apples", ""), ("", ""), ("A or B", ""), ("Answer:", "")),
        *(("answers ABCD", ""), ("Answer: \\boxed{}", ""), ("C is tempting, yet", "")),
        *(("Answer: B's", ""), ("Answer: E", ""), ("\u0410", "")),
        # The line that was asked for, whatever is said before and behind it.
        ("Answer: A\n\nNote that answer C would need a photon.", "A"),
        ("Answer: A. (Answer B forgets the spin.)", "A"),
        ("Answer: A\nIf you meant another isotope, the answer is B.", "A"),
        ("First try: \\boxed{B}. It fails.\n\nAnswer: C", "C"),
        ("Answer: A\nNo.\n> **Final Answer:** C", "C"),
        *(("The answer is B. So \\boxed{C}", "C"), ("Answer: C, a photon", "C")),
        *(("## Answer\n\nC", "C"), ("Is answer A possible? No", "")),
        # Several letters are no answer.
        *(("Answer: A or B", ""), ("Answer: A, B, C, D", ""), ("The answer is (A) and (B).", "")),
        *(("\\boxed{A, B}", ""), ("\\boxed{A) 10 m, B) 20 m}", ""), ("Answer: A/B", "")),
        *(("Answer: not A", ""), ("Answer: C-terminal", ""), ("\\boxed{A cat}", "")),
        *((f"Answer: {both}", "") for both in ("A+B", "B | C", "A; B", "A B", "A and/or B")),
        *((f"Answer: {both}", "") for both in ("**A** + **B**", "A (or B)", "`A`, `B`", "A || B")),
        *(("Answer: A and B are right", ""), ("The answer is A + B.", ""), ("A + B", "")),
        *(("Answer: C (A, B and D fail)", "C"), ("Answer: C\nA is wrong", "C")),
        *(("Answer: C\n| A | no |", "C"), ("Answer: A\nor B", "")),
        *(("Answer: A; B is wrong", "A"), ("Answer: C\n\nD", "C")),
        # Tags and sentences that name the choice.
        *(("<answer>B</answer>", "B"), ("<answer>\n(B) 10 m\n</answer>", "B")),
        *(("<answer>A, B</answer>", ""), ("<answer>A cat</answer>", "")),
        *(("The correct option is B.", "B"), ("So, **the correct choice is (B)**.", "B")),
        *(("Spin is 1.\n\nOption B is correct.", "B"), ("Thus option **B** is the right one", "B")),
        *(
            ("I choose B.", "B"),
            ("It decays. I would pick option B", "B"),
            ("I'll go with B!", "B"),
        ),
        *(("Option B is correct only if it decays", ""), ("Option B is correct, perhaps.", "")),
        *(("If so, option B is correct.", ""), ("Option B is not correct.", "")),
        *(("Option B is correct.\nYet it fails.", ""), ("Is option B correct?", "")),
        *(("Option B is correct. Wait, it is not.", ""), ("Say I choose B. It fails.", "")),
        *(("Option A is correct. Option B is correct.", ""), ("I choose A or B.", "")),
        *(("The correct option is B only if it decays.", ""), ("I choose a photon.", "")),
        *(("Option B is correct. The answer is C.", "C"), ("I choose B over C.", "")),
        # The same letter, written in other ways.
        *(("\\boxed{\\textbf{(C)}}", "C"), ("\\boxed{C) 10 m}", "C"), ("\\boxed{C.}", "C")),
        *(("Answer: \\(C\\)", "C"), ("Answer: Option C", "C"), ("Answer: `C`", "C")),
        *(("Answer\uff1aC", "C"), ("The answer is option C", "C"), ("Answer: [C]", "C")),
        *(("The answer is therefore C", "C"), ("\\boxed{\\text{Answer: C}}", "C")),
        *(("Answer: 'C'", "C"), ('Answer: "C"', "C"), ("Answer is: C", "C")),
        ("<think>\\boxed{B}? No.</think>\n\nAnswer: C", "C"),
        ("<think>so the answer is B? hmm, let me", ""),
    ],
)
def test_the_letter_of_a_reply(reply, letter):
    assert letter_in(reply) == letter


def test_the_prompt_shows_every_choice_by_letter():
    with TABLE.open() as lines:
        row = next(csv.DictReader(lines))
    environment = GpqaDiamond.from_settings({"path": str(TABLE)})
    example = example_of(row)
    prompt = environment.format_prompt(example)
    right = row["Correct Answer"]
    assert f"{example.answer}) {right}" in prompt
    assert all(f"{letter}) " in prompt for letter in LETTERS)
    assert json.loads(json.dumps(example.info))["domain"] == "Physics"
    assert environment.splits() == (Split.EVAL,)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"Correct Answer": ""}, ["'Correct Answer'"]),
        ({"Incorrect Answer 2": "the photon"}, ["right answer"]),
    ],
)
def test_a_row_that_cannot_be_asked_is_one_message(change, facts):
    with TABLE.open() as lines:
        row = next(csv.DictReader(lines))
    with pytest.raises(ConfigError) as refused:
        example_of({**row, **change})
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_the_letter_is_the_vote_of_a_reply():
    with TABLE.open() as lines:
        example = example_of(next(csv.DictReader(lines)))
    environment = GpqaDiamond.from_settings({"path": str(TABLE)})
    for text, letter in (("Answer: C", "C"), ("I do not know.", None)):
        tags: dict[str, str] = {}
        messages = (Message(role="assistant", content=text),)
        said = Rollout(environment="it", example_id="e", group_id="g", index=0, messages=messages)
        reward = environment.correct(said, example, SimpleNamespace(tags=tags))
        assert (reward == 1.0, tags.get("answer")) == (example.answer == letter, letter)
