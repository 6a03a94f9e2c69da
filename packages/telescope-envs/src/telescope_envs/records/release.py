"""The records of a registry: one release per index line, and one status per environment.

They validate untrusted bytes, so they are pydantic models. A reader ignores fields it does not know
and refuses a `schema` number above its own, so fields can be added without breaking old clients.
Every number is finite and every text is short and printable, whoever wrote the record. `lines` has
the same rules in a form that is quicker to import; a test holds the two together.
"""

from typing import Annotated, Literal, Self

from packaging.version import Version
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from telescope_core.errors import RegistryError
from telescope_envs.records.names import (
    FILE_NAME,
    FORMAT_VERSION,
    LARGEST_COUNT,
    LONGEST_TEXT,
    NAME_LENGTHS,
    OWNER_LENGTHS,
    PRINTABLE,
    VARIABLE,
    WORDS,
    check_requirement,
    check_specifier,
    check_version,
)

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Owner = Annotated[
    str, Field(pattern=WORDS, min_length=OWNER_LENGTHS[0], max_length=OWNER_LENGTHS[1])
]
Name = Annotated[str, Field(pattern=WORDS, min_length=NAME_LENGTHS[0], max_length=NAME_LENGTHS[1])]


def _is_version(text: str) -> str:
    try:
        return check_version(text)
    except RegistryError as error:
        raise ValueError(str(error)) from None


def _is_any_version(text: str) -> str:
    try:
        Version(text)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not a version") from None
    return text


def _is_template(text: str) -> str:
    # Not a format string: `{filename.attribute}` would read more than the name.
    if text.count(FILENAME) != 1 or set(text.replace(FILENAME, "")) & set("{}"):
        raise ValueError(f"expected an address with {FILENAME} in it once, got {text[:80]!r}")
    return text


FILENAME = "{filename}"
"""What stands for the name of a wheel in a template."""
Line = Annotated[str, Field(pattern=PRINTABLE, max_length=LONGEST_TEXT)]
"""Text that is safe to print as it is in lists and errors."""
ReleaseVersion = Annotated[str, AfterValidator(_is_version)]
PythonRange = Annotated[Line, AfterValidator(check_specifier)]
ProtocolVersion = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$")]

FileName = Annotated[str, Field(pattern=FILE_NAME, max_length=200)]
RequirementText = Annotated[Line, AfterValidator(check_requirement)]
AnyVersion = Annotated[Line, AfterValidator(_is_any_version)]
Template = Annotated[Line, AfterValidator(_is_template)]
Variable = Annotated[str, Field(pattern=VARIABLE, max_length=LONGEST_TEXT)]
Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]


class _Record(BaseModel):
    # Validators are built on first use, because listing ten thousand releases needs none of them.
    # For the same reason, defaults are made with model_construct, which builds no validator.
    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        populate_by_name=True,
        defer_build=True,
        # JSON has no NaN and no infinity: they would be stored as null, which no reader accepts.
        allow_inf_nan=False,
    )


class WheelFile(_Record):
    """The wheel file of a release and where to download it."""

    filename: FileName
    urls: tuple[Line, ...]
    """Absolute, or relative to the registry; any of them may be used, as the hash is checked."""
    sha256: Sha256
    size: Count
    """Bytes."""
    metadata_sha256: Sha256
    """Hash of the METADATA file in the wheel."""


class Source(_Record):
    """The sources that the wheel was built from."""

    repository: Line = ""
    commit: Line = ""
    subdirectory: Line = ""
    sdist_sha256: Line = ""


def _numbers(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor)


class ProtocolRange(_Record):
    """The environment protocol versions it supports, `major.minor`, both ends included."""

    minimum: ProtocolVersion = "1.0"
    maximum: ProtocolVersion = "1.0"

    @property
    def bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Both ends as (major, minor)."""
        return _numbers(self.minimum), _numbers(self.maximum)

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        lowest, highest = self.bounds
        if lowest > highest:
            raise ValueError(f"minimum {self.minimum} is above maximum {self.maximum}")
        return self


class Dataset(_Record):
    """One dataset that the environment can load."""

    repo: Line
    revision: Line
    license: Line = ""
    when: Line = ""
    """The setting that loads it; empty if it is always loaded."""


class RewardRange(_Record):
    """The range of its rewards, and the lowest reward that counts as success."""

    minimum: float
    maximum: float
    success: float

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum:g} is above maximum {self.maximum:g}")
        return self


class Validation(_Record):
    """The verdict of its validation when it was published."""

    policy: Line = ""
    """Version of the table of checks; empty if not validated."""
    verdict: Literal["pass", "warn", "fail", "none"] = "none"
    report_sha256: Line = ""
    checked_on: Line = ""
    """`fixture rows` if rows of the author's own stood in for its datasets; empty if not."""


