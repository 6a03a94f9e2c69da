"""Settings from files and flags, merged into one validated pydantic model.

Layers are applied in this order: the model's defaults, files from left to right, then flags from
left to right. The last one wins. Tables are merged and lists are replaced. A setting is named with
its section (`[rollout] group_size`, `--rollout.group_size`) or without it, because leaf names are
unique. An unknown name, a wrong type and a value out of range each raise a ConfigError that says
where the setting is, what was expected and what was given.
"""

import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError

from telescope_core.base.errors import ConfigError, nearest
from telescope_core.base.json_text import read_json
from telescope_core.base.secret_names import without_secrets
from telescope_core.base.setting_problems import SettingProblem, problems_of
from telescope_core.base.types import JsonValue
from telescope_core.records.folders import whole_file
from telescope_core.settings.names import (
    FEW,
    KeyPath,
    Names,
    Unknown,
    as_model,
    item_model,
    names_of,
    paths_below,
    refusal,
)

Schema = TypeVar("Schema", bound=BaseModel)


class RecordedSettings(NamedTuple):
    """Settings in place of a file, such as those with which a run was started."""

    origin: str
    """Name for errors, in place of a file name."""
    settings: Mapping[str, JsonValue]


@dataclass(slots=True, kw_only=True)
class _Layers:
    values: dict[KeyPath, JsonValue] = field(default_factory=dict[KeyPath, JsonValue])
    origins: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Source of the winning value, such as `run.toml` or `flag --use_tis`."""

    def add(self, path: KeyPath, value: JsonValue, origin: str) -> None:
        self.values[path] = merged(self.values.get(path), value)
        self.origins[path] = origin


def load_config(
    schema: type[Schema],
    files: Sequence[Path | RecordedSettings],
    flags: Sequence[str],
    *,
    foreign_names: Mapping[str, str] | None = None,
    refused_names: Mapping[str, str] | None = None,
) -> Schema:
    """Return the validated settings; raises ConfigError for anything that cannot be used.

    `foreign_names` maps the name of a setting in other systems to its name here, and
    `refused_names` the name of one that is left out on purpose to the reason; `Names` says how.
    """
    names = names_of(
        schema, leaf_paths(schema), foreign=foreign_names or {}, refused=refused_names or {}
    )
    layers, unknown = _Layers(), list[Unknown]()
    for one in files:
        if isinstance(one, RecordedSettings):
            origin, document = one
        elif "=" in one.name and not one.exists():
            unknown.append(_assignment(str(one), names))
            continue
        else:
            origin, document = str(one), read_settings_file(one)
        for key_path, value in _read_document(document, origin, names, unknown).items():
            layers.add(key_path, value, origin)
    for key_path, value, origin in _read_flags(flags, names, unknown):
        layers.add(key_path, value, origin)
    if unknown:
        few = unknown if len(unknown) <= FEW else ()
        placed = [one._replace(line=line_text(one.origin, one.place)) for one in few]
        raise refusal(placed or unknown, names)
    return _validated(schema, names, layers)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split `a.toml b.toml --key value ...` into files and flags; files come first."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            return [Path(name) for name in arguments[:index]], list(arguments[index:])
    return [Path(name) for name in arguments], []


def save_resolved(config: BaseModel, path: Path) -> None:
    """Write every setting but secrets, with defaults, as JSON; the file is written atomically."""
    settings = without_secrets(config.model_dump(mode="json"))
    with whole_file(path) as temporary:
        temporary.write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")


def leaf_paths(schema: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Return leaf name -> path for every setting; the schema must not use a leaf name twice."""
    paths: dict[str, KeyPath] = {}
    for name, info in schema.model_fields.items():
        section = as_model(info.annotation)
        found = [(name, leaf) for leaf in section.model_fields] if section else [(name,)]
        for path in found:
            assert path[-1] not in paths, f"{path} and {paths[path[-1]]} share a leaf name"
            paths[path[-1]] = path
    return paths


