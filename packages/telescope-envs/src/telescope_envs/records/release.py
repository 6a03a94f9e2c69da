"""The records of a registry: one release per index line, and one status per environment.

A reader refuses a `schema` number above its own.
"""

import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from packaging.version import Version

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.records.model import Count, Line, PublicRecord, Record, RecordProblem
from telescope_envs.records.names import (
    FILE_NAME,
    FORMAT_VERSION,
    LARGEST_COUNT,
    MAX_REQUIREMENTS,
    check_name,
    check_owner,
    check_requirement,
    check_specifier,
    check_variable,
    check_version,
)

FILENAME = "{filename}"
"""Placeholder for the name of a wheel in a template."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PROTOCOL = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")
_FILE_NAME = re.compile(FILE_NAME)
_KEPT = 16384
"""Most texts whose checks are remembered; a server receives new ones all the time.
"""
_Schema = Annotated[int, Meta(ge=1, le=FORMAT_VERSION)]
_AtLeastOne = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
_Moment = Annotated[datetime, Meta(tz=True)]


class WheelFile(PublicRecord, frozen=True, kw_only=True):
    """The wheel file of a release and where to download it."""

    filename: Annotated[str, Meta(max_length=200)]
    urls: tuple[Line, ...]
    """Absolute, or relative to the registry; any of them may be used, as the hash is checked."""
    sha256: str
    size: Count
    """Bytes."""
    metadata_sha256: str
    """Hash of the METADATA file in the wheel."""

    def check(self) -> None:
        """Raise RecordProblem for an invalid file name or hash."""
        check_digest("sha256", self.sha256)
        check_digest("metadata_sha256", self.metadata_sha256)
        if not _FILE_NAME.fullmatch(self.filename):
            raise RecordProblem(f"filename: {self.filename!r} is not the name of a file")


class Source(PublicRecord, frozen=True, kw_only=True):
    """The sources that the wheel was built from."""

    repository: Line = ""
    commit: Line = ""
    subdirectory: Line = ""
    sdist_sha256: Line = ""


class ProtocolRange(PublicRecord, frozen=True, kw_only=True):
    """The environment protocol versions it supports, `major.minor`, both ends included."""

    minimum: str = "1.0"
    maximum: str = "1.0"

    @property
    def bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Both ends as (major, minor)."""
        return _numbers(self.minimum), _numbers(self.maximum)

    def check(self) -> None:
        """Raise RecordProblem for an invalid version or range."""
        _check_range(self.minimum, self.maximum)


class Dataset(PublicRecord, frozen=True, kw_only=True):
    """One dataset that the environment can load."""

    repo: Line
    revision: Line
    license: Line = ""
    when: Line = ""
    """The setting that loads it; empty if it is always loaded."""


class RewardRange(PublicRecord, frozen=True, kw_only=True):
    """The range of its rewards, and the lowest reward that counts as success."""

    minimum: float
    maximum: float
    success: float

    def check(self) -> None:
        """Raise RecordProblem unless the numbers are finite and in order."""
        if not math.isfinite(self.minimum + self.maximum + self.success):
            for field in ("minimum", "maximum", "success"):
                if not math.isfinite(getattr(self, field)):
                    raise RecordProblem(f"{field}: must be a finite number")
        if self.minimum > self.maximum:
            raise RecordProblem(f"minimum {self.minimum:g} is above maximum {self.maximum:g}")


COMPUTED_DEFAULT = "..."
"""Stands for a default that a schema does not hold."""


class Setting(PublicRecord, frozen=True, kw_only=True):
    """One setting of an environment, `--env.NAME` on the command line."""

    name: Line
    """Dotted for a setting in a table."""
    type: Line
    default: Line
    """As JSON; empty if the setting is required, `COMPUTED_DEFAULT` if other settings decide."""
    help: Line


class Validation(PublicRecord, frozen=True, kw_only=True):
    """The verdict of its validation when it was published."""

    policy: Line = ""
    """Version of the table of checks; empty if not validated."""
    verdict: Literal["pass", "warn", "fail", "none"] = "none"
    report_sha256: Line = ""
    checked_on: Line = ""
    """`fixture rows` if rows of the author's own stood in for its datasets; empty if not."""


class EvalDefaults(PublicRecord, frozen=True, kw_only=True):
    """The default numbers of examples and rollouts in `telescope eval`."""

    examples: _AtLeastOne = 64
    rollouts: _AtLeastOne = 4


