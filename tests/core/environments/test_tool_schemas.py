"""From signatures and docstrings to schemas, and from JSON back to checked arguments."""

import dataclasses
import enum
import json
import re
from typing import Annotated, Literal, Optional

import pytest
from pydantic import VERSION as pydantic_version
from pydantic import BaseModel, Field

from telescope_core import Episode
from telescope_core.environments.tool_functions import (
    BadArgumentsError,
    argument_docs,
    simplified,
    tool_from,
)
from telescope_core.errors import EnvironmentLoadError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    title: str
    """A property with the name that pydantic generates for all of them."""
    at: tuple[int, int] = (0, 0)


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


@dataclasses.dataclass
class Size:
    width: int
    height: int


CLOSED = {"additionalProperties": False} if pydantic_version >= "2.14" else {}
"""What pydantic says of a dataclass in a model that takes no other fields."""


def paint(
    where: Place,
    color: Color = Color.RED,
    times: Annotated[int, Field(ge=1, le=9, description="How often.")] = 1,
    mode: Literal["fast", "slow"] = "fast",
    size: Size | None = None,
    notes: Annotated[list[str], "Anything else."] = [],  # noqa: B006
    json: Optional[dict[str, float]] = None,  # noqa: UP045
    *,
    episode: Episode,
) -> str:
    """Paint a
    place.

    Not shown to the policy.

    Args:
        where: The place,
            on two lines.
        color (Color): Its color.
        times: Not used, because the annotation says it.
        json: A parameter called like a method of pydantic.

    Returns:
        where: not a parameter.
    """
    return f"{where.title} {where.at} {color} {times} {mode} {size} {notes} {json} {episode}"


def parameters(function):
    return tool_from(function).schema["function"]["parameters"]


PAINT_SCHEMA = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint a place.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["where"],
            "properties": {
                "where": {
                    "type": "object",
                    "description": "The place, on two lines.",
                    "required": ["title"],
                    "properties": {
                        "title": {"type": "string"},
                        "at": {
                            "type": "array",
                            "default": [0, 0],
                            "minItems": 2,
                            "maxItems": 2,
                            "prefixItems": [{"type": "integer"}, {"type": "integer"}],
                        },
                    },
                },
                "color": {
                    "type": "string",
                    "enum": ["red", "blue"],
                    "default": "red",
                    "description": "Its color.",
                },
                "times": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 9,
                    "default": 1,
                    "description": "How often.",
                },
                "mode": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
                "size": {
                    "anyOf": [
                        {
                            "type": "object",
                            **CLOSED,
                            "required": ["width", "height"],
                            "properties": {
                                "width": {"type": "integer"},
                                "height": {"type": "integer"},
                            },
                        },
                        {"type": "null"},
                    ],
                    "default": None,
                },
                "notes": {
                    "type": "array",
                    "items": {"type": "string"},
                    "default": [],
                    "description": "Anything else.",
                },
                "json": {
                    "anyOf": [
                        {"type": "object", "additionalProperties": {"type": "number"}},
                        {"type": "null"},
                    ],
                    "default": None,
                    "description": "A parameter called like a method of pydantic.",
                },
            },
        },
    },
}


async def test_an_episode_needs_no_type_as_in_hooks():
    def look(episode):
        """Look around."""
        return f"seen by {episode}"

    made = tool_from(look)
    assert parameters(look).get("properties", {}) == {}
    assert await made.run("{}", "the rollout") == "seen by the rollout"


def test_a_schema_comes_from_signature_and_docstring():
    assert tool_from(paint).schema == PAINT_SCHEMA


GOOGLE = """List files.

Keyword Args:
    path (tuple(str, list(int))): Folder to list,
        or a file.

        In a second paragraph.
    depth (`int`, *optional*, defaults to 2):
        How deep: at most 9.
    args: Not the head of a section.
Raises:
    path: never
"""
NUMPY = """List files.

Parameters
----------
path : tuple(str, list(int))
    Folder to list,
    or a file.

    In a second paragraph.
depth, other : int, optional
    How deep: at most 9.

Other Parameters
----------------
args
    Not the head of a section.

Returns
-------
path : str
    Never.
"""
SPHINX = """List files.
:param path: Folder to list,
    or a file.

    In a second paragraph.
:type path: str
:param int depth: How deep:
  at most 9.
:keyword args: Not the head of a section.

Examples are to be found elsewhere.
"""


