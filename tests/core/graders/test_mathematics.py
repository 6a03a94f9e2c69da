"""Grading mathematics: finding answers, comparing them, and never for longer than allowed."""

import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path
from string import ascii_letters

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_core.errors import EnvironmentLoadError, ProcessDiedError
from telescope_core.graders.mathematics import (
    AnswerForm,
    MathGrader,
    Verdict,
    as_fraction,
    extract_answer,
    final_answer,
    has_box,
    numbers_match,
)
from telescope_core.graders.mathematics.comparing import compare
from telescope_core.graders.mathematics.grader import is_worth_comparing


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
        ("Some 12 steps.\nAnswer\uff1a34", "34"),
        ("The answer is\uff1a 34", "34"),
        ("\\boxed{2}\uff0c\\boxed{11}", "2, 11"),
        ("So it is 5 lakh", "5 lakh"),
        ("The final answer is: **-7**", "-7"),
        ('Put it on its own line after "Answer:".', ""),
        ("Answer:", ""),
        ("", ""),
        ("no number", ""),
        ("Mia had $90 - $35 = $55", "$55"),
        ("She spends $12 on tea and $30 on cake, $42 in all", "$42"),
        ("Tickets are $4.25 and he pays $8.50. The answer is 8.50.", "8.50"),
        ("Each pays $3, so $3 x 4 = $12", "$12"),
        ("The total is $42$ for $3$ people, or \\$14 each", "\\$14"),
        ("That is $\\$5.50$ each.", "\\$5.50"),
        ("So she has 18 - 7 = <<18-7=11>>11 eggs.", "11"),
        ("The sum is \u221226", "\u221226"),
        ("So the answer is .75", ".75"),
        ("The result is 2.5e4", "2.5e4"),
        ("So the ratio is \\frac{7}{12}", "\\frac{7}{12}"),
        ("y = -\\frac{3}{8}", "-\\frac{3}{8}"),
        ("There are 12 500 trees.", "12 500"),
        ("There are 33 billion of them.", "33 billion"),
        ("It takes 3 1/2 hours", "3 1/2"),
        ("The answer is 3,5", "3,5"),
        ("Code PQ8RS3", ""),
        ("Hence $y^2-9=0$", "y^2-9=0"),
        ("Therefore $m+n = 7$.", "7"),
        ("Answer:\n\\[\n31\n\\]", "31"),
        ("**Final Answer**\n\n\\[ 31 \\]", "31"),
        ("Final Answer: The final answer is $31$. I hope it is correct.", "31"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("The roots are 3 and 4.", "3 and 4"),
        ("so $x=2$ or $x=11$.", "2, 11"),
        ("\\boxed{2} and \\boxed{11}", "2, 11"),
        ("\\boxed{2} \\quad \\text{and} \\quad \\boxed{11}", "2, 11"),
        ("\\boxed{2}\nand\n\\boxed{11}", "11"),
        ("First guess: \\boxed{12}. That is wrong.\nAnswer: 31", "31"),
        ("Answer: 12\nNo: \\boxed{31}", "31"),
        ("Answer: \\boxed{5}", "5"),
        ("Answer: B", "B"),
        ("The answer is (B).", "(B)"),
        ("Answer: no solution", "no solution"),
        ("$9\\pi \\approx 28.27$", "9\\pi"),
        ("#### 35", "35"),
        ("A: 18", "18"),
        ("**x**: 18", "18"),
        ("x : -18", "-18"),
        ("A: 18, B: 20", "B: 20"),
        ("a : b = 3 : 4", "3 : 4"),
        # A last line in another script, with its words in English behind it.
        ("\u041e\u0442\u0432\u0435\u0442: 18", "18"),  # answer: 18
        ("\u0412\u0441\u0435\u0433\u043e 18 \u044f\u0438\u0446.", "18"),  # 18 eggs in all
        ("18 \u0438\u043b\u0438 20", "18 and 20"),  # 18 or 20
        ("\u041c\u0438\u043d\u0443\u0441 18", ""),  # minus 18
        ("18 \u0442\u044b\u0441\u044f\u0447", ""),  # 18 thousand
        ("\u7b54\u6848\u662f18\u3002", "18"),  # the answer is 18
        ("\u7b54\u6848\uff1a18\u3002", "18"),  # answer: 18
        ("\u7b54\u6848\u662f18\u4e07\u3002", ""),  # 18 ten thousands
        ("\u7b54\u6848\u662f3\u4e075000", ""),  # 35000
        ("18\u621620", "18 and 20"),  # 18 or 20
        ("18\u4e2a\u548c20\u4e2a\u3002", "18 and 20"),  # 18 and 20 pieces
        ("18\u300120\u3002", "18\u300120"),  # 18, 20
        ("\u8d1f18", ""),  # minus 18
        ("3\u5206\u306e1", ""),  # a third
        ("18\u70b95", ""),  # 18.5
        ("\u5408\u8a08\u306f18\u500b\u3067\u3059\u3002", "18"),  # the sum is 18 pieces
        ("18\u500b\u304b20\u500b", "18 and 20"),  # 18 or 20 pieces
        ("\ucd1d 18\uac1c\uc785\ub2c8\ub2e4.", "18"),  # 18 pieces in all
        ("18 \ub610\ub294 20", "18 and 20"),  # 18 or 20
        ("18\ub9cc", ""),  # 18 ten thousands
        ("T\u1ed5ng: 18", "18"),  # sum: 18
        ("Answer: 18 \u044f\u0438\u0446", "18"),  # 18 eggs
        ("Answer: 36\u03c0", "36\u03c0"),
        ("So 10\u00b2\u00b3", "10\u00b2\u00b3"),
        ("<think>is it \\boxed{18}? no</think>\nThe answer is 20.", "20"),
        ("is it \\boxed{18}? no</think>\nThe answer is 20.", "20"),
        ("<think>is it \\boxed{18}? no, let me th", ""),
        ("Tags such as <think> and 7", "7"),
        ("$F_n = \\sum_{k=0}^{n-1} F_k$", "F_n = \\sum_{k=0}^{n-1} F_k"),
    ],
)
def test_the_answer_is_found(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        *(("<answer>18</answer>", "18"), ("<answer>\n18\n</answer>", "18")),
        *(("So 18.\n<answer>18</answer>", "18"), ("<final_answer>-3</final_answer>", "-3")),
        *(("<answer>18</answer>\nIt took 3 steps.", "18"), ("<answer></answer>", "")),
        *(("\\boxed{31}? No: <answer>12</answer>", "12"), ("<answer>x<3</answer>", "x<3")),
        *(("<answer>12</answer>\nNo: \\boxed{31}", "31"), ("<answer>1.\nSo 18</answer>", "18")),
        *(("<answer>no solution</answer>", "no solution"), ("<answer>18 eggs</answer>", "18")),
        *(("<b>18</b>", "18"), ("It is <b>18</b>.", "18"), ('<i class="x5">18</i>', "18")),
        *(("Answer: `18`", "18"), ("It is `18`.", "18"), ("Answer:\n```\n18\n```", "18")),
        *(("**18**", "18"), ("*18*", "18"), ("x = __18__", "18"), ("It is \u201c18\u201d.", "18")),
        *(("It is 18</s>", "18"), ("18<|im_end|>", "18"), ("(18)", "(18)")),
        *(("2+16=18 #### 18", "18"), ("Answer: 18 #### 18", "18"), ("## 5\n#### **18**", "18")),
        *(("-**18**", "-18"), ("It is -<b>18</b>", "-18"), ("$`18`", "$18"), ("-*18*", "-18")),
        # What looks like markup, and is none.
        *(("x<3 and y>4", "x<3 and y>4"), ("3*4*5", "3*4*5"), ("$x_1$ and $x_2$", "x_1, x_2")),
        *(("10<sup>2</sup>", "10^{2}"), ("<del>18</del>", ""), ("<del>18</del> 20", "20")),
    ],
)
def test_markup_around_an_answer_is_no_part_of_it(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize("text", ["<answer>", "<a ", "*a", "_a ", "</a>", "<sup>", "a\n", "#", "`"])
def test_unclosed_markup_takes_no_longer_than_other_text(text):
    assert extract_answer(f"{text * (100_000 // len(text))}\nAnswer: 7") == "7"


@pytest.mark.parametrize(
    ("form", "answer"), [(AnswerForm.LINE, "31"), (AnswerForm.BOX, "12"), (None, "12")]
)
def test_the_form_that_was_asked_for_counts(form, answer):
    assert extract_answer("Answer: 31\nAs a box: \\boxed{12}", form=form) == answer
    assert extract_answer("It is 7.", form=form) == "7", "another form where that one is missing"


@given(st.integers(1, 999), st.sampled_from(["tea", "7 cups of tea", "each of 3 cakes"]))
def test_money_in_prose_is_no_formula(price, what):
    """An amount at the end of a sentence is found, whatever money stands before it."""
    assert as_fraction(extract_answer(f"He pays $5 for {what} and gets back ${price}.")) == price
    assert as_fraction(extract_answer(f"For {what} it is $2 + $3 = ${price:,}")) == price


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
        *("46\\%", "x=46", "0046", "{46}", "+46", "46^\\circ", "(46)", "\\mathbf{46}", "4.6e1"),
        *("\\text{46}", "$46$", "46{,}000e-3"),
    ],
)
def test_numbers_match_in_every_usual_way_of_writing(answer):
    assert numbers_match(answer, "46")


