"""IFEval: every instruction followed and not followed, strict and loose, and the dataset's rows."""

import json
import time

import pytest
from tests.environments.dataset_runs import (
    ENVIRONMENTS,
    run_cases,
    same_in_another_process,
    unplayed,
)

from telescope_core import Message, Rollout, Split
from telescope_core.errors import ConfigError
from telescope_env_telescope_ifeval import IFEval
from telescope_env_telescope_ifeval.checks import NAMES, is_followed
from telescope_env_telescope_ifeval.environment import DATASET, REVISION, example_of
from telescope_env_telescope_ifeval.languages import DetectedLanguages
from telescope_env_telescope_ifeval.scores import (
    Instruction,
    followed_loosely,
    followed_strictly,
    loose_variants,
)
from telescope_env_telescope_ifeval.texts import num_bullets, num_sentences
from telescope_envs.validation.fixture_hub import FixtureHub

FACTORY = "telescope_env_telescope_ifeval:IFEval"
ROWS = ENVIRONMENTS / "ifeval" / "fixture-rows"
TABLE = ROWS / "google/IFEval/train.jsonl"
LANGUAGES = DetectedLanguages()
ENGLISH = "the quick brown fox jumps over the lazy dog and then it sleeps"
CASES = [
    ("keywords:existence", {"keywords": ["sea", "C++"]}, "The SEA and c++", "The sea and C"),
    (
        "keywords:frequency",
        {"keyword": "sea", "relation": "at least", "frequency": 2},
        "Sea, seaside",
        "sea",
    ),
    (
        "keywords:frequency",
        {"keyword": "sea", "relation": "less than", "frequency": 2},
        "sea",
        "sea sea",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat."),
    (
        "keywords:letter_frequency",
        {"letter": "Z", "let_relation": "at least", "let_frequency": 2},
        "zZ",
        "z",
    ),
    (
        "language:response_language",
        {"language": "en"},
        ENGLISH,
        "Das ist ein sch\u00f6ner Tag heute.",
    ),
    (
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 3},
        "Dr. Smith came at 3.15 p.m. yesterday. He left.",
        "One. Two! Three?",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a***b***", "a***  ***b"),
    (
        "length_constraints:number_words",
        {"relation": "at least", "num_words": 3},
        "one-two three",
        "one two",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        'x\n\n"then, y',
        "Then x\n\ny",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", "[a\n] [b]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\np. s. y", "x\nPS y"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S y", "P.S. y"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n - b", "* a\n** b"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a*", "* * **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "PART", "num_sections": 2},
        "PART 1 a PART 2",
        "PART 1 part 2",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1} ok'),
    ("detectable_format:title", {}, "x\n<<A title>> y", "<< >>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say it."},
        "say it. I did",
        "I did. Say it.",
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, 'x. "the end."', "The end. x"),
    ("startend:quotation", {}, ' "a" ', '"a'),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 2},
        "WELL-KNOWN FACT x",
        "Well FACT x",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    (
        "change_case:english_lowercase",
        {},
        ENGLISH,
        "das ist ein sch\u00f6ner tag und die sonne scheint",
    ),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]


def test_every_instruction_of_the_paper_has_a_case():
    assert len(NAMES) == 25
    assert {name for name, *_ in CASES} == NAMES


@pytest.mark.parametrize(("name", "given", "follows", "fails"), CASES)
def test_an_instruction_is_followed_or_not(name, given, follows, fails):
    assert is_followed(name, follows, given, LANGUAGES)
    assert not is_followed(name, fails, given, LANGUAGES)
    assert not is_followed(name, " \n", given, LANGUAGES)


@pytest.mark.parametrize(("name", "given"), [case[:2] for case in CASES])
@pytest.mark.parametrize(
    "unit", ["[", "*", "\n", " ", "<<", "{", "PART ", "p. ", "***", "A.B.", "-\n", "\u0301"]
)
def test_no_text_takes_more_than_linear_time(name, given, unit):
    """A hundred thousand characters of one mark: what is quadratic would take minutes."""
    text = unit * (100_000 // len(unit))
    started_s = time.process_time()
    is_followed(name, text, given, LANGUAGES)
    assert time.process_time() - started_s < 5


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("my name is ann. i live here. i read. my dog is brown. we walk.", 5),
        ("**Bold.** Next", 2),
        ("I like cats, etc. They are fun.", 2),
        ("Dr. Smith came at 3.15 p.m. on Jan. 5. He left.", 2),
        ("J. K. Rowling wrote it in the U.S. long ago. I read it!", 2),
        ("He works at Apple Inc. He likes it.", 2),
        ("Wait... what? No way!", 2),
        ("Wait... The end.", 2),
        ('"Stop!" he cried. "Now!"', 3),
        ("Yes! yes! yes!", 3),
        ("What?! No!!!", 2),
        ("1. Do this.\n2. Do that.", 4),
        ("See https://example.com/a.b?c=1 or file.txt now", 1),
        ('He said "no."', 1),
        ("a\n\nb", 1),
        ("...", 1),
        ("", 0),
        ("It costs $3.50. (Buy it.) now", 3),
    ],
)
def test_sentences_end_at_stops_whatever_follows_but_not_at_abbreviations(text, count):
    assert num_sentences(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("* a\n- b\n  * c\n** d\n*e*", 4),
        ("* a\n*", 1),
        ("*\n* a\n* b", 2),
        ("*\n- a", 2),
        ("*", 0),
        ("* \n-", 2),
    ],
)
def test_a_star_alone_is_a_bullet_with_its_next_line(text, count):
    assert num_bullets(text) == count


