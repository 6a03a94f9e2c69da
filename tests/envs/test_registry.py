"""The registry: layout, records, building, publishing, resolving, choosing one."""

import json
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_core.errors import ConfigError, RegistryError, UnknownNameError
from telescope_envs.publish.build import build_wheel
from telescope_envs.publish.first_party import (
    publish,
    write_schemas,
)
from telescope_envs.records.reading import check_bytes
from telescope_envs.registry import Opening, Registry, open_registry, parse_request, resolve
from telescope_envs.rules.wheel import check_release, read_wheel

ROOT = Path(__file__).parents[2]
PROJECTS = sorted((ROOT / "packages" / "telescope-envs" / "environments").glob("*/pyproject.toml"))


@pytest.fixture(scope="module")
def first_party() -> Registry:
    return Registry.at(ROOT / "registry")


def test_every_record_of_the_committed_registry_can_be_read(first_party):
    ids = first_party.ids()
    assert ids == [f"telescope/{project.parent.name}" for project in PROJECTS]
    for environment_id in ids:
        for release in first_party.releases(environment_id):
            data = first_party.wheel_bytes(release)
            check_bytes(data, release)
            check_release(read_wheel(data, release.wheel.filename), release)
        assert first_party.namespace(environment_id.partition("/")[0]) is not None
        first_party.status(environment_id)
    assert set(first_party.aliases().values()) == set(ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "project",
    [PROJECTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in PROJECTS[1:])],
    ids=lambda path: path.parent.name,
)
def test_committed_wheels_are_rebuilt_byte_for_byte(first_party, project, tmp_path, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    release = first_party.releases(f"telescope/{project.parent.name}")[-1]
    wheel = build_wheel(project.parent, tmp_path)
    assert wheel.name == release.wheel.filename, "raise the version: releases are never replaced"
    assert wheel.read_bytes() == first_party.wheel_bytes(release)


def test_committed_schemas_are_current(first_party, tmp_path):
    write_schemas(tmp_path)
    for path in (tmp_path / "schema").iterdir():
        assert path.read_text() == (Path(first_party.address) / "schema" / path.name).read_text()


@pytest.mark.slow
def test_publishing_the_same_bytes_again_succeeds_and_others_are_refused(published, make_project):
    again = publish(published.store, make_project(), owner="acme", datasets=[])
    assert "already published" in again
    assert len(published.releases("acme/toy")) == 1
    code = (make_project() / "telescope_env_acme_toy/__init__.py").read_text()
    changed = make_project(code=f"{code}\n# changed\n")
    with pytest.raises(RegistryError, match="raise the version"):
        publish(published.store, changed, owner="acme", datasets=[])


def test_a_release_says_what_the_environment_declares(published):
    (release,) = published.releases("acme/toy")
    assert release.id == "acme/toy"
    assert release.splits == {"train": 1, "eval": 1}
    assert (release.reward.minimum, release.reward.maximum, release.reward.success) == (0, 1, 1)
    assert release.reward_weights == {"yes": 1.0}
    assert release.requires_python == ">=3.11"
    line = (Path(published.address) / "index/acme/toy.jsonl").read_text()
    assert json.loads(line)["schema"] == 1


def test_only_a_namespace_may_publish(registry, make_project):
    with pytest.raises(RegistryError, match="'evil'"):
        publish(registry.store, make_project(), owner="evil", datasets=[])
    assert registry.ids() == []
    assert not (Path(registry.address) / "artifacts").exists()


@pytest.mark.slow
def test_code_that_cannot_load_is_not_published(registry, make_project):
    with pytest.raises(Exception, match=r"cannot be loaded: .*ZeroDivisionError"):
        publish(registry.store, make_project(code="1 / 0\n"), owner="acme", datasets=[])
    assert registry.ids() == []


@pytest.fixture
def versions(published) -> Registry:
    (release,) = published.releases("acme/toy")
    with (Path(published.address) / "index/acme/toy.jsonl").open("a") as lines:
        for version in ("0.2.0", "0.10.0", "1.0.0rc1"):
            later = release.changed(version=version)
            lines.write(f"{later.as_json().decode()}\n")
    return published


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("toy", "0.10.0"),
        ("acme/toy", "0.10.0"),
        ("toy@0.1.0", "0.1.0"),
        ("toy@==0.2", "0.2.0"),
        ("toy@<0.10", "0.2.0"),
        ("acme/toy@>=0.1,<0.2", "0.1.0"),
        ("toy@1.0.0rc1", "1.0.0rc1"),
    ],
)
def test_requests_resolve(versions, text, version):
    assert resolve(versions, text).version == version


