"""From Python functions to tools: `@tool`, OpenAI schemas, checked arguments, time limits."""

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from telescope_core.environments.episode import Episode
from telescope_core.environments.tool_schema import argument_docs, simplified, summary
from telescope_core.environments.tool_threads import DaemonThreads
from telescope_core.errors import EnvironmentLoadError
from telescope_core.types import JsonValue

ToolFunction = Callable[..., object]
Method = TypeVar("Method", bound=ToolFunction)
_MARK = "__telescope_tool__"


class ToolError(Exception):
    """A tool cannot do what the policy asked; the policy is told why."""


class BadArgumentsError(ToolError):
    """The policy's arguments do not fit the tool's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMark:
    """What `@tool` says of a function."""

    timeout_s: float | None
    """None = the environment's `tool_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something the policy may call."""

    name: str
    schema: dict[str, JsonValue]
    """In OpenAI form: name, description and JSON schema of its arguments."""
    run: Callable[[str, Episode], Awaitable[str]]
    """Takes the arguments as JSON text. Raises ToolError for what the policy did wrong."""
    timeout_s: float | None = None
    """None = the environment's `tool_timeout_s`."""
    origin: str = ""
    """Where it is defined, for messages."""


@overload
def tool(function: Method, /) -> Method: ...
@overload
def tool(*, timeout_s: float | None = None) -> Callable[[Method], Method]: ...
def tool(
    function: Method | None = None, /, *, timeout_s: float | None = None
) -> Method | Callable[[Method], Method]:
    """Let the policy call this method of a ToolEnvironment; on a function, set its time limit."""
    if timeout_s is not None and timeout_s <= 0:
        raise EnvironmentLoadError(
            f"@tool: timeout_s must be above 0 s, got {timeout_s:g}; leave it out for the "
            "environment's tool_timeout_s"
        )
    mark = ToolMark(timeout_s=timeout_s)

    def apply(inner: Method) -> Method:
        setattr(inner, _MARK, mark)
        return inner

    return apply if function is None else apply(function)


def tool_methods(owner: object) -> list[ToolFunction]:
    """Return the bound methods that `@tool` marks, those of base classes first."""
    names: dict[str, bool] = {}
    for cls in reversed(type(owner).__mro__):
        names.update({name: hasattr(member, _MARK) for name, member in vars(cls).items()})
    return [getattr(owner, name) for name, is_tool in names.items() if is_tool]


def tool_from(function: ToolFunction, threads: DaemonThreads | None = None) -> Tool:
    """Make a tool of `function`: its name, docstring and typed parameters are what the model sees.

    The docstring's first paragraph describes it; `Args:` and `Annotated` describe its parameters.
    A parameter of type Episode is not shown: it gets the rollout's. Sync functions run in
    `threads`.
    """
    name = getattr(function, "__name__", "")
    place = _place(function)
    if not inspect.isroutine(function) or not name.isidentifier():
        raise EnvironmentLoadError(
            f"{place}: tool {function!r} is no function with a name; write one with `def`"
        )
    doc = inspect.getdoc(function) or ""
    if not summary(doc):
        raise EnvironmentLoadError(
            f"{place}: tool {name} has no docstring; write one: it is what the model reads of it"
        )
    shown, hidden = _parameters(function, name, place)
    arguments = _Arguments(name, shown, argument_docs(doc), place)
    pool = threads or DaemonThreads()

    async def run(text: str, episode: Episode) -> str:
        keywords = {**arguments.read(text), **dict.fromkeys(hidden, episode)}
        if inspect.iscoroutinefunction(function):
            return as_text(await cast(Awaitable[object], function(**keywords)))
        return as_text(await pool.run(lambda: function(**keywords)))

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


def as_text(result: object) -> str:
    """Return what the policy reads of a result: text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    plain: object = to_jsonable_python(result, fallback=str)
    return json.dumps(plain, ensure_ascii=False)


class _Arguments:
    """The parameters of one tool as a pydantic model.

    Its fields have names of their own, because a parameter may be called like a method of the
    model, such as `json` or `copy`.
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
        """Return what the policy wrote, checked; raises BadArgumentsError saying what is wrong."""
        try:
            checked = self._model.model_validate_json(text or "{}")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
            takes = ", ".join(self._names.values()) or "no arguments"
            raise BadArgumentsError(
                f"wrong arguments for {self._tool}, which takes {takes}: {problems}"
            ) from None
        given = checked.model_fields_set
        return {p: getattr(checked, field) for field, p in self._names.items() if field in given}


def _parameters(
    function: ToolFunction, name: str, place: str
) -> tuple[dict[str, tuple[Any, object]], list[str]]:
    """Return the shown parameters as (type, default), and the names of those for the episode."""
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
                f"{place}: tool {name} takes {parameter.name} by position only, but calls name "
                "their arguments; remove the /"
            )
        if parameter.name not in hints:
            raise EnvironmentLoadError(
                f"{place}: parameter {parameter.name} of tool {name} has no type; annotate it, "
                f"for instance {parameter.name}: str"
            )
        hint = hints[parameter.name]
        if isinstance(hint, type) and issubclass(hint, Episode):
            hidden.append(parameter.name)
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
    return Field(... if default is inspect.Parameter.empty else default, **keywords)


def _place(function: ToolFunction) -> str:
    """Return file:line of a function, or its module where there is no source."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename)}:{code.co_firstlineno}"
    return str(getattr(inner, "__module__", None) or type(inner).__name__)
