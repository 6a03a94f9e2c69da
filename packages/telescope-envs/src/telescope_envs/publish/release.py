"""Makes the release record of an inspected wheel."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.install.loading import describe_wheel
from telescope_envs.install.settings import settings_in
from telescope_envs.publish.build import BuiltWheel
from telescope_envs.records.model import RecordProblem, converted
from telescope_envs.records.names import LONGEST_TEXT, split_distribution
from telescope_envs.records.projects import read_datasets
from telescope_envs.records.release import (
    FILENAME,
    Dataset,
    Release,
    Validation,
)
from telescope_envs.validation import Report, Verdict

_MAX_SETTINGS_BYTES = 64 * 1024
"""As JSON; a whole release is at most four times as long."""


def release_of(
    built: BuiltWheel,
    *,
    owner: str,
    artifacts: Sequence[str],
    datasets: Sequence[Dataset] = (),
    counts_examples: bool = True,
) -> Release:
    """Return the record of `built`, including what its environment declares; runs the wheel's code.

    `artifacts` are the registry's URL templates. Counting the examples of each split may load
    datasets; without it their numbers are None. The caller adds the source and the validation
    verdict.
    """
    contents = built.contents
    name = split_distribution(contents.distribution, owner)
    if contents.entry_name != name:
        raise RegistryError(
            f"{built.path.name}: its entry point must be named {name!r}, got "
            f"{contents.entry_name!r}; rename it in pyproject.toml"
        )
    about = describe_wheel(built.path, contents.factory, counts_examples=counts_examples)
    try:
        return _release(built, about, owner=owner, artifacts=artifacts, datasets=datasets)
    except RecordProblem as problem:
        raise RegistryError(
            f"{built.path.name}: {problem}; correct it in the environment or in its pyproject.toml"
        ) from None


def _release(
    built: BuiltWheel,
    about: Mapping[str, Any],
    *,
    owner: str,
    artifacts: Sequence[str],
    datasets: Sequence[Dataset],
) -> Release:
    contents = built.contents
    return converted(
        Release,
        {
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
            "network": about["network"],
            "secrets": about["secrets"],
            "publisher": owner,
            "published_at": datetime.now(UTC).replace(microsecond=0),
            "license": contents.license,
            "tags": contents.tags,
        },
    )


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
