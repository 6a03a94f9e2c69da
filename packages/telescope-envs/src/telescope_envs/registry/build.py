"""Building first-party environment wheels and appending their releases to a registry.

`python -m telescope_envs.registry.build REGISTRY PROJECT...`. A wheel is rebuilt byte for byte:
hatchling makes it, then it is rewritten with sorted, uncompressed entries and one fixed time
(SOURCE_DATE_EPOCH when set), because compressors differ between machines.
"""

import argparse
import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from telescope_core.errors import RegistryError
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
from telescope_envs.registry.wheel import read_wheel, record_hash

_DEFAULT_EPOCH = 1577836800
"""1 January 2020: any fixed time that a zip file can hold."""
_DATASETS = TypeAdapter(list[Dataset])


def build_wheel(project: Path, folder: Path) -> Path:
    """Build `project` into `folder`; equal sources give equal bytes."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", str(_DEFAULT_EPOCH))
    with tempfile.TemporaryDirectory() as scratch:
        finished = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch],
            cwd=project,
            env={**os.environ, "SOURCE_DATE_EPOCH": epoch},
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if finished.returncode or len(wheels) != 1:
            raise RegistryError(
                f"{project}: hatchling made no wheel: {finished.stderr.strip()}; "
                "install hatchling, or correct the project"
            )
        data = normalise(wheels[0].read_bytes(), epoch=int(epoch))
        target = folder / wheels[0].name
        target.write_bytes(data)
    return target


def normalise(data: bytes, *, epoch: int) -> bytes:
    """Rewrite a wheel so that its bytes depend on the contents alone."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    record_path = next(path for path in files if path.endswith(".dist-info/RECORD"))
    wheel_path = record_path.replace("RECORD", "WHEEL")
    lines = files[wheel_path].decode().splitlines()
    kept = [line for line in lines if line and not line.startswith("Generator:")]
    files[wheel_path] = "".join(f"{line}\n" for line in kept).encode()
    order = sorted(files, key=lambda path: (path == record_path, ".dist-info/" in path, path))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for path in order[:-1]:
        writer.writerow((path, record_hash(files[path]), len(files[path])))
    writer.writerow((record_path, "", ""))
    files[record_path] = table.getvalue().encode()
    moment = datetime.fromtimestamp(epoch, UTC)
    rewritten = io.BytesIO()
    with zipfile.ZipFile(rewritten, "w", zipfile.ZIP_STORED) as archive:
        for path in order:
            info = zipfile.ZipInfo(path, moment.timetuple()[:6])
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            archive.writestr(info, files[path])
    return rewritten.getvalue()


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