def test_loose_forgives_first_and_last_lines_and_stars():
    end = [Instruction(name="startend:end_checker", given={"end_phrase": "bye."})]
    title = [Instruction(name="startend:quotation", given={})]
    assert followed_strictly("Sure!\n*bye.*", end, LANGUAGES) == (False,)
    assert followed_loosely("Sure!\n*bye.*", end, LANGUAGES) == (True,)
    assert followed_loosely('Here:\n"a"\nDone.', title, LANGUAGES) == (True,)
    assert followed_loosely("Here:\na\nDone.", title, LANGUAGES) == (False,)
    assert loose_variants("a\n*b*\nc") == [
        *("a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*"),
        *("a\nb\nc", "b\nc", "a\nb", "b"),
    ]


@pytest.mark.slow
def test_rows_over_the_hub(tmp_path):
    with FixtureHub(ROWS) as hub:
        [first], [second] = same_in_another_process([[FACTORY, {}]], hub.environ(tmp_path))
    assert unplayed(first) == second
    assert first["revisions"] == {DATASET: REVISION}
    assert any(f"/resolve/{REVISION}/" in path for path in hub.requested)
    assert list(first["splits"]) == ["eval"]
    examples = first["splits"]["eval"]
    assert len(examples) == 14
    seen = {one["name"] for example in examples for one in example["info"]["instructions"]}
    assert seen == NAMES, "the rows hold every instruction"
    for one in examples:
        rewards = {kind: found["reward"] for kind, found in one["earned"].items()}
        assert rewards.pop("gold") == 1.0, one["id"]
        assert set(rewards.values()) == {0.0}, one["id"]
        metrics = one["earned"]["gold"]["metrics"]
        assert metrics["prompt_strict"] == metrics["prompt_loose"] == 1.0
        assert metrics["instructions_strict"] == metrics["num_instructions"]


@pytest.mark.slow
def test_a_local_file_needs_no_network(tmp_path):
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    case = [FACTORY, {"path": str(TABLE), "score": "instruction"}]
    (told,) = run_cases([case], offline, kinds=("echo",))
    assert (told["revisions"], told["network"]) == ({}, "none")
    shares = {one["earned"]["echo"]["reward"] for one in told["splits"]["eval"]}
    assert shares <= {0.0, 1 / 3, 0.5, 2 / 3}


def row(number: int) -> dict:
    return json.loads(TABLE.read_text().splitlines()[number])


def said(text: str) -> Rollout:
    messages = (Message(role="assistant", content=text),)
    return Rollout(environment="it", example_id="e", group_id="g", index=0, messages=messages)


@pytest.mark.parametrize(
    ("settings", "reward"),
    [
        ({}, 0.0),
        ({"score": "instruction"}, 0.5),
        ({"strictness": "loose"}, 1.0),
        ({"score": "instruction", "strictness": "loose"}, 1.0),
    ],
)
def test_the_reward_is_of_the_level_and_strictness_that_was_chosen(settings, reward):
    environment = IFEval.from_settings({"path": str(TABLE), **settings})
    example = example_of(row(0))
    reply = "Sure, gladly!\nThe keeper lights the lantern."
    assert environment.follows(said(reply), example) == reward
    assert environment.prompt_strict(said(reply), example) == 0.0
    assert environment.prompt_loose(said(reply), example) == 1.0
    assert environment.instructions_strict(said(reply), example) == 1.0
    assert environment.num_instructions(said(reply), example) == 2.0
    assert environment.splits() == (Split.EVAL,)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (
            {"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]},
            ["no_coma", "'punctuation:no_comma'"],
        ),
        ({"kwargs": [{}]}, ["2 instructions"]),
        ({"kwargs": [{}, {}]}, ["keywords:existence"]),
    ],
)
def test_a_row_that_cannot_be_checked_is_one_message(change, facts):
    with pytest.raises(ConfigError) as refused:
        example_of({**row(0), **change})
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_a_dataset_of_somebody_else_needs_a_revision():
    with pytest.raises(ConfigError) as refused:
        IFEval.from_settings({"path": "acme/prompts"})
    assert all(fact in str(refused.value) for fact in ("'acme/prompts'", "env.revision"))