class EvalDefaults(_Record):
    """The default numbers of examples and rollouts in `telescope eval`."""

    examples: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] = 64
    rollouts: Annotated[int, Field(ge=1, le=LARGEST_COUNT)] = 4


class Release(_Record):
    """One published version. Immutable: an index line is never changed."""

    schema_version: Annotated[int, Field(alias="schema", le=FORMAT_VERSION, ge=1)] = FORMAT_VERSION
    owner: Owner
    name: Name
    version: ReleaseVersion
    """PEP 440; a new major version means that scores are not comparable."""
    summary: Line
    distribution: Line
    module: Line
    factory: Line
    """`module:Class`."""
    wheel: WheelFile
    source: Source = Source.model_construct()
    requires_python: PythonRange
    requires_dist: tuple[RequirementText, ...]
    protocol: ProtocolRange = ProtocolRange.model_construct()
    kind: Line = "environment"
    capabilities: tuple[Line, ...] = ()
    config_schema_sha256: Sha256
    """Hash of the JSON schema of its settings."""
    datasets: tuple[Dataset, ...] = ()
    splits: dict[Line, Count | None]
    """Split -> number of examples; None if it is endless, or if it was checked on fixture rows."""
    reward: RewardRange
    network: Literal["none", "load", "always"]
    secrets: tuple[Variable, ...] = ()
    """Names of environment variables it may read, never values."""
    resources: dict[Line, Line] = {}
    validation: Validation = Validation.model_construct()
    attestation_sha256: Line = ""
    publisher: Line
    published_at: AwareDatetime
    license: Line
    tags: tuple[Line, ...] = ()
    eval_defaults: EvalDefaults = EvalDefaults.model_construct()

    @property
    def id(self) -> str:
        """`owner/name`."""
        return f"{self.owner}/{self.name}"


class Deprecation(_Record):
    """Why the environment should no longer be used, and what to use instead."""

    reason: Line
    replacement: Line = ""


class Status(_Record):
    """The only mutable record of an environment."""

    schema_version: Annotated[int, Field(alias="schema", le=FORMAT_VERSION, ge=1)] = FORMAT_VERSION
    yanked: dict[Line, Line] = {}
    """Version -> reason. A yanked version is chosen only when it is named exactly."""
    deprecated: Deprecation | None = None
    advisories: tuple[Line, ...] = ()


class RegistryConfig(_Record):
    """`config.json`: what a client must know before reading anything else."""

    format: Annotated[int, Field(ge=1, le=FORMAT_VERSION)] = FORMAT_VERSION
    name: Line
    artifacts: tuple[Template, ...] = ("artifacts/{filename}",)
    """Templates of artifact URLs for new releases."""
    minimum_client: AnyVersion = "0.1.0"
    api: Line = ""
    """Path of a server's API below the registry; empty if the registry is only files."""


class Publisher(_Record):
    """Who may publish under a namespace."""

    kind: Literal["repository", "user", "key"]
    id: Line
    """A repository is `owner/name` on GitHub, or its https address."""
    workflow: Line = ""
    """The only CI workflow of the repository whose attestations count; empty if any may attest."""
    issuer: Line = ""
    """OIDC issuer of its attestations; empty for the issuer of github.com or gitlab.com."""


class Namespace(_Record):
    """`namespaces/<owner>.toml`."""

    owner: Owner
    status: Literal["active", "suspended"] = "active"
    publishers: tuple[Publisher, ...] = ()


class Aliases(_Record):
    """`aliases.toml`: curated short names, never given to another environment."""

    aliases: dict[Name, Line]
    """Bare name -> owner/name."""


SCHEMAS: dict[str, type[BaseModel]] = {
    "aliases": Aliases,
    "config": RegistryConfig,
    "namespace": Namespace,
    "release": Release,
    "status": Status,
}
