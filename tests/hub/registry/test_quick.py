"""The quick way to a registry's rows gives what the whole way gives, or leaves it to that one."""

import json

import pytest

from telescope_core.errors import RegistryError
from telescope_envs.registry import Opening, Registry, open_registry
from telescope_envs.registry.quick import quick_catalog


def test_rows_and_aliases_are_those_of_the_whole_registry():
    whole = open_registry()
    quick = quick_catalog()
    assert quick is not None
    assert quick.rows == whole.catalog() != []
    assert quick.aliases == [*whole.aliases()] != []
    assert quick.address == whole.address


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "x", "format": 2}, "format"),
        ({"name": "x", "minimum_client": "999.0"}, "needs telescope-envs >= 999.0"),
        ({"format": 1}, "name"),
        ("text", "config.json"),
        (None, "has no config.json"),
    ],
)
def test_what_is_not_plain_is_left_to_the_whole_way(tmp_path, config, message):
    (tmp_path / "index").mkdir()
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert quick_catalog(str(tmp_path)) is None
    with pytest.raises(RegistryError, match=message):
        Registry.at(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "aliases.toml"])
def test_what_is_no_text_is_left_to_the_whole_way(tmp_path, name):
    (tmp_path / "index").mkdir()
    (tmp_path / "config.json").write_text('{"name": "x"}')
    (tmp_path / name).write_bytes(b'{"name": "\xff"}')
    assert quick_catalog(str(tmp_path)) is None


def test_only_folders_are_quick(tmp_path):
    opening = Opening(environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert quick_catalog("https://hub.example", opening) is None
