"""Publish a project: build, check and validate it before changing anything.

All of that happens on a copy of the committed sources. The version in the project is raised, and
the release is appended to the registry, only after every check has passed.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.version import Version

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_envs.install.packages import missing_requirements
from telescope_envs.publish.attesting import (
    AttestMode,
    attest_wheel,
    require_signing,
    require_trust_config,
)
from telescope_envs.publish.build import build_and_inspect, copy_sources
from telescope_envs.publish.release import (
    declared_datasets,
    published_as,
    release_of,
    require_own_name,
    require_publishable,
    validated,
)
from telescope_envs.publish.source import (
    bumped,
    commit_file,
    committed_source,
    require_above,
    write_version,
)
from telescope_envs.records.changes import Change, changes_between, score_warnings
from telescope_envs.records.projects import Identity, read_identity, require_project
from telescope_envs.records.reading import Publication
from telescope_envs.records.release import Release, Source
from telescope_envs.registry.lookup import open_writable
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.stores import WritableStore
from telescope_envs.registry.stores.http import ServedStore
from telescope_envs.rules.admission import (
    require_namespace,
    require_not_removed,
    require_unreserved,
)
from telescope_envs.validation import (
    Outcome,
    Report,
    ValidationOptions,
    validate_project,
)
from telescope_envs.validation.processes import interpreter_with
from telescope_envs.validation.render import evidence_text


class PushState(StrEnum):
    """The outcome of a push."""

    PUBLISHED = "published"
    """The release is now in the registry."""
    ALREADY_PUBLISHED = "already published"
    """The same bytes were already in the registry."""
    WOULD_BE_PUBLISHED = "would be published"
    """This was a dry run, and everything up to the upload succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Options for publishing a project."""

    registry: str | None = None
    """Name or address; None means the default registry."""
    dry_run: bool = False
    bump: str = ""
    """major, minor, patch or a version; empty leaves the version unchanged."""
    commit: bool = False
    """Whether to commit the raised version."""
    allow_sdist: tuple[str, ...] = ()
    """Dependencies that may be built from source if this Python does not have them."""
    fixture_rows: bool = False
    """Whether it is validated on the project's fixture rows instead of its datasets."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the environment to validate it with; a release records none of them."""
    new_name_ok: bool = False
    allow_no_git: bool = False
    attest: AttestMode = AttestMode.AUTO
    trust_config: Path | None = None
    """Client trust configuration of a Sigstore instance other than the public one."""
    progress: Callable[[str], None] = field(default=lambda step: None)
    confirm: Callable[[str], bool] = field(default=lambda question: True)
    """Called with a question before the registry is changed; returns whether to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """The release, the outcome of its push, and changes since the previous release."""

    state: PushState
    release: Release
    registry: str
    report: Report | None = None
    """None if the same bytes were already published."""
    previous: Release | None = None
    """The newest release before this one; None if this is the first."""
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    result: PushResult
    wheel: bytes


def push(project: Path, options: PushOptions) -> PushResult:
    """Publish `project`; a check that fails raises before anything has changed."""
    if options.commit and not options.bump:
        raise ConfigError("--commit commits the version that --bump raises; give --bump as well")
    if options.trust_config is not None:
        require_trust_config(options.trust_config)
    require_project(project)
    source = committed_source(project, allow_no_git=options.allow_no_git)
    at = f"commit {source.commit[:12]}, clean" if source.commit else "not in git"
    options.progress(f"sources      {project}, {at}")
    store = open_writable(options.registry)
    try:
        if not options.dry_run:
            if isinstance(store, ServedStore):
                store.require_publisher(read_identity(project).owner)
            require_signing(options.attest)
        with tempfile.TemporaryDirectory() as scratch:
            prepared = _prepare(project, Path(scratch), Registry(store), source, options)
        if prepared.result.state is PushState.ALREADY_PUBLISHED or options.dry_run:
            return prepared.result
        return _publish(store, project, prepared, options)
    finally:
        store.close()


def _prepare(
    project: Path, scratch: Path, registry: Registry, source: Source, options: PushOptions
) -> _Prepared:
    copy = scratch / project.resolve().name
    copy.mkdir()
    copy_sources(project, copy)
    identity = _checked_identity(copy, registry, options)
    built = build_and_inspect(copy, scratch / "dist")
    wheel = f"{built.path.name}, {built.size:,} bytes, sha256 {built.sha256}"
    options.progress(f"wheel        {wheel}")
    options.progress("inspection   one pure package, nothing that runs at installation")
    require_not_removed(registry.store.read, identity.id, built.contents.version)
    known = published_as(registry, built, identity.id)
    if known is not None:
        state = PushState.ALREADY_PUBLISHED
        result = PushResult(state=state, release=known, registry=registry.address)
        return _Prepared(result=result, wheel=b"")
    needs = built.contents.requires_dist
    if missing := missing_requirements(needs):
        options.progress(f"dependencies {', '.join(missing)}: into a temporary virtual environment")
    interpreter = interpreter_with(
        needs, scratch / "venv", needed_by=identity.id, allow_sdist=options.allow_sdist
    )
    release = release_of(
        built,
        owner=identity.owner,
        artifacts=registry.config.artifacts,
        datasets=declared_datasets(copy),
        counts_examples=not options.fixture_rows,
        interpreter=interpreter,
    ).changed(source=source)
    options.progress("validating   loading it and playing it with scripted answers")
    report = validate_project(
        copy,
        ValidationOptions(fixture_rows=options.fixture_rows, settings=options.settings),
        interpreter=interpreter,
    )
    options.progress(f"validation   {_summary(report)}")
    if found := evidence_text(report):
        options.progress(found)
    require_publishable(report, built.sha256)
    result = _compared(registry, validated(release, report), report)
    return _Prepared(result=result, wheel=built.path.read_bytes())


def _checked_identity(copy: Path, registry: Registry, options: PushOptions) -> Identity:
    """Return the project's identity after checking its names; raise the copy's version if asked."""
    identity = read_identity(copy)
    require_namespace(registry.store.read, identity.owner)
    require_unreserved(registry.store.read, identity.id)
    require_own_name(registry, identity.id, new_name_ok=options.new_name_ok)
    known = [release.version for release in registry.releases(identity.id)]
    options.progress(f"name         {identity.id}{'' if known else ', new in this registry'}")
    if options.bump:
        version = bumped(identity.version or "0", options.bump)
        require_above(version, [*known, identity.version or "0"], identity.id)
        write_version(copy / "pyproject.toml", version)
        options.progress(f"version      {identity.version} -> {version}")
    return identity


def _compared(registry: Registry, release: Release, report: Report) -> PushResult:
    releases = registry.releases(release.id)
    previous = max(releases, key=lambda known: Version(known.version), default=None)
    return PushResult(
        state=PushState.WOULD_BE_PUBLISHED,
        release=release,
        registry=registry.address,
        report=report,
        previous=previous,
        changes=tuple(changes_between(previous, release)) if previous is not None else (),
        warnings=tuple(score_warnings(previous, release)) if previous is not None else (),
    )


def _publish(
    store: WritableStore, project: Path, prepared: _Prepared, options: PushOptions
) -> PushResult:
    """Raise and commit the version if asked, sign the wheel, and upload the release."""
    result = prepared.result
    release = result.release
    for warning in result.warnings:
        options.progress(f"warning      {warning}")
    if not options.confirm(f"Publish {release.id} {release.version} to {result.registry}?"):
        raise ConfigError("nothing was published")
    if options.bump:
        release = _raised(project, release, commit=options.commit)
    try:
        bundle = attest_wheel(
            release, options.attest, trust_config=options.trust_config, progress=options.progress
        )
        release = bundle.recorded_in(release)
        options.progress(f"publishing   {release.id} {release.version} to {result.registry}")
        is_new = store.publish(
            Publication(release=release, wheel=prepared.wheel, attestation=bundle.data)
        )
    except TelescopeError as error:
        if options.bump:
            now = f"{project / 'pyproject.toml'} has version {release.version} by now"
            error.args = (f"{error}; {now}, so push again without --bump",)
        raise
    state = PushState.PUBLISHED if is_new else PushState.ALREADY_PUBLISHED
    return replace(result, state=state, release=release)


def _raised(project: Path, release: Release, *, commit: bool) -> Release:
    """Write the new version into the project and commit it; the wheel has that version already."""
    write_version(project / "pyproject.toml", release.version)
    message = f"{release.id} {release.version}"
    if not release.source.commit:
        return release
    if not commit:
        raise ConfigError(
            f"{project / 'pyproject.toml'} now has version {release.version}, and nothing is "
            f"published yet: run git commit -m '{message}' -- pyproject.toml, then telescope env "
            "push. --commit does both"
        )
    commit_file(project, "pyproject.toml", message)
    return release.changed(source=committed_source(project, allow_no_git=False))


def _summary(report: Report) -> str:
    counts = Counter(check.outcome.value for check in report.checks)
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    told_of = (Outcome.WARN, Outcome.FAIL, Outcome.INCONCLUSIVE)
    found = [check.id for check in report.checks if check.outcome in told_of]
    what = f": {', '.join(found)}" if found else ""
    return f"{report.verdict} ({told}; policy {report.policy}){what}"
