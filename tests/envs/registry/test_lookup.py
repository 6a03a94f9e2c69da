"""Which registry a name, an address or a request means."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.envs.projects import toy_publication, write_registry
from tests.envs.serving import fill, served
from tests.envs.static_host import static_host

from telescope_core.errors import ConfigError, RegistryError, UnknownNameError
from telescope_envs.records.release import Status
from telescope_envs.registry import Opening, locate_release, open_registry, open_writable
from telescope_envs.registry.config import (
    AttestationMode,
    find_address,
    parse_address,
    parse_user_config,
)
from telescope_envs.registry.credentials import token_variables
from telescope_envs.server.auth import Scope


@pytest.fixture
def opening(tmp_path):
    """A user whose default registry is main/ and who calls two others corp and lab."""
    for name in ("main", "corp", "lab"):
        write_registry(tmp_path / name)
    return at(tmp_path, "main", corp='"{}/corp"', lab='{{ address = "{}/lab" }}')


def at(folder, default: str, **registries: str) -> Opening:
    lines = [f"{name} = {line.format(folder)}\n" for name, line in registries.items()]
    config = folder / ".config/telescope/config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f'registry = "{folder / default}"\n[registries]\n{"".join(lines)}')
    return Opening(environ={"HOME": str(folder)}, working_directory=folder)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("https://Hub.Example:443/a/", "https://hub.example/a"),
        ("HTTP://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("https://[::1]:8443/", "https://[::1]:8443"),
        ("https://[0:0::0001]", "https://[::1]"),
        ("http://[::FFFF:127.0.0.1]/a", "http://127.0.0.1/a"),
        ("https://hub.example./x/../%61/./b//", "https://hub.example/a/b"),
        ("https://hub.example/a%2fb%20c", "https://hub.example/a%2Fb%20c"),
        ("hf://acme/envs", "hf://acme/envs"),
        ("hf://datasets/acme/envs@v1/", "hf://acme/envs@v1"),
    ],
)
def test_one_place_has_one_spelling(text, means):
    assert parse_address(text).text == means


def test_a_folder_is_itself(tmp_path):
    for text in (f"{tmp_path}", f"file://{tmp_path}", f"{tmp_path}/", f"{tmp_path}/x/../"):
        assert parse_address(text).text == str(tmp_path)
    (tmp_path / "far/away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far/away")
    assert parse_address(f"{tmp_path}/link/../x").text == f"{tmp_path}/link/../x"


STRICT = AttestationMode.REQUIRED


def modes(address: str, spellings: list[str]) -> set[AttestationMode]:
    """Return how attestations are asked of these, when they are required at `address`."""
    lines = {"prod": {"address": address, "attestations": "required"}}
    config = parse_user_config({"registries": lines})
    return {config.attestations_of(config.place_of(text))[0] for text in spellings}


@given(st.lists(st.sampled_from(["x/..", ".", "", "link/..", "../top"]), max_size=4), st.data())
def test_all_spellings_of_one_folder_have_one_setting(folders, steps, data):
    ends = data.draw(st.sampled_from(["reg", "reg/", "reg//", "reg/.", "link", "link/../reg"]))
    inner = "/".join([*steps, ends])
    spellings = [f"{folders}/{inner}", f"file://{folders}/{inner}", f"FILE://{folders}/{inner}"]
    spellings.append(os.path.relpath(folders) + f"/{inner}")
    assert modes(str(folders / "reg"), spellings) == {STRICT}
    assert modes(spellings[0], [str(folders / "reg")]) == {STRICT}
    assert modes(spellings[0], [str(folders / "x")]) == {AttestationMode.OFF}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder with a registry, a link to it, and another folder."""
    top = tmp_path_factory.mktemp("spellings") / "top"
    (top / "reg").mkdir(parents=True)
    (top / "x").mkdir()
    (top / "link").symlink_to(top / "reg")
    return top


