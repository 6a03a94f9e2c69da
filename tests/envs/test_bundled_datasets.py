"""Datasets in a bundle: pinned files, checked by hash without a network, and read there."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.envs.bundles import entry_of, environments_of, files_of, write_files
from tests.envs.projects import toy_publication, write_registry

from telescope_core.dataset_source import DATASETS_VARIABLE, DatasetSpec, load_table
from telescope_core.errors import ConfigError, RegistryError
from telescope_core.open import local_place
from telescope_core.processes.settings import ProcessSettings
from telescope_core.protocols import EnvironmentLocation
from telescope_envs.install.bundling import Part, write_bundle
from telescope_envs.install.data import dataset_folder, kept_datasets
from telescope_envs.install.open_bundle import dataset_digest, opened_bundle
from telescope_envs.install.steps import silent
from telescope_envs.records.lockfile import LOCK_NAME, Lock, parse_lock, render, write_lock
from telescope_envs.records.release import Dataset
from telescope_envs.validation.fixture_hub import FixtureHub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SUMS = (Dataset(repo="acme/sums", revision=COMMIT), Dataset(repo="acme/moving", revision="main"))
TOY = toy_publication(datasets=SUMS)
ENTRY = entry_of(TOY, datasets=[{"repo": data.repo, "revision": data.revision} for data in SUMS])


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Files of acme/sums: what is served for every commit."""
    folder = tmp_path_factory.mktemp("rows") / "acme/sums"
    (folder / "data").mkdir(parents=True)
    for split in ("train", "test"):
        line = json.dumps({"question": f"{split}?", "answer": "1"})
        (folder / f"data/{split}.jsonl").write_text(f"{line}\n")
    (folder / ".gitattributes").write_text("*.jsonl filter=lfs\n")
    return folder.parents[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The folder in which bundles are made."""
    return tmp_path_factory.mktemp("bundled")


@pytest.fixture(scope="module")
def bundle(rows, root) -> Callable[..., tuple[int, str, str]]:
    """Run `telescope env bundle` for a lock with acme/toy; returns (exit code, stdout, stderr)."""
    registry = write_registry(root / "registry")
    registry.store.publish(TOY)
    lock = Lock(environments=(ENTRY.changed(registry=registry.address),))
    write_lock(root / LOCK_NAME, lock)

    def run(*arguments: str) -> tuple[int, str, str]:
        with FixtureHub(rows) as hub:
            program = "from telescope_cli.main import main; main()"
            done = subprocess.run(
                [sys.executable, "-c", program, "env", "bundle", *arguments],
                env={**os.environ, **hub.environ(root / "hub"), "TELESCOPE_HOME": str(root / "h")},
                cwd=root,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_a_bundle_brings_a_dataset_to_a_machine_without_a_network(
    bundle, root, tmp_path, monkeypatch
):
    code, out, err = bundle("--datasets", "acme/sums", "-o", "b.zip")
    assert code == 0, err
    assert f"can load acme/sums at {COMMIT}: it is in the bundle" in out
    assert "can load acme/moving at main: it is not in the bundle; add --datasets acme/mov" in out
    path = root / "b.zip"
    with zipfile.ZipFile(path) as archive:
        lock = parse_lock(archive.read(LOCK_NAME).decode(), "lock", remedy="")
        names = [name for name in archive.namelist() if name.startswith("datasets/")]
    (entry,) = lock.environments
    sums, moving = entry.datasets
    assert (len(sums.sha256), moving.sha256) == (64, "")
    assert names == [f"datasets/{sums.sha256}/data/{one}.jsonl" for one in ("test", "train")]
    assert entry.digest == ENTRY.digest, "the same virtual environment with and without data"
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "machine"))
    assert kept_datasets(entry) == {}
    for _ in range(2):  # the second time they are there
        with opened_bundle(path, progress=silent):
            pass
    kept = kept_datasets(entry)
    assert kept == {f"acme/sums@{COMMIT}": str(dataset_folder(sums.sha256))}
    location = EnvironmentLocation(
        id="acme/toy", version="0.1.0", factory="m:C", interpreter="", datasets=kept
    )
    place = local_place("toy", location, ProcessSettings(), 0)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(DATASETS_VARIABLE, place.variables()[DATASETS_VARIABLE])
    spec = DatasetSpec(path="acme/sums", revision=COMMIT, cache_dir=str(tmp_path / "cache"))
    assert [row["question"] for row in load_table(spec, "test")] == ["test?"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme/sum", "'acme/sum'; .*'acme/sums'"),
        ("all", "acme/moving .*'main'"),
    ],
)
def test_what_cannot_be_bundled_is_said(name, message, tmp_path):
    part = Part(entry=ENTRY, release=TOY.release, wheel=tmp_path / "unread.whl")
    with pytest.raises(ConfigError, match=message):
        write_bundle([part], tmp_path / "b.zip", datasets=[name], progress=silent)
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_with_other_files_than_the_lock_names_is_refused(home, tmp_path):
    data = b'{"question": "evil"}\n'
    digest = dataset_digest([("test.jsonl", "0" * 64)])
    held = ENTRY.datasets[0].changed(sha256=digest)
    lock = Lock(environments=(ENTRY.changed(datasets=(held,)),))
    assert parse_lock(render(lock), "lock", remedy="") == lock
    files = files_of([TOY], lock, {})
    for name in (f"datasets/{digest}/test.jsonl", f"datasets/{'0' * 64}/test.jsonl"):
        path = write_files(tmp_path / "b.zip", {**files, name: data}, environments_of(TOY))
        with (
            pytest.raises(RegistryError, match="that its lock does not name, or with other files"),
            opened_bundle(path, progress=silent),
        ):
            pass
    for name in (f"datasets/{digest}/.pth", f"datasets/{digest}", "datasets/x/" + "a/" * 40 + "b"):
        path = write_files(tmp_path / "b.zip", {**files, name: data}, environments_of(TOY))
        with (
            pytest.raises(RegistryError, match="which a bundle must not hold"),
            opened_bundle(path, progress=silent),
        ):
            pass
    assert not home.exists()
