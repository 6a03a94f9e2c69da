"""Settings from files and flags, merged into one validated pydantic model.

Layers are applied in this order: the model's defaults, files from left to right, then flags from
left to right. The last one wins. Tables are merged and lists are replaced. A setting is named with
its section (`[rollout] group_size`, `--rollout.group_size`) or without it, because leaf names are
unique. An unknown name, a wrong type and a value out of range each raise a ConfigError that says
where the setting is, what was expected and what was given.
"""

import json
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError

from telescope_core.config_files import read_settings_file
from telescope_core.errors import ConfigError, nearest, unknown_name
from telescope_core.records.folders import whole_file
from telescope_core.setting_problems import Problem, problems_of
from telescope_core.types import JsonValue

Schema = TypeVar("Schema", bound=BaseModel)
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    schema: type[BaseModel]
    sections: Mapping[str, type[BaseModel]]
    leaves: Mapping[str, KeyPath]
    """Leaf name -> (section, leaf), or (leaf,) for a setting outside any section."""
    tables: Mapping[str, Collection[str]]
    """Name of each list of tables, such as `environments` -> setting names of one entry."""
    foreign: Mapping[str, str]
    refused: Mapping[str, str]
    """Name -> why it is no setting there, and what to do."""

    def annotation(self, path: KeyPath) -> object:
        owner = self.sections[path[0]] if len(path) == 2 else self.schema
        return owner.model_fields[path[-1]].annotation


@dataclass(slots=True, kw_only=True)
class _Layers:
    values: dict[KeyPath, JsonValue] = field(default_factory=dict[KeyPath, JsonValue])
    origins: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    """Source of the winning value, such as `run.toml` or `flag --use_tis`."""

    def add(self, path: KeyPath, value: JsonValue, origin: str) -> None:
        self.values[path] = _merged(self.values.get(path), value)
        self.origins[path] = origin


def load_config(
    schema: type[Schema],
    files: Sequence[Path],
    flags: Sequence[str],
    *,
    foreign_names: Mapping[str, str] | None = None,
    refused_names: Mapping[str, str] | None = None,
) -> Schema:
    """Return the validated settings; raises ConfigError for anything that cannot be used.

    `foreign_names` maps the name of a setting in other systems to its name here, and
    `refused_names` the name of one that is left out on purpose to the reason.
    """
    names = _names_of(schema, foreign_names or {}, refused_names or {})
    layers = _Layers()
    for path in files:
        for key_path, value in _read_document(read_settings_file(path), str(path), names).items():
            layers.add(key_path, value, str(path))
    for key_path, value, origin in _read_flags(flags, names):
        layers.add(key_path, value, origin)
    return _validated(schema, names, layers)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split `a.toml b.toml --key value ...` into files and flags; files come first."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            return [Path(name) for name in arguments[:index]], list(arguments[index:])
    return [Path(name) for name in arguments], []


def save_resolved(config: BaseModel, path: Path) -> None:
    """Write every setting, defaults included, as JSON; the file is written atomically."""
    with whole_file(path) as temporary:
        temporary.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_resolved(schema: type[Schema], path: Path) -> Schema:
    """Read what `save_resolved` wrote."""
    try:
        return schema.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ConfigError(
            f"{path}: not a resolved configuration of this version: {error}"
        ) from None


def leaf_paths(schema: type[BaseModel]) -> dict[str, tuple[str, ...]]:
    """Return leaf name -> path for every setting; the schema must not use a leaf name twice."""
    paths: dict[str, KeyPath] = {}
    for name, info in schema.model_fields.items():
        section = _as_model(info.annotation)
        found = [(name, leaf) for leaf in section.model_fields] if section else [(name,)]
        for path in found:
            assert path[-1] not in paths, f"{path} and {paths[path[-1]]} share a leaf name"
            paths[path[-1]] = path
    return paths


def _names_of(
    schema: type[BaseModel],
    foreign: Mapping[str, str],
    refused: Mapping[str, str],
) -> _Names:
    models = {name: _as_model(info.annotation) for name, info in schema.model_fields.items()}
    sections = {name: model for name, model in models.items() if model is not None}
    fields = [pair for owner in (schema, *sections.values()) for pair in owner.model_fields.items()]
    items = {name: _item_model(info.annotation) for name, info in fields}
    return _Names(
        schema=schema,
        sections=sections,
        tables={name: item.model_fields for name, item in items.items() if item is not None},
        leaves=leaf_paths(schema),
        foreign=foreign,
        refused=refused,
    )


