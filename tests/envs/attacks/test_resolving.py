"""What is refused before anything is fetched or installed, through the command a person types."""

from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_cli.main import main
from telescope_envs.records.release import (
    ProtocolRange,
    Status,
)


@pytest.fixture
def install(registry, tmp_path, monkeypatch, capsys):
    """Run `telescope env install` on a registry without its wheels; returns (code, stderr)."""
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        for wheel in (Path(registry.address) / "artifacts").iterdir():
            wheel.unlink()
        with pytest.raises(SystemExit) as ended:
            main(["env", "install", "--registry", registry.address, *arguments])
        return int(ended.value.code or 0), capsys.readouterr().err

    yield run
    assert [path for path in tmp_path.rglob("*") if path.name == "telescope.lock"] == []
    assert [path for path in (tmp_path / "home").rglob("*.json") if path.is_file()] == []
    assert list((tmp_path / "home").rglob("pyvenv.cfg")) == []


def test_a_protocol_too_new(registry, install):
    future = ProtocolRange(minimum="2.0", maximum="3.0")
    registry.store.publish(toy_publication(protocol=future))
    code, error = install("toy")
    assert code == 4
    assert "acme/toy 0.1.0 speaks environment protocol 2.0 to 3.0" in error
    assert "upgrade telescope-core" in error


def test_a_yanked_release(registry, install):
    registry.store.publish(toy_publication())
    registry.store.change_status("acme/toy", lambda _: Status(yanked={"0.1.0": 'pays for ""'}))
    code, error = install("acme/toy")
    assert code == 4
    assert 'acme/toy 0.1.0 is yanked: pays for ""' in error
    assert "name this one exactly: acme/toy@0.1.0" in error


def test_a_suspended_namespace(registry, install):
    registry.store.publish(toy_publication())
    namespace = Path(registry.address) / "namespaces/acme.toml"
    namespace.write_text('owner = "acme"\nstatus = "suspended"\n')
    code, error = install("toy@0.1.0")
    assert code == 4
    assert "'acme' is suspended" in error


def test_a_namespace_that_nobody_owns(registry, install):
    registry.store.publish(toy_publication())
    (Path(registry.address) / "namespaces/acme.toml").unlink()
    code, error = install("toy")
    assert code == 4
    assert "namespaces/acme.toml" in error
