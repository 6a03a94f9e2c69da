"""Parts of a reply: the last box, tag, fenced block of code or JSON value, and the thinking.

Tags are found by text search, because models do not write valid XML.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError

from telescope_core.base.types import JsonValue

OPEN = "<think>"
CLOSE = "</think>"
_LEAST_TICKS = 3
_QUOTED = re.compile(r"`+[^`]*`+|\"[^\"]*\"|'</?think>[^']*'")
"""Code and quotations in one line, in which a mark of thinking is only mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The thinking and the answer of one text."""

    thinking: str
    answer: str
    """The answer; empty if the thinking is not closed."""
    is_closed: bool
    """Whether the thinking has ended; True when there was none."""


def split_thinking(text: str, *, opening: str = OPEN, closing: str = CLOSE) -> Thinking:
    """Split `text` into thinking and answer at the last closing mark.

    The opening mark may be missing, because some chat templates write it into the prompt. If an
    opening mark is never closed, there is no answer and the whole text is thinking. A mark that is
    only mentioned, in code, in quotes or as a word of a sentence, opens and closes nothing.
    """
    begin = _begin_of_answer(text, opening, closing)
    if begin is None:
        thought = text.replace(opening, "", 1).strip()
        return Thinking(thinking=thought, answer="", is_closed=False)
    thought = text[: max(0, begin - len(closing))].replace(opening, "", 1)
    return Thinking(thinking=thought.strip(), answer=text[begin:].strip(), is_closed=True)


def without_thinking(text: str, *, opening: str = OPEN, closing: str = CLOSE) -> str:
    """Return only the answer; empty when the thinking is not closed."""
    return after_thinking(text, opening=opening, closing=closing).strip()


def after_thinking(text: str, *, opening: str = OPEN, closing: str = CLOSE) -> str:
    """Return the answer with the white space around it, which code may need."""
    begin = _begin_of_answer(text, opening, closing)
    return "" if begin is None else text[begin:]


def _begin_of_answer(text: str, opening: str, closing: str) -> int | None:
    """Return the index at which the answer begins; None if the thinking is not closed."""
    if opening not in text and closing not in text:
        return 0
    marks = _without_mentions(text, opening, closing)
    end = marks.rfind(closing)
    if end < 0 and text.lstrip().startswith(opening):
        # What looks like a quotation may begin in the thinking and end behind it.
        end = text.find(closing)
    begin = end + len(closing) if end >= 0 else 0
    # Where a line or a sentence may begin, or glued to a word: elsewhere it is a word itself.
    mark = re.escape(opening)
    live = re.compile(rf"(?:^|(?<=[.!?>]))[ \t]*{mark}|(?<=\w){mark}", re.MULTILINE)
    return None if live.search(marks[begin:]) else begin


def _without_mentions(text: str, opening: str, closing: str) -> str:
    """Return `text`, as long as before, without the marks in quotations and closed fences.

    A fence with a closing mark before any opening one is not a sample: the thinking was cut in it.
    """

    def blank(part: str) -> str:
        for mark in (opening, closing):
            part = part.replace(mark, "\0" * len(mark))
        return part

    lines = text.split("\n")
    fence, since = "", 0
    for number, line in enumerate(lines):
        lines[number] = _QUOTED.sub(lambda found: blank(found[0]), line)
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if not fence:
            if len(ticks) >= _LEAST_TICKS and "`" not in bare[len(ticks) :]:
                fence, since = ticks, number
        elif bare == ticks and len(ticks) >= len(fence):
            inside = "\n".join(lines[since:number])
            if opening in inside.partition(closing)[0]:
                lines[since:number] = blank(inside).split("\n")
            fence = ""
    return "\n".join(lines)


_BOXES = ("\\boxed", "\\fbox")


def boxed_answer(text: str) -> str | None:
    r"""Return the stripped content of the last `\boxed{...}` or `\fbox{...}`; None without one.

    Text after the thinking is read. Braces inside may be nested, and `\{` and `\}` count as
    ordinary characters. `\boxed 5` boxes the next word. If the last box is not closed, the result
    is None even when earlier boxes are closed.
    """
    text = after_thinking(text)
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    box = next(box for box in _BOXES if text.startswith(box, start))
    rest = text[start + len(box) :]
    inside = rest.lstrip(" ")
    if inside.startswith("{"):
        return _balanced(inside)
    words = inside.split(maxsplit=1) if rest.startswith(" ") else []
    return words[0].rstrip("$.,;") or None if words else None


def _balanced(text: str) -> str | None:
    """Return the text between the opening brace of `text` and its closing brace, or None."""
    depth = 0
    is_escaped = False
    for end, character in enumerate(text):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[1:end].strip()
    return None


_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
_MAX_INDENT = 3
"""Most spaces by which a closing fence may be deeper than its opening one: CommonMark 0.31, 4.5."""
_PYTHON = re.compile(r"(py|python|pypy)([23](\.\d+)?)?")


class CodeBlock(NamedTuple):
    """A fenced block of a reply."""

    language: str
    """First word after the fence, in small letters; empty without one."""
    code: str

    @property
    def is_python(self) -> bool:
        """Whether it says that it is Python."""
        return _PYTHON.fullmatch(self.language) is not None


def code_blocks(text: str) -> list[CodeBlock]:
    """Return the fenced blocks of Python and of no language in particular, in order.

    Text after the thinking is read. A block begins with a line of three or
    more backticks or tildes and ends with one of as many or more, as in CommonMark 0.31, 4.5; one
    that was cut off goes on to the end of the text. What a fence is indented by, as in a list, its
    lines are not.
    """
    found: list[CodeBlock] = []
    indent = fence = language = ""
    lines: list[str] | None = None
    for line in after_thinking(text).split("\n"):
        match = _FENCE.fullmatch(line.rstrip())
        margin, mark, said = match.groups() if match else ("", "", "")
        if lines is None:
            if mark and not (mark[0] == "`" and "`" in said):
                words = said.lower().split()
                indent, fence, lines = margin, mark, []
                language = words[0].strip("{.}") if words else ""
        elif mark.startswith(fence) and not said and len(margin) <= len(indent) + _MAX_INDENT:
            found.append(CodeBlock(language, "\n".join(lines)))
            lines = None
        else:
            spaces = len(line) - len(line.lstrip(" "))
            is_inside = line.startswith(indent)
            lines.append(line[len(indent) if is_inside else min(spaces, len(indent)) :])
    if lines is not None:
        found.append(CodeBlock(language, "\n".join(lines)))
    return [block for block in found if block.is_python or not block.language]


def code_block(text: str) -> str | None:
    """Return the code of the last block of Python, else of the last without a language.

    None if there is neither. A block without a language after one of Python is most often what the
    program writes. See `code_blocks` for what a block is.
    """
    blocks = code_blocks(text)
    of_python = [block for block in blocks if block.is_python]
    last = (of_python or blocks)[-1:]
    return last[0].code if last else None


def xml_tag(text: str, name: str) -> str | None:
    """Return the stripped content of the last complete `<name>...</name>`; None without one.

    Text after the thinking is read, unless the tag is `think`. When tags of the same name are
    nested, the innermost one counts.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    if opening != OPEN:
        text = after_thinking(text)
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)].strip()