def _as_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _item_model(annotation: object) -> type[BaseModel] | None:
    arguments = typing.get_args(annotation)
    is_list = typing.get_origin(annotation) in (list, tuple)
    return _as_model(arguments[0]) if is_list and arguments else None


def _merged(old: JsonValue, new: JsonValue) -> JsonValue:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        both = {**old, **new}
        return {key: _merged(old.get(key), both[key]) if key in new else both[key] for key in both}
    return new


def _read_document(
    document: Mapping[str, JsonValue], origin: str, names: _Names
) -> dict[KeyPath, JsonValue]:
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
            _require_known(path, f"{origin}: {'.'.join(path)}", names)
            if path in values:
                raise ConfigError(
                    f"{origin}: {path[-1]} is set twice, at the top and in [{path[0]}]; remove one"
                )
            _require_known_items(names.annotation(path), inner, f"{origin}: {path[-1]}", names)
            values[path] = inner
    return values


def _require_known(path: KeyPath, where: str, names: _Names) -> None:
    key = path[-1]
    if names.leaves.get(key) == path:
        return
    if len(path) == 1:
        raise _unknown(key, [*names.leaves, *names.sections], where, names)
    section = path[0]
    if section not in names.sections:
        raise _unknown(section, [*names.sections, *names.leaves], where, names)
    home = names.leaves.get(key)
    if home is not None:
        place = f"in [{home[0]}]" if len(home) > 1 else "above the first [section]"
        raise ConfigError(
            f"{where}: {key!r} is a setting, but it does not belong to [{section}]; set it {place}"
        )
    close = nearest(key, names.sections[section].model_fields)
    raise _unknown(key, close or [*names.leaves, *names.sections], where, names)


def _require_known_items(annotation: object, value: JsonValue, where: str, names: _Names) -> None:
    model = _item_model(annotation)
    if model is None or not isinstance(value, Sequence) or isinstance(value, str):
        return
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            continue
        for key in item:
            if key not in model.model_fields:
                raise _unknown(key, list(model.model_fields), f"{where}[{index}].{key}", names)


def _unknown(key: str, candidates: Collection[str], where: str, names: _Names) -> ConfigError:
    here = names.foreign.get(key)
    if here is not None:
        return ConfigError(
            f"{where}: unknown setting {key!r}; here it is called {here!r} "
            f"({'.'.join(names.leaves[here])})"
        )
    if key in names.refused:
        return ConfigError(f"{where}: {key!r} is refused here: {names.refused[key]}")
    for table, fields in names.tables.items():
        if key in fields:
            return ConfigError(
                f"{where}: {key!r} is a setting of each [[{table}]] entry; set it there in a "
                "settings file"
            )
    return ConfigError(f"{where}: {unknown_name('setting', key, candidates)}")


def _read_flags(flags: Sequence[str], names: _Names) -> list[tuple[KeyPath, JsonValue, str]]:
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
        path = _flag_path(name, names)
        kinds = _plain_kinds(names.annotation(path))
        if not has_text:
            text = _next_text(flag, rest, kinds)
        value = _flag_value(text, kinds)
        _require_known_items(names.annotation(path), value, f"flag --{name}", names)
        found.append((path, value, f"flag --{name}"))
    return found


def _flag_path(name: str, names: _Names) -> KeyPath:
    head, *rest = name.replace("-", "_").split(".")
    path = (head, *rest) if rest else names.leaves.get(head, (head,))
    is_inside_value = bool(rest) and head in names.leaves and head not in names.sections
    if len(rest) > 1 or is_inside_value:
        raise ConfigError(
            f"flag --{name}: expected --key or --section.key; pass a list or table as a whole, "
            f"in JSON: --{head} '[...]'"
        )
    _require_known(path, f"flag --{name}", names)
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


def _flag_value(text: str, kinds: set[object]) -> JsonValue:
    if type(None) in kinds and text == "null":
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if str in kinds or Path in kinds:
        return text
    try:
        return cast(JsonValue, json.loads(text))
    except json.JSONDecodeError:
        return text


def _validated(schema: type[Schema], names: _Names, layers: _Layers) -> Schema:
    document: dict[str, Any] = {section: {} for section in names.sections}
    for path, value in layers.values.items():
        target = document[path[0]] if len(path) == 2 else document
        target[path[-1]] = value
    try:
        return schema.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        lines = [_describe(problem, names, layers) for problem in problems_of(error, document)]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _describe(problem: Problem, names: _Names, layers: _Layers) -> str:
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
        return f"{origin}: {dotted} is required; add {location[-1]} there"
    return f"{origin or 'settings'}: {dotted}: {problem.message}, got {problem.got}"
