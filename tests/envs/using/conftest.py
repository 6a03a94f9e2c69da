"""`telescope` in this process, over a data folder and a registry of the test's own."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_cli import main as cli
from telescope_envs.records.lockfile import (
    LockedEnvironment,
    digest_of,
)
from telescope_envs.records.release import Release
from telescope_envs.registry import Registry


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data folder, and a working directory outside of any project."""
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TELESCOPE_REGISTRY", str(tmp_path / "registry"))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a linked environment adds its folder
    yield tmp_path / "home"
    for name in [name for name in sys.modules if name.startswith("telescope_env_acme_")]:
        del sys.modules[name]


@pytest.fixture
def published(registry) -> Registry:
    """A registry that holds acme/toy 0.1.0, made without a build."""
    registry.store.publish(toy_publication())
    return registry


@pytest.fixture
def telescope(home, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return run


def lock_of(release: Release, registry: str, **fields) -> LockedEnvironment:
    values = {
        "id": release.id,
        "version": release.version,
        "wheel": release.wheel.filename,
        "sha256": release.wheel.sha256,
        "registry": registry,
        "protocol": "1.0-1.0",
        "python": f"3.{sys.version_info.minor}",
        "requirements": (),
        "requirements_sha256": digest_of(()),
    }
    return LockedEnvironment(**(values | fields))


def change_record(home: Path, environment_id: str = "acme/toy", **fields: object) -> Path:
    """Change fields of the record of an installation; returns its path."""
    path = home / "environments" / f"{environment_id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path
