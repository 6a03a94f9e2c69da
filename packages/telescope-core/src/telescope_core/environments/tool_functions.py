"""Turn Python functions into tools: `@tool`, schemas from docstrings, checked arguments."""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import (
    Annotated,
    Any,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)
from urllib.parse import unquote

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from telescope_core.base.code_places import called_at, require_known, require_method
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.images import message_of, why_unusable
from telescope_core.base.types import Image, JsonValue, Message
from telescope_core.environments.building import is_number
from telescope_core.environments.episode import Episode
from telescope_core.environments.hooks import marked, require_first
from telescope_core.environments.running import noted, noting
from telescope_core.environments.tool_threads import DaemonThreads
from telescope_core.parsers.texts import NO_NUMBER, place_of_truth_value

ToolFunction = Callable[..., object]
Method = TypeVar("Method", bound=ToolFunction)
_MARK = "__telescope_tool__"


class ToolError(Exception):
    """Raise this in a tool that cannot do what the policy asked; the policy gets the message."""


class BadArgumentsError(ToolError):
    """The policy's arguments do not fit the tool's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMark:
    """The arguments of `@tool` on a function."""

    timeout_s: float | None
    """Seconds that a call may take; None = the environment's `tool_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the policy may call."""

    name: str
    schema: dict[str, JsonValue]
    """OpenAI form of the tool: its name, description and the JSON schema of its arguments."""
    run: Callable[[str, Episode[Any]], Awaitable[str | Message]]
    """Takes the arguments as JSON text; raises ToolError for a mistake of the policy. The result is
    text, or a message with pictures."""
    timeout_s: float | None = None
    """Seconds that a call may take; None = the environment's `tool_timeout_s`."""
    origin: str = ""
    """Place in which the tool is defined, for messages."""


@overload
def tool(function: Method, /) -> Method: ...
@overload
def tool(*, timeout_s: float | None = None) -> Callable[[Method], Method]: ...
def tool(
    function: Method | None = None,
    /,
    *more: object,
    timeout_s: float | None = None,
    **unknown: object,
) -> Method | Callable[[Method], Method]:
    """Let the policy call this method of a ToolEnvironment.

    `timeout_s` is the time limit of a call in seconds; None means the environment's
    `tool_timeout_s`. On a function that `tools` returns, the decorator only sets that limit.
    """
    require_known("@tool", more, unknown, ("timeout_s",))
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
        raise EnvironmentLoadError(
            f"{called_at()}: @tool: timeout_s must be a number above 0 s, got {timeout_s!r}; leave "
            "it out to use the environment's tool_timeout_s"
        )
    mark = ToolMark(timeout_s=timeout_s)

    def apply(inner: Method) -> Method:
        require_method(inner, "@tool")
        require_first(inner, "tool")
        setattr(inner, _MARK, mark)
        return inner

    return apply if function is None else apply(function)


def tool_methods(owner: object) -> list[ToolFunction]:
    """Return the bound methods marked with `@tool`, those of base classes first."""
    return [getattr(owner, name) for name in marked(type(owner), _MARK, ToolMark)]


def tool_from(function: ToolFunction, threads: DaemonThreads | None = None) -> Tool:
    """Make a tool of `function`; the model sees its name, docstring and typed parameters.

    The docstring's first paragraph describes the tool. An `Args:` section or `Annotated` types
    describe its parameters. A parameter of type Episode, or named `episode` without a type, is
    hidden from the model and gets the rollout's episode. Sync functions run in `threads`.
    """
    name = getattr(function, "__name__", "")
    place = _place(function)
    if not inspect.isroutine(function) or not name.isidentifier():
        raise EnvironmentLoadError(
            f"{place}: tool {function!r} is not a function with a name; write one with `def`"
        )
    doc = inspect.getdoc(function) or ""
    if not summary(doc):
        raise EnvironmentLoadError(
            f"{place}: tool {name} has no docstring; write one, because the model reads it"
        )
    shown, hidden = _parameters(function, name, place)
    arguments = _Arguments(name, shown, argument_docs(doc, shown), place)
    pool = threads or DaemonThreads()
    where = f"{place}: tool {name}"

    async def run(text: str, episode: Episode[Any]) -> str | Message:
        keywords = {**arguments.read(text), **dict.fromkeys(hidden, episode)}
        if inspect.iscoroutinefunction(function):
            called = cast(Awaitable[object], function(**keywords))
            return as_result(await noted(called, function, "tool"), where)

        def call() -> object:
            with noting(function, "tool"):
                return function(**keywords)

        return as_result(await pool.run(call), where)

    about: dict[str, JsonValue] = {
        "name": name,
        "description": summary(doc),
        "parameters": arguments.schema,
    }
    mark = getattr(function, _MARK, ToolMark(timeout_s=None))
    return Tool(
        name=name,
        schema={"type": "function", "function": about},
        run=run,
        timeout_s=mark.timeout_s,
        origin=place,
    )


