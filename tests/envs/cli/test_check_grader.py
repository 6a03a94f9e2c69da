"""`telescope env check-grader`: which wrong answers a grader takes for right, and how it ends."""

import json

import pytest
from tests.envs.projects import write_project
from typer.testing import CliRunner

from telescope_cli.env.app import app
from telescope_core.graders.mathematics import MathGrader
from telescope_core.probes.near_gold import NEAR_GOLD, near_answers

RUN = CliRunner()
CODE = """
import re
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward
from telescope_core.graders.mathematics import extract_answer, numbers_match


class Toy(SingleTurnEnvironment):
    def examples(self, split):
        first = 30 if split == "train" else 60
        return ListSource(
            [
                Example(id=str(n), prompt=f"{n} + 7 = ?", answer=ANSWER)
                for n in range(first, first + 6)
            ]
        )

    def gold_answer(self, example):
        return f"\\\\boxed{{{example.answer}}}"

    @reward
    def correct(self, rollout, example):
        answer = extract_answer(rollout.completion_text)
        return float(JUDGED)
"""
STRICT = "numbers_match(answer, example.answer)"
OF_NUMBERS = NEAR_GOLD.keys() - {"other_letters"}
LENIENT = 're.sub(r"[\\\\a-z ]+$", "", answer) == example.answer'


def check(tmp_path, answer: str, judged: str, *flags: str):
    code = CODE.replace("ANSWER", answer).replace("JUDGED", judged)
    folder = write_project(tmp_path / "toy", code=code, needs=("telescope-core>=0.1,<0.2",))
    done = RUN.invoke(app, ["check-grader", str(folder), "--examples", "3", *flags])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.slow
def test_a_grader_that_reads_values_passes(tmp_path):
    done = check(tmp_path, "str(n + 7)", STRICT, "--json")
    said = json.loads(done.stdout)
    assert (done.exit_code, said["verdict"], said["wrong"]) == (0, "pass", [])
    kinds = {kind["kind"]: (kind["num_tried"], kind["num_equal"]) for kind in said["kinds"]}
    assert kinds.pop("gold") == (6, 6)
    assert set(kinds) == OF_NUMBERS
    assert {equal for _, equal in kinds.values()} == {0}


@pytest.mark.slow
def test_what_a_lenient_grader_takes_for_right_is_shown(tmp_path):
    done = check(tmp_path, "str(n + 7)", LENIENT)
    assert done.exit_code == 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    for said in ("other_symbol         6      6", "other_constant       6      6", "'37' is right"):
        assert said in done.stdout
    assert "takes for right" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judged", "num_kinds"),
    [
        pytest.param(f"1 / {STRICT}", len(OF_NUMBERS), id="every wrong answer"),
        pytest.param(f'{STRICT} or 0 / ("pi" not in answer)', 1, id="one kind"),
    ],
)
def test_a_grader_that_raises_on_wrong_answers_told_nothing_apart(tmp_path, judged, num_kinds):
    done = check(tmp_path, "str(n + 7)", judged, "--json")
    said = json.loads(done.stdout)
    assert (done.exit_code, said["verdict"], said["wrong"]) == (8, "not conclusive", [])
    assert len(said["failed"]) == 6 * num_kinds
    assert all("ZeroDivisionError" in one["error"] for one in said["failed"])


@pytest.mark.slow
def test_the_first_error_of_a_grader_is_shown(tmp_path):
    done = check(tmp_path, "str(n + 7)", f"1 / {STRICT}")
    assert done.exit_code == 8
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "answers without a reward, because the rollout failed; the first is" in " ".join(
        done.stdout.split()
    )
    assert done.stdout.count("ZeroDivisionError") == 1


@pytest.mark.slow
def test_answers_that_cannot_be_changed_are_said(tmp_path):
    done = check(tmp_path, '"to the north"', "answer == example.answer")
    assert done.exit_code == 8
    assert "not conclusive" in done.stdout
    assert "6 of 6 examples: the right answer is no number, formula or word" in " ".join(
        done.stdout.split()
    )


@pytest.fixture(scope="module")
def grader():
    one = MathGrader()
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        *("7", "-12", "1,000", "3/4", "2.5", "50\\%", "0", "0 km", "17\\text{ km}"),
        *("x+1", "1 \\pm \\sqrt{3}", "(1, 2)", "(2, 1, 2)", "[-1, 1]", "(0,1)\\cup(2,3)"),
    ],
)
def test_near_answers_are_worth_something_else(grader, answer):
    near = near_answers(answer)
    same = {kind: text for kind, text in near.items() if grader.are_equal(text, answer)}
    assert near
    assert same == {}


def test_letters_of_several_choices_are_no_word():
    """Whoever answers DCA for ACD has named the same choices."""
    assert near_answers("ACD") == {}
    assert near_answers("CAB") == {"other_letters": "bac"}
