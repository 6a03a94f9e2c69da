"""Grading mathematics: finding answers, comparing them, and never for longer than allowed."""

import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.errors import EnvironmentLoadError, ProcessDiedError
from telescope_core.graders.mathematics import (
    MathGrader,
    as_fraction,
    extract_answer,
    final_answer,
    has_box,
    numbers_match,
)
from telescope_core.graders.mathematics.bounds import is_worth_comparing


@pytest.fixture(scope="module")
def grader():
    made = MathGrader()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("46", "46"),
        ("The answer is 46.", "46"),
        ("12+34=46", "46"),
        ("12+34=", ""),
        ("5-99=-94", "-94"),
        ("1\n2\n3\n", "3"),
        ("so \\boxed{46} it is 12", "46"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\boxed{unclosed", ""),
        ("I say $x=3$.", "3"),
        ("it costs $1,234.50", "$1,234.50"),
        ("Some steps.\nAnswer: 34", "34"),
        ("Some steps.\n**Answer:** $\\frac{1}{2}$.", "\\frac{1}{2}"),
        ("Answer: \\frac{1}{2}", "\\frac{1}{2}"),
        ("The final answer is: **-7**", "-7"),
        ('Put it on its own line after "Answer:".', ""),
        ("Answer:", ""),
        ("", ""),
        ("no number", ""),
    ],
)
def test_the_answer_is_found(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("Two and two.\n#### 4", "4"),
        ("A lot.\n#### 1,200", "1200"),
        ("#### 5\nno\n#### -6 ", "-6"),
        ("So it is $\\boxed{\\frac{3}{4}}$.", "\\frac{3}{4}"),
        (" 204 ", "204"),
        ("x^2+1", "x^2+1"),
    ],
)
def test_the_answer_of_a_worked_solution(solution, answer):
    assert final_answer(solution) == answer


def test_a_box_counts_only_when_something_is_in_it():
    assert has_box("\\boxed{3}")
    assert not has_box("\\boxed{}")


@pytest.mark.parametrize(
    "answer",
    [
        *("46", "$46", "\\$46", "46.", "46.0", "046", "46 dollars", "46\\text{ apples}"),
        *("46\\%", "x=46", "0046"),
    ],
)
def test_numbers_match_in_every_usual_way_of_writing(answer):
    assert numbers_match(answer, "46")


@pytest.mark.parametrize(
    "answer",
    [
        *("", "12+34", "92/2", "\\frac{92}{2}", "-46", "4 6", "460", "46 or 47"),
        *("\u0664\u0666", "1,046"),
    ],
)
def test_a_calculation_or_another_number_does_not_match(answer):
    assert not numbers_match(answer, "46")


@given(st.fractions(), st.integers(0, 3))
def test_a_number_is_worth_what_is_written(value, zeros):
    """Against Python's own fractions: signs, leading zeros and both ways to write a fraction."""
    top, bottom = abs(value.numerator), value.denominator
    if len(str(top)) > 30 or len(str(bottom)) > 30:
        return
    sign = "-" if value < 0 else ""
    assert as_fraction(f"{sign}{'0' * zeros}{top}/{bottom}") == value
    assert as_fraction(f"{sign}\\frac{{{top}}}{{{bottom}}}") == value
    assert as_fraction(f"{sign}{top:,}") == Fraction(top) * (-1 if sign else 1)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("1,200", "1200"),
        ("007", "7"),
        ("0.75", "\\frac{3}{4}"),
        ("\\frac34", "\\frac{3}{4}"),
        ("\\sqrt{2}+3", "3+\\sqrt{2}"),
        ("y=2x+3", "3+2x"),
        ("49 \\pi", "49\\pi"),
        ("\\text{(C)}", "\\text{(C)}"),
        ("2^{10}", "1024"),
        ("\\binom{10}{3}", "120"),
        ("6!", "720"),
    ],
)
def test_answers_are_equal_symbolically(grader, answer, right):
    assert grader.are_equal(answer, right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *(("\\sqrt{2}", "\\sqrt{3}"), ("x+1", "x+2"), ("", ""), ("\\boxed{}", "3")),
        *(("(" * 20, "3"), ("\\frac{1}{0}", "3"), ("{" * 300 + "x" + "}" * 300, "y+1")),
        pytest.param("(" * 400, "3", marks=pytest.mark.slow),
        *(("\0\a\u0301\U0001f600", "x"), ("\\begin{pmatrix}", "x^2"), ("$$$", "x")),
    ],
)
def test_other_answers_and_junk_are_not_equal(grader, answer, right):
    assert not grader.are_equal(answer, right)