@pytest.mark.parametrize(
    "answer",
    [
        *("", "12+34", "92/2", "\\frac{92}{2}", "-46", "4 6", "460", "46 or 47"),
        *("\u0664\u0666", "1,046", "46i", "46x", "46\\pi", "2x+3y=46", "46 billion", "45, 46"),
        *("4\\text{ or }6", "46\\ldots", "46\\text{ squared}"),
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
        *(("\\frac{2a}{2}", "a"), ("\\frac{n^2}{n}", "n"), ("x+0", "x"), ("2x-x", "x")),
        *(("3\\frac{1}{3}\\pi", "\\frac{10\\pi}{3}"), ("10\\frac12\\sqrt{3}", "10.5\\sqrt{3}")),
        *(("2\\frac12x", "2.5x"), ("2 1/2x", "2.5x"), ("x+2 1/2", "x+2.5"), ("2^3\\frac12x", "4x")),
        *(("x-3\\frac13y", "x-\\frac{10y}{3}"), ("x^2\\frac12", "\\frac{x^2}{2}")),
        *(
            ("x_2\\frac12", "\\frac{x_2}{2}"),
            ("x^{2\\frac12}", "x^{2.5}"),
            ("3\\frac43\\pi", "4\\pi"),
        ),
        *(("4/3\\pi r^3", "\\frac43\\pi r^3"), ("1/2(x+1)", "\\frac{x+1}{2}"), ("3/4 x", "0.75x")),
        *(("y=-3/4x+2", "y=-\\frac34x+2"), ("\\sqrt2/2x", "\\frac{\\sqrt2}{2}x")),
        *(("1/(2x)", "\\frac{1}{2x}"), ("x^1/2y", "\\frac{x}{2y}"), ("1/2i", "\\frac{i}{2}")),
        *(("CAD", "\\text{CAD}"), ("C{A}D", "C A D"), ("2AB", "2BA"), ("A \\cdot B", "BA")),
        *(("A+B", "B+A"), ("ab", "ba"), ("AB, CD", "CD, AB"), ("\\angle{CAD}", "m\\angle DAC")),
        *(("1,000x", "1000x"), ("1{,}234\\pi", "1234\\pi"), ("\\sqrt{1,000,000}", "1000")),
        *(("1,2,345", "1, 2345"), ("10,000, 5", "5, 10000"), ("1,\\!234{,}567", "1234567")),
        *(("-\u00a35", "-5"), ("\\pounds 5.50", "\u00a35.5"), ("\u00a5500", "500 yen")),
        *(("\u20ac 5", "5\u20ac"), ("\u20b91,200", "Rs. 1200"), ("\u00a35 million", "5000000")),
        *(("2ABC_{16}", "2abc_{16}"), ("11011_\\text{two}", "11011_2"), ("22^{nd}", "22")),
        *(("10_{twelve}", "10_{12}"), ("5\\text{ cm.}", "5\\text{ cm}"), ("10^{th}", "10")),
        *(("\\mathbb{R}\\backslash\\{2\\}", "(-\\infty,2)\\cup(2,\\infty)"), ("\u00a3.75", "0.75")),
        *(("b=2, a=1", "(a,b)=(1,2)"), ("(b,a)=(2,1)", "(a,b)=(1,2)"), ("(a,b)=(1,2)", "(1,2)")),
        *(("5 ft 6 in", "66\\text{ in}"), ("1\\text{ hr }30\\text{ min}", "1.5 hours")),
        *(("2 hours 15 minutes 30 seconds", "8130 seconds"), ("5 dollars 50 cents", "$5.50")),
        *(("x<1 \\land 0 \\le x", "[0,1)"), ("$x>0$ and $x \\le \\pi$", "(0,\\pi]")),
        *(("x", "x+0"), ("\\sin^2 x+\\cos^2 x", "1"), ("1", "\\frac{\\rho}{\\rho}"), ("x-x", "0")),
        *(("= 18", "18"), ("\\approx 18", "18"), ("\\therefore x = 18", "18"), ("\u2248 18", "18")),
        *((f"\\{sign} 5", "5") for sign in ("simeq", "equiv", "cong", "Rightarrow", "bf", "large")),
        *(("18\\text{.}", "18"), ("18\\", "18"), ("\\underline{18}", "18"), ("{\\bf 18}", "18")),
        *(("\\textcolor{red}{18}", "18"), ("\\color{red} 18", "18"), ("18{\\rm cm}", "18")),
        *(("\\text{18 dollars}", "18"), ("\\text{18 eggs}", "18"), ("\\text{4 dozen}", "48")),
        *(("\\sqrt{10^{40}}", "10^{20}"), ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2")),
        *(("\\cos 36^\\circ", "\\frac{1+\\sqrt5}{4}"), ("5\\text{ reams}", "5")),
        *(("5, 3, 5", "3, 5, 5"), ("3, 5, 5", "\\{3, 5\\}"), ("\\{3, 3\\}", "\\{3\\}")),
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
        *(("2x-x", "y"), ("\\sqrt{x^2}", "x"), ("\\sin^2 x-\\cos^2 x", "1"), ("x+x=5", "5")),
        *(("xx", "x"), ("x+x", "5"), ("x_1-x_2", "0"), ("\\text{noon}5", "5"), ("e", "x+0")),
        *(
            ("3\\frac{1}{3}\\pi", "\\pi"),
            ("10\\frac12\\sqrt{3}", "5\\sqrt{3}"),
            ("2\\frac12x", "x"),
        ),
        *(("x+2 1/2", "x+1"), ("x^2\\frac12", "x^{2.5}"), ("1/2x", "\\frac{1}{2x}")),
        *(
            ("1/2(x+1)", "\\frac{1}{2(x+1)}"),
            ("1/(2x)", "\\frac{x}{2}"),
            ("2/3^2x", "\\frac{4x}{9}"),
        ),
        *(("1000,000", "1000000"), ("1234,567", "1234567"), ("1234,567,890", "1234567890")),
        *(("1000{,}000", "1000000"), ("1{,}0000", "10000"), ("1000,\\!000", "1000000")),
        *(("1000,000x", "1000000x"), ("(1000,000x)", "1000000x"), ("0.123,456", "0.123456")),
        *(
            ("\u00a35", "6"),
            ("\u00a35", "$5"),
            ("\u00a35x", "5"),
            ("\u00a35-\u00a33", "2"),
            ("Rs5x", "5"),
        ),
        *(
            ("2ABC_{16}", "2BAC_{16}"),
            ("2A_{16}", "2A_{15}"),
            ("a_{16}", "A_{16}"),
            ("2G_{16}", "2g_{16}"),
        ),
        *(
            ("2A_2", "2a_2"),
            ("11_{\\text{two}}", "11_3"),
            ("x_{\\text{two}}", "x_2"),
            ("10^{rd}", "10"),
        ),
        *(("\\text{Thursday.}", "Friday"), ("\\mathbb{R}-\\{2\\}", "\\mathbb{R}\\setminus\\{3\\}")),
        *(("\\mathbb{R}-\\{2\\}", "\\mathbb{R}"), ("11^{th}", "10"), ("10^{t}", "10")),
        *(
            ("b=1, a=2", "(a,b)=(1,2)"),
            ("()", "\\emptyset"),
            ("(b,a)=(1,2)", "(a,b)=(1,2)"),
            ("(a,b)=(1,2)", "(2,1)"),
        ),
        *(
            ("5 ft 6 in", "5 ft 7 in"),
            ("6 in 5 ft", "66 in"),
            ("5 ft 12 in", "6 ft"),
            ("5 ft 3 ft", "8 ft"),
        ),
        *(
            ("5 ft 6 kg", "5 ft"),
            ("3\\text{ apples }2\\text{ oranges}", "5"),
            ("x>0 and x<1", "[0,1)"),
        ),
        *(("x>0 and x<1", "x>0 or x<1"), ("x<-1 and x>1", "x<-1 or x>1"), ("x>0 and y<1", "(0,1)")),
        *(("CAD", "ACD"), ("\\mathrm{CAD}", "ACD"), ("C{A}D", "DAC"), ("AB", "BA"), ("AAB", "ABA")),
        *(("(CAD)", "ACD"), ("AB, CD", "DC, AB"), ("\\angle CAD", "\\angle ACD")),
        *(("3, 3, 5", "3, 5, 5"), ("5, 5, 5, 5", "5"), ("1,1", "1"), ("1, 1", "1"), ("5", "5,5")),
        *(("\\approx 18", "18.2"), ("\\approx 3.14", "\\pi"), ("\\ne 5", "5"), ("=> 5", "5")),
        *(("= x+y = 18", "18x"), ("18\\text{.}5", "18"), ("18\\text{!}", "18"), ("\\le 5", "5")),
        *(("\\text{18 dozen}", "18"), ("\\text{18 or 5}", "18"), ("\\text{18 x}", "18")),
        *(("\\sqrt{10^{40}+1}", "10^{20}"), ("\\sqrt{10^{1000}+1}", "10^{500}")),
        *(("\\frac{\\ln(640320^3+744)}{\\pi}", "\\sqrt{163}"), ("x+10^{-40}", "x")),
        *((f"4\\text{{ {word}}}", "4") for word in ("mil", "gross", "quadrillion", "tens", "ppm")),
        *((f"4\\text{{ {word}}}", "4") for word in ("grand", "milliards", "twelfths", "tenfold")),
        *(("\0\a\u0301\U0001f600", "x"), ("\\begin{pmatrix}", "x^2"), ("$$$", "x")),
    ],
)
def test_other_answers_and_junk_are_not_equal(grader, answer, right):
    assert not grader.are_equal(answer, right)


@pytest.mark.parametrize(
    ("answer", "right", "is_equal"),
    [
        *(
            (answer, "C", True)
            for answer in ("\\textbf{(C)}\\ 10", "\\text{(C) } \\frac12", "C) 10")
        ),
        *((answer, "\\text{(C)}", True) for answer in ("(C) 10", "\\mathrm{(C)}~\\$10", "C. 10")),
        *((answer, "C", True) for answer in ("\\text{(C) 10}", "(\\textbf{C}) 10", "(C) x=5")),
        *((answer, "C", False) for answer in ("(D) 10", "C 10", "C(10)", "(C)(10)", "C+10")),
        *((answer, "C", False) for answer in ("(C) and (D)", "(C) 10, (D) 12", "(C) or D")),
        *((answer, "C", False) for answer in ("(C) is wrong", "\\textbf{(C)} 5, 6", "10", "C.10")),
        ("\\textbf{(C)}\\ 10", "10", False),
        ("\\textbf{(C)}\\ 10", "\\textbf{(C)}\\ 11", False),
    ],
)
def test_a_choice_may_be_named_with_its_value(grader, answer, right, is_equal):
    assert grader.are_equal(answer, right) is is_equal


PAGE = Path(__file__).parents[3] / "docs" / "reference" / "grading-mathematics.md"


def rows_of_the_page() -> list[tuple[str, str, bool]]:
    cells = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()]
    rows = [one[1:] for one in cells if len(one) == 4 and one[3] in ("yes", "no")]
    assert len(rows) > 90
    return [(one[0].strip("`"), one[1].strip("`"), one[2] == "yes") for one in rows]