_ADDRESS = re.compile(r"<.* at 0x[0-9a-fA-F]+>", re.DOTALL)
_PICTURES = "pictures as read_image or image_of of telescope_core.images return them"


def as_result(result: object, where: str) -> str | Message:
    """Return a result for the policy: text unchanged, pictures in a message, the rest as JSON.

    Raises EnvironmentLoadError for what the policy could not read; `where` names the tool in it.
    """
    if isinstance(result, str):
        return result
    value = result
    parts = cast(Sequence[object], value) if isinstance(value, list | tuple) else (value,)
    if _has_picture(result) and all(isinstance(part, str | Image) for part in parts):
        result = message_of("tool", *cast(Sequence[str | Image], parts))
    if isinstance(result, Message) and result.role in ("tool", "user"):
        if wrong := why_unusable(result):
            raise EnvironmentLoadError(f"{where}: in its result, {wrong}")
        return result
    if _has_picture(result):
        raise EnvironmentLoadError(
            f"{where} returned a picture inside a {type(result).__name__}; return the picture, or "
            "a list of texts and pictures"
        )

    def written(value: object) -> str:
        text = str(value)
        if _ADDRESS.fullmatch(text):
            raise EnvironmentLoadError(
                f"{where} returned {text:.80}, which says nothing to the policy; return text, "
                f"numbers, lists or dicts, and {_PICTURES}"
            )
        return text

    plain: object = to_jsonable_python(result, fallback=written)
    return json.dumps(plain, ensure_ascii=False)


def _has_picture(value: object) -> bool:
    if isinstance(value, Message):
        return bool(value.images)
    if isinstance(value, Mapping):
        value = [*cast(Mapping[object, object], value).values()]
    if isinstance(value, list | tuple):
        return any(map(_has_picture, cast(Sequence[object], value)))
    return isinstance(value, Image)


class _Arguments:
    """The parameters of one tool as a pydantic model.

    The fields of the model have generated names, because a parameter may have the name of a
    pydantic method, such as `json` or `copy`.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, tuple[Any, object]],
        described: Mapping[str, str],
        place: str,
    ) -> None:
        self._tool = name
        self._names = {f"field_{index}": parameter for index, parameter in enumerate(parameters)}
        # A default that stands in a pydantic Field is unknown to the function.
        self._without_default = {
            field
            for field, parameter in self._names.items()
            if parameters[parameter][1] is inspect.Parameter.empty
        }
        fields: dict[str, Any] = {
            field: (
                parameters[parameter][0],
                _field(parameter, *parameters[parameter], described.get(parameter)),
            )
            for field, parameter in self._names.items()
        }
        try:
            self._model: type[BaseModel] = create_model(
                name, __config__=ConfigDict(extra="forbid"), **fields
            )
            self.schema = simplified(self._model.model_json_schema())
        except (PydanticUserError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise EnvironmentLoadError(
                f"{place}: tool {name} has a parameter that JSON cannot express: {reason} Use "
                "numbers, text, lists, dicts, Literal, Enum, dataclasses or pydantic models"
            ) from None

    def read(self, text: str) -> dict[str, Any]:
        """Return the policy's validated arguments; raises BadArgumentsError for invalid ones."""
        takes = ", ".join(self._names.values()) or "no arguments"
        wrong = f"wrong arguments for {self._tool}, which takes {takes}"
        is_empty = text.strip() in ("", "null")
        try:
            checked = self._model.model_validate_json("{}" if is_empty else text)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
            raise BadArgumentsError(f"{wrong}: {problems}") from None
        place = None
        if "true" in text or "false" in text:
            taken = checked.model_dump(by_alias=True, warnings=False)
            place = place_of_truth_value(json.loads(text), taken)
        if place is not None:
            raise BadArgumentsError(
                f"{wrong}: {'.'.join(map(str, place))}: Value error, {NO_NUMBER}"
            )
        passed = checked.model_fields_set | self._without_default
        return {p: getattr(checked, field) for field, p in self._names.items() if field in passed}


