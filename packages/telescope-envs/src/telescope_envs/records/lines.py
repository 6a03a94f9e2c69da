"""Reads index lines and statuses without importing the record models, for lists.

`quick_line` and `quick_status` accept nothing that `records` refuses. About anything out of the
ordinary they say None, and the record models decide. A test changes records at random and compares.
"""

import re
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Annotated, Any, Literal

import msgspec

from telescope_core.errors import RegistryError
from telescope_core.terminal import acts_on_terminals
from telescope_envs.records.names import (
    FILE_NAME,
    FORMAT_VERSION,
    LARGEST_COUNT,
    LONGEST_TEXT,
    VARIABLE,
    check_name,
    check_owner,
    check_requirement,
    check_specifier,
    is_version,
)

MAX_LINE_BYTES = 256 * 1024
"""Longest index line or status record that is read."""
_ESCAPES_OTHER_THAN_QUOTES = re.compile(rb'\\[^"\\/]')
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|\+00:00)"
)
_PROTOCOL = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")
_FILE_NAME = re.compile(FILE_NAME)
_VARIABLE = re.compile(VARIABLE)

_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
# A pattern in these types would take more time than reading the rest of a line, so `_keeps_rules`
# has the patterns.
_Sha256 = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
_Schema = Annotated[int, msgspec.Meta(ge=1, le=FORMAT_VERSION)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)]


class _Wheel(msgspec.Struct, gc=False):
    filename: Annotated[str, msgspec.Meta(max_length=200)]
    urls: tuple[_Text, ...]
    sha256: _Sha256
    size: _Count
    metadata_sha256: _Sha256


class _Source(msgspec.Struct, gc=False):
    repository: _Text = ""
    commit: _Text = ""
    subdirectory: _Text = ""
    sdist_sha256: _Text = ""


class _Protocols(msgspec.Struct, gc=False):
    minimum: str = "1.0"
    maximum: str = "1.0"


class _Dataset(msgspec.Struct, gc=False):
    repo: _Text
    revision: _Text
    license: _Text = ""
    when: _Text = ""


class _Reward(msgspec.Struct, gc=False):
    minimum: float
    maximum: float
    success: float


class _Validation(msgspec.Struct, gc=False):
    policy: _Text = ""
    verdict: Literal["pass", "warn", "fail", "none"] = "none"
    report_sha256: _Text = ""
    checked_on: _Text = ""


class _EvalDefaults(msgspec.Struct, gc=False):
    examples: _AtLeastOne = 64
    rollouts: _AtLeastOne = 4


class _Line(msgspec.Struct, gc=False):
    """The fields of `records.Release`, with its rules."""

    owner: str
    name: str
    version: str
    summary: _Text
    distribution: _Text
    module: _Text
    factory: _Text
    wheel: _Wheel
    requires_python: _Text
    requires_dist: tuple[_Text, ...]
    config_schema_sha256: _Sha256
    splits: dict[_Text, _Count | None]
    reward: _Reward
    network: Literal["none", "load", "always"]
    publisher: _Text
    published_at: str
    license: _Text
    schema: _Schema = FORMAT_VERSION
    schema_version: Any = None
    """The models read this name as well, so it is not ignored."""
    source: _Source = msgspec.field(default_factory=_Source)
    protocol: _Protocols = msgspec.field(default_factory=_Protocols)
    kind: _Text = "environment"
    capabilities: tuple[_Text, ...] = ()
    datasets: tuple[_Dataset, ...] = ()
    secrets: tuple[_Text, ...] = ()
    resources: dict[_Text, _Text] = {}
    validation: _Validation = msgspec.field(default_factory=_Validation)
    attestation_sha256: _Text = ""
    tags: tuple[_Text, ...] = ()
    eval_defaults: _EvalDefaults = msgspec.field(default_factory=_EvalDefaults)


class _Deprecation(msgspec.Struct):
    reason: _Text
    replacement: _Text = ""


class _Status(msgspec.Struct):
    schema: _Schema = FORMAT_VERSION
    schema_version: Any = None
    yanked: dict[_Text, _Text] = {}
    deprecated: _Deprecation | None = None
    advisories: tuple[_Text, ...] = ()


class ListedLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a list shows of one release."""

    version: str
    summary: str
    tags: tuple[str, ...]
    license: str
    published_at: str
    """ISO 8601."""
    verdict: str


class ListedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a list shows of a status."""

    yanked: dict[str, str]
    """Version -> reason."""
    deprecated: str
    """The reason; empty if it is not deprecated."""


