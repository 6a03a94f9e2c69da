"""Read JSON and TOML from others: plain documents, and `Record`s, which have rules.

Every fault of a document raises the same kind of error. Most rules are the types of a record's
fields, and `check` states the others. A reader ignores unknown fields, so fields can be added
without breaking old clients. There is one reader, so lists, installs and servers agree.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast

import msgspec
from msgspec import Meta

from telescope_core.base.decoders import convert, json_decoder
from telescope_core.base.errors import ConfigError
from telescope_core.base.terminal import acts_on_terminals
from telescope_envs.records.files import read_file
from telescope_envs.records.names import LARGEST_COUNT, LONGEST_TEXT

_MAX_DEPTH = 100
_MAX_INTEGER = 2**63 - 1
"""As TOML requires of its readers; Python cannot even print integers of any size."""
_BYTE_ORDER_MARK = "\ufeff"
Document = TypeVar("Document")


def read_toml(data: str | bytes) -> dict[str, object]:
    """Return the tables of a TOML document; raises ValueError with the reason.

    A byte order mark, with which some editors begin a file, is skipped.
    """
    toml = import_module("tomllib")  # only now: many commands read nothing but JSON
    text = data if isinstance(data, str) else data.decode()
    return _read(lambda: toml.loads(text.removeprefix(_BYTE_ORDER_MARK)))


def read_json(data: str | bytes) -> object:
    """Return a JSON document; raises ValueError with the reason."""
    return _read(lambda: cast(object, json.loads(data)))


def _read(parse: Callable[[], Document]) -> Document:
    try:
        document = parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_plain(document)
    return document


def _require_plain(document: object) -> None:
    """Raise ValueError for unprintable content: deep nesting, huge integers, half characters."""
    level: list[object] = [document]
    for _ in range(_MAX_DEPTH):
        for value in level:
            if isinstance(value, int) and abs(value) > _MAX_INTEGER:
                raise ValueError("an integer in it has more than 64 bits")
            if isinstance(value, str):
                value.encode()  # fails for half of a pair of surrogates
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for key, inner in cast(dict[object, object], value).items():
            yield key
            yield inner
    elif isinstance(value, list):
        yield from cast(list[object], value)


Table = dict[str, object]


def read_toml_file(path: Path, *, others_read_it: bool = False) -> Table:
    """Return the tables of a TOML file; raises ConfigError if it cannot be read or parsed.

    With `others_read_it`, a byte order mark is refused, because other programs fail at it.
    """
    try:
        data = read_file(path, follows_link=True)
        if others_read_it and data.startswith(_BYTE_ORDER_MARK.encode()):
            raise ConfigError(
                f"{path} begins with a byte order mark, at which build backends fail; save it as "
                "UTF-8 without one"
            )
        return read_toml(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def read_pyproject(project: Path) -> Table:
    """Return the tables of the project's pyproject.toml; raises ConfigError if it has none."""
    return read_toml_file(project / "pyproject.toml", others_read_it=True)


def table_at(document: Table, *names: str, path: Path) -> Table:
    """Return the table at `names`, empty if it is missing; ConfigError if it is not a table."""
    here = document
    for depth, name in enumerate(names, 1):
        found = here.get(name, {})
        if not isinstance(found, dict):
            where = ".".join(names[:depth])
            raise ConfigError(f"{path}: {where} must be a table, got {found!r}")
        here = cast(Table, found)
    return here


def texts_at(table: Table, key: str, where: str, *, path: Path) -> list[str]:
    """Return the list of texts under `key`, empty if it is missing; else ConfigError."""
    listed = table.get(key, [])
    if not isinstance(listed, list) or not all(
        isinstance(text, str) for text in cast(list[object], listed)
    ):
        raise ConfigError(f"{path}: {where}.{key} must be a list of texts, got {listed!r}")
    return cast(list[str], listed)


Line = Annotated[str, Meta(max_length=LONGEST_TEXT)]
"""Text that is safe to print in lists and errors."""
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
_ESCAPES_OTHER_THAN_QUOTES = re.compile(rb'\\[^"\\/]')
_ERROR = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<where>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
RecordType = TypeVar("RecordType", bound="Record")


