"""Writes bundles as somebody else would: any lock, any manifest and any files, made to fit."""

import hashlib
import io
import json
import platform
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.envs.package_index import tiny_wheel

from telescope_envs.records.lockfile import (
    Lock,
    LockedEnvironment,
    digest_of,
    render,
)
from telescope_envs.records.model import converted
from telescope_envs.records.reading import Publication

REGISTRY = "/srv/registry"
DEP = "dep-9.0-py3-none-any.whl"


def entry_of(
    publication: Publication, lines: Sequence[str] = (), **fields: object
) -> LockedEnvironment:
    """Return the entry of a release in a lock, with these requirement lines."""
    release = publication.release
    values: dict[str, object] = {
        "id": release.id,
        "version": release.version,
        "wheel": release.wheel.filename,
        "sha256": release.wheel.sha256,
        "registry": REGISTRY,
        "protocol": "1.0-1.0",
        "python": f"3.{sys.version_info.minor}",
        "requirements": tuple(lines),
        "requirements_sha256": digest_of(lines),
    }
    return converted(LockedEnvironment, values | fields)


def dep_line(data: bytes | None = None) -> str:
    """Return the requirement line of the wheel `dep`."""
    digest = hashlib.sha256(data if data is not None else tiny_wheel("dep", "9.0")).hexdigest()
    return f"dep==9.0 --hash=sha256:{digest}"


def environments_of(*publications: Publication, registry: str = REGISTRY) -> list[object]:
    """Return what a manifest says of these environments."""
    return [{"registry": registry, "release": one.release.as_table()} for one in publications]


def files_of(
    publications: Sequence[Publication], lock: Lock, packages: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return path -> bytes of everything but the manifest."""
    wheels = {f"environments/{one.release.wheel.filename}": one.wheel for one in publications}
    brought = {f"packages/{name}": data for name, data in packages.items()}
    return {**wheels, **brought, "telescope.lock": render(lock).encode()}


def write_files(
    path: Path, contents: Mapping[str, bytes], environments: Sequence[object], **fields: object
) -> Path:
    """Write a bundle of `contents`, whose manifest lists them; `fields` replace parts of it."""
    listed = [
        {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for name, data in sorted(contents.items())
    ]
    manifest = {
        "version": 1,
        "python": f"3.{sys.version_info.minor}",
        "platform": f"{sys.platform}-{platform.machine().lower()}",
        "environments": environments,
        "files": listed,
        **fields,
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in {**contents, "bundle.json": json.dumps(manifest).encode()}.items():
            archive.writestr(name, data)
    path.write_bytes(packed.getvalue())
    return path


def write_bundle(path: Path, publication: Publication, packages: Mapping[str, bytes]) -> Path:
    """Write the bundle of one environment that runs with `dep`, with these packages in it."""
    lock = Lock(environments=(entry_of(publication, [dep_line()]),))
    files = files_of([publication], lock, packages)
    return write_files(path, files, environments_of(publication))