def merged(old: JsonValue, new: JsonValue) -> JsonValue:
    """Return `new` over `old`: the fields of tables one by one, and other values as a whole."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        both = {**old, **new}
        return {key: merged(old.get(key), both[key]) if key in new else both[key] for key in both}
    return new


def _read_document(
    document: Mapping[str, JsonValue], origin: str, names: Names, unknown: list[Unknown]
) -> dict[KeyPath, JsonValue]:
    """Return the settings in a file; unknown names are added to `unknown`."""
    values: dict[KeyPath, JsonValue] = {}
    for key, value in document.items():
        if key in names.sections and (isinstance(value, Mapping) or key not in names.leaves):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{origin}: {key}: expected a table [{key}] of settings, got {value!r}"
                )
            found = {(key, leaf): inner for leaf, inner in value.items()}
        else:
            found = {names.leaves.get(key, (key,)): value}
        for path, inner in found.items():
            is_below = isinstance(inner, Mapping) and names.knows(path)
            if not names.knows(path) or (is_below and not names.takes_tables(path)):
                below = paths_below(path, inner)
                unknown += (Unknown(origin, ".".join(one), one) for one in below)
                continue
            if path in values:
                raise ConfigError(
                    f"{origin}: {path[-1]} is set twice, at the top and in [{path[0]}]; remove one"
                )
            unknown += _unknown_in_items(names.annotation(path), inner, origin, path[-1])
            values[path] = inner
    return values


def _unknown_in_items(
    annotation: object, value: JsonValue, origin: str, name: str
) -> Iterator[Unknown]:
    model = item_model(annotation)
    if model is None or not isinstance(value, Sequence) or isinstance(value, str):
        return
    for index, item in enumerate(value):
        for key in item if isinstance(item, Mapping) else ():
            if key not in model.model_fields:
                place = f"{name}[{index}].{key}"
                yield Unknown(origin, place, (name, key), list(model.model_fields))


def _read_flags(
    flags: Sequence[str], names: Names, unknown: list[Unknown]
) -> list[tuple[KeyPath, JsonValue, str]]:
    """Return the settings in flags; unknown names are added to `unknown`, with their values."""
    found: list[tuple[KeyPath, JsonValue, str]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(
                f"unexpected argument {flag!r}; expected --key value or --section.key value, "
                "with all settings files before the first flag"
            )
        name, has_text, text = flag[2:].partition("=")
        origin = f"flag --{name}"
        path = _flag_path(name, names)
        if not names.knows(path):
            # --no-key and --no-section.key turn a boolean off.
            off = _flag_path(re.sub("^no[-_]", "", name), names)
            if names.knows(off) and bool in _plain_kinds(names.annotation(off)) and not has_text:
                found.append((off, False, origin))
                continue
            unknown.append(Unknown(origin, "", path))
            while not has_text and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        kinds = _plain_kinds(names.annotation(path))
        if not has_text:
            text = _next_text(flag, rest, kinds)
        value = _flag_value(text, kinds, origin)
        unknown += _unknown_in_items(names.annotation(path), value, origin, path[-1])
        found.append((path, value, origin))
    return found


def _assignment(text: str, names: Names) -> Unknown:
    """Return the name in `name=value`, the notation of other systems; settings here are flags."""
    name = text.lstrip("+~").partition("=")[0]
    path = _flag_path(name, names)
    if names.knows(path):
        raise ConfigError(f"unexpected argument {text!r}; a setting is written --{name} VALUE")
    return Unknown(f"argument {text}", "", path)


def _flag_path(name: str, names: Names) -> KeyPath:
    head, *rest = name.replace("-", "_").split(".")
    path = (head, *rest) if rest else names.leaves.get(head, (head,))
    # A part of a list or table has no flag of its own.
    depth = 2 if head in names.sections else 1
    whole = path[:2] if depth == 2 else names.leaves.get(head, path)
    if len(rest) >= depth and names.knows(whole) and names.takes_tables(whole):
        raise ConfigError(
            f"flag --{name}: expected --key or --section.key; pass a list or table as a whole, "
            f"in JSON: --{head} '[...]'"
        )
    return path


def _next_text(flag: str, rest: list[str], kinds: set[object]) -> str:
    following = rest[0] if rest else None
    if bool in kinds:
        has_other_values = bool(kinds - {bool, type(None)})
        is_value = following is not None and (
            following.lower() in ("true", "false")
            or (has_other_values and not following.startswith("--"))
        )
        return rest.pop(0) if is_value else "true"
    if following is None or following.startswith("--"):
        raise ConfigError(f"flag {flag}: expected a value after the flag; write {flag} VALUE")
    return rest.pop(0)


def _plain_kinds(annotation: object) -> set[object]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(annotation) for kind in _plain_kinds(part)}
    if origin is Literal:
        return {type(value) for value in typing.get_args(annotation)}
    return {origin or annotation}


def _flag_value(text: str, kinds: set[object], origin: str) -> JsonValue:
    if type(None) in kinds and text == "null":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if str in kinds or Path in kinds:
        return text
    try:
        return read_json(text)
    except ValueError as error:
        if text.startswith(("[", "{")):
            raise ConfigError(
                f"{origin}: {text!r} begins like JSON but is not valid JSON ({error}); check its "
                "quotes"
            ) from None
        return text


def _validated(schema: type[Schema], names: Names, layers: _Layers) -> Schema:
    document: dict[str, Any] = {section: {} for section in names.sections}
    for path, value in layers.values.items():
        target = document[path[0]] if len(path) == 2 else document
        target[path[-1]] = value
    try:
        return schema.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        lines = [_describe(problem, names, layers) for problem in problems_of(error, document)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _describe(problem: SettingProblem, names: Names, layers: _Layers) -> str:
    location = problem.place
    if not location:
        return f"settings: {problem.message}"
    length = 2 if location[0] in names.sections else 1
    path = tuple(str(part) for part in location[:length])
    dotted = path[0] + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:]
    )
    origin = layers.origins.get(path)
    if problem.is_missing:
        if origin is None:
            return f"{dotted} is required; set it in a file, or pass --{path[-1]} VALUE"
        table = dotted.rpartition(".")[0]
        return f"{origin}: {dotted} is required; add {location[-1]} there{line_text(origin, table)}"
    line = line_text(origin or "", dotted)
    return f"{origin or 'settings'}: {dotted}: {problem.message}, got {problem.got}{line}"


def line_text(origin: str, dotted: str) -> str:
    """Return ` (line N)` of a setting such as `evals[0].name` in a file; empty if it is not known.

    It is the line where the setting begins.
    """
    path = Path(origin)
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return ""
    text = _read_text(path)
    parts = [int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", dotted)]
    # A setting may stand without its section, and a list in a section of the same name.
    forms = [form for form in (parts, parts[1:], [*parts[:1], *parts]) if form]
    if path.suffix.lower() == ".toml":
        number = _toml_line(text, forms)
    else:
        root = cast(Any, yaml.compose(text, Loader=_StrictLoader))
        marks = (_yaml_mark(root, form) for form in forms)
        mark = next((mark for mark in marks if mark is not None), None)
        # Lines as editors count them: those of the mark also end at U+2028 and the like.
        number = None if mark is None else text.count("\n", 0, mark.index) + 1
    return "" if number is None else f" (line {number})"


def _yaml_mark(node: Any, parts: Sequence[str | int]) -> Any:
    """Return the mark where the setting at `parts` below `node` begins; None = there is none."""
    mark = None
    for part in parts:
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            found = (node.value[part],) * 2 if part < len(node.value) else None
        else:
            return None
        if found is None:
            return None
        mark, node = found[0].start_mark, found[1]
    return mark


def _toml_line(text: str, forms: Sequence[Sequence[str | int]]) -> int | None:
    """Return the line where the setting begins, at the first of the `forms` that is there.

    It is in the shortest beginning of the file that has the setting, which is searched by halves.
    Of a value of several lines, one that ends with an item of a list is a beginning too.
    """
    lines = text.split("\n")
    form = next((form for form in forms if _begins(lines, form)), None)
    if form is None:
        return None
    # The first lines up to `low` do not have it, those up to `high` do, and of those in between the
    # ones from `top` on are no beginnings.
    low, top, high = 0, len(lines), len(lines)
    while low + 1 < top:
        number = middle = (low + top) // 2
        found = None
        while number < top and (found := _begins(lines[:number], form)) is None:
            number += 1
        if found is False:
            low = number
        else:
            top, high = middle, high if found is None else number
    # What begins on an earlier line is this setting, or only the item that holds it.
    key = lines[low].partition("=")[0].strip().rpartition(".")[2].strip("\"' ")
    return low + 1 if low + 1 == high or key == form[-1] else None


def _begins(lines: Sequence[str], form: Sequence[str | int]) -> bool | None:
    """Return whether the first lines of a file have a setting; None if they end within a value."""
    table: Any = None
    for end in ("]", ""):
        with suppress(tomllib.TOMLDecodeError):
            table = tomllib.loads("\n".join([*lines, end]))
    if table is None:
        return None
    with suppress(LookupError, TypeError):
        for part in form:
            table = table[part]
        return True
    return False


SUFFIXES = (".toml", ".yaml", ".yml")


def read_settings_file(path: Path) -> dict[str, JsonValue]:
    """Return the table in `path`; raises ConfigError that says what is wrong with the file."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{path}: expected a settings file ending in {', '.join(SUFFIXES)}; "
            "rename or convert it"
        )
    text = _read_text(path)
    try:
        if path.suffix.lower() == ".toml":
            table = tomllib.loads(text)
        else:
            table = yaml.load(text, Loader=_StrictLoader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be parsed: {error}") from None
    except RecursionError:
        raise ConfigError(_too_deep(path)) from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path}: expected a table of settings at the top, got {type(table).__name__}"
        )
    try:
        return cast(dict[str, JsonValue], _check_plain(cast(object, table), path, ""))
    except RecursionError:
        raise ConfigError(_too_deep(path)) from None


