"""Rows of tables, and the examples that are made of them.

Values stay as they are written: no types are guessed, and values that a row cannot keep are
refused. Only parquet needs a library, pyarrow. For datasets of the Hugging Face Hub there is
`telescope_core.dataset_source`.
"""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.json_text import object_of
from telescope_core.base.messages import REASONING_FIELDS, message_from_json, message_to_record
from telescope_core.base.types import Example, Message
from telescope_core.examples.checks import IN_INFO, as_text

Row = Mapping[str, object]
PROMPT_FIELDS = ("question", "problem", "prompt")
ANSWER_FIELDS = ("answer", "solution")
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_MAX_FIELD = 1 << 24
_MESSAGE_FIELDS = (
    *("role", "content", *REASONING_FIELDS),
    *("tool_calls", "tool_call_id", "refusal", "images"),
)
_SURE_DIGITS = 15
"""Decimal digits that every 64-bit number keeps."""


class Table(Protocol):
    """Rows by their position; a list of rows is one."""

    def __iter__(self) -> Iterator[Row]: ...
    def __getitem__(self, index: int, /) -> Row: ...
    def __len__(self) -> int: ...


class RowFields(NamedTuple):
    """The fields of a row that have a meaning; of each tuple, the first field in the row counts."""

    prompt: tuple[str, ...] = PROMPT_FIELDS
    answer: tuple[str, ...] = ANSWER_FIELDS
    cluster: str = "cluster"
    """The field with the cluster of the example, as text or a number; it stays in `info`."""
    has_ids: bool = True
    """Whether the field `id` of a row is its id. Without it, the id is a hash of the prompt."""


def read_rows(path: Path, *, kind: str = "", delimiter: str = "") -> Table:
    """Return the rows of a .jsonl, .json, .csv, .tsv or .parquet file.

    Errors name the file and the line. `kind` is one of these where the name of the file does not
    end in it, and `delimiter` stands between the fields of a table of text.
    """
    kind = kind or path.suffix
    readers = {
        ".jsonl": _json,
        ".json": _json,
        ".csv": partial(_csv, delimiter=delimiter or ","),
        ".tsv": partial(_csv, delimiter=delimiter or "\t"),
        ".parquet": _parquet,
    }
    if kind not in readers:
        raise EnvironmentLoadError(
            f"cannot read examples from {str(path)!r}; its name must end in {', '.join(readers)}"
        )
    try:
        rows = readers[kind](path)
    except FileNotFoundError:
        raise EnvironmentLoadError(
            f"the file of examples {str(path)!r} does not exist; a relative path starts at the "
            "folder of the environment's own file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentLoadError(
            f"cannot read the examples in {str(path)!r}: {error}; check the file, and that it is "
            "UTF-8"
        ) from error
    if not len(rows):
        raise EnvironmentLoadError(
            f"the file of examples {str(path)!r} has no rows; it needs at least one"
        )
    return rows


def example_of(row: object, *, where: str, fields: RowFields | None = None) -> Example:
    """Return the example that `row` is: an Example, a table row, or the text of a prompt.

    The field `id` of a row is its id; without one, the id is a hash of the prompt. Fields other
    than the id, the prompt and the answer are in `info`, that of the cluster too.
    """
    if isinstance(row, Example):
        return row
    if isinstance(row, str):
        return Example(id=id_of(row), prompt=row)
    if not isinstance(row, Mapping):
        raise EnvironmentLoadError(
            f"{where} is {row!r:.80} ({type(row).__name__}); it must be an Example, a dict with a "
            f"prompt, or the text of a prompt"
        )
    known = fields or RowFields()
    rest = dict(cast(Row, row))
    prompt_field = next((name for name in known.prompt if name in rest), None)
    if prompt_field is None:
        *others, last = known.prompt
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise EnvironmentLoadError(
            f"{where} has no field {wanted}, only {', '.join(map(str, rest)) or 'nothing'}; rename "
            "the field with the prompt, or build the examples yourself: define examples(self, "
            "split), or give make to a DatasetSource"
        )
    asked = rest.pop(prompt_field)
    prompt = as_prompt(asked, where=f"{where}, field {prompt_field!r}")
    answer_field = next((name for name in known.answer if name in rest), None)
    answer: object = rest.pop(answer_field) if answer_field is not None else ""
    text = prompt if isinstance(prompt, str) else json.dumps(asked, sort_keys=True, default=str)
    cluster = rest.get(known.cluster)
    own_id = rest.pop("id") if known.has_ids and "id" in rest else id_of(text)
    return Example(
        id=as_text(own_id, f"{where}, field 'id'"),
        prompt=prompt,
        answer=as_text(
            "" if answer is None else answer, f"{where}, field {answer_field!r}", advice=IN_INFO
        ),
        info=cast(Any, rest),
        # A value of another type is missing, or has another meaning.
        cluster=str(cluster) if type(cluster) in (str, int) else "",
    )