@pytest.mark.parametrize("doc", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_parameters_are_described_in_every_style_of_docstrings(doc):
    def listed(path: str, depth: int, args: str) -> str:
        return f"{path}{depth}{args}"

    listed.__doc__ = doc
    about = tool_from(listed).schema["function"]
    assert about["description"] == "List files."
    told = {name: one["description"] for name, one in about["parameters"]["properties"].items()}
    assert told == {
        "path": "Folder to list, or a file. In a second paragraph.",
        "depth": "How deep: at most 9.",
        "args": "Not the head of a section.",
    }


@pytest.mark.parametrize(
    ("doc", "text"),
    [
        ("Arguments:\n  path: Folder.\n  or: a file.", "Folder."),
        ("Args:\n  path: Folder\n  or a file.", "Folder or a file."),
        ("Parameters:\n  path -- Folder.", None),
        ("Args:\n  path (str):: Folder.", "Folder."),
        ("Args:\n  path (str, optional)\n    Folder.", "Folder."),
        ("Other Parameters\n----\npath\n  Folder.", "Folder."),
        ("Parameters\n----\nfile, path : str\n  Folder.", "Folder."),
        ("@param path: Folder.\n@return: path: no", "Folder."),
        (":param tuple[str, int] path: Folder", "Folder"),
        (":param path: Folder\n\nMore about it.", "Folder"),
        ("Returns:\n  path: no.", None),
        ("path: no.", None),
        ("Args:\n  path (((((:", None),
    ],
)
def test_a_description_ends_where_the_next_begins(doc, text):
    assert argument_docs(f"Summary.\n\n{doc}", ["path"]).get("path") == text


async def test_arguments_arrive_as_the_types_that_were_declared():
    written = {
        "where": {"title": "hall"},
        "color": "blue",
        "size": {"width": 2, "height": 3},
        "json": {"a": 1},
    }
    said = await tool_from(paint).run(json.dumps(written), "rollout")
    *parts, episode = said.partition("Size(width=2, height=3)")
    assert parts == ["hall (0, 0) Color.BLUE 1 fast ", "Size(width=2, height=3)"]
    assert episode.split() == ["[]", "{'a':", "1.0}", "rollout"]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ('{"where": {}}', ["where.title: "]),
        ('{"where": {"title": "x"}, "times": 10}', ["times: ", "equal to 9"]),
        ('{"where": {"title": "x"}, "color": "green"}', ["color: ", "'red' or 'blue'"]),
        ('{"where": {"title": "x"}, "episode": 1}', ["episode: "]),
        ("[]", ["arguments: ", "object"]),
    ],
)
async def test_wrong_arguments_say_what_was_expected(text, facts):
    with pytest.raises(BadArgumentsError) as refused:
        await tool_from(paint).run(text, None)
    assert all(fact in str(refused.value) for fact in facts), refused.value


async def test_defaults_that_stand_in_a_field_are_shown_and_passed():
    def pick(
        some: list[int] = Field(default_factory=list, description="Which."),  # noqa: B008
        top: int = Field(3, ge=1, le=9),
        more: Annotated[list[int], Field(default_factory=list)] = Field(title="More"),  # noqa: B008
        *,
        last: Annotated[list[int], Field(default_factory=list)],
        least: int = Field(ge=0),
    ) -> object:
        """Pick some."""
        return [some, top, more, last, least]

    schema = parameters(pick)
    assert schema["required"] == ["least"]
    numbers = {"type": "array", "items": {"type": "integer"}}
    assert schema["properties"]["some"] == {**numbers, "description": "Which."}
    assert schema["properties"]["more"] == numbers
    whole = {"type": "integer"}
    assert schema["properties"]["top"] == {**whole, "default": 3, "minimum": 1, "maximum": 9}
    tool = tool_from(pick)
    assert json.loads(await tool.run('{"least": 2}', None)) == [[], 3, [], [], 2]
    assert json.loads(await tool.run('{"least": 2, "top": 4}', None)) == [[], 4, [], [], 2]
    with pytest.raises(BadArgumentsError, match="top: Input should be less than or equal to 9"):
        await tool.run('{"least": 2, "top": 10}', None)


def test_a_recursive_type_keeps_its_reference():
    def plant(tree: Tree) -> None:
        """Plant."""

    schema = parameters(plant)
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}


