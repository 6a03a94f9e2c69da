"""One name in several registries: only the one that is meant is asked, and it alone answers."""

import json

import pytest
from tests.envs.projects import toy_publication, write_registry
from tests.envs.static_host import static_host

from telescope_cli.main import main
from telescope_core.errors import UnknownNameError
from telescope_envs.records.catalog import write_catalog
from telescope_envs.registry import Opening, locate_release
from telescope_envs.registry.stores.folder import LocalStore


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """The default registry, and one called corp, each with requests counted."""
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    for name in ("default", "corp"):
        registry = write_registry(tmp_path / name)
        (tmp_path / name / "v1").mkdir()
        (tmp_path / name / "v1/index.json").write_text("[]")
        assert registry.ids() == []
    with static_host(tmp_path / "default") as default, static_host(tmp_path / "corp") as corp:
        config = tmp_path / ".config/telescope/config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(
            f'registry = "{default.address}"\n[registries]\ncorp = "{corp.address}"\n'
        )
        yield default, corp


@pytest.fixture
def opening(hosts, tmp_path):
    return Opening(environ={"HOME": str(tmp_path)}, working_directory=tmp_path)


def publish(host, publication) -> None:
    store = LocalStore(host.folder)
    store.publish(publication)
    (host.folder / "v1/index.json").write_bytes(write_catalog(store.catalog()))


@pytest.mark.parametrize("text", ["toy", "acme/toy"])
def test_what_only_another_registry_has_is_not_found(hosts, opening, text):
    default, corp = hosts
    publish(corp, toy_publication("9.0.0"))
    with pytest.raises(UnknownNameError) as missing:
        locate_release(text, None, opening)
    assert default.address in str(missing.value)
    assert corp.address not in str(missing.value)
    assert corp.requests == [], "the other registry is not even asked"


@pytest.mark.parametrize("text", ["toy", "acme/toy"])
def test_a_higher_version_elsewhere_is_never_chosen(hosts, opening, text):
    default, corp = hosts
    publish(default, toy_publication("0.1.0"))
    publish(corp, toy_publication("9.0.0", code="Toy = 'evil'\n"))
    registry, release = locate_release(text, None, opening)
    assert (registry.address, release.version) == (default.address, "0.1.0")
    assert corp.requests == []
    default.requests.clear()
    registry, release = locate_release(f"corp:{text}", None, opening)
    assert (registry.address, release.version) == (corp.address, "9.0.0")
    assert default.requests == [], "nor the default one, when another is named"


def test_same_name_and_version_keep_their_own_bytes(hosts, opening):
    for host, code in zip(hosts, ("Toy = 1\n", "Toy = 2\n"), strict=True):
        publish(host, toy_publication("0.1.0", code=code))
    digests = {}
    for text in ("acme/toy", "corp:acme/toy"):
        registry, release = locate_release(text, None, opening)
        assert len(registry.wheel_bytes(release)) == release.wheel.size
        digests[text] = release.wheel.sha256
    assert len(set(digests.values())) == 2


def test_a_command_shows_the_registry_that_the_request_names(hosts, capsys, monkeypatch, tmp_path):
    default, corp = hosts
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("TELESCOPE_REGISTRY", raising=False)
    publish(default, toy_publication("0.1.0"))
    publish(corp, toy_publication("9.0.0"))
    for name, version in (("toy", "0.1.0"), ("corp:toy", "9.0.0"), ("corp:acme/toy", "9.0.0")):
        with pytest.raises(SystemExit) as ended:
            main(["env", "info", name, "--json"])
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out)["version"] == version