def _parameters(
    function: ToolFunction, name: str, place: str
) -> tuple[dict[str, tuple[Any, object]], list[str]]:
    """Return the shown parameters as (type, default), and the names of hidden Episode ones."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise EnvironmentLoadError(
            f"{place}: tool {name} has a type that cannot be looked up: {error}; define or import "
            "it at the top of the module"
        ) from None
    shown: dict[str, tuple[Any, object]] = {}
    hidden: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EnvironmentLoadError(
                f"{place}: tool {name} takes {parameter}, which has no schema; name its parameters"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise EnvironmentLoadError(
                f"{place}: tool {name} takes {parameter.name} by position only, but tool calls "
                "pass arguments by name; remove the /"
            )
        if parameter.name not in hints and parameter.name == "episode":
            hidden.append(parameter.name)  # as in hooks, where it needs no type either
            continue
        if parameter.name not in hints:
            raise EnvironmentLoadError(
                f"{place}: parameter {parameter.name} of tool {name} has no type; annotate it, "
                f"for example {parameter.name}: str"
            )
        hint = hints[parameter.name]
        if (get_origin(hint) or hint) is Episode:
            hidden.append(parameter.name)
        elif isinstance(parameter.default, FieldInfo):
            shown[parameter.name] = (Annotated[hint, parameter.default], parameter.empty)
        else:
            shown[parameter.name] = (hint, parameter.default)
    return shown, hidden


def _field(parameter: str, hint: Any, default: object, about: str | None) -> Any:
    texts = [extra for extra in get_args(hint)[1:] if get_origin(hint) is Annotated]
    infos = [extra for extra in texts if isinstance(extra, FieldInfo)]
    text = next((extra for extra in texts if isinstance(extra, str)), about)
    keywords: dict[str, Any] = {"alias": parameter}
    if text and not any(info.description for info in infos):
        keywords["description"] = text
    if default is not inspect.Parameter.empty:
        keywords["default"] = default
    return Field(**keywords)


def _place(function: ToolFunction) -> str:
    """Return file:line of a function, or the name of its module when it has no source."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename)}:{code.co_firstlineno}"
    return str(getattr(inner, "__module__", None) or type(inner).__name__)


