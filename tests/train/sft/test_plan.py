"""The dry run of supervised training: its numbers, what it marks, and that it writes nothing."""

import json
import sys
from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_train.sft.config import load_sft_config
from telescope_train.sft.plan import plan_sft, render_sft_plan

sys.path.insert(0, str(Path(__file__).parents[1]))

TINY = """
model = "base"
make_tiny_model = true
output = "warm"
batch_size = 4
"""


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plan with these settings over those of a model that is yet to be made."""
    monkeypatch.chdir(tmp_path)

    def plan(text: str, *flags: str, steps: str = "number_of_steps = 6\n"):
        (tmp_path / "sft.toml").write_text(TINY + steps + text)
        before = sorted(tmp_path.rglob("*"))
        found = plan_sft(load_sft_config([tmp_path / "sft.toml"], flags))
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
        return found

    return plan


def written(path: Path, *answers: str, question: str = "q") -> None:
    rows = [[{"role": "user", "content": question}, answer_of(text)] for text in answers]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def answer_of(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def test_what_is_learned_is_the_answers_with_their_end(planned, tmp_path):
    talk = [
        *({"role": "user", "content": "one"}, answer_of("first")),
        *({"role": "user", "content": "two"}, answer_of("not this", weight=0)),
        *({"role": "user", "content": "three"}, answer_of("third")),
    ]
    rows = [talk, [{"role": "user", "content": "four"}, answer_of("held out")]]
    lines = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    (tmp_path / "talk.jsonl").write_text(lines)
    plan = planned('dataset = "talk.jsonl"\nnum_held_out = 1\nseq_len = 500\n')
    (first,) = plan.first
    texts = {
        is_learned: [part.text for part in first.parts if part.is_learned == is_learned]
        for is_learned in (True, False)
    }
    if texts[True] == ["held out<|end|>"]:  # which of the two is held out is drawn
        assert "four" in texts[False][0]
    else:
        assert texts[True] == ["first<|end|>", "third<|end|>"]
        assert "not this" in texts[False][1]
    assert plan.num_samples == plan.num_held_out == 1
    assert plan.num_tokens == sum(part.num_tokens for part in first.parts)
    learned = sum(part.num_tokens for part in first.parts if part.is_learned)
    assert plan.num_learned_tokens == learned


def test_samples_that_are_too_long_are_counted_and_passes_are_over_those_that_are_left(
    planned, tmp_path
):
    written(tmp_path / "rows.jsonl", "b", "c", "d", "e" * 60, "f", "g")
    settings = 'dataset = "rows.jsonl"\nnum_held_out = 2\nseq_len = 40\n'
    cut = planned(settings, "--too_long", "truncate")
    assert (cut.num_truncated, cut.num_dropped, cut.longest) == (1, 0, 40)
    assert (cut.num_samples, cut.passes) == (4, 6 * 4 / 4)
    left = planned(settings, "--too_long", "drop")
    assert (left.num_truncated, left.num_dropped) == (0, 1)
    assert left.num_samples + left.num_held_out == 5
    assert left.longest < 40
    often = planned(settings, "--too_long", "drop", "--number_of_steps", "9000")
    assert "each sample 9,000 times" in render_sft_plan(often)


def test_epochs_are_steps_over_the_samples_that_are_left(planned, tmp_path):
    """9 are read, one is too long and one is held out: 7 a pass, in batches of 4."""
    written(tmp_path / "rows.jsonl", *"abcdefgh", "i" * 60)
    settings = 'dataset = "rows.jsonl"\nnum_held_out = 1\nseq_len = 40\ntoo_long = "drop"\n'
    for given, num_steps in {"1": 2, "2": 4, "0.1": 1, "1.1": 2, "4": 7}.items():
        plan = planned(settings, "--number_of_epochs", given, steps="")
        assert (plan.num_samples, plan.num_steps) == (7, num_steps), given
    with pytest.raises(ConfigError, match="number_of_steps and number_of_epochs both say"):
        planned(settings, "--number_of_epochs", "2")
    fit = {
        ("--cooldown_steps", "5"): "cooldown_steps",
        ("--warmup_steps", "5"): "warmup_steps",
        ("--checkpoint_every", "5"): "checkpoint_every",
    }
    for flags, name in fit.items():
        refused = rf"number_of_epochs = 2 over 7 samples is 4 steps of 4, and then: .*{name}"
        with pytest.raises(ConfigError, match=refused):
            planned(settings, "--number_of_epochs", "2", *flags, steps="")
        assert planned(settings, "--number_of_epochs", "4", *flags, steps="").num_steps == 7


def test_each_environment_shows_its_first_sample(planned, tmp_path_factory, monkeypatch):
    code = tmp_path_factory.mktemp("code")
    monkeypatch.syspath_prepend(code)
    (code / "other_digits.py").write_text(
        "from toy_digits import LastDigit\n\nclass Other(LastDigit):\n    pass\n"
    )
    plan = planned(
        "num_examples = 30\nnum_held_out = 4\nstop_at_accuracy = 0.5\n"
        '[[environments]]\nname = "toy_digits:LastDigit"\n'
        '[[environments]]\nname = "other_digits:Other"\n'
    )
    assert [one.source for one in plan.first] == ["toy_digits:LastDigit", "other_digits:Other"]
    assert plan.num_samples == 30
    text = render_sft_plan(plan)
    assert "6 steps, or until accuracy is 0.5, of 4 samples on base: each sample 0.8 times" in text
    assert text.count("first sample of ") == 2


def test_the_text_marks_what_is_learned_within_80_columns_and_acts_on_no_terminal(
    planned, tmp_path
):
    question = "".join(f"line {number}\n" for number in range(100)) + "x" * 300 + " \x1b[31mred"
    written(tmp_path / "rows.jsonl", "yes", "yes", question=question)
    plan = planned('dataset = "rows.jsonl"\nnum_held_out = 1\nseq_len = 4000\n')
    text = render_sft_plan(plan)
    assert "\n  | yes<|end|>" in text
    assert "more lines)" in text
    assert "line 50" not in text
    assert "\x1b" not in text
    assert max(len(line.replace("\\u001b", "")) for line in text.splitlines()) <= 80


def test_a_dataset_of_one_conversation_is_too_small(planned, tmp_path):
    written(tmp_path / "rows.jsonl", "b")
    with pytest.raises(ConfigError, match=r"has 1 conversation and .*; at least two are needed"):
        planned('dataset = "rows.jsonl"\nnum_held_out = 1\n')