TEXT = {"type": "string"}
KEPT = (
    {"properties": {"x": True, "y": {"anyOf": [True, {"type": "null"}]}, "z": {"not": False}}},
    {"properties": None, "$defs": None},
    {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": True}},
    {
        "properties": {"x": {"$ref": "#/$defs/A/properties/q"}},
        "$defs": {"A": {"properties": {"q": TEXT}}},
    },
    {"properties": {"x": {"$ref": "#word"}}, "$defs": {"A": {"$anchor": "word", **TEXT}}},
    {
        "properties": {"x": {"$ref": "#/$defs/A~1b"}},
        "$defs": {"A/b": {"items": {"$ref": "#/$defs/A~1b"}}},
    },
)


@pytest.mark.parametrize("schema", KEPT)
def test_what_cannot_be_inlined_is_kept_with_all_that_it_refers_to(schema):
    assert simplified(schema) == schema


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("A", lambda inner: {"patternProperties": {"^a": inner}}),
        ("A", lambda inner: {"dependentSchemas": {"a": inner}}),
        ("A", lambda inner: {"propertyNames": inner}),
        ("A", lambda inner: {"contains": inner}),
        ("A", lambda inner: {"if": inner, "then": True, "else": inner}),
        ("A", lambda inner: {"items": [inner, True]}),
        ("A/b", lambda inner: {"items": inner}),
        ("A b", lambda inner: {"items": inner}),
    ],
)
def test_definitions_are_inlined_wherever_a_schema_may_stand(name, keyword):
    path = name.replace("/", "~1").replace(" ", "%20")
    found = simplified(
        {"properties": {"x": keyword({"$ref": f"#/$defs/{path}"})}, "$defs": {name: TEXT}}
    )
    assert found == {"properties": {"x": keyword(TEXT)}}


def test_a_choice_between_inlined_types_does_not_name_them():
    one = {"$ref": "#/$defs/A"}
    told = {"propertyName": "kind", "mapping": {"a": "#/$defs/A"}}
    found = simplified({"oneOf": [one], "discriminator": told, "$defs": {"A": TEXT}})
    assert found == {"oneOf": [TEXT], "discriminator": {"propertyName": "kind"}}


def test_other_docstring_forms_and_methods():
    class Owner:
        def go(self, to: str, fast: bool = False) -> None:
            """Go somewhere.

            :param to: Where to.
            :param bool fast: Whether to hurry.
            """

    found = parameters(Owner().go)["properties"]
    assert found["to"] == {"type": "string", "description": "Where to."}
    described = found["fast"].pop("description")
    assert found["fast"] == {"type": "boolean", "default": False}
    assert described == "Whether to hurry."
    assert set(found) == {"to", "fast"}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("text", "text"),
        (None, "null"),
        (Size(1, 2), '{"width": 1, "height": 2}'),
        (Place(title="x"), '{"title": "x", "at": [0, 0]}'),
        ({"color": Color.RED, "who": "Zo\u00eb"}, '{"color": "red", "who": "Zo\u00eb"}'),
        (float("nan"), "NaN"),
    ],
)
async def test_results_are_text_or_json(result, text):
    def give() -> object:
        """Give."""
        return result

    assert await tool_from(give).run("", None) == text


def untyped(a, b: int = 1):
    """Add."""


def undocumented(a: int) -> int:
    return a


def variable(*rest: int) -> None:
    """Take many."""


def by_position(a: int, /) -> None:
    """Take one."""


def unknown_type(a: "Nowhere") -> None:  # noqa: F821
    """Take one."""


def no_json(a: object.__class__, b: re.Match) -> None:
    """Take one."""


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (untyped, ["untyped", "a: str"]),
        (undocumented, ["undocumented", "docstring"]),
        (variable, ["variable", "*rest: int"]),
        (by_position, ["by_position", "by position"]),
        (unknown_type, ["'Nowhere'"]),
        (no_json, ["JSON"]),
    ],
)
def test_a_tool_that_cannot_be_described_names_file_line_and_fix(function, facts):
    line = function.__code__.co_firstlineno
    with pytest.raises(EnvironmentLoadError) as refused:
        tool_from(function)
    assert f"test_tool_schemas.py:{line}: " in str(refused.value)
    assert all(fact in str(refused.value) for fact in facts), refused.value


@pytest.mark.parametrize("function", [lambda: 0, print, int])
def test_what_is_no_plain_function_is_refused(function):
    with pytest.raises(EnvironmentLoadError):
        tool_from(function)
