"""Records of a registry that say something odd: one message that says what, and what to do."""

import json
import subprocess
from pathlib import Path

import pytest
from tests.envs.authors import tree
from tests.envs.projects import toy_publication

from telescope_core.errors import ConfigError, EnvironmentLoadError, RegistryError, UnknownNameError
from telescope_envs.install.attestations import expected_identities
from telescope_envs.processes.running import printed_table
from telescope_envs.publish.source import public_address
from telescope_envs.records.model import (
    converted,
    read_json,
    read_toml,
)
from telescope_envs.records.release import (
    Publisher,
    RegistryConfig,
    Release,
    WheelFile,
)
from telescope_envs.registry import Registry, resolve
from telescope_envs.registry.fetch import (
    Fetcher,
    Patience,
)

TOY = toy_publication()


def test_a_namespace_that_says_it_is_anothers_is_not_used(registry: Registry) -> None:
    registry.store.publish(TOY)
    root = Path(registry.address)
    (root / "namespaces" / "acme.toml").write_text('owner = "evil-corp"\n')
    before = tree(root)
    for use in (
        lambda: resolve(registry, "toy"),
        lambda: registry.namespace("acme"),
        lambda: registry.store.publish(toy_publication("0.2.0")),
    ):
        with pytest.raises(RegistryError, match="belongs to owner 'evil-corp'"):
            use()
    assert tree(root) == before, "nothing was published"


def test_an_alias_of_nothing_says_so_and_suggests_no_dead_name(registry: Registry) -> None:
    with pytest.raises(UnknownNameError, match=r"'toy' means acme/toy .*has no release of it"):
        resolve(registry, "toy")
    registry.store.publish(toy_publication(name="pet"))
    with pytest.raises(ConfigError) as unknown:
        resolve(registry, "toi")
    assert "toy" not in str(unknown.value), "a name that leads nowhere is no suggestion"
    registry.store.publish(TOY)
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        resolve(registry, "toi")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not a requirement at all",
        "six; python_version ~= 'abc'",
        "six; nothing > '1'",
        "six==" + "9" * 5000 + "; python_version > '" + "9" * 5000 + "'",
        "six; " + "(" * 3000,
        "six\n--index-url http://127.0.0.1/",
        "six ; platform_version != 'a\u2028b'",
    ],
)
def test_a_requirement_that_is_none_is_refused_with_the_record(text: str) -> None:
    record = TOY.release.as_table()
    converted(Release, {**record, "requires_dist": ["six>=1; extra == 'more'", "six"]})
    with pytest.raises(ValueError, match="requires_dist"):
        converted(Release, {**record, "requires_dist": [text]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("minimum_client", "banana"),
        ("minimum_client", "9" * 5000),
        ("artifacts", ["{foo}"]),
        ("artifacts", ["artifacts/x.whl"]),
        ("artifacts", ["{filename.__class__}"]),
        ("artifacts", ["{filename}/{filename}"]),
        ("artifacts", ["{filename!r}"]),
        ("artifacts", ["{filename"]),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(field, value, registry: Registry) -> None:
    path = Path(registry.address) / "config.json"
    path.write_text(json.dumps({"name": "test", field: value}))
    with pytest.raises(RegistryError, match=rf"config\.json: {field}.*update the registry"):
        Registry.at(Path(registry.address))
    assert RegistryConfig(name="x", artifacts=("https://h/{filename}?x",)).artifacts


@pytest.mark.parametrize("name", ["../x.whl", "a/b.whl", "x" * 5000, "a\0.whl", "-x.whl", ".x", ""])
def test_the_name_of_a_wheel_is_a_plain_name(name: str) -> None:
    record = TOY.release.wheel.as_table()
    with pytest.raises(ValueError, match="filename"):
        converted(WheelFile, {**record, "filename": name})


@pytest.mark.parametrize(
    "url", ["https://host:99999/x", "https://host:x/x", "http://[::1", "https://[x]/", "https://"]
)
def test_an_address_that_is_none_is_one_message(url: str) -> None:
    fetcher = Fetcher("https://hub.example", None, "")
    with pytest.raises(RegistryError, match=r"never fetched|not a URL"):
        fetcher.get(url, max_bytes=1, patience=Patience(max_tries=1), headers={})
    assert public_address(url.replace("host", "h@st")) in ("", "https://st/x")
    publisher = Publisher(kind="repository", id=url)
    assert expected_identities([publisher]) == []


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000,
        "[" + "a." * 5000 + "a]",
        "a." * 500 + "a = 1",
        "a = " + "9" * 5000,
        "a = 0x" + "f" * 17,
        "a = -9223372036854775809",
        "a = 1\na = 2",
        'a = "\\ud800"',
    ],
)
def test_toml_that_cannot_be_used_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_toml(text)
    with pytest.raises(ValueError, match=r"."):
        read_toml(text.encode() + b"\xff")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 200 + "]" * 200, "9" * 5000, '"\\ud800"'])
def test_json_that_cannot_be_used_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(text)


def test_what_is_in_order_is_read() -> None:
    assert read_toml('a = [1, {b = "c"}]\nd = 9223372036854775807') == {
        "a": [1, {"b": "c"}],
        "d": 2**63 - 1,
    }
    assert read_json('{"a": [1, 2.5, null, "\\ud83d\\ude00"]}') == {
        "a": [1, 2.5, None, "\U0001f600"]
    }


@pytest.mark.parametrize(
    "said",
    ["", "\n", "no JSON", "[" * 100_000, "[]", "{}", '{"a": 1}\n{"b": 1}', '{"a": "\\ud800"}'],
)
def test_whatever_code_prints_in_place_of_its_declarations_is_one_message(said: str) -> None:
    done = subprocess.CompletedProcess(["x"], 0, said, "")
    with pytest.raises(EnvironmentLoadError, match="acme/toy ended its process"):
        printed_table(done, what="acme/toy", keys=("a",))
    done = subprocess.CompletedProcess(["x"], 0, 'hello\n{"a": 1}\n', "")
    assert printed_table(done, what="acme/toy", keys=("a",)) == {"a": 1}
