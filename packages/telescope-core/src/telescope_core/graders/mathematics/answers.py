r"""Find the final answer in a policy's completion, and in the worked solution of a dataset.

The rule, in its order, stands in docs/reference/grading-mathematics.md.
"""

import re
from enum import StrEnum

from telescope_core.graders.mathematics.notation import normalized
from telescope_core.graders.mathematics.values import (
    FUNCTIONS,
    has_variables,
    of_equation,
    value_of_equation,
)
from telescope_core.parsers import boxed_answer, without_thinking

_BOX = "\\boxed"
_MAX_COMPLETION = 100_000
"""Characters at the end of a completion, without its thinking, that are searched."""
_MAX_LINE = 2000
_AROUND = r"(?:[\s,;$]|\\[()\[\]]|\\q?quad)*"
_JOINED = re.compile(
    rf"{_AROUND}(?:and|or|\\text\{{ *(?:and|or) *\}}|[,;\uff0c\uff1b\u3001]){_AROUND}"
)
_DISPLAYED = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$", re.DOTALL)
_LINE = re.compile(
    r"^.*####(?P<hashes>.*)"
    r"|^[\s>*_#$]*(?:\\(?:text|textbf|mathbf)\{)?(?:the |my )?(?:final |correct )?answer(?: is)?"
    r"[*_]*\s*[:\uff1a][\s*_}]*(?P<rest>.*)",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_TAG = re.compile(
    r"<((?:final[_-]?)?answer)>\s{0,9}([^\s<][^\n]{0,500}?)\s{0,9}</\1>", re.IGNORECASE
)
_CLOSING_TAG = re.compile(r"</([A-Za-z][\w-]*)\s?>")
_OPENING_TAG = re.compile(r"<([A-Za-z][\w-]*)(?:\s[^<>]{0,200})?>")
_RAISED_TAG = re.compile(r"<(su[pb])>([^<>\n]{1,100})</\1>", re.IGNORECASE)
_STRUCK_OUT = frozenset({"del", "strike", "sup", "sub"})
"""Tags that say something of what is inside: it is none, or not beside what stands before."""
_OTHER_MARKS = re.compile(r"<\|[^<>|\n]{1,40}\|>|<(?:br|hr)\s?/?>|^ *`{3,}\w*\s*$|`", re.MULTILINE)
"""Special tokens, breaks, fences of code and backticks."""
_EMPHASIS = re.compile(
    r"(?<![\w*\\)\]}^$])(\*{1,3}|_{1,3})(?=[^\s*_])([^*_\n]{1,200})(?<=\S)\1(?![\w*({])"
)
_SAID = re.compile(
    r".*(?<![a-z])(?:answer\s+(?:is|was)(?:\s+(?:therefore|thus|then|simply))?[:\uff1a]?"
    r"|final answer\s*[:\uff1a])",
    re.IGNORECASE,
)
_UNSPACED = r"\u0e01-\u0e4f\u3005\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Letters of scripts that write a number and its words without a space."""
_SPACED = r"\u0400-\u1cff\u1e00-\u1eff"
"""Letters of other scripts. Greek ones are variables, and so is a single Latin one."""
_WORD = re.compile(
    rf"[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]{{2,}}|(?!\d)[{_SPACED}{_UNSPACED}]"
)
_SEAM = re.compile(
    rf"(?<=[{_UNSPACED}])(?=[^\s{_UNSPACED}])|(?<=[^\s{_UNSPACED}])(?=[{_UNSPACED}])"
)
_JOINT = re.compile(
    rf"and|or|(?:(?!\d)[{_SPACED}]){{1,3}}"
    r"|.{0,3}(?:[\u548c\u6216\u4e0e\u8207\u53ca\u8ddf\ubc0f]|\u8fd8\u662f|\u9084\u662f|\u307e\u305f\u306f"
    r"|\u3042\u308b\u3044\u306f|\ub610\ub294|\ud639\uc740).{0,2}"
    r"|.{0,3}[\u3068\u304b\u3084\uacfc\uc640\ub791\ub098]|\u0e41\u0e25\u0e30|\u0e2b\u0e23\u0e37\u0e2d"
)
"""Words between the numbers of a list; of Cyrillic and the like any short word counts as one."""
_OTHER_VALUE = re.compile(
    r"\d\s*(?:[\u767e\u5343\u4e07\u842c\u4ebf\u5104\u5146\ubc31\ucc9c\ub9cc\uc5b5\uc870]"
    r"|\u5206\u4e4b|\u5206\u306e|\ubd84\uc758|[\u70b9\u9ede\uc810](?=\s*\d)"
    r"|\u0442\u044b\u0441|\u043c\u043b\u043d|\u043c\u043b\u0440\u0434|\u043c\u0438\u043b\u043b|\u0441\u043e\u0442"
    r"|\u0434\u044e\u0436\u0438\u043d|\u0623\u0644\u0641|\u0622\u0644\u0627\u0641|\u0645\u0644\u064a"
    r"|\u0932\u093e\u0916|\u0915\u0930\u094b|\u0939\u091c|\u0939\u095b|\u0938\u094c"
    r"|\u0e23\u0e49\u0e2d\u0e22|\u0e1e\u0e31\u0e19|\u0e2b\u0e21\u0e37\u0e48\u0e19|\u0e41\u0e2a\u0e19|\u0e25\u0e49\u0e32\u0e19)"
    r"\s*(?:\d[\d.,]*)?\D*$"
    r"|(?:[\u8d1f\u8ca0]|\u30de\u30a4\u30ca\u30b9|\ub9c8\uc774\ub108\uc2a4|\u043c\u0438\u043d\u0443\u0441"
    r"|\u043c\u0456\u043d\u0443\u0441|\u0633\u0627\u0644\u0628|\u0e25\u0e1a)\s*\d[\d.,]*\D*$",
    re.IGNORECASE,
)
"""A last number whose words make it another one: thousands, a fraction, a decimal, a minus."""
_LABEL = re.compile(r"^[\s>*_#]*[^\W\d_][*_]*\s?[:\uff1a][\s*_]*(?=[-\u2212+.$(\\\d][^:\uff1a=]*$)")
"""A letter and a colon before the only value of a line."""
_SCALE = re.compile(r"(?:hundred|thousand|million|billion|trillion|dozen|lakh|crore)s?[.,;]?")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
"""Calculator notes in worked solutions of GSM8K: `<<18-7=11>>`."""
_TIMES = re.compile(r"(?<=[0-9]) ?[xX] ?(?=\$?[0-9])")
_QUOTES = "\"'\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb\u300c\u300d"
_EDGE = re.compile(r"^[\s,;:.*/+=_-]|[\s,;:.*/+=_-]$")


class AnswerForm(StrEnum):
    """The form in which a prompt asks for the final answer."""

    BOX = "box"
    r"""`\boxed{...}`."""
    LINE = "line"
    """A line that begins with `Answer:`."""


def extract_answer(completion: str, *, form: AnswerForm | None = None) -> str:
    r"""Return the final answer in `completion`; empty if there is none.

    Thinking does not count. The form that the prompt asked for counts, then the later of the last
    box and the last line `Answer: ...`. Without either, the last line counts: the text after
    "answer is", its last formula, or its last number. In an equation only the right side counts, so
    that repeating `12+34=` answers nothing. A text that cannot be read as a whole is no answer;
    parts of it are not used.
    """
    tail = _without_markup(without_thinking(completion)[-_MAX_COMPLETION:])
    box_at = tail.rfind(_BOX)
    line = max(_LINE.finditer(tail), key=lambda found: found.start(), default=None)
    line_at = line.start() if line else -1
    is_line_first = form is AnswerForm.LINE or (form is None and line_at > box_at)
    if line and (is_line_first or box_at < 0):
        return _announced(_with_paragraph(tail, line))
    if box_at >= 0:
        return _boxes(tail)
    lines = [one for one in _on_one_line(tail).splitlines() if one.strip()]
    last = lines[-1][-_MAX_LINE:] if lines else ""
    said = _SAID.match(last)
    return _announced(last[said.end() :]) if said else _searched(last)


def _without_markup(text: str) -> str:
    """Return `text` without tags, backticks and emphasis; `<answer>` is a line `Answer: ...`.

    A tag counts as one only if it is closed, since `x<y and z>4` is mathematics.
    """
    plain = _ANSWER_TAG.sub(r"\nAnswer: \2\n", text)
    plain = _RAISED_TAG.sub(
        lambda found: f"{'^' if found[1].lower() == 'sup' else '_'}{{{found[2]}}}", plain
    )
    closed = {name.lower() for name in _CLOSING_TAG.findall(plain)} - _STRUCK_OUT
    for tags in (_OPENING_TAG, _CLOSING_TAG):
        plain = tags.sub(lambda tag: "\0" if tag[1].lower() in closed else tag[0], plain)
    plain = _EMPHASIS.sub("\0\\2\0", _OTHER_MARKS.sub("\0", plain))
    # A sign stays at its number: alone it would be the mark of a list.
    return re.sub(r"(?<=[-+\u2212$])\0+", "", plain).replace("\0", " ")


def final_answer(solution: str) -> str:
    """Return the answer of a worked solution: after `####`, else boxed, else the whole text."""
    if "####" in solution:
        return re.sub(r"(?<=[0-9]),(?=[0-9])", "", solution.rpartition("####")[2].strip())
    return extract_answer(solution, form=AnswerForm.BOX) if _BOX in solution else solution.strip()


def has_box(completion: str) -> bool:
    """Return whether the completion boxes a non-empty answer."""
    return bool(boxed_answer(without_thinking(completion)[-_MAX_COMPLETION:]))


def _boxes(tail: str) -> str:
    """Return the content of the last box, and of boxes that `and`, `or` or a comma joins to it."""
    found = boxed_answer(tail)
    if not found:
        return ""
    start = tail.rfind(_BOX)
    answers = [found]
    while (before := tail.rfind(_BOX, 0, start)) >= 0:
        one = boxed_answer(tail[before:start])
        end = tail.find(one, before) + len(one) + 1 if one else start
        between = tail[end:start]
        if not one or "\n" in between or not _JOINED.fullmatch(between):
            break
        answers.insert(0, one)
        start = before
    return ", ".join(answers)


def _on_one_line(text: str) -> str:
    """Return `text` with each displayed formula on one line."""
    return _DISPLAYED.sub(lambda found: " ".join(found[0].split()), text)


def _with_paragraph(tail: str, line: "re.Match[str]") -> str:
    """Return the announced answer: the rest of the line, or the first text below it."""
    rest = line["rest"] if line["rest"] is not None else line["hashes"]
    rest = rest.strip()
    is_open = rest in ("\\[", "$$")
    if rest.strip("*_ ") and not is_open:
        return rest[-_MAX_LINE:]
    below = _on_one_line(f"{rest}{tail[line.end() :][:_MAX_LINE]}").strip()
    return below.splitlines()[0] if below else ""


def _announced(text: str) -> str:
    """Return the answer in a text that announces it: all of it unless it is prose."""
    if _BOX in text:
        return _boxes(text)
    said = _SAID.match(text)
    plain = (text[said.end() :] if said else text).strip().strip("*_").strip()
    if plain.startswith("\\text{") and plain.endswith("}"):
        return plain
    whole = plain.rstrip(".\u3002")
    formulas = _formulas(whole)
    if len(formulas) == 1 and formulas[0][0] == 0 and formulas[0][1] == len(whole):
        return _right_side(formulas[0][2])
    if not formulas and not _is_prose(whole):
        return _right_side(whole)
    return _searched(plain) or ("" if _has_digit(plain) else _words(whole))


def _words(text: str) -> str:
    """Return an answer in a few words, such as `no solution`; None for a sentence."""
    return text if len(text.split()) <= 3 and text[:1].isalpha() else ""


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


def _is_prose(text: str) -> bool:
    words = _WORD.findall(_COMMANDS.sub(" ", text))
    return any(
        word not in FUNCTIONS and word not in ("and", "or") and not _SCALE.fullmatch(word)
        for word in words
    )


def _searched(line: str) -> str:
    """Return the last formula of a line, with those joined to it, or a number behind it."""
    formulas = _formulas(line)
    behind = _last_mathematics(line[formulas[-1][1] :] if formulas else line)
    if behind or not formulas:
        return behind
    answers = [formulas[-1][2]]
    for before, after in zip(reversed(formulas[:-1]), reversed(formulas[1:]), strict=True):
        if not _JOINED.fullmatch(f" {line[before[1] : after[0]]} "):
            break
        answers.insert(0, before[2])
    return ", ".join(_right_side(answer) for answer in answers)


def _formulas(line: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and text of each formula between dollars, `\(...\)` or `\[...\]`.

    A dollar before a digit is money where what follows it up to the next dollar holds words, or
    ends with an operator or a space.
    """
    found: list[tuple[int, int, str]] = []
    at = 0
    while at < len(line):
        for opens, closes in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
            if line.startswith(opens, at):
                end = line.find(closes, at + len(opens))
                while opens == "$" and end > 0 and line[end - 1] == "\\":
                    end = line.find(closes, end + 1)
                inside = line[at + len(opens) : end] if end >= 0 else ""
                if inside.strip() and not (opens == "$" and _is_money(inside)):
                    found.append((at, end + len(closes), inside.strip()))
                    at = end + len(closes)
                    break
        else:
            at += 2 if line.startswith("\\", at) else 1
    return found


def _is_money(inside: str) -> bool:
    return inside[0].isdigit() and (_is_prose(inside) or _EDGE.search(inside) is not None)


def _last_mathematics(line: str) -> str:
    """Return the last words of `line` that form mathematics with a digit or a command."""
    if _OTHER_VALUE.search(line):
        return ""
    runs: list[list[str]] = [[]]
    spaced = _SEAM.sub(" ", _LABEL.sub("", line.replace("**", " ")))
    for word in _CALCULATOR.sub("", spaced).split():
        bare = word.strip(f"()[]{{}}.,;:!?{_QUOTES}\u3002\uff01\uff1f\uff1a")
        is_joint = _JOINT.fullmatch(bare) is not None and bool(runs[-1])
        if is_joint or not _is_prose(word):
            runs[-1].append("and" if is_joint and bare != "or" else word)
            if word[-1] not in ",;.!?\u3002\uff01\uff1f":
                continue
        if runs[-1]:
            runs.append([])
    for run in reversed(runs):
        words = list(run)
        while words and words[-1] in ("and", "or", "a", "A", "I"):
            words.pop()
        while words and words[0] in ("and", "or", "a", "A", "I", "-", "*", "=", ":"):
            words.pop(0)
        text = " ".join(words)
        if _has_digit(text) or "\\" in text:
            plain = text.lstrip(f",;:!?{_QUOTES} \uff1a")
            plain = plain.rstrip(f",;:!?.{_QUOTES} \u3002\uff01\uff1f")
            return _right_side(_balanced(plain))
    return ""


def _balanced(text: str) -> str:
    """Return `text` without a bracket at an end that has no partner."""
    for opens, closes in ("()", "[]", "{}"):
        if text.count(opens) > text.count(closes):
            text = text.removeprefix(opens)
        elif text.count(closes) > text.count(opens):
            text = text.removesuffix(closes)
    return text


def _right_side(text: str) -> str:
    """Return the last side of an equation, and other text as it is."""
    if text.rstrip().endswith("="):
        return ""
    plain = normalized(_TIMES.sub(" * ", text))
    value = value_of_equation(plain, of_sums=True)
    if value == plain or has_variables(value):
        return text.strip()
    # The value as it was written, unless it is an equation that says more.
    return of_equation(text)