@pytest.mark.slow
def test_the_page_says_what_is_equal_to_what(grader):
    """Each row, in both directions."""
    wrong = [
        (answer, right, grader.compare(answer, right))
        for one, other, is_equal in rows_of_the_page()
        for answer, right in ((one, other), (other, one))
        if (grader.compare(answer, right) is Verdict.EQUAL) != is_equal
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *(("23", "23\\rho"), ("15", "15t"), ("18\\mu", "18\\lambda"), ("19\\tan w", "19")),
        *(("4", "4\\ln"), ("3\\text{ and }8", "38"), ("5'", "5"), ("5_2", "5"), ("5\\star", "5")),
        *(("5\\ldots", "5"), ("7\\text{ hundred}", "7"), ("\\sin 30", "\\sin 30^\\circ")),
        *(("5^\\circ\\text{C}", "5^\\circ\\text{F}"), ("3.141593", "\\pi"), ("x^2=4", "4")),
    ],
)
def test_what_stands_behind_a_number_may_be_its_value(grader, answer, right):
    assert not grader.are_equal(answer, right)
    assert not grader.are_equal(right, answer)
    assert not numbers_match(answer, right)
    assert not numbers_match(right, answer)


COMMANDS = [
    *("alpha", "beta", "theta", "lambda", "mu", "rho", "sigma", "omega", "pi", "Omega", "Delta"),
    *("sin", "cos", "tan", "ln", "log", "exp", "sqrt", "infty", "partial", "nabla", "ell", "hbar"),
    *("prime", "star", "dagger", "ast", "circ", "bullet", "cdot", "times", "pm", "ldots", "vdots"),
    *("sum", "int", "prod", "max", "min", "det", "Re", "hat", "vec", "mathbb", "mathcal", "aleph"),
]