def xml_fields(text: str, names: Sequence[str]) -> Mapping[str, str]:
    """Return name -> content of the last tag of that name; names without a tag are left out."""
    found = {name: xml_tag(text, name) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def follows_xml_format(text: str, names: Sequence[str]) -> bool:
    """Return whether `text` is exactly these tags, each once and in this order.

    Only whitespace may stand outside the tags. The content of the tags does not matter, so this
    can serve as a reward for the format alone.
    """
    rest = text
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        before, _, rest = rest.partition(opening)
        if before.strip() or closing not in rest:
            return False
        rest = rest.partition(closing)[2]
    return not rest.strip()


Model = TypeVar("Model", bound=BaseModel)
JsonContainer = dict[str, JsonValue] | list[JsonValue]
_MAX_TRIES = 10_000
"""Most brackets at which parsing is tried, so that text full of brackets cannot take long."""
_TRIES_OF_DEEP = 100
"""Number of tries that a deeply nested bracket counts as, because it takes longer."""


def json_values(text: str) -> list[JsonContainer]:
    """Return the outermost JSON objects and arrays in `text`, in order.

    Text that is not JSON is skipped, and so are brackets that are nested too deeply for this Python
    to parse. NaN and infinities are not JSON. The search ends after 10,000 attempts.
    """
    found: list[JsonContainer] = []
    decoder = json.JSONDecoder(parse_constant=_refuse)
    position = tries = 0
    while tries < _MAX_TRIES:
        found_at = (text.find(bracket, position) for bracket in "{[")
        start = min((at for at in found_at if at >= 0), default=-1)
        if start < 0:
            break
        tries += 1
        try:
            value, position = cast(tuple[JsonContainer, int], decoder.raw_decode(text, start))
            found.append(value)
        except ValueError:
            position = start + 1
        except RecursionError:
            # Each bracket of the run would be tried, and all but the last would fail like this.
            position = len(text) - len(text[start:].lstrip(f"{text[start]} \n\t"))
            tries += _TRIES_OF_DEEP
    return found


def last_json(text: str) -> JsonContainer | None:
    """Return the last object or array in `text`; None when there is none."""
    found = json_values(text)
    return found[-1] if found else None


def as_model(text: str, model: type[Model]) -> Model:
    """Return the last JSON object in `text` that is a valid `model`, as an instance of it.

    Raises ValueError when there is none.
    """
    objects = [value for value in json_values(text) if isinstance(value, dict)]
    if not objects:
        raise ValueError(f"expected a JSON object with {_fields(model)}, got {text[:200]!r}")
    problem = ""
    for value in reversed(objects):
        try:
            return model.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            problem = problem or f"{place}: {first['msg']}, got {first['input']!r:.80}"
    raise ValueError(f"expected a JSON object with {_fields(model)}; {problem}")


NO_NUMBER = "expected a number, which true and false are not"


def no_truth_value(value: object) -> object:
    """Return `value`; raises ValueError for true and false, which pydantic would take as 1 and 0.

    It goes before the number of a pydantic type: `Annotated[int, BeforeValidator(no_truth_value)]`.
    """
    if isinstance(value, bool):
        raise ValueError(NO_NUMBER)
    return value


def place_of_truth_value(given: object, taken: object) -> tuple[str | int, ...] | None:
    """Return the place of a true or false that pydantic took as 1 or 0; None if there is none.

    `given`: plain values; `taken`: the dump of the model that was made of them.
    """
    if isinstance(given, bool):
        is_number = isinstance(taken, int | float) and not isinstance(taken, bool)
        return () if is_number and taken == given else None
    pairs: list[tuple[str | int, object, object]] = []
    if isinstance(given, Mapping) and isinstance(taken, Mapping):
        inside, made = cast(Mapping[str, object], given), cast(Mapping[str, object], taken)
        pairs = [(name, value, made[name]) for name, value in inside.items() if name in made]
    elif isinstance(given, list | tuple) and isinstance(taken, list | tuple):
        values, made = cast(Sequence[object], given), cast(Sequence[object], taken)
        pairs = [(at, *pair) for at, pair in enumerate(zip(values, made, strict=False))]
    elif isinstance(given, list | tuple) and isinstance(taken, set | frozenset):
        values, members = cast(Sequence[object], given), cast(Collection[object], taken)
        equal = [next((one for one in members if one == value), None) for value in values]
        pairs = [(at, *pair) for at, pair in enumerate(zip(values, equal, strict=True))]
    found = ((name, place_of_truth_value(*pair)) for name, *pair in pairs)
    return next(((name, *place) for name, place in found if place is not None), None)


def _fields(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