_is_version = cache(is_version)
_LINE = msgspec.json.Decoder(_Line)
_STATUS = msgspec.json.Decoder(_Status)


def index_lines(data: bytes) -> list[bytes]:
    """Return the lines of an index file, with their newlines; the last may lack its own.

    Only a newline ends a line: not a carriage return, and no separator within a text.
    """
    if b"\r" not in data:
        return data.splitlines(keepends=True)
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def quick_lines(data: bytes, environment_id: str) -> list[ListedLine] | None:
    """Return what a list shows of each line of an index file; None if a line is not ordinary."""
    try:
        if not _is_plain(data):
            return None
        found = [_listed(line, environment_id) for line in index_lines(data)]
    except (ValueError, RecursionError):
        return None
    lines = [line for line in found if line is not None]
    return lines if len(lines) == len(found) else None


def quick_line(line: bytes, environment_id: str) -> ListedLine | None:
    """Return what a list shows of a release of `environment_id`; None if the models must decide."""
    try:
        return _listed(line, environment_id) if _is_plain(line) else None
    except (ValueError, RecursionError):
        return None


def quick_status(data: bytes) -> ListedStatus | None:
    """Return what a list shows of a status record; None if the record models must decide."""
    try:
        is_short = len(data) <= MAX_LINE_BYTES
        found = _STATUS.decode(data) if is_short and _is_plain(data) else None
    except (ValueError, RecursionError):
        return None
    if found is None or found.schema_version is not None:
        return None
    reason = found.deprecated.reason if found.deprecated else ""
    return ListedStatus(yanked=found.yanked, deprecated=reason)


def _is_plain(text: bytes) -> bool:
    """Whether no text in this JSON can contain what a terminal would act on.

    Raises UnicodeDecodeError if it is not UTF-8.
    """
    if b"\\" in text and _ESCAPES_OTHER_THAN_QUOTES.search(text):
        return False
    # JSON has no unescaped control characters below the space.
    is_ascii = text.isascii() and b"\x7f" not in text
    return is_ascii or not acts_on_terminals(text.decode().replace("\n", ""))


def _listed(line: bytes, environment_id: str) -> ListedLine | None:
    """Return what a list shows of a plain line; raises ValueError or returns None for odd ones."""
    if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
        return None
    found = _LINE.decode(line)
    if not _keeps_rules(found, environment_id):
        return None
    return ListedLine(
        version=found.version,
        summary=found.summary,
        tags=found.tags,
        license=found.license,
        published_at=found.published_at,
        verdict=found.validation.verdict,
    )


def _keeps_rules(line: _Line, environment_id: str) -> bool:
    """Whether the rules hold that the types of the fields do not express.

    Raises ValueError if a digest is not hexadecimal.
    """
    wheel, reward, protocol = line.wheel, line.reward, line.protocol
    digests = wheel.sha256 + wheel.metadata_sha256 + line.config_schema_sha256
    return (
        _is_id(line.owner, line.name, environment_id)
        and line.schema_version is None
        and bytes.fromhex(digests).hex() == digests
        and _FILE_NAME.fullmatch(wheel.filename) is not None
        and all(map(_VARIABLE.fullmatch, line.secrets))
        and _is_version(line.version)
        and _is_specifier(line.requires_python)
        and _are_requirements(line.requires_dist)
        and _is_time(line.published_at)
        and reward.minimum <= reward.maximum
        and _is_range(protocol.minimum, protocol.maximum)
    )


# Releases of one environment, and of one hub, have most of their texts in common, so each text is
# looked at once.


@cache
def _is_id(owner: str, name: str, environment_id: str) -> bool:
    try:
        return f"{check_owner(owner)}/{check_name(name)}" == environment_id
    except RegistryError:
        return False


@cache
def _is_specifier(text: str) -> bool:
    return _passes(check_specifier, text)


@cache
def _are_requirements(texts: tuple[str, ...]) -> bool:
    return all(map(_is_requirement, texts))


@cache
def _is_requirement(text: str) -> bool:
    return _passes(check_requirement, text)


@cache
def _is_range(minimum: str, maximum: str) -> bool:
    return () < _numbers(minimum) <= _numbers(maximum)


def _numbers(version: str) -> tuple[int, ...]:
    """Return a protocol version as numbers; empty if it is none."""
    return tuple(map(int, version.split("."))) if _PROTOCOL.fullmatch(version) else ()


def _passes(check: Callable[[str], str], text: str) -> bool:
    try:
        check(text)
    except ValueError:
        return False
    return True


def _is_time(text: str) -> bool:
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