def in_other_letters(text: str, chance: st.DataObject) -> str:
    """Escape some letters of a path, and add what leads nowhere."""
    added = st.sampled_from(["", ".", "x/..", "/", "%2e", "x/%2E%2e"])
    letters = [chance.draw(st.sampled_from([one, f"%{ord(one):02x}"])) for one in text]
    return "/".join([chance.draw(added), "".join(letters), chance.draw(added)])


@given(st.data())
def test_all_spellings_of_one_address_have_one_setting(data):
    hosts = ["hub.example", "HUB.Example", "hub.example.", "hub.example:443", "hub.example.:443"]
    host, path = data.draw(st.sampled_from(hosts)), in_other_letters("reg", data)
    scheme = data.draw(st.sampled_from(["https", "HTTPS"]))
    assert modes("https://hub.example/reg", [f"{scheme}://{host}/{path}"]) == {STRICT}
    assert modes(f"{scheme}://{host}/{path}", ["https://hub.example/reg"]) == {STRICT}
    others = ["https://hub.example/regs", "https://hub.example:8443/reg", "http://hub.example/reg"]
    assert modes(f"{scheme}://{host}/{path}", others) == {AttestationMode.OFF}


def test_this_machine_and_repositories_have_one_setting_by_all_their_names():
    here = ["127.0.0.1", "localhost", "LOCALHOST.", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.2"]
    spellings = [f"http://{host}:8470/reg" for host in here]
    assert all(modes(one, spellings) == {STRICT} for one in spellings)
    assert modes(spellings[0], ["http://localhost:8471/reg"]) == {AttestationMode.OFF}
    repositories = ["hf://acme/envs", "hf://Acme/Envs@v1", "hf://datasets/acme/envs/"]
    assert all(modes(one, repositories) == {STRICT} for one in repositories)


def test_a_token_is_not_for_another_name_of_this_machine(tmp_path):
    opening = at(tmp_path, "main", corp='"http://127.0.0.1:8470"')
    for address, names in (("127.0.0.1", ["TELESCOPE_HUB_TOKEN_CORP"]), ("localhost", [])):
        place = parse_address(f"http://{address}:8470")
        assert token_variables(place, environ=opening.environ) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("https://user:hunter2@hub.example/x", "holds a password; leave it out"),
        ("https://hub.example/x?y=1", "without \\? and #"),
        ("https:///x", "must be written https://HOST/PATH"),
        ("https://hub.example:port", "is not an address"),
        ("http://127.1/x", "all four numbers of an address"),
        ("http://0x7f.1/x", "all four numbers of an address"),
        ("https://hub%2eexample/x", "not the name or the address of a host"),
        ("https://b\u00fccher.example", "write a name in ASCII"),
        ("hf://acme", "hf://OWNER/REPOSITORY"),
        ("hf://acme/envs/more", "hf://OWNER/REPOSITORY"),
    ],
)
def test_what_is_no_address_is_one_clear_message(text, message):
    with pytest.raises(ConfigError, match=message) as refused:
        parse_address(text)
    assert "hunter2" not in str(refused.value)


def test_a_name_is_a_registry_wherever_one_is_asked_for(opening, tmp_path):
    for name in ("corp", "lab"):
        assert open_registry(name, opening).address == str(tmp_path / name)
    chosen = Opening(
        environ={**opening.environ, "TELESCOPE_REGISTRY": "lab"}, working_directory=tmp_path
    )
    assert open_registry(None, chosen).address == str(tmp_path / "lab")
    assert open_registry(None, opening).address == str(tmp_path / "main")


def test_a_request_names_its_registry(opening, tmp_path):
    open_writable("corp", opening).publish(toy_publication("0.3.0"))
    for text in ("corp:acme/toy", "corp:toy", "corp:toy@0.3.0"):
        registry, release = locate_release(text, None, opening)
        assert (registry.address, release.version) == (str(tmp_path / "corp"), "0.3.0")
    assert locate_release("corp:toy", "corp", opening).release.version == "0.3.0"
    assert locate_release("acme/toy", "corp", opening).release.version == "0.3.0"


def test_two_registries_for_one_request_are_refused(opening):
    with pytest.raises(ConfigError, match=r"'corp'.*'lab'"):
        locate_release("corp:toy", "lab", opening)