@given(st.integers(2, 10**6), st.sampled_from(ascii_letters))
def test_a_number_with_a_letter_is_never_the_number(number, letter):
    for text in (f"{number}{letter}", f"{number} {letter}", f"{number}\\mathbf{{{letter}}}"):
        assert as_fraction(text) is None
        assert not numbers_match(text, str(number))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_with_a_command_is_never_the_number(grader, command):
    for text in (f"3\\{command}", f"3 \\{command}{{}}"):
        assert not grader.are_equal(text, "3")
        assert not grader.are_equal("3", text)


def test_an_infinite_value_is_no_number_whatever_math_verify_says(monkeypatch):
    # What sympy says of `3 * oo - 3` depends on the order in which it asks, which is random.
    monkeypatch.setattr("math_verify.grader.verify", lambda *texts, **settings: True)
    assert compare("3", "3\\infty") is Verdict.DIFFERENT
    assert compare("-\\infty", "\\infty") is Verdict.DIFFERENT
    assert compare("3\\infty", "\\infty") is Verdict.EQUAL


@given(
    st.integers(1, 10**9), st.sampled_from([",", "{,}", "\\,", "\\ ", " ", "\u202f", "'", "\\!\\,"])
)
def test_thousands_are_read_in_every_common_form(number, separator):
    assert as_fraction(f"{number:,}".replace(",", separator)) == number


