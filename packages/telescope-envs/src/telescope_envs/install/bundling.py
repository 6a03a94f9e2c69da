"""Create bundles: choose the content, and write it. Equal inputs give equal bytes."""

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from telescope_core.base.errors import (
    ConfigError,
    EnvironmentLoadError,
    RegistryError,
    unknown_name,
)
from telescope_envs.install.attestations import attestation_of
from telescope_envs.install.data import cached_attestation, dataset_folder, installing
from telescope_envs.install.open_bundle import (
    DATASETS,
    ENVIRONMENTS,
    MANIFEST,
    MAX_FILES,
    PACKAGES,
    BundledEnvironment,
    BundledFile,
    Manifest,
    dataset_digest,
    may_hold,
    this_platform,
)
from telescope_envs.install.pipeline import checked_wheel, choose_release, locked_environment
from telescope_envs.install.requirements import lock_requirements, python_version
from telescope_envs.install.steps import InstallOptions, Progress, Step
from telescope_envs.install.sync import OpenRegistry, locked_release, locked_wheel
from telescope_envs.processes.running import last_line, run_program
from telescope_envs.processes.uv import Uv, wheels_only
from telescope_envs.records.files import files_below, remove_tree
from telescope_envs.records.lockfile import (
    LOCK_NAME,
    Lock,
    LockedDataset,
    LockedEnvironment,
    write_lock,
)
from telescope_envs.records.names import is_commit
from telescope_envs.records.reading import attestation_path
from telescope_envs.records.release import Release
from telescope_envs.registry.registry import Registry
from telescope_envs.registry.resolving import notices

ALL_DATASETS = "all"
_CHUNK_BYTES = 1024 * 1024
_MOMENT = (2020, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One environment to put into a bundle."""

    entry: LockedEnvironment
    release: Release
    wheel: Path
    attestation: bytes = b""
    """The Sigstore bundle of its wheel, unchecked; empty if there is none."""


def part_of_lock(
    entry: LockedEnvironment, open_registry: OpenRegistry, *, progress: Progress
) -> Part:
    """Return the part of a bundle for an entry of telescope.lock."""
    if entry.python != python_version():
        raise ConfigError(
            f"{entry.id} is locked for Python {entry.python}, but this is {python_version()}; make "
            f"the bundle with Python {entry.python}, or run telescope env sync first"
        )
    release = locked_release(entry, open_registry)
    try:
        warnings = notices(open_registry(entry.registry), entry.id, entry.version)
    except RegistryError as error:
        warnings = [f"{entry.id}: whether anything speaks against it is not known: {error}"]
    for warning in warnings:
        progress(f"warning: {warning}")
    with installing(entry.id, progress):
        wheel = locked_wheel(entry, release, open_registry, progress)
    attestation = cached_attestation(release)
    if release.attestation_sha256 and attestation is None:
        attestation = attestation_of(open_registry(entry.registry), release)
    return Part(entry=entry, release=release, wheel=wheel, attestation=attestation or b"")


def part_of_registry(
    registry: Registry, text: str, *, options: InstallOptions, progress: Progress
) -> Part:
    """Return the part of a bundle for a name that is in no lock; installs nothing."""
    release = choose_release(registry, text, options=options, progress=progress)
    with installing(release.id, progress) as held:
        wheel = checked_wheel(registry, release, progress=progress)
        progress(f"{release.id} {release.version}: {Step.LOCK}")
        lines = lock_requirements(release, Uv(heirs=(held,)), options=options)
    entry = locked_environment(registry, release, lines)
    attestation = attestation_of(registry, release) or b""
    return Part(entry=entry, release=release, wheel=wheel, attestation=attestation)


def write_bundle(
    parts: Sequence[Part], target: Path, *, datasets: Sequence[str] = (), progress: Progress
) -> Manifest:
    """Fetch the packages and `datasets` of `parts`, and write their bundle to `target` atomically.

    `datasets` names datasets that `parts` can load; "all" means every one.
    """
    chosen = _chosen_datasets(parts, datasets)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bundle-") as scratch:
        root = Path(scratch) / "contents"
        (root / ENVIRONMENTS).mkdir(parents=True)
        (root / PACKAGES).mkdir()
        fetched: set[str] = set()  # one line, with its hashes, is one file of this platform
        for part in parts:
            progress(f"{part.entry.id} {part.entry.version}: fetching its packages")
            wheel = root / ENVIRONMENTS / part.entry.wheel
            shutil.copyfile(part.wheel, wheel)
            if part.attestation:
                wheel.with_name(attestation_path(wheel.name)).write_bytes(part.attestation)
            lines = [line for line in part.entry.requirements if line not in fetched]
            download_wheels(lines, root / PACKAGES, needed_by=part.entry.id)
            fetched.update(lines)
        held = {data: _copied(data, root, progress) for data in chosen}
        parts = [replace(part, entry=_holding(part.entry, held)) for part in parts]
        write_lock(root / LOCK_NAME, Lock().merged(part.entry for part in parts))
        manifest = Manifest(
            python=python_version(),
            platform=this_platform(),
            environments=tuple(
                BundledEnvironment(registry=part.entry.registry, release=part.release)
                for part in sorted(parts, key=lambda part: part.entry.id)
            ),
            files=tuple(_described(path, root) for path in sorted(files_below(root))),
        )
        if len(manifest.files) >= MAX_FILES:
            raise ConfigError(
                f"the bundle would hold {len(manifest.files)} files, and one may hold fewer than "
                f"{MAX_FILES}; leave out a dataset of many files"
            )
        (root / MANIFEST).write_bytes(manifest.as_json(indent=2) + b"\n")
        progress(f"writing {target}")
        _pack(root, Path(scratch) / "bundle.zip")
        os.replace(Path(scratch) / "bundle.zip", target)
    return manifest


def _chosen_datasets(parts: Sequence[Part], names: Sequence[str]) -> list[LockedDataset]:
    known = {data: data.repo for part in parts for data in part.entry.datasets}
    for name in names:
        if name != ALL_DATASETS and name not in known.values():
            raise unknown_name("dataset", name, [*known.values(), ALL_DATASETS])
    chosen = [data for data, repo in known.items() if repo in names or ALL_DATASETS in names]
    for data in chosen:
        if not is_commit(data.revision):
            raise ConfigError(
                f"{data.repo} is at {data.revision!r}, which is no commit, so it is not always the "
                "same files; a bundle holds datasets that are pinned to a commit"
            )
    return chosen


def _copied(data: LockedDataset, root: Path, progress: Progress) -> str:
    """Copy the files of a dataset into the folder of the bundle; returns their digest."""
    progress(f"{data.repo} at {data.revision[:12]}: fetching the dataset")
    source = dataset_folder(data.sha256) if data.sha256 else Path()
    if not data.sha256 or not source.is_dir():
        source = _fetched(data)
    scratch = root / f".{data.revision}"
    scratch.mkdir()
    for path in files_below(source):
        name = path.relative_to(source).as_posix()
        if name.startswith(".") or "/." in name:
            continue  # .gitattributes and the like, which no reader of the data looks at
        if not may_hold(f"{DATASETS}/0/{name}"):
            raise ConfigError(
                f"{data.repo} holds {name!r}, which cannot be in a bundle; let the machines "
                "without a network have this dataset by other means"
            )
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, scratch / name)
    files = [_described(path, scratch) for path in files_below(scratch)]
    if not files:
        raise EnvironmentLoadError(f"{data.repo} at {data.revision} holds no files; leave it out")
    digest = dataset_digest((file.path, file.sha256) for file in files)
    if data.sha256 not in ("", digest):
        raise EnvironmentLoadError(
            f"{data.repo} at {data.revision} has other files than telescope.lock names: expected "
            f"digest {data.sha256}, got {digest}"
        )
    target = root / DATASETS / digest
    target.parent.mkdir(exist_ok=True)
    if target.is_dir():
        remove_tree(scratch)
    else:
        scratch.rename(target)
    return digest


def _fetched(data: LockedDataset) -> Path:
    """Return the folder of a dataset in the cache of the Hugging Face Hub, fetched if need be."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        raise ConfigError(
            "datasets of a bundle need huggingface_hub, which is not installed; run: pip install "
            "'telescope-envs[hub]'"
        ) from None
    try:
        found = HfApi().snapshot_download(data.repo, repo_type="dataset", revision=data.revision)
    except (HTTPError, OSError, ValueError) as error:
        raise EnvironmentLoadError(
            f"dataset {data.repo} at {data.revision} cannot be fetched: {error}; check the "
            "network, and HF_TOKEN if it is gated"
        ) from error
    return Path(str(found))