class RecordProblem(ValueError):
    """A record that breaks a rule; its text begins with the field."""


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One record. Creating one in a program checks nothing; reading one checks everything."""

    def check(self) -> None:
        """Raise RecordProblem for a broken rule that types do not express."""

    def changed(self, **fields: object) -> Self:
        """Return a copy with other values of `fields`."""
        return msgspec.structs.replace(self, **fields)

    def as_json(self, *, indent: int = 0) -> bytes:
        """Return its JSON, in one line unless `indent` is given."""
        text = msgspec.json.encode(self)
        return msgspec.json.format(text, indent=indent) if indent else text

    def as_table(self) -> dict[str, Any]:
        """Return it as JSON would hold it."""
        return cast(dict[str, Any], msgspec.json.decode(self.as_json()))


class PublicRecord(Record, frozen=True, kw_only=True):
    """A record of a registry, written by anybody: every text in it is a `Line`."""


def read(record: type[RecordType], text: bytes | str, *, is_plain: bool = False) -> RecordType:
    """Return the record in a JSON text; `is_plain` if `is_plain_json` has said so.

    Raises RecordProblem for a record that breaks a rule, and another ValueError for a text that is
    not JSON.
    """
    data = text.encode() if isinstance(text, str) else text
    try:
        found = cast(RecordType, _decoder(record).decode(data))
        found.check()
        if not is_plain and not is_plain_json(data):
            _require_lines(found)
    except msgspec.ValidationError as error:
        raise RecordProblem(explained(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def read_known(
    record: type[RecordType], paths: Iterable[Path]
) -> Iterator[tuple[Path, RecordType]]:
    """Yield path and record of files of this user, in order of path."""
    for path in sorted(paths):
        try:
            found = read(record, read_file(path, follows_link=True))
        except ValueError:
            continue  # written by another version of Telescope, so ignored
        yield path, found


def converted(record: type[RecordType], tables: Mapping[str, object]) -> RecordType:
    """Return the record in the tables of a document; raises RecordProblem."""
    try:
        found = convert(tables, record)
        found.as_json()
    except msgspec.ValidationError as error:
        raise RecordProblem(explained(error)) from None
    except UnicodeEncodeError:  # half of a pair of surrogates
        odd = next(place for place, text in _texts(tables, "") if not _is_unicode(text))
        raise RecordProblem(f"{odd}: holds half of a pair of surrogates") from None
    found.check()
    _require_lines(found)
    return found


def explained(error: msgspec.ValidationError) -> str:
    """Return the wrong field, with its tables, and the reason."""
    found = _ERROR.fullmatch(str(error))
    assert found is not None, "every text matches"
    steps = [name or number for name, number in _STEP.findall(found["where"] or "")]
    missing = _MISSING.fullmatch(found["what"])
    steps = [*filter(None, steps), *([missing["field"]] if missing else [])]
    what = "Field required" if missing else found["what"].replace("`", "")
    return f"{'.'.join(steps) or 'record'}: {what}"


@cache
def _decoder(record: type[Record]) -> "msgspec.json.Decoder[Record]":
    return json_decoder(record)


def is_plain_json(text: bytes) -> bool:
    """Return whether no text in this JSON, one record or many lines, acts on a terminal.

    Raises ValueError for text that is not UTF-8.
    """
    if b"\\" in text and _ESCAPES_OTHER_THAN_QUOTES.search(text):
        return False
    # JSON has no unescaped control characters below the space.
    is_ascii = text.isascii() and b"\x7f" not in text
    return is_ascii or not acts_on_terminals(text.decode().replace("\n", ""))


def _require_lines(value: object, where: str = "") -> None:
    """Raise RecordProblem for a text in a `PublicRecord`, at any depth, that is no `Line`."""
    if isinstance(value, PublicRecord):
        for place, text in _texts(msgspec.to_builtins(value), where):
            if acts_on_terminals(text):
                raise RecordProblem(f"{place}: contains control characters or line breaks")
    elif isinstance(value, Record):
        for field in value.__struct_fields__:
            _require_lines(getattr(value, field), f"{where}.{field}" if where else field)
    elif isinstance(value, tuple):
        for number, inner in enumerate(cast(tuple[object, ...], value)):
            _require_lines(inner, f"{where}.{number}")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield every text in plain data, keys included, with its place."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, inner in cast(dict[str, object], value).items():
            yield where or str(key), str(key)
            yield from _texts(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(cast(list[object], value)):
            yield from _texts(inner, f"{where}.{number}")
