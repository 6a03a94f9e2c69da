"""The records of a registry: one release per index line, and one status per environment.

They validate untrusted bytes, so they are pydantic models. A reader ignores fields it does not know
and refuses a `schema` number above its own, so fields can be added without breaking old clients.
"""

from typing import Annotated, Literal, Self

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
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
from telescope_envs.registry.names import (
    FORMAT_VERSION,
    NAME_LENGTHS,
    OWNER_LENGTHS,
    PRINTABLE,
    WORDS,
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


def _is_specifier(text: str) -> str:
    try:
        SpecifierSet(text).contains("3.11")  # which fails for numbers that are too long to read
    except ValueError as error:
        raise ValueError(f"{str(error)[:80]}; write for instance '>=3.11'") from None
    return text


def _is_requirement(text: str) -> str:
    try:
        marker = Requirement(text).marker
        _ = marker is None or marker.evaluate({"extra": ""})
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:80]!r} is not a requirement (PEP 508)") from None
    return text


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
ReleaseVersion = Annotated[str, AfterValidator(_is_version)]
PythonRange = Annotated[str, AfterValidator(_is_specifier)]
ProtocolVersion = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$")]

Line = Annotated[str, Field(pattern=PRINTABLE)]
"""Text that is safe to print as it is in lists and errors."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", max_length=200)]
RequirementText = Annotated[Line, AfterValidator(_is_requirement)]
AnyVersion = Annotated[str, AfterValidator(_is_any_version)]
Template = Annotated[Line, AfterValidator(_is_template)]


class _Record(BaseModel):
    # Validators are built on first use, because listing ten thousand releases needs none of them.
    # For the same reason, defaults are made with model_construct, which builds no validator.
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True, defer_build=True)


class WheelFile(_Record):
    """The wheel file of a release and where to download it."""

    filename: FileName
    urls: tuple[str, ...]
    """Absolute, or relative to the registry; any of them may be used, as the hash is checked."""
    sha256: Sha256
    size: int
    """Bytes."""
    metadata_sha256: Sha256
    """Hash of the METADATA file in the wheel."""


class Source(_Record):
    """The sources that the wheel was built from."""

    repository: str = ""
    commit: str = ""
    subdirectory: str = ""
    sdist_sha256: str = ""


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

    repo: str
    revision: str
    license: str = ""
    when: str = ""
    """The setting that loads it; empty if it is always loaded."""


class RewardRange(_Record):
    """The range of its rewards, and the lowest reward that counts as success."""

    minimum: float
    maximum: float
    success: float


class Validation(_Record):
    """The verdict of its validation when it was published."""

    policy: str = ""
    """Version of the table of checks; empty if not validated."""
    verdict: Literal["pass", "warn", "fail", "none"] = "none"
    report_sha256: str = ""


class EvalDefaults(_Record):
    """The default numbers of examples and rollouts in `telescope eval`."""

    examples: int = 64
    rollouts: int = 4


class Release(_Record):
    """One published version. Immutable: an index line is never changed."""

    schema_version: Annotated[int, Field(alias="schema", le=FORMAT_VERSION, ge=1)] = FORMAT_VERSION
    owner: Owner
    name: Name
    version: ReleaseVersion
    """PEP 440; a new major version means that scores are not comparable."""
    summary: Line
    distribution: str
    module: str
    factory: str
    """`module:Class`."""
    wheel: WheelFile
    source: Source = Source.model_construct()
    requires_python: PythonRange
    requires_dist: tuple[RequirementText, ...]
    protocol: ProtocolRange = ProtocolRange.model_construct()
    kind: str = "environment"
    capabilities: tuple[str, ...] = ()
    config_schema_sha256: Sha256
    """Hash of the JSON schema of its settings."""
    datasets: tuple[Dataset, ...] = ()
    splits: dict[str, int | None]
    """Split -> number of examples; None if it is endless."""
    reward: RewardRange
    network: Literal["none", "load", "always"]
    secrets: tuple[str, ...] = ()
    """Names of environment variables it may read, never values."""
    resources: dict[str, str] = {}
    validation: Validation = Validation.model_construct()
    attestation_sha256: str = ""
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
    yanked: dict[str, Line] = {}
    """Version -> reason. A yanked version is chosen only when it is named exactly."""
    deprecated: Deprecation | None = None
    advisories: tuple[Line, ...] = ()


class RegistryConfig(_Record):
    """`config.json`: what a client must know before reading anything else."""

    format: Annotated[int, Field(ge=1, le=FORMAT_VERSION)] = FORMAT_VERSION
    name: str
    artifacts: tuple[Template, ...] = ("artifacts/{filename}",)
    """Templates of artifact URLs for new releases."""
    minimum_client: AnyVersion = "0.1.0"
    api: str = ""
    """Path of a server's API below the registry; empty if the registry is only files."""


class Publisher(_Record):
    """Who may publish under a namespace."""

    kind: Literal["repository", "user", "key"]
    id: str
    """A repository is `owner/name` on GitHub, or its https address."""
    workflow: str = ""
    """The only CI workflow of the repository whose attestations count; empty if any may attest."""
    issuer: str = ""
    """OIDC issuer of its attestations; empty for the issuer of github.com or gitlab.com."""


class Namespace(_Record):
    """`namespaces/<owner>.toml`."""

    owner: Owner
    status: Literal["active", "suspended"] = "active"
    publishers: tuple[Publisher, ...] = ()


class Aliases(_Record):
    """`aliases.toml`: curated short names, never given to another environment."""

    aliases: dict[Name, str]
    """Bare name -> owner/name."""


SCHEMAS: dict[str, type[BaseModel]] = {
    "aliases": Aliases,
    "config": RegistryConfig,
    "namespace": Namespace,
    "release": Release,
    "status": Status,
}