def test_a_yanked_version_is_chosen_only_when_named(versions):
    status = Path(versions.address) / "status/acme/toy.json"
    status.write_text('{"schema": 1, "yanked": {"0.10.0": "wrong answers"}}')
    assert resolve(versions, "toy").version == "0.2.0"
    assert resolve(versions, "toy@0.10.0").version == "0.10.0"
    with pytest.raises(RegistryError, match="yanked: wrong answers"):
        resolve(versions, "toy@>=0.10,<1")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("toi", UnknownNameError, "'toi'; .*'toy'"),
        ("acme/toi", UnknownNameError, "'acme/toi'; .*'acme/toy'"),
        ("toy@7", RegistryError, "0.1.0, 0.2.0, 0.10.0, 1.0.0rc1"),
        ("toy@new", ConfigError, "'new'"),
        ("../toy", ConfigError, "'../toy'.*owner/name"),
        ("Toy", ConfigError, "'Toy'.*lower-case"),
        ("a/b/c", ConfigError, "'a/b/c'.*owner/name"),
    ],
)
def test_bad_requests_are_one_clear_message(versions, text, error, message):
    with pytest.raises(error, match=message) as refusal:
        resolve(versions, text)
    assert "\n" not in str(refusal.value)


def test_another_python_is_refused(registry):
    registry.store.publish(toy_publication(requires_python=">=3.99"))
    with pytest.raises(RegistryError, match=r"needs Python >=3\.99"):
        resolve(registry, "toy")


def test_the_registry_is_chosen_in_order(registry, tmp_path):
    def chosen(flag=None, **environ):
        opening = Opening(environ={"HOME": str(tmp_path), **environ}, working_directory=tmp_path)
        return open_registry(flag, opening).address

    root = registry.address
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"name": "other"}')
    assert chosen(TELESCOPE_REGISTRY=str(other)) == str(other)
    assert chosen(root, TELESCOPE_REGISTRY=str(other)) == root
    assert chosen(f"file://{other}") == str(other)
    assert chosen() == root, "the registry/ of a folder above the working directory"
    (tmp_path / ".config/telescope").mkdir(parents=True)
    (tmp_path / ".config/telescope/config.toml").write_text(f'registry = "{other}"\n')
    assert chosen() == str(other)
    assert chosen(TELESCOPE_REGISTRY=root) == root


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("s3://bucket/registry", "s3://.*https"),
        ("/no/such/folder", "/no/such/folder.*folder"),
    ],
)
def test_a_registry_that_cannot_be_read_is_one_clear_message(flag, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        open_registry(flag)
    assert "\n" not in str(refusal.value)


def test_a_folder_that_is_no_registry_says_so(tmp_path):
    with pytest.raises(RegistryError, match=r"config\.json") as refusal:
        open_registry(str(tmp_path))
    assert str(tmp_path) in str(refusal.value)


def test_a_broken_index_line_names_its_place_and_costs_only_itself(published, caplog):
    path = Path(published.address) / "index/acme/toy.jsonl"
    before = published.releases("acme/toy")
    path.write_text(f"{path.read_text()}{{}}\n")
    assert published.releases("acme/toy") == before
    assert "toy.jsonl:2: owner: Field required" in caplog.text


def test_a_newer_format_is_refused(registry):
    (Path(registry.address) / "config.json").write_text('{"format": 2, "name": "later"}')
    with pytest.raises(RegistryError, match="format"):
        Registry.at(Path(registry.address))


def test_requests_are_taken_apart():
    request = parse_request("acme/toy@>=1,<2")
    assert (request.owner, request.name, request.wanted) == ("acme", "toy", ">=1,<2")
