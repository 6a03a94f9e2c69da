"""From a wish to a release: what may be chosen, what is refused, what a person is told."""

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication, write_registry

from telescope_core.errors import ConfigError, RegistryError, UnknownNameError
from telescope_envs.install.pipeline import choose_release, locked_environment
from telescope_envs.install.steps import InstallOptions, silent
from telescope_envs.records.lockfile import change_lock
from telescope_envs.records.reading import Publication
from telescope_envs.records.release import (
    Deprecation,
    ProtocolRange,
    Release,
    Status,
)
from telescope_envs.registry import Registry, resolve
from telescope_envs.registry.resolving import (
    matches,
    resolve_with_warnings,
)

FUTURE = ProtocolRange(minimum="1.1", maximum="2.0")
PAST = ProtocolRange(minimum="0.1", maximum="0.9")


@pytest.fixture
def publish(registry):
    def apply(*versions: str, **fields) -> None:
        for version in versions:
            registry.store.publish(toy_publication(version, **fields))

    return apply


def chosen(registry: Registry, text: str) -> str:
    return resolve(registry, text).version


def test_behind_its_registry_a_name_of_one_owner_needs_no_alias(registry, publish):
    publish("0.1.0", name="rare")
    with pytest.raises(UnknownNameError, match="unknown environment 'rare'"):
        resolve(registry, "rare")
    assert resolve(registry, "corp:rare").id == "acme/rare"
    place = Path(registry.address)
    (place / "namespaces/zoo.toml").write_text('owner = "zoo"\nstatus = "active"\n')
    publish("0.3.0", name="rare", owner="zoo")
    with pytest.raises(ConfigError, match=r"2 environments .*: corp:acme/rare, corp:zoo/rare; use"):
        resolve(registry, "corp:rare")
    assert resolve(registry, "corp:zoo/rare").id == "zoo/rare"
    (place / "aliases.toml").write_text('[aliases]\nrare = "acme/rare"\n')
    assert resolve(registry, "corp:rare").id == "acme/rare", "an alias is what maintainers chose"
    with pytest.raises(UnknownNameError, match="unknown environment 'rar'; did you mean 'rare'"):
        resolve(registry, "corp:rar")


def test_a_digest_names_one_release(registry, publish):
    publish("0.1.0", "0.2.0")
    digest = toy_publication("0.1.0").release.wheel.sha256
    assert chosen(registry, f"toy@sha256:{digest}") == "0.1.0"
    assert chosen(registry, f"acme/toy@sha256:{digest}") == "0.1.0"
    with pytest.raises(RegistryError, match="has no wheel with 'sha256:000"):
        resolve(registry, f"toy@sha256:{'0' * 64}")
    for wrong in ("sha256:", f"sha256:{digest[:12]}", f"sha256:{digest.upper()}"):
        with pytest.raises(ConfigError, match="all 64 hexadecimal digits"):
            resolve(registry, f"toy@{wrong}")
    assert matches("0.1.0", f"sha256:{digest}", digest)
    assert not matches("0.1.0", f"sha256:{digest}")


def test_a_yanked_release_is_chosen_only_when_named_and_with_a_warning(registry, publish):
    publish("0.1.0", "0.2.0")
    registry.store.change_status("acme/toy", lambda _: Status(yanked={"0.2.0": "wrong answers"}))
    digest = toy_publication("0.2.0").release.wheel.sha256
    assert chosen(registry, "toy") == "0.1.0"
    assert chosen(registry, "toy@>=0.1") == "0.1.0"
    for exact in ("toy@0.2.0", "toy@==0.2.0", f"toy@sha256:{digest}"):
        found = resolve_with_warnings(registry, exact)
        assert found.release.version == "0.2.0"
        assert found.warnings == ("acme/toy 0.2.0 is yanked: wrong answers",)
    with pytest.raises(RegistryError, match=r"is yanked: wrong answers; .*acme/toy@0\.2\.0"):
        resolve(registry, "toy@>0.1.0")


def test_deprecation_and_advisories_are_told(registry, publish):
    publish("0.1.0")
    advisory = "rewards of 0.1.0 are too high for long answers"
    said = Status(
        deprecated=Deprecation(reason="too easy", replacement="acme/toy-2"), advisories=(advisory,)
    )
    registry.store.change_status("acme/toy", lambda _: said)
    found = resolve_with_warnings(registry, "toy")
    assert found.release.version == "0.1.0"
    deprecated, advised = found.warnings
    assert "too easy" in deprecated
    assert deprecated.endswith("use acme/toy-2")
    assert advised.endswith(advisory)


