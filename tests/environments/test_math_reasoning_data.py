"""Math reasoning on datasets: the real `datasets` library, a Hub on loopback, a local folder."""

import json

import pytest
from tests.environments.dataset_runs import run_cases

from telescope_envs.validation.fixture_hub import FixtureHub

pytestmark = pytest.mark.slow
FACTORY = "telescope_env_telescope_math_reasoning:MathReasoning"
REPO = "acme/sums"
REVISION = "0123456789abcdef0123456789abcdef01234567"
ROWS = {
    "train": [
        {"question": "What is 1+1?", "answer": "One and one.\n#### 2"},
        {"question": "What is 2+2?", "answer": "Two and two.\n#### 4"},
        {"question": "What is 500+700?", "answer": "A lot.\n#### 1,200"},
    ],
    "test": [{"question": "What is 2+2?", "answer": "Two and two.\n#### 4"}],
}


def write(folder, name, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def load(settings, variables):
    (told,) = run_cases([[FACTORY, {"instruction": "", **settings}]], variables)
    rows = {
        split: [[one["id"], one["prompt"][0], one["answer"], one["gold"]] for one in found]
        for split, found in told["splits"].items()
    }
    return rows, told["revisions"], told["network"]


def test_a_dataset_of_the_hub_is_loaded_at_its_revision(tmp_path):
    for split, rows in ROWS.items():
        write(tmp_path / "hub" / REPO / "data", f"{split}.jsonl", rows)
    settings = {"dataset": REPO, "dataset_revision": REVISION, "data_folder": str(tmp_path / "d")}
    with FixtureHub(tmp_path / "hub") as hub:
        rows, revisions, network = load(settings, hub.environ(tmp_path / "home"))
    assert [row[1:3] for row in rows["train"]] == [
        ["What is 1+1?", "2"],
        ["What is 500+700?", "1200"],
    ], "the question that is also held out must not be trained on"
    assert [row[1:] for row in rows["eval"]] == [["What is 2+2?", "4", "4"]]
    assert revisions == {REPO: REVISION}
    assert network == "load"
    assert any(REVISION in path for path in hub.requested)


def test_a_local_folder_is_read_by_the_same_library_and_divided(tmp_path):
    rows = [
        {"problem": f"Simplify {n}x.", "solution": f"So \\boxed{{{n}x}}."} for n in range(2, 80)
    ]
    write(tmp_path / "own", "train.jsonl", [*rows, rows[0]])
    settings = {
        "dataset": str(tmp_path / "own"),
        "train_split": "train",
        "eval_split": "train",
    }
    loaded, revisions, _ = load(settings, {"HF_HOME": str(tmp_path / "home")})
    prompts = {split: [row[1] for row in loaded[split]] for split in loaded}
    assert sorted(prompts["train"] + prompts["eval"]) == sorted(row["problem"] for row in rows)
    assert prompts["eval"]
    assert loaded["eval"][0][2].endswith("x")
    assert revisions == {}
