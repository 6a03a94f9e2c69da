"""Publish the first-party environments: `python -m telescope_envs.publish.first_party`.

Its arguments are the registry's folder and then the project folders. The code that it shares with
`telescope env push` is in the other modules of this package.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from telescope_envs.publish.build import build_and_inspect
from telescope_envs.publish.release import (
    declared_datasets,
    published_as,
    release_of,
    require_publishable,
    validated,
)
from telescope_envs.records.names import split_distribution
from telescope_envs.records.reading import Publication
from telescope_envs.records.release import Dataset, Source
from telescope_envs.records.schemas import write_schemas
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.stores.folder import LocalStore
from telescope_envs.rules.admission import require_namespace
from telescope_envs.validation import ValidationOptions, validate_project
from telescope_envs.validation.fixture_hub import FOLDER
from telescope_envs.validation.processes import interpreter_with


def publish(
    store: LocalStore,
    project: Path,
    *,
    owner: str,
    datasets: list[Dataset],
    validate: bool = False,
) -> str:
    """Build `project` and append its release; returns a line that reports the outcome.

    Publishing the same bytes again succeeds; different bytes under a published version are an
    error.
    """
    registry = Registry(store)
    require_namespace(registry.store.read, owner)
    with tempfile.TemporaryDirectory() as scratch:
        built = build_and_inspect(project, Path(scratch))
        name = split_distribution(built.contents.distribution, owner)
        known = published_as(registry, built, f"{owner}/{name}")
        if known is not None:
            return f"{known.id} {known.version}: already published, same bytes"
        has_fixtures = (project / FOLDER).is_dir()
        interpreter = sys.executable
        if validate:
            interpreter = interpreter_with(
                built.contents.requires_dist, Path(scratch, "venv"), needed_by=f"{owner}/{name}"
            )
        release = release_of(
            built,
            owner=owner,
            artifacts=registry.config.artifacts,
            datasets=datasets,
            counts_examples=not has_fixtures,
            interpreter=interpreter,
        )
        if validate:
            report = validate_project(
                project, ValidationOptions(fixture_rows=has_fixtures), interpreter=interpreter
            )
            require_publishable(report, built.sha256)
            release = validated(release, report)
        source = Source(subdirectory=_subdirectory(project))
        release = release.changed(source=source)
        store.publish(Publication(release=release, wheel=built.path.read_bytes()))
    return f"{release.id} {release.version}: published, {release.wheel.size} bytes"


def _subdirectory(project: Path) -> str:
    """Return the project's path from the root of its checkout."""
    resolved = project.resolve()
    for parent in resolved.parents:
        if (parent / ".git").exists():
            return resolved.relative_to(parent).as_posix()
    return ""


def _main() -> None:
    parser = argparse.ArgumentParser(description="Build environments and publish them.")
    parser.add_argument("registry", type=Path)
    parser.add_argument("projects", type=Path, nargs="+")
    parser.add_argument("--owner", default="telescope")
    arguments = parser.parse_args()
    store = LocalStore(arguments.registry)
    write_schemas(arguments.registry)
    for project in arguments.projects:
        datasets = declared_datasets(project)
        done = publish(store, project, owner=arguments.owner, datasets=datasets, validate=True)
        sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    _main()