_SECTION = re.compile(
    r"\s*(?:(?:keyword|other)\s+)?(?:args|arguments|params|parameters)\s*(?P<colon>:?)\s*",
    re.IGNORECASE,
)
_DASHES = re.compile(r"\s*-{3,}\s*")
_NAMES = r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)"
_TYPE = reduce(lambda inner, _: rf"(?:[^()]|\({inner}\))*", range(4), "[^()]*")
"""Text with parentheses in parentheses, up to this depth."""
_GOOGLE = re.compile(rf"\s*{_NAMES}\s*(?:\({_TYPE}\)+\s*(?::+|$)|:+)(?:\s+(?P<text>.*)|\s*)")
_NUMPY = re.compile(rf"\s*{_NAMES}\s*(?::.*)?(?P<text>)")
_SPHINX = re.compile(
    r"\s*[:@](?:param|parameter|arg|argument|key|keyword|kwarg)\s+(?:[^:]*[\s*])?"
    r"(?P<names>\w+)\s*:\s*(?P<text>.*)"
)
_FIELD = re.compile(r"\s*[:@]\w+[^:]*:(?:\s|$)")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs")
_SCHEMAS = (
    *("anyOf", "oneOf", "allOf", "prefixItems", "items", "contains", "additionalProperties"),
    *("unevaluatedItems", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
)
"""Keywords that hold a schema, or a list of schemas."""
_DEFINITION = "#/$defs/"

Schema = Mapping[str, JsonValue]


def summary(doc: str) -> str:
    """Return the first paragraph of a docstring as one line, without sections and fields."""
    lines = doc.strip().splitlines()
    for number, line in enumerate(lines):
        head = _SECTION.fullmatch(line)
        if not line.strip() or _FIELD.match(line) or (head and (number or head["colon"])):
            return " ".join(" ".join(lines[:number]).split())
    return " ".join(" ".join(lines).split())


def argument_docs(doc: str, names: Collection[str]) -> dict[str, str]:
    """Return the docstring's text for each of the parameters `names` that it describes.

    Read are the sections of Google and NumPy, for keyword and other arguments too, and the fields
    of Sphinx.
    """
    found: dict[str, list[str]] = {}
    current: list[str] = []
    section: re.Pattern[str] | None = None
    edge, indent = -1, -1
    """Columns of the section's head and of its entries; -1 = not known."""
    lines = doc.splitlines()
    for number, line in enumerate(lines):
        column = len(line) - len(line.lstrip())
        is_dashed = number + 1 < len(lines) and bool(_DASHES.fullmatch(lines[number + 1]))
        head = _SECTION.fullmatch(line)
        field = _SPHINX.fullmatch(line)
        is_entry = section is _GOOGLE and column > edge
        if head and not is_entry and (is_dashed or head["colon"]):
            section, edge, indent, current = _NUMPY if is_dashed else _GOOGLE, column, -1, []
        elif is_dashed or (section is _GOOGLE and line.strip() and column <= edge):
            section, current = None, []
        elif field or _FIELD.match(line):
            section, indent, current = None, column, []
            if field:
                current = _started(found, field, names)
        elif section is None:
            # The description of a field goes on until a paragraph that is not part of it.
            if line.strip() and column <= indent and not lines[number - 1].strip():
                current = []
            current.append(line.strip())
        elif not _DASHES.fullmatch(line) and line.strip():
            indent = column if indent < 0 else indent
            entry = section.fullmatch(line) if column == indent else None
            if entry is not None:
                current = _started(found, entry, names)
            else:
                current.append(line.strip())
    told = {name: " ".join(filter(None, texts)) for name, texts in found.items()}
    return {name: text for name, text in told.items() if text}


def _started(
    found: dict[str, list[str]], entry: re.Match[str], names: Collection[str]
) -> list[str]:
    """Begin the description of an entry's parameters in `found`, and return its lines."""
    lines = [(entry["text"] or "").strip()]
    for one in entry["names"].split(","):
        if (name := one.strip(" *")) in names:
            found.setdefault(name, lines)
    return lines


def simplified(schema: Schema) -> dict[str, JsonValue]:
    """Return `schema` without titles and with its references inlined.

    One that is recursive, or refers to more than whole definitions, keeps all its references.
    """
    definitions = schema.get("$defs")
    if isinstance(definitions, Mapping) and not _is_recursive(definitions):
        flat = {key: value for key, value in schema.items() if key != "$defs"}
        inlined = _rewritten(flat, definitions)
        if all(one == "#" or _is_elsewhere(one) for one in _references(inlined)):
            return cast(dict[str, JsonValue], inlined)
    return cast(dict[str, JsonValue], _rewritten(schema, {}))


def _rewritten(schema: JsonValue, definitions: Schema) -> JsonValue:
    if isinstance(schema, list):
        return [_rewritten(one, definitions) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    named = definitions.get(_definition(reference)) if isinstance(reference, str) else None
    if isinstance(named, Mapping):
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _rewritten({**named, **beside}, definitions)
    found: dict[str, JsonValue] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _rewritten(one, definitions) for name, one in value.items()}
        elif key in _SCHEMAS:
            found[key] = _rewritten(value, definitions)
        elif key == "discriminator" and definitions and isinstance(value, Mapping):
            # Its mapping names the definitions, which are inlined.
            found[key] = {name: one for name, one in value.items() if name != "mapping"}
        elif key != "title":
            found[key] = value
    return found


def _references(value: JsonValue) -> Iterator[str]:
    """Yield what the references in a schema, and in all that it holds, refer to."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key in ("$ref", "$dynamicRef") and isinstance(inner, str):
                yield inner
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _definition(reference: str) -> str:
    """Return the name of the definition that is referred to; empty = none, or a part of one."""
    path = unquote(reference)
    name = path.removeprefix(_DEFINITION)
    if name == path or "/" in name:
        return ""
    return name.replace("~1", "/").replace("~0", "~")


def _is_elsewhere(reference: str) -> bool:
    """Whether a place of the schema outside its definitions is referred to."""
    path = unquote(reference)
    return path.startswith("#/") and not path.startswith(_DEFINITION)


def _is_recursive(definitions: Schema) -> bool:
    """Return whether a definition refers to itself, directly or through others."""
    refers = {
        name: {_definition(one) for one in _references(inner)} & definitions.keys()
        for name, inner in definitions.items()
    }
    for start in refers:
        seen: set[str] = set()
        pending = [start]
        while pending:
            others = refers[pending.pop()]
            if start in others:
                return True
            pending += others - seen
            seen |= others
    return False
