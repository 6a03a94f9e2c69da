"""The settings of an environment as a list of flags, whatever its tables hold."""

from __future__ import annotations

from pydantic import Field

from telescope_core import Environment, EnvironmentConfig
from telescope_envs.install.declare import schema_of
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


class Limits(EnvironmentConfig):
    most: int
    least: int = 1
    names: list[str] = Field(default_factory=list)


class Limited(Environment):
    class Config(EnvironmentConfig):
        usual: Limits = Limits(most=5, least=2)
        made: Limits = Field(default_factory=lambda: Limits(most=6))
        maybe: Limits | None = None
        twice: int = Field(default_factory=lambda data: 2 * data["usual"].most)


def test_defaults_are_those_that_count() -> None:
    found = {one.name: one.default for one in settings_in(schema_of(Limited))}
    assert found == {
        "usual.most": "5",
        "usual.least": "2",
        "usual.names": "[]",
        "made.most": "6",
        "made.least": "1",
        "made.names": "[]",
        "maybe.most": "",
        "maybe.least": "1",
        "maybe.names": "[]",
        "twice": "...",
    }
