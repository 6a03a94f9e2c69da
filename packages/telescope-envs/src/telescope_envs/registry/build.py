"""Publishing the first-party environments: `python -m telescope_envs.registry.build`.

Give it the registry's folder, then projects.
What it shares with `telescope env push` is in `telescope_envs.authoring`.
"""

import argparse
import hashlib
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from telescope_core.errors import RegistryError
from telescope_envs.authoring.build import build_wheel
from telescope_envs.registry.describe import describe_wheel
from telescope_envs.registry.names import split_distribution
from telescope_envs.registry.records import (
    Dataset,
    Release,
    RewardRange,
    Source,
    Validation,
    WheelFile,
)
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.schemas import write_schemas
from telescope_envs.registry.store import Publication
from telescope_envs.registry.stores.local import LocalStore
from telescope_envs.registry.wheel import read_wheel

_DATASETS = TypeAdapter(list[Dataset])


def publish(store: LocalStore, project: Path, *, owner: str, datasets: list[Dataset]) -> str:
    """Build `project` and append its release; returns what was done, in words.

    The same bytes again are a success; other bytes under a published version are an error.
    """
    registry = Registry(store)
    if registry.namespace(owner) is None:
        raise RegistryError(f"{store.address}: nobody may publish as {owner!r}")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(project, Path(scratch))
        release = _release(registry, wheel, project, owner=owner, datasets=datasets)
        for known in registry.releases(release.id):
            if known.version == release.version:
                if known.wheel.sha256 == release.wheel.sha256:
                    return f"{release.id} {release.version}: already published, same bytes"
                raise RegistryError(
                    f"{release.id} {release.version} is published with other bytes; releases are "
                    "never replaced: raise the version in its pyproject.toml"
                )
        store.publish(Publication(release=release, wheel=wheel.read_bytes()))
    return f"{release.id} {release.version}: published, {release.wheel.size} bytes"


def _release(
    registry: Registry, wheel: Path, project: Path, *, owner: str, datasets: list[Dataset]
) -> Release:
    data = wheel.read_bytes()
    contents = read_wheel(data, wheel.name)
    name = split_distribution(contents.distribution, owner)
    if contents.entry_name != name:
        raise RegistryError(f"{wheel.name}: its entry point must be named {name!r}")
    about = describe_wheel(wheel, contents.factory)
    return Release(
        owner=owner,
        name=name,
        version=contents.version,
        summary=contents.summary,
        distribution=contents.distribution,
        module=contents.module,
        factory=contents.factory,
        wheel=WheelFile(
            filename=wheel.name,
            urls=tuple(url.format(filename=wheel.name) for url in registry.config.artifacts),
            sha256=hashlib.sha256(data).hexdigest(),
            size=len(data),
            metadata_sha256=contents.metadata_sha256,
        ),
        source=Source(subdirectory=_subdirectory(project)),
        requires_python=contents.requires_python,
        requires_dist=contents.requires_dist,
        config_schema_sha256=about["config_schema_sha256"],
        datasets=tuple(datasets),
        splits=about["splits"],
        reward=RewardRange(**about["reward"]),
        network=about["network"],
        secrets=tuple(about["secrets"]),
        validation=Validation(),
        publisher=owner,
        published_at=datetime.now(UTC).replace(microsecond=0),
        license=contents.license,
        tags=contents.tags,
    )


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
        listed = project / "datasets.json"
        datasets = _DATASETS.validate_json(listed.read_bytes()) if listed.is_file() else []
        done = publish(store, project, owner=arguments.owner, datasets=datasets)
        sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    _main()
