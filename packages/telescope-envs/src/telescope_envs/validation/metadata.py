"""Checks of a wheel's METADATA: name, version, license, README, dependencies and tags."""

import platform
import re
from importlib.metadata import version as installed_version

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from telescope_core.errors import RegistryError
from telescope_envs.records.names import check_name, check_owner, check_version
from telescope_envs.validation.findings import Findings

CHECKED = (
    "static.name",
    "static.version",
    "static.summary",
    "static.license",
    "static.readme",
    "static.requires_python",
    "static.protocol",
    "static.protocol_bound",
    "static.dependencies",
    "static.tags",
)
_CORE = "telescope-core"
_PREFIX = "telescope-env-"
_SHORTEST_README = 120
_PLACEHOLDERS = re.compile(
    r"\bTO[D]O\b|\bFIX[M]E\b|lorem ipsum|describe (?:it|your environment|this environment) here"
    r"|your (?:description|text) here|coming soon",
    re.IGNORECASE,
)
_TAG = re.compile(r"[a-z0-9]+(?:[-_.][a-z0-9]+)*")
_MAX_TAGS = 10


def check_metadata(metadata: bytes, entry_name: str, findings: Findings) -> None:
    """Check METADATA; `entry_name` is the environment's name in its entry point."""
    raw, _ = parse_email(metadata)
    _check_name(raw, entry_name, findings)
    _check_version(raw, findings)
    _check_texts(raw, findings)
    _check_python(raw, findings)
    _check_dependencies(raw, findings)
    _check_tags(raw, findings)
    for check in CHECKED:
        findings.passed(check)


def environment_id(metadata: bytes, entry_name: str) -> str:
    """Return owner/name if the distribution's name contains the owner, else that name."""
    name = str(canonicalize_name(parse_email(metadata)[0].get("name", "")))
    owner = name.removeprefix(_PREFIX).removesuffix(f"-{entry_name}")
    return f"{owner}/{entry_name}" if name == f"{_PREFIX}{owner}-{entry_name}" else name


def version_in(metadata: bytes) -> str:
    """Return the version that METADATA gives."""
    return parse_email(metadata)[0].get("version", "")


def _check_name(raw: RawMetadata, entry_name: str, findings: Findings) -> None:
    name = raw.get("name", "")
    owner = name.removeprefix(_PREFIX).removesuffix(f"-{entry_name}")
    if name != f"{_PREFIX}{owner}-{entry_name}":
        findings.found(
            "static.name",
            f"distribution {name!r} with entry point {entry_name!r}: expected "
            f"{_PREFIX}<owner>-{entry_name}",
        )
        return
    try:
        check_owner(owner)
        check_name(entry_name)
    except RegistryError as error:
        findings.found("static.name", str(error))


def _check_version(raw: RawMetadata, findings: Findings) -> None:
    try:
        check_version(raw.get("version", ""))
    except RegistryError as error:
        findings.found("static.version", str(error))


def _check_texts(raw: RawMetadata, findings: Findings) -> None:
    if not raw.get("summary", "").strip():
        findings.found("static.summary", "there is no description")
    expression = raw.get("license_expression", "")
    try:
        canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        got = repr(expression) if expression else "none"
        findings.found("static.license", f"expected an SPDX expression such as MIT, got {got}")
    readme = raw.get("description", "").strip()
    placeholder = _PLACEHOLDERS.search(readme)
    if len(readme) < _SHORTEST_README:
        findings.found(
            "static.readme",
            f"the README has {len(readme)} characters, expected {_SHORTEST_README} or more",
        )
    elif placeholder:
        findings.found("static.readme", f"the README still says {placeholder[0]!r}")


def _check_python(raw: RawMetadata, findings: Findings) -> None:
    wanted = raw.get("requires_python", "")
    try:
        allows = SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
    except ValueError:
        findings.found("static.requires_python", f"{wanted!r} is not a version range")
        return
    if not wanted:
        findings.found("static.requires_python", "requires-python is not set")
    elif not allows:
        findings.found(
            "static.requires_python",
            f"{wanted!r} does not allow this Python, {platform.python_version()}",
        )


def _check_dependencies(raw: RawMetadata, findings: Findings) -> None:
    core: Requirement | None = None
    for text in raw.get("requires_dist", []):
        try:
            requirement = Requirement(text)
        except (ValueError, RecursionError) as error:
            findings.found("static.dependencies", f"{text!r}: {error}")
            continue
        name = str(canonicalize_name(requirement.name))
        if requirement.url:
            findings.found("static.dependencies", f"{text!r} gives a URL")
        elif name.startswith(_PREFIX):
            findings.found("static.dependencies", f"{text!r} is another environment")
        elif name == _CORE and requirement.marker is None:
            core = requirement
    if core is None:
        findings.found("static.protocol", f"{_CORE} is not among the dependencies")
        return
    installed = installed_version(_CORE)
    if not core.specifier.contains(installed, prereleases=True):
        findings.found("static.protocol", f"{str(core)!r} does not allow {_CORE} {installed}")
    if not any(one.operator in ("<", "<=", "==", "~=") for one in core.specifier):
        findings.found("static.protocol_bound", f"{str(core)!r} has no upper bound")


def _check_tags(raw: RawMetadata, findings: Findings) -> None:
    tags = [tag.strip() for tag in raw.get("keywords", [])]
    if not 1 <= len(tags) <= _MAX_TAGS:
        findings.found("static.tags", f"expected 1 to {_MAX_TAGS} keywords, got {len(tags)}")
    odd = [tag for tag in tags if not _TAG.fullmatch(tag)]
    if odd:
        findings.found("static.tags", f"not lower-case words: {', '.join(map(repr, odd))}")
