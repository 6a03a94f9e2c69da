"""From Python functions to tools: OpenAI schemas, checked arguments, calls found in text."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from telescope_core.errors import EnvironmentLoadError
from telescope_core.types import JsonValue, ToolCall

ToolFunction = Callable[..., object]
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ARGUMENT_DOC = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


class ToolError(Exception):
    """A tool cannot do what the policy asked; the policy is told why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function the policy may call."""

    name: str
    function: ToolFunction
    schema: dict[str, JsonValue]
    """The tool in OpenAI form: name, description and JSON schema of its arguments."""
    arguments: type[BaseModel]

    def read_arguments(self, text: str) -> dict[str, Any]:
        """Check the arguments the policy wrote; raises ToolError saying what is wrong."""
        try:
            checked = self.arguments.model_validate_json(text or "{}")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in problem['loc']) or 'arguments'}: {problem['msg']}"
                for problem in error.errors()
            )
            raise ToolError(f"wrong arguments for {self.name}: {problems}") from None
        return {name: getattr(checked, name) for name in checked.model_fields_set}


def tool_from(function: ToolFunction) -> Tool:
    """Make a tool of `function`: its name, docstring and typed parameters are what the policy sees.

    The docstring's first paragraph describes it; an `Args:` section describes its parameters.
    """
    name = getattr(function, "__name__", "")
    doc = inspect.getdoc(function) or ""
    if not name.isidentifier() or not doc:
        raise EnvironmentLoadError(f"tool {function!r} needs a name and a docstring")
    described = _argument_docs(doc)
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EnvironmentLoadError(f"tool {name}: *args and **kwargs have no schema")
        if parameter.name not in hints:
            raise EnvironmentLoadError(f"tool {name}: parameter {parameter.name} needs a type")
        default = ... if parameter.default is parameter.empty else parameter.default
        about = described.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=about))
    arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema: dict[str, JsonValue] = {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(doc.split("\n\n", 1)[0].split()),
            "parameters": _without_titles(arguments.model_json_schema()),
        },
    }
    return Tool(name=name, function=function, schema=schema, arguments=arguments)


def tagged_calls(text: str) -> list[ToolCall]:
    """Return the calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A tag that holds no such object is a call of the tool named "", so that the policy is told.
    """
    calls: list[ToolCall] = []
    for index, body in enumerate(_TAGGED.findall(text)):
        name, arguments = "", "{}"
        try:
            found: object = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            written = cast(dict[str, object], found)
            name = str(written.get("name", ""))
            arguments = json.dumps(written.get("arguments", {}))
        calls.append(ToolCall(id=f"call_{index}", name=name, arguments=arguments))
    return calls


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Return the text that tells a model without native tool calls what it may call."""
    schemas = "\n".join(json.dumps(tool.schema) for tool in tools)
    return (
        f"You may call these tools:\n{schemas}\n\n"
        'To call one, write <tool_call>{"name": "...", "arguments": {...}}</tool_call>. '
        "Answer without a call when you are done."
    )


def _argument_docs(doc: str) -> dict[str, str]:
    _, _, section = doc.partition("\nArgs:\n")
    found: dict[str, str] = {}
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        match = _ARGUMENT_DOC.match(line)
        if match:
            found[match[1]] = match[2].strip()
    return found


def _without_titles(schema: JsonValue) -> JsonValue:
    """Drop pydantic's generated titles, but not a property that is called title."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    return schema
