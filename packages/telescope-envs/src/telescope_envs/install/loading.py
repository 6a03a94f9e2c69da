"""Load an environment in its own process, to read its declarations or to test it.

Every interpreter runs one program for this: `declare.py`. The environment's code gets no token, no
home folder, and only the harmless variables of this process.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from msgspec import UNSET

from telescope_core.base.errors import EnvironmentLoadError, RegistryError
from telescope_envs.install.packages import missing_requirements
from telescope_envs.processes.running import last_line, passed_on, printed_table, run_program
from telescope_envs.records.links import write_link
from telescope_envs.records.projects import LinkedProject, read_project
from telescope_envs.records.release import COMPUTED_DEFAULT, Release, Setting
from telescope_envs.rules.wheel import WheelContents

Question = Literal["built", "schema", "declarations", "declared", "task_files"]
"""A function of `declare.py`."""
_PROGRAM = str(Path(__file__).with_name("declare.py"))
_LIMITS_S = {
    "built": 300.0,
    "schema": 60.0,
    "declarations": 120.0,
    "declared": 120.0,
    "task_files": 300.0,
}
"""Time limit; an environment of a framework may read its data while it is built."""
_ABSENT = object()
_DECLARED = (
    *("config_schema", "config_schema_sha256", "splits", "reward", "reward_weights"),
    *("network", "secrets"),
)


def asked(
    question: Question,
    factory: str,
    *,
    interpreter: str | Sequence[str] = sys.executable,
    search_path: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    what: str,
) -> dict[str, Any]:
    """Return the answer of the environment `factory`, imported by `interpreter`, to `question`.

    `interpreter` may include options. By default it can import what this process can, except from
    the working directory and the user's own packages, and it writes no byte code beside what it
    imports. `variables` are those that it gets besides.
    Raises EnvironmentLoadError, which begins with `what`, if it cannot be loaded in time.
    """
    limit_s = _LIMITS_S[question]
    given = json.dumps(dict(settings or {}))
    started = (interpreter, "-P", "-s", "-B") if isinstance(interpreter, str) else interpreter
    done = run_program(
        [*started, _PROGRAM, question, factory, given, *search_path],
        environ={**passed_on(), **(variables or {})},
        limit_s=limit_s,
        late=f"{what}: it did not load within {limit_s:g} s; look at what its module "
        "does when it is imported, and its environment when it is made",
    )
    if done.returncode:
        failed = "exported" if question == "task_files" else "loaded"
        raise EnvironmentLoadError(f"{what} cannot be {failed}: {last_line(done)}")
    return printed_table(done, what=what, keys=_DECLARED if question.startswith("decl") else ())


def describe_wheel(
    contents: WheelContents, *, counts_examples: bool = True, interpreter: str = sys.executable
) -> dict[str, Any]:
    """Return the declarations of the environment in an inspected wheel.

    Counting the examples of its splits may load datasets; without it each number is None.

    This runs the wheel's code in a process of `interpreter`, which has its dependencies. It is
    unpacked first, as its code may read files of its own package. Raises EnvironmentLoadError if it
    cannot be loaded.
    """
    question: Question = "declared" if counts_examples else "declarations"
    what = f"{contents.module}-{contents.version}-py3-none-any.whl"
    with tempfile.TemporaryDirectory(prefix="telescope-wheel-") as unpacked:
        for path, data in contents.files.items():
            target = Path(unpacked, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        about = asked(
            question,
            contents.factory,
            interpreter=interpreter,
            search_path=(unpacked,),
            what=what,
        )
    return about if counts_examples else {**about, "splits": dict.fromkeys(about["splits"])}


def probe(python: Path, release: Release) -> None:
    """Load `release` with `python`, and compare its declarations with its record.

    Raises EnvironmentLoadError if it cannot be loaded, RegistryError if the declarations differ.
    """
    what = f"{release.id} in its own virtual environment"
    # With nothing but its own packages, as nobody has them anywhere else.
    isolated = (str(python), "-I", "-B")
    declared = asked("declarations", release.factory, interpreter=isolated, what=what)
    # Not the schema of settings, whose text differs between versions of pydantic.
    recorded: dict[str, object] = {
        "splits": sorted(release.splits),
        "reward": release.reward.as_table(),
        "network": release.network,
        "secrets": sorted(release.secrets),
    }
    if release.reward_weights is not UNSET:
        recorded["reward_weights"] = release.reward_weights
    for field, expected in recorded.items():
        if declared[field] != expected:
            raise RegistryError(
                f"{release.id} {release.version}: its code declares {field} "
                f"{declared[field]!r}, but the registry says {expected!r}; do not use it, and tell "
                "the registry's owner"
            )


def link(folder: Path) -> LinkedProject:
    """Link the project in `folder` after checking that it is valid and loads in this Python."""
    project = read_project(folder)
    missing = missing_requirements(project.requires_dist)
    if missing:
        wanted = " ".join(f"'{requirement}'" for requirement in missing)
        raise EnvironmentLoadError(
            f"{project.id} needs {', '.join(missing)}, which this Python does not have; a linked "
            f"environment runs in this Python. Run: {sys.executable} -m uv pip install {wanted}"
        )
    what = f"nothing was linked: {project.id} in {project.folder}"
    asked("built", project.factory, search_path=(str(project.source),), what=what)
    write_link(project)
    return project


def declared_settings(
    interpreter: str, factory: str, search_path: tuple[str, ...] = ()
) -> list[Setting]:
    """Return the settings of `factory`; its code is imported by `interpreter`, not here."""
    found = asked("schema", factory, interpreter=interpreter, search_path=search_path, what=factory)
    return settings_in(found)


def settings_in(schema: Mapping[str, Any]) -> list[Setting]:
    """Return the settings that a JSON schema describes; tables become dotted names."""
    tables = schema.get("$defs", {})
    # A table that holds itself is among the named ones, even at the top.
    top = tables.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return list(_settings(top, tables, {}))


def _settings(
    schema: Mapping[str, Any],
    tables: Mapping[str, Any],
    defaults: Mapping[str, Any],
    prefix: str = "",
    within: tuple[Mapping[str, Any], ...] = (),
) -> Iterator[Setting]:
    """Yield the settings of one table; `defaults` are those of the field that holds the table."""
    within = (*within, schema)
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        default = defaults.get(name, field.get("default", _ABSENT))
        inner = _table_of(field, tables)
        # A table that holds itself has no end; what is in it is listed once.
        if inner is not None and not any(inner is one for one in within):
            chosen = cast(Mapping[str, Any], default if isinstance(default, dict) else {})
            yield from _settings(inner, tables, chosen, f"{prefix}{name}.", within)
            continue
        # Not in the schema if it is made from other settings, or cannot be written as JSON.
        text = json.dumps(default) if default is not _ABSENT else COMPUTED_DEFAULT
        yield Setting(
            name=f"{prefix}{name}",
            type=_type_of(field, tables),
            default="" if name in required and name not in defaults else text,
            help=" ".join(str(field.get("description", "")).split()),
        )


def _table_of(field: Mapping[str, Any], tables: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the table in `field`, even if it may be null; None if it is no table."""
    for option in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        named = tables.get(str(option.get("$ref", "")).rpartition("/")[2])
        if named is not None and "properties" in named:
            return cast(Mapping[str, Any], named)
    return None


def _type_of(
    field: Mapping[str, Any], tables: Mapping[str, Any], within: tuple[str, ...] = ()
) -> str:
    if "$ref" in field:
        name = str(field["$ref"]).rpartition("/")[2]
        if name in within:
            return name
        return _type_of(tables.get(name, {}), tables, (*within, name))
    options = field.get("anyOf") or field.get("allOf")
    if options:
        return " or ".join(_type_of(option, tables, within) for option in options)
    if "enum" in field:
        return " or ".join(json.dumps(value) for value in field["enum"])
    if "const" in field:
        return json.dumps(field["const"])
    kind = str(field.get("type", "any"))
    items = field.get("items")
    if kind == "array" and items:
        return f"list of {_type_of(items, tables, within)}"
    names = {"string": "text", "number": "number", "boolean": "true or false", "object": "table"}
    return names.get(kind, kind) + _limits(field)


def _limits(field: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return f" {' and '.join(found)}" if found else ""