class Release(PublicRecord, frozen=True, kw_only=True):
    """One published version. Immutable: an index line is never changed."""

    schema_version: _Schema = msgspec.field(name="schema", default=FORMAT_VERSION)
    owner: str
    name: str
    version: str
    """PEP 440; a new major version means that scores are not comparable."""
    summary: Line
    distribution: Line
    module: Line
    factory: Line
    """`module:Class`."""
    wheel: WheelFile
    source: Source = Source()
    requires_python: Line
    requires_dist: tuple[Line, ...]
    protocol: ProtocolRange = ProtocolRange()
    kind: Line = "environment"
    capabilities: tuple[Line, ...] = ()
    config_schema_sha256: str
    """Hash of the JSON schema of its settings."""
    settings: tuple[Setting, ...] | UnsetType = UNSET
    """Missing in releases from before settings were recorded, or if they take too much space."""
    datasets: tuple[Dataset, ...] = ()
    splits: dict[Line, Count | None]
    """Split -> number of examples; None if it is endless, or if it was checked on fixture rows."""
    reward: RewardRange
    reward_weights: dict[Line, float] | UnsetType = UNSET
    """Name of each reward -> its factor in their sum; empty if the total is computed in another
    way. Missing in releases from before weights were recorded."""
    network: Literal["none", "load", "always"]
    secrets: tuple[Line, ...] = ()
    """Names of environment variables it may read, never values."""
    resources: dict[Line, Line] = msgspec.field(default_factory=dict[str, str])
    validation: Validation = Validation()
    attestation_sha256: Line = ""
    publisher: Line
    published_at: _Moment
    license: Line
    tags: tuple[Line, ...] = ()
    eval_defaults: EvalDefaults = EvalDefaults()

    @property
    def id(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"

    def check(self) -> None:
        """Raise RecordProblem for invalid names, versions, hashes and ranges."""
        if len(self.requires_dist) > MAX_REQUIREMENTS:
            count = len(self.requires_dist)
            raise RecordProblem(f"requires_dist: expected at most {MAX_REQUIREMENTS}, got {count}")
        # Releases of one environment differ in their versions and wheels, and seldom in the rest.
        _check_what_is_shared(
            self.owner,
            self.name,
            self.requires_python,
            (self.requires_dist, self.secrets),
            self.config_schema_sha256,
            self.protocol,
            self.reward,
        )
        require("version", check_version, self.version)
        check_part("wheel", self.wheel)
        weights = {} if self.reward_weights is UNSET else self.reward_weights
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise RecordProblem(f"reward_weights.{name}: must be a finite number")


class Deprecation(PublicRecord, frozen=True, kw_only=True):
    """Why the environment should no longer be used, and what to use instead."""

    reason: Line
    replacement: Line = ""


class Status(PublicRecord, frozen=True, kw_only=True):
    """The only mutable record of an environment."""

    schema_version: _Schema = msgspec.field(name="schema", default=FORMAT_VERSION)
    yanked: dict[Line, Line] = msgspec.field(default_factory=dict[str, str])
    """Version -> reason. A yanked version is chosen only when it is named exactly."""
    deprecated: Deprecation | None = None
    advisories: tuple[Line, ...] = ()


class RegistryConfig(PublicRecord, frozen=True, kw_only=True):
    """`config.json`: what a client must know before reading anything else."""

    format: _Schema = FORMAT_VERSION
    name: Line
    artifacts: tuple[Line, ...] = (f"artifacts/{FILENAME}",)
    """Templates of artifact URLs for new releases."""
    minimum_client: Line = "0.1.0"
    api: Line = ""
    """Path of a server's API below the registry; empty if the registry is only files."""

    def check(self) -> None:
        """Raise RecordProblem for an invalid client version, and for invalid templates."""
        for number, text in enumerate(self.artifacts):
            # Not a format string: `{filename.attribute}` would read more than the name.
            if text.count(FILENAME) != 1 or set(text.replace(FILENAME, "")) & set("{}"):
                problem = f"expected an address with {FILENAME} in it once, got {text[:80]!r}"
                raise RecordProblem(f"artifacts.{number}: {problem}")
        try:
            Version(self.minimum_client)
        except ValueError:
            problem = f"{self.minimum_client[:80]!r} is not a version"
            raise RecordProblem(f"minimum_client: {problem}") from None


class Publisher(PublicRecord, frozen=True, kw_only=True):
    """Who may publish under a namespace."""

    kind: Literal["repository", "user", "key"]
    id: Line
    """A repository is `owner/name` on GitHub, or its https address."""
    workflow: Line = ""
    """The only CI workflow of the repository whose attestations count; empty if any may attest."""
    issuer: Line = ""
    """OIDC issuer of its attestations; empty for the issuer of github.com or gitlab.com."""


class Namespace(PublicRecord, frozen=True, kw_only=True):
    """`namespaces/<owner>.toml`."""

    owner: str
    status: Literal["active", "suspended"] = "active"
    withheld: bool = True
    """Whether a suspended owner's releases are not installed either."""
    publishers: tuple[Publisher, ...] = ()

    @property
    def is_withheld(self) -> bool:
        """Whether nothing of this owner is installed."""
        return self.status == "suspended" and self.withheld

    def check(self) -> None:
        """Raise RecordProblem for an invalid name of an owner."""
        require("owner", check_owner, self.owner)


class Aliases(PublicRecord, frozen=True, kw_only=True):
    """`aliases.toml`: curated short names, never given to another environment."""

    aliases: dict[str, Line]
    """Bare name -> owner/name."""

    def check(self) -> None:
        """Raise RecordProblem for an invalid name of an environment."""
        for name in self.aliases:
            require("aliases", check_name, name)


class RemovedRelease(PublicRecord, frozen=True, kw_only=True):
    """One release that was taken down for good."""

    id: Line
    """`owner/name`."""
    version: str
    sha256: str
    """Of its wheel."""
    reason: Line

    def check(self) -> None:
        """Raise RecordProblem for values that no release can have, and for a missing reason."""
        owner, _, name = self.id.partition("/")
        require("id", check_owner, owner)
        require("id", check_name, name)
        require("version", check_version, self.version)
        check_digest("sha256", self.sha256)
        if not self.reason:
            raise RecordProblem("reason: expected why it was removed, got an empty text")


class Removals(PublicRecord, frozen=True, kw_only=True):
    """`removed.toml`: releases whose wheels or index lines are gone, rightly."""

    removed: tuple[RemovedRelease, ...] = ()

    def check(self) -> None:
        """Raise RecordProblem if an entry has one."""
        check_each("removed", self.removed)

    def has(self, release: Release) -> bool:
        """Return whether exactly this release was removed."""
        wanted = (release.id, release.version, release.wheel.sha256)
        return any((one.id, one.version, one.sha256) == wanted for one in self.removed)


SCHEMAS: dict[str, type[Record]] = {
    "aliases": Aliases,
    "config": RegistryConfig,
    "namespace": Namespace,
    "release": Release,
    "removed": Removals,
    "status": Status,
}


def check_digest(field: str, text: str) -> None:
    """Raise RecordProblem unless `text` is a sha256 in lower-case hexadecimal digits."""
    if not _DIGEST.fullmatch(text):
        raise RecordProblem(f"{field}: expected 64 hexadecimal digits, got {text[:80]!r}")


def check_part(field: str, record: Record) -> None:
    """Check the record in `field`; a problem's text begins with the field."""
    try:
        record.check()
    except RecordProblem as problem:
        text = str(problem)
        joint = "." if text.split(" ", 1)[0].endswith(":") else ": "
        raise RecordProblem(f"{field}{joint}{text}") from None


def check_each(field: str, records: Iterable[Record]) -> None:
    """Check the records in a list; a problem's text begins with the field and the number."""
    for number, one in enumerate(records):
        try:
            one.check()
        except RecordProblem as problem:
            raise RecordProblem(f"{field}.{number}.{problem}") from None


def require(field: str, check: Callable[[str], str], text: str) -> None:
    """Raise RecordProblem, which begins with `field`, if `check` refuses `text`."""
    problem = _problem(check, text)
    if problem:
        raise RecordProblem(f"{field}: {problem}")


@lru_cache(maxsize=_KEPT)
def _check_what_is_shared(
    owner: str,
    name: str,
    requires_python: str,
    needs: tuple[tuple[str, ...], tuple[str, ...]],
    config_schema_sha256: str,
    protocol: ProtocolRange,
    reward: RewardRange,
) -> None:
    require("owner", check_owner, owner)
    require("name", check_name, name)
    require("requires_python", check_specifier, requires_python)
    _require_all("requires_dist", check_requirement, needs[0])
    _require_all("secrets", check_variable, needs[1])
    check_digest("config_schema_sha256", config_schema_sha256)
    check_part("protocol", protocol)
    check_part("reward", reward)


def _require_all(field: str, check: Callable[[str], str], texts: tuple[str, ...]) -> None:
    """Raise RecordProblem, which begins with `field` and a number, if `check` refuses a text."""
    for number, text in enumerate(texts):
        require(f"{field}.{number}", check, text)


@lru_cache(maxsize=_KEPT)
def _problem(check: Callable[[str], str], text: str) -> str:
    """Return why `check` refuses `text`; empty if it does not."""
    try:
        check(text)
    except (ConfigError, RegistryError, ValueError) as error:
        return str(error)
    return ""


@lru_cache(maxsize=_KEPT)
def _check_range(minimum: str, maximum: str) -> None:
    for field, text in (("minimum", minimum), ("maximum", maximum)):
        if not _PROTOCOL.fullmatch(text):
            raise RecordProblem(f"{field}: {text[:80]!r} is not a version of the protocol")
    if _numbers(minimum) > _numbers(maximum):
        raise RecordProblem(f"minimum {minimum} is above maximum {maximum}")


def _numbers(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor)