def id_of(text: str) -> str:
    """Return the id of a problem that has none of its own: a hash of its text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Mark(NamedTuple):
    """Values that distinguish an example from the others of its table."""

    id: str
    prompt: str
    """Digest of the prompt."""
    content: str
    """Digest of everything in the example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An example of a table that is kept."""

    index: int
    """Its position in the table."""
    id: str
    """Its id, unique among all that are kept."""
    split_key: str
    """Equal for examples with equal prompts, so that no split shows a prompt which another holds
    out."""
    num_repeats: int
    """Number of later examples with the same content, which are left out."""


def mark_of(example: Example) -> Mark:
    """Return the mark of an example that has been checked."""
    prompt = (
        example.prompt
        if isinstance(example.prompt, str)
        else [message_to_record(message) for message in example.prompt]
    )
    asked = json.dumps(prompt)
    rest = json.dumps([example.answer, sorted(example.info.items())])
    return Mark(example.id, id_of(asked), id_of(f"{asked}\n{rest}"))


def distinct(marks: Sequence[Mark]) -> list[Kept]:
    """Return the examples of a table that are kept, in their order.

    Examples that are equal in everything are one. Those that differ and have one id between them,
    as a hash of equal prompts is, get ids that begin with it; all others keep their id.
    """
    times = Counter((mark.id, mark.content) for mark in marks)
    num_of_id = Counter(own_id for own_id, _ in times)
    key_of: dict[str, str] = {}
    for mark in marks:
        key_of[mark.prompt] = min(key_of.get(mark.prompt, mark.id), mark.id)
    first = {(mark.id, mark.content): index for index, mark in reversed([*enumerate(marks)])}
    return [
        Kept(
            index=index,
            id=mark.id if num_of_id[mark.id] == 1 else f"{mark.id}-{mark.content}",
            split_key=key_of[mark.prompt],
            num_repeats=times[mark.id, mark.content] - 1,
        )
        for index, mark in enumerate(marks)
        if first[mark.id, mark.content] == index
    ]


def as_prompt(value: object, *, where: str = "the prompt") -> str | tuple[Message, ...]:
    """Return the prompt of a row: text, or the messages of a list of {role, content}.

    Raises EnvironmentLoadError for other values, and for content that a message cannot hold.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise EnvironmentLoadError(
            f"{where} must be text or a list of messages, got {value!r:.80} "
            f"({type(value).__name__})"
        )
    turns = cast(Sequence[object], value)
    return tuple(_as_message(turn, f"{where}, message {n}") for n, turn in enumerate(turns))


def _as_message(turn: object, where: str) -> Message:
    if isinstance(turn, Message):
        return turn
    given: Mapping[str, object] = {}
    if isinstance(turn, Mapping):
        given = {k: v for k, v in cast(Mapping[str, object], turn).items() if v is not None}
    calls = cast(Sequence[object], given.get("tool_calls") or ())
    if "role" not in given or ("content" not in given and not calls):
        raise EnvironmentLoadError(
            f"{where} is {turn!r:.80}; it must be a Message, or a dict with role and content"
        )
    if lost := [name for name in given if name not in _MESSAGE_FIELDS]:
        raise EnvironmentLoadError(
            f"{where} has the field {lost[0]!r}, which no message keeps; leave it out. A message "
            f"has {', '.join(_MESSAGE_FIELDS)}"
        )
    if not isinstance(given.get("content", ""), str | list):
        raise EnvironmentLoadError(
            f"{where}: its content must be text or a list of parts, got {given['content']!r:.80}"
        )
    try:
        _require_calls(calls)
        return message_from_json(given)
    except (TypeError, ValueError) as error:
        raise EnvironmentLoadError(f"{where}: {error}") from None


def _require_calls(calls: Sequence[object]) -> None:
    """Raise ValueError for a tool call that is not as in the chat API."""
    for call in calls:
        match call:
            case {"function": {"name": str(), "arguments": str() | dict() | None}}:
                pass
            case _:
                raise ValueError(
                    f"a call of its tool_calls is {call!r:.80}; it must have a function with a "
                    "name, and arguments that are an object or its JSON"
                )