def _holding(entry: LockedEnvironment, held: dict[LockedDataset, str]) -> LockedEnvironment:
    """Return `entry` with the digests of the datasets in the bundle."""
    datasets = tuple(
        data.changed(sha256=held[data]) if data in held else data for data in entry.datasets
    )
    return entry.changed(datasets=datasets)


_TIME_LIMIT_S = 1800.0
_UV_TO_PIP = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
    "SSL_CERT_FILE": "PIP_CERT",
}


def download_wheels(lines: Sequence[str], folder: Path, *, needed_by: str) -> None:
    """Download the wheels that requirement `lines` name into `folder` with pip, as uv cannot.

    Raises EnvironmentLoadError if a package is missing, has another hash, or has no wheel.
    """
    if not lines:
        return
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text("".join(f"{line}\n" for line in lines))
        environ = _pip_environment(Path(scratch))
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--require-hashes", *wheels_only(())),
            *("--requirement", str(listed), "--dest", str(folder.absolute())),
        ]
        late = f"the packages of {needed_by} were not fetched within {_TIME_LIMIT_S:g} s"
        done = run_program(command, environ=environ, limit_s=_TIME_LIMIT_S, late=late)
    if done.returncode:
        raise EnvironmentLoadError(
            f"the packages of {needed_by} cannot be fetched as wheels for this platform: "
            f"{last_line(done)}; a bundle cannot hold packages that must be built from source"
        )


def _pip_environment(scratch: Path) -> dict[str, str]:
    """Return this process's variables plus uv's settings by pip's names; installs pip if needed."""
    environ = dict(os.environ)
    for uv_name, pip_name in _UV_TO_PIP.items():
        if environ.get(uv_name) and not environ.get(pip_name):
            environ[pip_name] = environ[uv_name].replace(",", " ")
    # On the search path alone: the finder that setuptools adds changes modules when asked for pip.
    if PathFinder.find_spec("pip") is None:
        Uv().run(
            ["pip", "install", "--quiet", "--target", str(scratch / "pip"), "pip"],
            failure="pip, which fetches the packages of a bundle, cannot be installed",
        )
        environ["PYTHONPATH"] = str(scratch / "pip")
    return environ


def _described(path: Path, root: Path) -> BundledFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    return BundledFile(path=path.relative_to(root).as_posix(), sha256=digest, size=size)


def _pack(root: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(files_below(root)):
            info = zipfile.ZipInfo(path.relative_to(root).as_posix(), _MOMENT)
            info.create_system = 3
            info.external_attr = 0o100644 << 16
            info.file_size = path.stat().st_size
            with path.open("rb") as source, archive.open(info, "w") as packed:
                shutil.copyfileobj(source, packed, _CHUNK_BYTES)