def test_the_newest_release_that_runs_here_is_chosen_and_newer_ones_are_told(registry, publish):
    publish("0.1.0")
    publish("0.2.0", protocol=FUTURE)
    publish("0.3.0", requires_python=">=3.99")
    found = resolve_with_warnings(registry, "toy")
    assert found.release.version == "0.1.0"
    python, protocol = found.warnings
    assert python.startswith("acme/toy 0.3.0 needs Python >=3.99, but this is")
    assert platform.python_version() in python
    assert "acme/toy 0.2.0 speaks environment protocol 1.1 to 2.0" in protocol


def test_a_protocol_too_new_is_refused_with_what_to_upgrade(registry, publish):
    publish("0.1.0")
    publish("0.2.0", protocol=FUTURE)
    with pytest.raises(RegistryError, match=r"1\.1 to 2\.0.*upgrade"):
        resolve(registry, "toy@0.2.0")


def test_a_protocol_too_old_is_refused(registry, publish):
    publish("0.1.0", protocol=PAST)
    with pytest.raises(RegistryError, match=r"0\.1 to 0\.9.* old"):
        resolve(registry, "toy")


def test_a_protocol_range_that_holds_ours_runs(registry, publish):
    publish("0.1.0", protocol=ProtocolRange(minimum="0.9", maximum="7.0"))
    assert chosen(registry, "toy") == "0.1.0"


@pytest.mark.parametrize("wish", ["toy", "toy@0.1.0", "acme/toy"])
def test_nothing_of_a_suspended_namespace_is_chosen(registry_place, wish):
    namespace = registry_place / "namespaces/acme.toml"
    namespace.write_text('owner = "acme"\nstatus = "suspended"\n')
    with pytest.raises(RegistryError, match=r"'acme'.* suspended"):
        resolve(Registry.at(registry_place), wish)


def test_nothing_is_chosen_that_nobody_answers_for(registry_place):
    (registry_place / "namespaces/acme.toml").unlink()
    registry = Registry.at(registry_place)
    with pytest.raises(RegistryError, match=r"namespaces/acme\.toml") as refusal:
        resolve(registry, "toy")
    assert registry.address in str(refusal.value)


@pytest.mark.parametrize(
    ("wish", "version"),
    [
        ("toy", "0.1.0"),
        ("toy@>=0.1", "0.1.0"),
        ("toy@>=0.2rc1", "0.2.0rc1"),
        ("toy@0.2.0rc1", "0.2.0rc1"),
    ],
)
def test_a_preview_is_chosen_only_when_the_wish_names_one(registry, publish, wish, version):
    publish("0.1.0", "0.2.0rc1")
    assert chosen(registry, wish) == version


def test_where_all_is_preview_the_newest_is_chosen(registry, publish):
    publish("0.1.0rc1", "0.1.0rc2")
    assert chosen(registry, "toy") == "0.1.0rc2"
    with pytest.raises(RegistryError, match=r"published versions: 0\.1\.0rc1, 0\.1\.0rc2"):
        resolve(registry, "toy@>=0")


@pytest.mark.parametrize("yanked", [["0.1.0"], ["0.2.0rc1"], ["0.1.0", "0.2.0rc1"]])
def test_what_is_chosen_is_what_the_catalog_shows(registry, publish, yanked):
    publish("0.1.0", "0.2.0rc1")
    registry.store.change_status("acme/toy", lambda _: Status(yanked=dict.fromkeys(yanked, "why")))
    found = resolve_with_warnings(registry, "toy", allows_yanked=True)
    (row,) = registry.catalog()
    assert found.release.version == row.version
    assert bool(found.warnings) == (len(yanked) == 2)
    if len(yanked) == 1:
        assert chosen(registry, "toy") == row.version