def _too_deep(path: Path) -> str:
    return (
        f"{path}: a value contains itself, or is nested too deeply; write settings out, without "
        "YAML's aliases to what they are part of"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such settings file{_similar_files(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text ({error}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    names = [entry.name for entry in path.parent.iterdir() if entry.suffix.lower() in SUFFIXES]
    close = nearest(path.name, names)
    return f"; did you mean {' or '.join(str(path.parent / name) for name in close)}?" * bool(close)


def _check_plain(value: object, path: Path, where: str) -> JsonValue:
    if isinstance(value, dict):
        table: dict[str, JsonValue] = {}
        for key, inner in cast(dict[object, object], value).items():
            if not isinstance(key, str):
                raise ConfigError(f"{path}: {where or 'the top'}: keys must be text, got {key!r}")
            table[key] = _check_plain(inner, path, f"{where}.{key}".lstrip("."))
        return table
    if isinstance(value, list):
        items = cast(list[object], value)
        return [_check_plain(item, path, f"{where}[{i}]") for i, item in enumerate(items)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{path}: {where}: expected text, a number, true or false, a list or a table, "
        f"got {type(value).__name__} {value}; put it in quotes"
    )


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and no duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Build a table; a key given twice is an error that names its line."""
        seen: set[tuple[str, str]] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                key = (key_node.tag, str(key_node.value))
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise yaml.YAMLError(f"{key[1]!r} is given twice (again on line {line})")
                seen.add(key)
        return super().construct_mapping(node, deep)


def _add_scalar(tag: str, pattern: str, first: str) -> None:
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first)
    )


_StrictLoader.yaml_implicit_resolvers = {}
_add_scalar("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_add_scalar("null", r"^(?:~|null|Null|NULL)$", "~nN")
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])
_add_scalar("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789")
_add_scalar(
    "float",
    r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$",
    "-+.0123456789",
)
_add_scalar("merge", r"^<<$", "<")
