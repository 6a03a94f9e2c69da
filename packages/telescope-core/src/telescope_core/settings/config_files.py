"""Read TOML and YAML settings files strictly into plain tables.

YAML scalars follow version 1.2: `yes`, `on` and `12:30` are text, and `1e-6` is a number.
Giving a key twice in one table is an error in both formats.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, cast

import yaml

from telescope_core.base.errors import ConfigError, nearest
from telescope_core.base.types import JsonValue

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
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(
            f"{path}: expected a table of settings at the top, got {type(table).__name__}"
        )
    return cast(dict[str, JsonValue], _check_plain(cast(object, table), path, ""))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
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
