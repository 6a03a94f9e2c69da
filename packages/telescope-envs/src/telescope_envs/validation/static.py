"""The static level: the project's files and its wheel, without importing any of its code.

Building the wheel runs the build backend that the project names, without tokens and without a home,
but no code of the environment.
"""

import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from telescope_core.base.errors import ConfigError, RegistryError, TelescopeError
from telescope_envs.publish.build import build_wheel, source_files
from telescope_envs.records.model import read_pyproject
from telescope_envs.records.names import (
    check_name,
    check_owner,
    check_version,
    distribution_name,
    id_in_distribution,
    is_commit,
)
from telescope_envs.records.projects import read_datasets
from telescope_envs.rules.wheel import OddVersionError, read_wheel
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.processes import Subject

_SHAPES = {
    "a private key": (
        ("PRIVATE KEY",),
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
    ),
    "an AWS access key": (("AKIA", "ASIA"), r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        r"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_[A-Za-z0-9_]{50,}\b",
    ),
    "a GitLab token": (("glpat-",), r"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a Hugging Face token": (("hf_",), r"\bhf_[A-Za-z]{34,}\b"),
    "an Anthropic key": (("sk-ant-",), r"\bsk-ant-[A-Za-z0-9_-]{32,}"),
    "an OpenAI key": (
        ("T3BlbkFJ",),
        r"\bsk-(?:proj-|svcacct-)?[A-Za-z0-9_-]{20,}T3BlbkFJ[A-Za-z0-9_-]{20,}",
    ),
    "a Slack token": (("xox",), r"\bxox[abeoprs]-[A-Za-z0-9-]{20,}"),
    "a Google key": (("AIza",), r"\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Stripe key": (("k_live_",), r"\b[rs]k_live_[0-9A-Za-z]{20,}\b"),
    "a package index token": (("pypi-AgEI",), r"\bpypi-AgEI[A-Za-z0-9_-]{50,}"),
    "a signed web token": (
        ("eyJ",),
        r"\beyJ[A-Za-z0-9_-]{15,}\.eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{20,}",
    ),
}
"""Kind -> texts of which each secret of that kind holds one, and its whole shape.

Looking for a fixed text first is a hundred times as fast as for the shape, which seldom is there.
"""
_PATTERNS = {kind: (marks, re.compile(shape)) for kind, (marks, shape) in _SHAPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """One secret. It holds only the beginning, so that a report does not reveal the secret."""

    kind: str
    line: int
    beginning: str


def secrets_in(text: str) -> Iterator[Secret]:
    """Yield the parts of `text` that look like secrets."""
    for kind, (marks, pattern) in _PATTERNS.items():
        if not any(mark in text for mark in marks):
            continue
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield Secret(kind=kind, line=line, beginning=f"{match[0][:8]}...")


_OF_METADATA = (
    "static.name",
    "static.metadata",
    "static.readme",
    "static.dependencies",
)
_CORE = "telescope-core"
_PREFIX = "telescope-env-"
_SHORTEST_README = 120
_PLACEHOLDERS = re.compile(
    r"\bTO[D]O\b|\bFIX[M]E\b|lorem ipsum|describe (?:it|your environment|this environment) here"
    r"|your (?:description|text) here|coming soon",
    re.IGNORECASE,
)
_MAX_WHEEL_BYTES = 50 * 1024 * 1024
_MAX_SCANNED_BYTES = 4 * 1024 * 1024
"""Most bytes of a file to scan; the rest counts as data."""
_FROM_WHEEL = ("static.wheel", *_OF_METADATA)


def check_static(subject: Subject, findings: Findings) -> Subject:
    """Do the static checks; returns the subject with its wheel, metadata and factory."""
    if subject.project is not None:
        subject = _with_wheel(subject, subject.project, findings)
        _check_datasets(subject.project or Path(), findings)
    else:
        for check in ("static.project", "static.datasets"):
            findings.not_applicable(check, "there is no project folder")
    if subject.wheel:
        subject = _with_contents(subject, findings)
    elif subject.project is None:
        findings.not_applicable("static.wheel", "checked when it was installed")
        name = subject.label.rpartition("/")[2]
        check_metadata(subject.metadata, name, findings)
    findings.not_run(_FROM_WHEEL, "there is no wheel to inspect")
    _check_secrets(subject, findings)
    return subject


def _with_wheel(subject: Subject, project: Path, findings: Findings) -> Subject:
    try:
        table = read_pyproject(project)
    except ConfigError as error:
        findings.found("static.project", str(error).removeprefix(f"{project}/"))
        return subject
    for section in ("build-system", "project"):
        if section not in table:
            findings.found("static.project", f"pyproject.toml has no [{section}]")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheel = build_wheel(project, Path(scratch))
        except TelescopeError as error:
            findings.found("static.project", str(error))
            return subject
        findings.passed("static.project")
        return replace(subject, wheel_name=wheel.name, wheel=wheel.read_bytes())


def _with_contents(subject: Subject, findings: Findings) -> Subject:
    size = len(subject.wheel)
    if size > _MAX_WHEEL_BYTES:
        findings.found("static.wheel", f"{size} bytes, expected at most {_MAX_WHEEL_BYTES}")
    try:
        contents = read_wheel(subject.wheel, subject.wheel_name)
    except OddVersionError as error:
        findings.found("static.name", str(error))
        return subject
    except RegistryError as error:
        findings.found("static.wheel", str(error))
        return subject
    findings.passed("static.wheel")
    check_metadata(contents.metadata, contents.entry_name, findings)
    name = contents.distribution
    return replace(
        subject,
        label=id_in_distribution(name, contents.entry_name) or name,
        metadata=contents.metadata,
        factory=contents.factory,
        files=contents.files,
    )


def _check_datasets(project: Path, findings: Findings) -> None:
    try:
        listed = read_datasets(project)
    except ConfigError as error:
        findings.found("static.datasets", f"datasets.json: {error}")
        return
    if listed is None:
        findings.not_applicable("static.datasets", "there is no datasets.json")
        return
    for dataset in listed:
        if not is_commit(dataset.revision):
            findings.found(
                "static.datasets",
                f"{dataset.repo}: revision {dataset.revision!r} is not a commit of 40 digits",
            )
    findings.passed("static.datasets")


def _check_secrets(subject: Subject, findings: Findings) -> None:
    if not subject.wheel and subject.project is None:
        findings.not_applicable("static.secrets", "checked before it was published")
        return
    seen: set[tuple[str, str]] = set()
    for name, data in _texts(subject):
        for secret in secrets_in(data.decode("utf-8", "replace")):
            # The same file is in the project and in its wheel.
            key = (name.rpartition("/")[2], f"{secret.kind} {secret.line}")
            if key not in seen:
                seen.add(key)
                findings.found(
                    "static.secrets",
                    f"{name}:{secret.line} holds {secret.kind} ({secret.beginning})",
                )
    findings.passed("static.secrets")


def _texts(subject: Subject) -> Iterator[tuple[str, bytes]]:
    if subject.project is not None:
        for name in source_files(subject.project):
            path = subject.project / name
            if not path.is_symlink():
                with path.open("rb") as file:
                    yield str(name), file.read(_MAX_SCANNED_BYTES)
    for name, data in subject.files.items():
        if len(data) <= _MAX_SCANNED_BYTES:
            yield name, data


def check_metadata(metadata: bytes, entry_name: str, findings: Findings) -> None:
    """Check METADATA; `entry_name` is the environment's name in its entry point."""
    raw, _ = parse_email(metadata)
    _check_name(raw, entry_name, findings)
    _check_texts(raw, findings)
    _check_python(raw, findings)
    _check_dependencies(raw, findings)
    for check in _OF_METADATA:
        findings.passed(check)


def version_in(metadata: bytes) -> str:
    """Return the version that METADATA gives."""
    return parse_email(metadata)[0].get("version", "")


def _check_name(raw: RawMetadata, entry_name: str, findings: Findings) -> None:
    try:
        check_version(raw.get("version", ""))
    except ConfigError as error:
        findings.found("static.name", str(error))
    name = raw.get("name", "")
    found = id_in_distribution(name, entry_name)
    if not found:
        findings.found(
            "static.name",
            f"distribution {name!r} with entry point {entry_name!r}: expected "
            f"{distribution_name('<owner>', entry_name)}",
        )
        return
    try:
        check_owner(found.partition("/")[0])
        check_name(entry_name)
    except ConfigError as error:
        findings.found("static.name", str(error))


def _check_texts(raw: RawMetadata, findings: Findings) -> None:
    if not raw.get("summary", "").strip():
        findings.found("static.metadata", "there is no description")
    expression = raw.get("license_expression", "")
    try:
        canonicalize_license_expression(expression)
    except InvalidLicenseExpression:
        got = repr(expression) if expression else "none"
        findings.found("static.metadata", f"license: expected an SPDX one such as MIT, got {got}")
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
        findings.found("static.metadata", f"requires-python {wanted!r} is not a version range")
        return
    if not wanted:
        findings.found("static.metadata", "requires-python is not set")
    elif not allows:
        findings.found(
            "static.metadata",
            f"requires-python {wanted!r} does not allow this Python, {platform.python_version()}",
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
        findings.found("static.dependencies", f"{_CORE} is not among the dependencies")
        return
    installed = installed_version(_CORE)
    if not core.specifier.contains(installed, prereleases=True):
        findings.found("static.dependencies", f"{str(core)!r} does not allow {_CORE} {installed}")
