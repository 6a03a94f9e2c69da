"""Math datasets: each preset on fixture rows, over a loopback Hub and from disk."""

import json
import re
from types import SimpleNamespace

import pytest
from tests.environments.dataset_runs import (
    ENVIRONMENTS,
    KINDS,
    run_cases,
    same_in_another_process,
    unplayed,
)

from telescope_core import Example, Split
from telescope_core.errors import ConfigError, EnvironmentLoadError
from telescope_env_telescope_math_datasets import MathDatasets
from telescope_env_telescope_math_datasets.presets import PRESETS
from telescope_env_telescope_math_datasets.rows import example_of
from telescope_envs.validation.fixture_hub import FixtureHub

FACTORY = "telescope_env_telescope_math_datasets:MathDatasets"
ROWS = ENVIRONMENTS / "math-datasets" / "fixture-rows"
TRAINING = ("gsm8k", "hendrycks-math", "dapo-math", "deepscaler")
EVALS = ("math500", "aime-2024", "aime-2025", "aime-2026")
CASES = [[FACTORY, {"dataset": name}] for name in PRESETS]


@pytest.fixture(scope="module")
def over_the_hub(tmp_path_factory):
    """What two processes with different hash seeds saw of every preset, and what was asked for."""
    with FixtureHub(ROWS) as hub:
        variables = hub.environ(tmp_path_factory.mktemp("home"))
        seen = same_in_another_process(CASES, variables)
    told = dict(zip(PRESETS, zip(*seen, strict=True), strict=True))
    return told, hub.requested


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_gold_reaches_the_maximum_and_cheats_stay_at_the_floor(over_the_hub, name):
    told = over_the_hub[0][name][0]
    examples = [one for found in told["splits"].values() for one in found]
    assert len(examples) >= 10
    assert {kind for one in examples for kind in one["earned"]} == set(KINDS)
    for one in examples:
        rewards = {kind: found["reward"] for kind, found in one["earned"].items()}
        assert rewards.pop("gold") == 1.0, one
        assert set(rewards.values()) == {0.0}, one


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_ids_are_the_same_in_two_processes_and_splits_are_disjoint(over_the_hub, name):
    first, second = over_the_hub[0][name]
    assert unplayed(first) == second
    ids = {split: {one["id"] for one in found} for split, found in first["splits"].items()}
    assert set(ids) == ({"train", "eval"} if name in TRAINING else {"eval"})
    assert not ids.get("train", set()) & ids["eval"]
    assert all(ids.values())
    assert all(len(ids[split]) == len(found) for split, found in first["splits"].items())


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_pinned_commit_is_asked_for_and_recorded(over_the_hub, name):
    told, requested = over_the_hub
    spec = PRESETS[name].spec
    assert re.fullmatch("[0-9a-f]{40}", spec.revision)
    assert told[name][0]["revisions"] == {spec.path: spec.revision}
    assert any(
        path.startswith(f"/datasets/{spec.path}/resolve/{spec.revision}/") for path in requested
    )
    declared = json.loads((ROWS.parent / "datasets.json").read_text())
    assert {one["when"]: one["revision"] for one in declared}[f"dataset={name}"] == spec.revision


@pytest.mark.slow
def test_columns_are_read_as_each_dataset_has_them(over_the_hub):
    told, _ = over_the_hub
    found = {name: told[name][0]["splits"] for name in PRESETS}
    answers = {name: {one["answer"] for one in splits["eval"]} for name, splits in found.items()}
    assert "1100" in answers["gsm8k"], "1,100 after ####"
    assert "\\frac{\\sqrt{2}}{2}" in answers["hendrycks-math"] & answers["math500"]
    assert "83" in answers["aime-2024"] & answers["aime-2026"], (
        "Problem and Answer, problem and answer"
    )
    assert "083" in answers["aime-2025"]
    dapo = found["dapo-math"]
    assert len(dapo["train"]) + len(dapo["eval"]) == 24, "each of 72 rows stands there three times"
    assert dapo["train"][0]["gold"].startswith("Answer: ")
    assert "boxed" not in dapo["train"][0]["prompt"][0]
    held_out = {one["prompt"][0] for one in found["gsm8k"]["eval"]}
    assert not {one["prompt"][0] for one in found["gsm8k"]["train"]} & held_out
    assert found["hendrycks-math"]["train"][0]["info"] == {"level": "Level 1", "type": "Algebra"}


@pytest.mark.slow
def test_a_local_file_takes_the_place_of_a_hub_that_cannot_be_reached(tmp_path):
    lines = (ROWS / "math-ai/aime25/test.jsonl").read_text()
    (tmp_path / "own.jsonl").write_text(lines)
    settings = {"dataset": "aime-2025", "path": str(tmp_path / "own.jsonl")}
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    cases = [[FACTORY, settings], [FACTORY, {"dataset": "math500"}]]
    own, told = run_cases(cases, offline)
    assert len(own["splits"]["eval"]) == len(lines.splitlines())
    assert (own["revisions"], own["network"]) == ({}, "none")
    assert all(named in told["error"] for named in ("'test'", "'HuggingFaceH4/MATH-500'"))
    assert "local folder" in told["error"], "what can be done"
    assert "splits" not in told