class ArrowRows:
    """Rows of a table of Arrow, with tool calls that have the arguments which somebody wrote.

    A column has one type, so that each object in it has the keys of all others, as nulls. Whether
    a null was written there is not known; arguments lose it.
    """

    def __init__(self, rows: Table) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return _with_arguments_as_written(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(_with_arguments_as_written, self._rows)


def _with_arguments_as_written(row: Row) -> Row:
    return {name: _messages_as_written(value) for name, value in row.items()}


def _messages_as_written(value: Any) -> Any:
    """Return `value`, or if it is a list of messages, these without nulls in arguments."""
    if isinstance(value, list):
        items = cast(list[Any], value)
        # Lists of numbers may be long, and hold no message.
        holds_any = any(isinstance(one, dict | list) for one in items)
        return [_messages_as_written(one) for one in items] if holds_any else items
    match value:
        case {"tool_calls": calls}:
            return {**value, "tool_calls": _messages_as_written(calls)}
        case {"function": {"arguments": arguments} as function}:
            return {**value, "function": {**function, "arguments": without_nulls(arguments)}}
        case _:
            return value


def without_nulls(value: Any) -> Any:
    """Return `value` without the keys, at any depth, whose value is null."""
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return {key: without_nulls(one) for key, one in items if one is not None}
    return (
        [without_nulls(one) for one in cast(list[Any], value)] if isinstance(value, list) else value
    )


class _ParquetRows:
    """The rows of a parquet file, which stay in columns until they are asked for."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def _json(path: Path) -> Table:
    """Return the objects of one list, or of one line each: files of both names hold either."""
    with path.open(encoding="utf-8-sig") as file:
        begin = next((line.lstrip()[0] for line in file if line.strip()), "")
        file.seek(0)
        if begin == "[":
            items = cast(list[object], _parsed(file.read(), str(path)))
            return [_as_row(row, f"{path}, item {number}") for number, row in enumerate(items, 1)]
        lines = ((f"{path}:{number}", line.strip()) for number, line in enumerate(file, 1))
        return [_as_row(_parsed(line, where), where) for where, line in lines if line]


def _csv(path: Path, *, delimiter: str) -> Table:
    csv.field_size_limit(_MAX_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True, delimiter=delimiter)
        rows: list[Row] = []
        try:
            names = next(reader, list[str]())
            _require_once(names, f"{path}:1")
            for values in reader:
                if values and len(values) != len(names):
                    raise EnvironmentLoadError(
                        f"{path}:{reader.line_num} does not have the {len(names)} fields that the "
                        f"first line names; put quotes around text with {delimiter!r}"
                    )
                if values:
                    rows.append(dict(zip(names, values, strict=True)))
        except csv.Error as error:
            raise EnvironmentLoadError(
                f"{path}:{reader.line_num} is no row of fields: {error}; put quotes around text "
                "with quotes or line ends, and write each quote in it twice"
            ) from None
        return rows


def _parquet(path: Path) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EnvironmentLoadError(
            f"{path} is a parquet file, and pyarrow is not installed; run: "
            "pip install 'telescope-core[records]'"
        ) from error
    arrow = cast(Any, pyarrow)
    try:
        # Without `partitioning` a folder named a=b would become a field of each row.
        table = cast(Any, parquet).read_table(path, partitioning=None)
    except arrow.ArrowInvalid as error:
        raise EnvironmentLoadError(f"{path} is not a parquet file: {error}") from error
    _require_once(table.column_names, str(path))
    return ArrowRows(_ParquetRows(table))


def _require_once(names: Sequence[str], where: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise EnvironmentLoadError(
                f"{where} has {count} fields {name!r}, of which a row would keep one; rename them"
            )


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text, parse_float=_number, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise EnvironmentLoadError(
            f"{where} is not JSON: {error.msg} (line {error.lineno}, column {error.colno}); a file "
            "of rows is one list of objects, or one object on each line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise EnvironmentLoadError(f"{where} cannot be kept as it is written: {error}") from None


def _number(text: str) -> float:
    """Return a number with a point or an exponent; raises ValueError if 64 bits do not hold it."""
    number = float(text)
    if len(text) <= _SURE_DIGITS and "e" not in text.lower():
        return number
    with localcontext(prec=2000):
        written = Decimal(text)
        last_digit = Decimal(1).scaleb(int(written.as_tuple().exponent))
        # All that programs write of a number in 64 bits is it, or it rounded to that many digits.
        is_kept = written == Decimal(repr(number)) or (
            2 * abs(Decimal(number) - written) <= last_digit
        )
    if not is_kept:
        raise ValueError(f"the number {text:.40} would become {number!r}; write it as text")
    return number


def _as_row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise EnvironmentLoadError(
            f"{where} is {value!r:.80}; each row must be a JSON object, such as "
            '{"prompt": "2 + 2 =", "answer": "4"}'
        )
    return cast(Row, value)
