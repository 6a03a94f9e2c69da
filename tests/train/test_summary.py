"""A run proves that it was not trained on what its evals hold out."""

import io

import pytest
from rich.console import Console
from tests.core.evals.test_comparison import an_eval

from telescope_core import TelescopeError
from telescope_core.evals.folder import write_result
from telescope_core.records import RunFolder
from telescope_train.observability.terminal import print_summary
from telescope_train.plan.load import load_train_config
from telescope_train.summary import make_summary, require_disjoint

SETTINGS = """
name = "summed"
number_of_steps = 9
model = "a/b"
[[environments]]
name = "sums"
[[evals]]
name = "sums"
eval_every = 2
"""


def test_an_eval_example_that_was_trained_on_is_told():
    summary = {"run_folder": "runs/a", "examples": {"trained": 9, "held_out": 4, "in_both": 0}}
    require_disjoint(summary)
    summary["examples"]["in_both"] = 2
    with pytest.raises(TelescopeError, match=r"\b2 examples.*runs/a"):
        require_disjoint(summary)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_eval_of_what_is_trained_on_is_not_shown_as_held_out(tmp_path, split):
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS.replace("[[evals]]", f'split = "{split}"\n[[evals]]'))
    config = load_train_config([path], [])
    folder = RunFolder.create(tmp_path / "run", config=config.model_dump(mode="json"))
    for tag in ("before", "after"):
        write_result(folder.evals_path / f"sums-{tag}", an_eval([("e", [1.0]), ("f", [0.0])]))
    summary = make_summary(config, folder)
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, console=console)
    assert list(summary["examples"]["trained_evals"]) == (["sums"] if split == "eval" else [])
    assert ("held-out pass@1" in console.file.getvalue()) == (split == "train")


@pytest.mark.parametrize(
    ("tags", "ends"),
    [
        (("before", "step-4", "after"), ["before", "after"]),
        (("step-2", "step-4", "step-8"), ["step-2", "step-8"]),
        (("before", "step-2", "step-6"), ["before", "step-6"]),
        (("step-4",), ["step-4"]),
        ((), []),
    ],
)
def test_the_first_and_the_last_eval_are_compared(tmp_path, tags, ends):
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS)
    config = load_train_config([path], [])
    folder = RunFolder.create(tmp_path / "run", config={})
    for position, tag in enumerate(tags, start=1):
        solved = [1.0] * (3 * position) + [0.0] * (12 - 3 * position)
        rewards = [(f"e{number}", [one]) for number, one in enumerate(solved)]
        write_result(folder.evals_path / f"sums-{tag}", an_eval(rewards))
    for step in range(1, 10):
        folder.log_metrics({"step": step, "reward/mean": 0.5, "optimizer/steps": 1.0})
    summary = make_summary(config, folder)
    entry = summary["evals"]["sums"]
    assert [tag for tag in entry if tag != "change"] == ends
    assert ("change" in entry) == (len(tags) > 1)
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, console=console)
    text = console.file.getvalue()
    for tag in ends:
        assert tag.replace("step-", "step ") in text
    for told in ("from 0.250 ", f" to {3 * len(tags) / 12:.3f} "):
        assert (told in text) == (len(tags) > 1)