@pytest.mark.parametrize("name", EVALS)
def test_what_is_for_evals_has_no_split_to_train_on(name):
    environment = MathDatasets.from_settings({"dataset": name})
    assert environment.splits() == (Split.EVAL,)
    with pytest.raises(ConfigError, match="is for evals"):
        environment.examples(Split.TRAIN).example(0)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"dataset": "gsm9k"}, ["env.dataset", "'gsm9k'"]),
        ({"path": "acme/sums"}, ["'acme/sums'", "env.revision"]),
        ({"datset": "gsm8k"}, ["datset", "'dataset'"]),
    ],
)
def test_bad_settings_are_named(settings, facts):
    with pytest.raises(ConfigError) as refused:
        MathDatasets.from_settings(settings)
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_a_revision_of_ones_own_is_loaded_and_recorded():
    environment = MathDatasets.from_settings({"dataset": "gsm8k", "revision": "a" * 40})
    assert environment.dataset_revisions() == {"openai/gsm8k": "a" * 40}


@pytest.mark.parametrize(
    "row", [{"problem": "1?", "answer": ""}, {"problem": "1?", "answer": None}]
)
def test_a_row_without_an_answer_is_refused(row):
    with pytest.raises(ConfigError) as refused:
        example_of(row, path="acme/sums")
    assert all(fact in str(refused.value) for fact in ("acme/sums", "answer"))


def test_answers_of_three_digits_are_numbers():
    environment = MathDatasets.from_settings({"dataset": "aime-2025"})
    example = example_of({"problem": "How many?", "answer": "007"}, path="own")
    assert environment.gold_answer(example) == "\\boxed{007}"
    rewards = {
        text: _graded(environment, text, example)
        for text in ("\\boxed{7}", "\\boxed{007}", "\\boxed{7.0}", "\\boxed{14/2}", "\\boxed{70}")
    }
    assert rewards == {
        "\\boxed{7}": 1.0,
        "\\boxed{007}": 1.0,
        "\\boxed{7.0}": 1.0,
        "\\boxed{14/2}": 0.0,
        "\\boxed{70}": 0.0,
    }


def test_the_form_that_a_preset_asks_for_counts():
    line = MathDatasets.from_settings({"dataset": "dapo-math"})
    box = MathDatasets.from_settings({"dataset": "gsm8k"})
    example = example_of({"problem": "How many?", "answer": "31"}, path="own")
    both = "Answer: 31\nAs a box, for a first guess: \\boxed{12}"
    assert (line.gold_answer(example), box.gold_answer(example)) == ("Answer: 31", "\\boxed{31}")
    assert (_graded(line, both, example), _graded(box, both, example)) == (1.0, 0.0)
    own = MathDatasets.from_settings({"dataset": "gsm8k", "instruction": "End with Answer: N"})
    assert _graded(own, both, example) == 1.0
    free = MathDatasets.from_settings({"dataset": "gsm8k", "instruction": ""})
    assert _graded(free, "\\boxed{12}, no.\nAnswer: 31", example) == 1.0


@pytest.mark.slow
def test_an_answer_that_cannot_be_read_is_counted():
    environment = MathDatasets.from_settings({"dataset": "math500"})
    example = example_of({"problem": "How many?", "answer": "31"}, path="own")
    texts = ("\\boxed{31}", "\\boxed{30}", "", "\\boxed{31 kangaroos}", "\\boxed{31\\ln}")
    seen = {
        text: (
            _graded(environment, text, example),
            environment.ungradable(_said(text), example),
        )
        for text in texts
    }
    environment.grader.close()
    assert seen == dict(zip(texts, [(1, 0), (0, 0), (0, 0), (0, 1), (0, 1)], strict=True))


def test_answers_of_the_same_worth_vote_together():
    environment = MathDatasets.from_settings({"dataset": "math500"})
    example = example_of({"problem": "How many?", "answer": "\\frac{1}{2}"}, path="own")
    boxes = ("\\frac12", "0.5", "50\\%", "3", "3.0", "x + 1", " x+1 ", "")
    votes = {}
    for inside in boxes:
        tags: dict[str, str] = {}
        environment.correct(
            _said(f"\\boxed{{{inside}}}" if inside else "?"), example, SimpleNamespace(tags=tags)
        )
        votes[inside] = tags.get("answer")
    environment.grader.close()
    assert votes["\\frac12"] == votes["0.5"] == "1/2"
    assert votes["3"] == votes["3.0"] == "3"
    assert votes["x + 1"] not in (None, "3", "1/2")
    assert votes[""] is None


def _graded(environment: MathDatasets, text: str, example: Example) -> float:
    return environment.correct(_said(text), example, SimpleNamespace(tags={}))


def _said(text: str):
    from telescope_core import Message, Rollout

    messages = (Message(role="assistant", content=text),)
    return Rollout(environment="it", example_id="e", group_id="g", index=0, messages=messages)


def test_answers_that_are_no_text_or_number_are_refused():
    with pytest.raises(
        EnvironmentLoadError, match=r"'own': the answer must be text .*\['3', '4'\]"
    ):
        example_of({"problem": "How many?", "answer": ["3", "4"]}, path="own")
    with pytest.raises(EnvironmentLoadError, match="'own': ground_truth must be text"):
        example_of({"problem": "p", "reward_model": {"ground_truth": True}}, path="own")
