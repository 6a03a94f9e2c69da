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
from telescope_envs.registry.names import (
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

_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_Protocol = Annotated[str, msgspec.Meta(pattern=r"^(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$")]
_Schema = Annotated[int, msgspec.Meta(ge=1, le=FORMAT_VERSION)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_COUNT)]


class _Wheel(msgspec.Struct, gc=False):
    filename: Annotated[str, msgspec.Meta(pattern=FILE_NAME, max_length=200)]
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
    minimum: _Protocol = "1.0"
    maximum: _Protocol = "1.0"


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
    secrets: tuple[
        Annotated[str, msgspec.Meta(pattern=VARIABLE, max_length=LONGEST_TEXT)], ...
    ] = ()
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
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def quick_line(line: bytes, environment_id: str) -> ListedLine | None:
    """Return what a list shows of a release of `environment_id`; None if the models must decide."""
    try:
        found = _LINE.decode(line) if line.endswith(b"\n") and _is_plain(line) else None
    except (ValueError, RecursionError):
        return None
    if found is None or not _keeps_rules(found, environment_id):
        return None
    return ListedLine(
        version=found.version,
        summary=found.summary,
        tags=found.tags,
        license=found.license,
        published_at=found.published_at,
        verdict=found.validation.verdict,
    )


def quick_status(data: bytes) -> ListedStatus | None:
    """Return what a list shows of a status record; None if the record models must decide."""
    try:
        found = _STATUS.decode(data) if _is_plain(data) else None
    except (ValueError, RecursionError):
        return None
    if found is None or found.schema_version is not None:
        return None
    reason = found.deprecated.reason if found.deprecated else ""
    return ListedStatus(yanked=found.yanked, deprecated=reason)


def _is_plain(text: bytes) -> bool:
    """Whether no text in this JSON can contain what a terminal would act on."""
    if len(text) > MAX_LINE_BYTES:
        return False
    if b"\\" in text and _ESCAPES_OTHER_THAN_QUOTES.search(text):
        return False
    # JSON has no unescaped control characters below the space.
    is_ascii = text.isascii() and b"\x7f" not in text
    return is_ascii or not acts_on_terminals(text.replace(b"\n", b"").decode())


def _keeps_rules(line: _Line, environment_id: str) -> bool:
    """Whether the rules hold that the types of the fields cannot express."""
    reward, protocol = line.reward, line.protocol
    return (
        f"{line.owner}/{line.name}" == environment_id
        and line.schema_version is None
        and _is_id(line.owner, line.name)
        and _is_version(line.version)
        and _is_specifier(line.requires_python)
        and all(map(_is_requirement, line.requires_dist))
        and _is_time(line.published_at)
        and reward.minimum <= reward.maximum
        and _numbers(protocol.minimum) <= _numbers(protocol.maximum)
    )


@cache
def _is_id(owner: str, name: str) -> bool:
    try:
        return bool(check_owner(owner) and check_name(name))
    except RegistryError:
        return False


@cache
def _is_specifier(text: str) -> bool:
    return _passes(check_specifier, text)


@cache
def _is_requirement(text: str) -> bool:
    return _passes(check_requirement, text)


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


@cache
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
