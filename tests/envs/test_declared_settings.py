"""The settings of an environment as a list of flags, whatever its tables hold."""

from __future__ import annotations

from telescope_core import EnvironmentConfig
from telescope_envs.install.loading import settings_in
from telescope_envs.publish.release import recorded_settings


class Node(EnvironmentConfig):
    depth: int = 1
    child: Node | None = None
    nodes: tuple[Node, ...] = ()


class Config(EnvironmentConfig):
    tree: Node = Node()
    size: int


def listed(config: type[EnvironmentConfig]) -> list[tuple[str, str, str]]:
    return [(one.name, one.type, one.default) for one in settings_in(config.model_json_schema())]


def test_a_table_that_holds_itself_is_listed_once() -> None:
    depth, child, nodes, size = listed(Config)
    assert depth == ("tree.depth", "integer", "1")
    assert child == ("tree.child", "table or null", "null")
    assert nodes == ("tree.nodes", "list of table", "[]")
    assert size == ("size", "integer", "")


def test_at_the_top_too() -> None:
    assert [name for name, _, _ in listed(Node)] == ["depth", "child", "nodes"]


def test_a_release_records_lines_and_leaves_out_what_would_fill_it() -> None:
    def schema(num_settings: int) -> dict[str, object]:
        field = {"type": "integer", "default": 3, "description": "x" * 2000}
        return {"properties": {f"n{number}": field for number in range(num_settings)}}

    (recorded,) = recorded_settings(schema(1))["settings"]
    assert (recorded["name"], recorded["type"], recorded["default"]) == ("n0", "integer", "3")
    assert recorded["help"] == "x" * 997 + "..."
    assert recorded_settings(schema(100)) == {}


def test_a_list_of_lists_without_end_has_a_type() -> None:
    schema = {
        "$defs": {"Tree": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
        "properties": {"tree": {"$ref": "#/$defs/Tree", "default": []}},
    }
    (setting,) = settings_in(schema)
    assert (setting.name, setting.default) == ("tree", "[]")
    assert setting.type == "list of Tree"