def test_a_range_of_yanked_versions_is_told_which_are_not(registry, publish):
    publish("0.1.0", "0.2.0", "0.3.0rc1")
    registry.store.change_status("acme/toy", lambda _: Status(yanked={"0.2.0": "why"}))
    with pytest.raises(
        RegistryError, match=r"choose one that is not yanked \(0\.1\.0, 0\.3\.0rc1\)"
    ):
        resolve(registry, "toy@>0.1.0")
    registry.store.change_status(
        "acme/toy", lambda _: Status(yanked=dict.fromkeys(("0.1.0", "0.2.0", "0.3.0rc1"), "why"))
    )
    with pytest.raises(
        RegistryError, match=r"no version is left that is not yanked; .* name this one"
    ):
        resolve(registry, "toy")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", '"1.0+local"', "version: .*without a local part"),
        ("version", '"newest"', "version: .*PEP 440"),
        ("protocol", '{"minimum": "2.0", "maximum": "1.0"}', "protocol: .*above maximum"),
        ("protocol", '{"minimum": "1"}', "protocol.minimum"),
        ("requires_python", '"three"', "requires_python: "),
        ("published_at", '"2026-11-21T12:00:00"', "published_at: .*timezone"),
        ("schema", "2", "schema"),
        ("summary", r'"\u001b[2J"', "summary: "),
        ("tags", r'["\u202e"]', "tags.0: "),
    ],
)
def test_a_record_that_makes_no_sense_names_its_field(registry_place, field, value, message):
    path = registry_place / "index/acme/toy.jsonl"
    line = path.read_text().strip()
    path.write_text(f'{line[:-1]},"{field}":{value}}}\n')
    registry = Registry.at(registry_place)
    with pytest.raises(RegistryError, match=rf"toy\.jsonl:1: {message}"):
        resolve(registry, "toy")
    assert registry.releases("acme/toy") == []


def test_choosing_a_release_reads_its_status_once(registry, publish, monkeypatch):
    """Each read is a request to a registry on the web, which may answer differently."""
    publish("0.1.0", "0.2.0")
    paths: list[str] = []
    read = registry.store.read

    def counted(path: str) -> bytes | None:
        paths.append(path)
        return read(path)

    monkeypatch.setattr(registry.store, "read", counted)
    options = InstallOptions()
    release = choose_release(registry, "acme/toy", options=options, progress=silent)
    assert release.version == "0.2.0"
    assert paths.count("status/acme/toy.json") == 1


@pytest.fixture
def twins(tmp_path, monkeypatch) -> Callable[..., Registry]:
    """Return a function that makes a registry with these releases of acme/toy."""
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))

    def make(name: str, *publications: Publication) -> Registry:
        twin = write_registry(tmp_path / name)
        for publication in publications:
            twin.store.publish(publication)
        return twin

    return make


def locked_from(registry: Registry, release: Release, path: Path) -> InstallOptions:
    change_lock(path, lambda lock: lock.merged([locked_environment(registry, release, ())]))
    return InstallOptions(lock=path)


def test_an_equal_name_in_another_registry_is_not_called_tampering(twins, tmp_path):
    corp = twins("corp", toy_publication())
    team = twins("team", toy_publication(code="other = 1\n"))
    (release,) = corp.releases("acme/toy")
    options = locked_from(corp, release, tmp_path / "telescope.lock")
    with pytest.raises(RegistryError) as refusal:
        choose_release(team, "acme/toy", options=options, progress=silent)
    message = str(refusal.value)
    assert "never replaced" not in message
    assert f"--registry {corp.address}" in message
    assert team.address in message
    assert "telescope env uninstall acme/toy" in message


def test_a_newer_release_from_another_registry_is_told(twins, tmp_path):
    corp = twins("corp", toy_publication(), toy_publication("0.1.1"))
    team = twins("team", toy_publication("0.2.0"))
    options = locked_from(corp, corp.releases("acme/toy")[0], tmp_path / "telescope.lock")
    lines: list[str] = []
    choose_release(corp, "acme/toy", options=options, progress=lines.append)
    assert lines == []
    assert choose_release(team, "toy", options=options, progress=lines.append).version == "0.2.0"
    (line,) = lines
    assert line.startswith("warning: ")
    assert all(part in line for part in (corp.address, team.address, "0.1.0", "0.2.0"))


def test_the_newest_that_fits_a_range_is_not_called_the_newest(twins, tmp_path):
    corp = twins("corp", toy_publication(), toy_publication("0.2.0"))
    options = locked_from(corp, corp.releases("acme/toy")[1], tmp_path / "telescope.lock")
    with pytest.raises(RegistryError, match=r"offers 0\.1\.0 as the newest that fits '<0\.2';"):
        choose_release(corp, "acme/toy@<0.2", options=options, progress=silent)