@pytest.mark.parametrize(
    ("answer", "right", "verdict"),
    [
        ("", "3", Verdict.DIFFERENT),
        ("4", "3", Verdict.DIFFERENT),
        ("no solution", "3", Verdict.DIFFERENT),
        ("4\\ln", "4", Verdict.UNREADABLE),
        ("\\frac{1}{", "x+1", Verdict.UNREADABLE),
        ("I hope that it is correct", "3", Verdict.UNREADABLE),
        ("3", "see the worked solution above", Verdict.UNREADABLE),
        ("7 kangaroos", "7", Verdict.UNREADABLE),
        ("1" * 600, "x", Verdict.UNREADABLE),
        ("(" * 100 + "3" + ")" * 100, "3", Verdict.UNREADABLE),
        ("9^{9^{9^9}}", "x", Verdict.UNREADABLE),
    ],
)
def test_what_cannot_be_read_is_not_gradable(grader, answer, right, verdict):
    assert grader.compare(answer, right) is verdict


def test_a_pair_is_compared_once(grader, monkeypatch):
    asked: list[str] = []
    helpers = grader._helpers
    monkeypatch.setattr(
        helpers, "compare", lambda answer, _: asked.append(answer) or Verdict.DIFFERENT
    )
    assert [grader.compare("x+171", "x+172") for _ in range(3)] == [Verdict.DIFFERENT] * 3
    assert asked == ["x+171"]


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


@pytest.mark.slow
def test_a_comparison_ends_when_its_processor_time_is_over():
    grader = MathGrader(max_helpers=1, cpu_limit_s=0.5)
    try:
        assert grader.are_equal("2^{10}", "1024"), "it is warm, so only the comparison counts"
        for answer, right in (
            ("(x+y+z)^{90}", "(x+y+z)^{89}"),
            ("100000000!", "3"),
            ("\\binom{1000000000}{500000000}", "3"),
            ("x", "9^{9^{9^9}}"),
        ):
            before = psutil.Process().children()
            spent_s = children_s()
            assert not grader.are_equal(answer, right)
            assert children_s() - spent_s < 20, "the time that ended processes have computed"
            assert grader.are_equal("2^{11}", "2048"), "another process takes its place"
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
    pairs = [(f"x(x+{n})", f"x^2+{n}x") for n in range(2, 14)]
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


@pytest.mark.slow
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
            grader.are_equal("2^{11}", "2048")
        assert grader.are_equal("2^{11}", "2048")
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