@pytest.mark.parametrize("text", ["crop:acme/toy", "crop:toy"])
def test_an_unknown_registry_is_answered_with_the_nearest(opening, text):
    with pytest.raises(UnknownNameError, match=r"'crop'; .*'corp'"):
        locate_release(text, None, opening)
    with pytest.raises(UnknownNameError, match=r"'corp'.*\[registries\]"):
        open_registry("crop", opening)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("./crop", "folder.*file://.*https://"),
        ("s3://bucket/x", "s3://.*file, .*http"),
        ("http://192.0.2.1/x", "http://192.0.2.1/x.*insecure = true"),
    ],
)
def test_what_cannot_be_opened_says_what_can(opening, text, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        open_registry(text, opening)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("registry = 3", "registry: Expected str, got int"),
        ("registeries = {}", "unknown setting 'registeries'; did you mean 'registries'"),
        ("[registries]\nCorp = 'x'", "cannot be named 'Corp'"),
        ("[registries]\nhttps = 'x'", "cannot be named 'https'"),
        ("[registries]\ncorp = { adress = 'x' }", "registries.corp"),
        ("[registries]\ncorp = 'hf://x'", "corp: registry 'hf://x'"),
        ("registries = 'corp'", "registries: expected a table of names, got 'corp'"),
        ("[registries", "not TOML"),
    ],
)
def test_a_mistake_in_the_users_file_names_file_and_line(opening, tmp_path, text, message):
    path = tmp_path / ".config/telescope/config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        find_address(None, opening)
    assert str(path) in str(refused.value)


def test_other_tables_of_the_users_file_are_none_of_our_business(opening, tmp_path):
    path = tmp_path / ".config/telescope/config.toml"
    path.write_text(f"[publish]\nsigned = true\n\n{path.read_text()}".replace("registry =", "#"))
    assert find_address("corp", opening).text == str(tmp_path / "corp")


def test_plain_http_is_for_this_machine_or_for_who_says_so(tmp_path):
    lab = '{{ address = "http://192.0.2.1", insecure = true }}'
    config = at(tmp_path, "main", lab=lab)
    place = find_address("lab", config)
    assert place.is_plain_http
    offline = Opening(
        environ=config.environ, working_directory=tmp_path, offline=True, tell=lambda text: None
    )
    for text in ("lab", "http://192.0.2.1/"):
        with pytest.raises(RegistryError, match="was never fetched"):
            open_registry(text, offline)


def test_a_static_host_is_read_only_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    write_registry(tmp_path / "registry")
    opening = Opening(environ={"HOME": str(tmp_path)}, working_directory=tmp_path)
    with static_host(tmp_path / "registry") as host:
        assert open_registry(host.address, opening).config.name == "test"
        with pytest.raises(RegistryError, match="is read-only; publish to the folder"):
            open_writable(host.address, opening)
    assert list((tmp_path / "home/cache/http").iterdir())


def test_a_server_is_found_by_its_config_and_published_to(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    write_registry(tmp_path / "registry").store.publish(toy_publication("0.1.0"))
    with served(tmp_path / "hub") as hub:
        fill(hub.store, tmp_path / "registry")
        chosen = {"TELESCOPE_REGISTRY": hub.address, "HOME": str(tmp_path)}
        with pytest.raises(RegistryError, match="token"):
            open_writable(None, Opening(environ=chosen)).publish(toy_publication("0.2.0"))
        environ = {**chosen, "TELESCOPE_HUB_TOKEN": hub.token(Scope.ADMIN)}
        store = open_writable(None, Opening(environ=environ))
        assert store.publish(toy_publication("0.2.0")) is True
        yanked = store.change_status("acme/toy", lambda _: Status(yanked={"0.2.0": "bad"}))
        store.close()
        registry, release = locate_release("toy@0.2.0", None, Opening(environ=chosen))
        assert registry.status("acme/toy") == yanked
        assert registry.wheel_bytes(release) == toy_publication("0.2.0").wheel
