"""Make a release from a build: its record, and whether it may be published.

A store repeats the checks under its lock where it can. They are made here as well to fail early,
and to check more than the registry can. Nothing is written here.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_envs.install.loading import describe_wheel, settings_in
from telescope_envs.publish.build import BuiltWheel
from telescope_envs.publish.source import require_above
from telescope_envs.records.model import RecordProblem, converted
from telescope_envs.records.names import LONGEST_TEXT, split_distribution
from telescope_envs.records.projects import read_datasets
from telescope_envs.records.release import FILENAME, Dataset, Release, Validation
from telescope_envs.registry.registry import Registry
from telescope_envs.rules.admission import is_published, near_ids
from telescope_envs.validation import LEVELS, Outcome, Report, Verdict

_MAX_SETTINGS_BYTES = 64 * 1024
"""As JSON; a whole release is at most four times as long."""


def release_of(
    built: BuiltWheel,
    *,
    owner: str,
    artifacts: Sequence[str],
    datasets: Sequence[Dataset] = (),
    counts_examples: bool = True,
    interpreter: str = sys.executable,
) -> Release:
    """Return the record of `built`, including what its environment declares; runs the wheel's code.

    `artifacts` are the registry's URL templates. Counting the examples of each split may load
    datasets; without it their numbers are None. `interpreter` has the wheel's dependencies. The
    caller adds the source and the validation verdict.
    """
    contents = built.contents
    name = split_distribution(contents.distribution, owner)
    if contents.entry_name != name:
        raise ConfigError(
            f"{built.path.name}: its entry point must be named {name!r}, got "
            f"{contents.entry_name!r}; rename it in pyproject.toml"
        )
    about = describe_wheel(contents, counts_examples=counts_examples, interpreter=interpreter)
    fields = {
        "owner": owner,
        "name": contents.entry_name,
        "version": contents.version,
        "summary": contents.summary,
        "distribution": contents.distribution,
        "module": contents.module,
        "factory": contents.factory,
        "wheel": {
            "filename": built.path.name,
            "urls": [url.replace(FILENAME, built.path.name) for url in artifacts],
            "sha256": built.sha256,
            "size": built.size,
            "metadata_sha256": contents.metadata_sha256,
        },
        "requires_python": contents.requires_python,
        "requires_dist": contents.requires_dist,
        "config_schema_sha256": about["config_schema_sha256"],
        **recorded_settings(about["config_schema"]),
        "datasets": [dataset.as_table() for dataset in datasets],
        "splits": about["splits"],
        "reward": about["reward"],
        "reward_weights": about["reward_weights"],
        "network": about["network"],
        "secrets": about["secrets"],
        "publisher": owner,
        "published_at": datetime.now(UTC).replace(microsecond=0),
        "license": contents.license,
        "tags": contents.tags,
    }
    try:
        return converted(Release, fields)
    except RecordProblem as problem:
        raise ConfigError(
            f"{built.path.name}: {problem}; correct it in the environment or in its pyproject.toml"
        ) from None


def recorded_settings(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a release with its settings; nothing if they would fill its line."""
    rows = [setting.as_table() for setting in settings_in(schema)]
    lines = [{field: _as_line(text) for field, text in row.items()} for row in rows]
    is_short = len(msgspec.json.encode(lines)) <= _MAX_SETTINGS_BYTES
    return {"settings": lines} if is_short else {}


def _as_line(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


def validated(release: Release, report: Report) -> Release:
    """Return `release` with the result of its validation, which is conclusive."""
    verdict = report.verdict.value
    assert verdict != Verdict.INCONCLUSIVE.value, "what is not conclusive is not published"
    validation = Validation(
        policy=report.policy,
        verdict=verdict,
        report_sha256=report.sha256,
        checked_on=report.checked_on,
    )
    return release.changed(validation=validation)


def declared_datasets(project: Path) -> list[Dataset]:
    """Return the datasets in the project's datasets.json; empty if there is no such file."""
    try:
        return read_datasets(project) or []
    except ConfigError as error:
        raise ConfigError(f"{project / 'datasets.json'}: {error}") from None


def require_own_name(registry: Registry, environment_id: str, *, new_name_ok: bool) -> None:
    """Raise ConfigError for a new name that people may confuse with an existing one."""
    ids = set(registry.ids())
    if environment_id in ids or new_name_ok:
        return
    near = near_ids(environment_id, ids, registry.aliases())
    if near:
        raise ConfigError(
            f"{environment_id} is new and easily confused with {', '.join(near)}; choose another "
            "name, or give --new-name-ok if you want this one"
        )


def published_as(registry: Registry, built: BuiltWheel, environment_id: str) -> Release | None:
    """Return the release if the same bytes are published; None if the version is a new maximum.

    Raises RegistryError for different bytes under a published version, ConfigError for a lower one.
    """
    releases = registry.releases(environment_id)
    version = built.contents.version
    if is_published(registry.store.read, environment_id, version, built.sha256):
        return next(one for one in releases if Version(one.version) == Version(version))
    require_above(version, (known.version for known in releases), environment_id)
    return None


def require_publishable(report: Report, wheel_sha256: str) -> None:
    """Raise TelescopeError unless `report` is whole, conclusive, of this wheel, without failure.

    The outcomes of the checks are examined too; the report's own verdict is not enough.
    """
    failed = [check for check in report.checks if check.outcome is Outcome.FAIL]
    if failed or report.verdict is Verdict.FAIL:
        raise TelescopeError(
            f"{report.environment} {report.version} does not pass validation: "
            f"{_ids(check.id for check in failed) or 'its verdict is fail'}; run telescope env "
            "validate to see what to do. Nothing was published"
        )
    open_ = [check.id for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    if open_ or report.verdict is Verdict.INCONCLUSIVE:
        raise TelescopeError(
            f"the validation of {report.environment} {report.version} is not conclusive: too "
            f"little could be tried for {_ids(open_) or 'its verdict'}. Nothing failed, and "
            "nothing was published: push again when the machine is less busy; if that does not "
            "help, make waits in its code shorter and rewards cheaper"
        )
    not_run = [check.id for check in report.checks if check.outcome is Outcome.NOT_RUN]
    if report.level is not LEVELS[-1] or not_run or not report.checks:
        raise TelescopeError(
            f"the validation of {report.environment} is not complete: {_ids(not_run) or 'levels'} "
            "were not run; nothing was published"
        )
    if report.wheel_sha256 != wheel_sha256:
        raise TelescopeError(
            f"the validation of {report.environment} is of a different wheel: it has sha256 "
            f"{report.wheel_sha256}, this one has {wheel_sha256}; nothing was published"
        )


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(ids)