TOWERS = [
    "9^{9^{9^9}}",
    "9^9^9^9",
    "9^{{}9^{9^9}}",
    "(10^{999})^{999}",
    "10^{99999999}",
    "2^{(3^{(9^9)})}",
    "9**9**9**9",
    "1" * 600,
]


@pytest.mark.parametrize("answer", TOWERS)
def test_towers_of_powers_are_refused_without_a_comparison(answer):
    assert not is_worth_comparing(answer)
    # No helper could be started: the refusal needs none.
    assert not MathGrader(max_helpers=1).are_equal(answer, "x")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        pytest.param("(x+y+z)^{90}", "(x+y+z)^{89}", marks=pytest.mark.slow),
        ("100000000!", "3"),
        pytest.param("\\binom{1000000000}{500000000}", "3", marks=pytest.mark.slow),
        ("x", "9^{9^{9^9}}"),
    ],
)
def test_a_comparison_ends_when_its_processor_time_is_over(answer, right):
    grader = MathGrader(max_helpers=1, cpu_limit_s=0.5)
    try:
        assert grader.are_equal("2^{10}", "1024"), "it is warm, so only the comparison counts"
        before = psutil.Process().children()
        spent_s = children_s()
        assert not grader.are_equal(answer, right)
        assert children_s() - spent_s < 20, "the time that ended processes have computed"
        assert grader.are_equal("2^{10}", "1024"), "another process takes its place"
        assert len(psutil.Process().children()) <= len(before)
    finally:
        grader.close()


def children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.slow
def test_many_threads_compare_at_once_and_signals_are_left_alone():
    grader = MathGrader(max_helpers=2)
    handler = signal.getsignal(signal.SIGALRM)
    results: list[bool] = []
    pairs = [("x(x+1)", "x^2+x"), ("2^{10}", "1024"), ("\\sqrt{8}", "2\\sqrt{2}")] * 4
    threads = [
        threading.Thread(target=lambda a, b: results.append(grader.are_equal(a, b)), args=pair)
        for pair in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grader.close()
    assert results == [True] * len(pairs)
    assert signal.getsignal(signal.SIGALRM) is handler


def test_closing_ends_every_process_and_refuses_more():
    before = {child.pid for child in psutil.Process().children()}
    grader = MathGrader(max_helpers=2)
    assert grader.are_equal("2^{10}", "1024")
    assert {child.pid for child in psutil.Process().children()} - before
    grader.close()
    assert {child.pid for child in psutil.Process().children()} <= before
    with pytest.raises(ProcessDiedError, match="closed"):
        grader.are_equal("2^{11}", "x")
    assert grader.are_equal("3", "3.0"), "numbers need no process"


@pytest.mark.slow
def test_a_helper_that_is_killed_is_a_failure_and_not_a_wrong_answer():
    before = {child.pid for child in psutil.Process().children()}
    grader = MathGrader(max_helpers=1)
    try:
        assert grader.are_equal("2^{10}", "1024")
        (helper,) = [child for child in psutil.Process().children() if child.pid not in before]
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match="status -9"):
            grader.are_equal("2^{10}", "1024")
        assert grader.are_equal("2^{10}", "1024")
    finally:
        grader.close()


@pytest.mark.slow
def test_a_helper_ends_with_its_parent():
    program = (
        "import psutil; from telescope_core.graders.mathematics import MathGrader; "
        "grader = MathGrader(); assert grader.are_equal('2^{10}', '1024'); "
        "print(psutil.Process().children()[0].pid, flush=True); import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True
    )
    pid = int(done.stdout)
    ends_s = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def test_without_the_package_the_message_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    grader = MathGrader(max_helpers=1)
    with pytest.raises(EnvironmentLoadError, match=r"telescope-core\[math\]"):
        grader.are_equal("x+1", "1+x")
    assert grader.are_equal("3", "3.0"), "numbers need no package"
    grader.close()
