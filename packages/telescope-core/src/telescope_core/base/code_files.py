"""The files that the code of an environment consists of, found without running it.

They are the module of its class, the modules that it imports from the same folder or from packages
in editable mode, and data files named in these: beside them, or in the environment's settings.
Packages from wheels, and Telescope, are identified by their versions. Computed file names are not
found, except f-strings such as f"data/{split}.jsonl".
"""

import ast
import glob
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, cast

from telescope_core.base.file_proofs import quick_digest
from telescope_core.base.protocols import EnvironmentLocation

_DATA = (
    *(".json", ".jsonl", ".csv", ".tsv", ".txt", ".md", ".parquet", ".arrow", ".yaml", ".yml"),
    *(".toml", ".jinja", ".j2", ".gz", ".zst", ".zip", ".sqlite", ".db", ".npy", ".npz", ".pkl"),
)
"""File extensions; a text in a source that ends in one is taken for the name of a file."""
_TABLES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
_MOST_TABLES = 1024
"""Files of one folder that are compared; a folder of more is hardly a dataset."""
_LONGEST_NAME = 255
_INSTALLED = ("site-packages", "dist-packages")


def code_files(location: EnvironmentLocation, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each file that an environment consists of, by a name for people.

    `settings`: those of the environment; for the path of a file the content counts, and for that of
    a folder the content of the tables in it and in its own folders. Source files are left out if
    another Python imports them.
    """
    found = {f"settings: {name}": quick_digest(path) for name, path in _in_settings(settings)}
    if location.interpreter in ("", sys.executable):
        found |= _Sources(location.search_path, location.factory.partition(":")[0]).digests()
    return dict(sorted(found.items()))


def source_files(module: str) -> dict[str, str]:
    """Return the digest of each file that a module consists of, as far as it is not installed."""
    return _Sources((), module).digests()


def digest_of_files(files: Mapping[str, str]) -> str:
    """Return one digest of all `files`; empty if there are none."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest() if files else ""


def file_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return one line for each file that differs; no lines if one side is not known."""
    if not before or not after:
        return []
    return [
        f"file {name}: {_what(name in before, name in after)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _what(was_there: bool, is_there: bool) -> str:
    if was_there and is_there:
        return "its content is another one"
    return "it is new" if is_there else "it is gone, or no longer used"


def _in_settings(value: Any, name: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the files that settings name, also in lists, and the tables of folders they name.

    A cache is no part of an environment, and fills while it is played.
    """
    if isinstance(value, Mapping):
        inner = cast(Mapping[str, Any], value)
        for key, one in inner.items():
            yield from _in_settings(one, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for one in cast(Sequence[Any], value):
            yield from _in_settings(one, name)
    elif isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and "\n" not in value:
        # Unlike those of Path, functions of os.path raise nothing for a text that is no path here.
        path = Path(os.path.expanduser(value))
        # A word may be the name of a folder by chance.
        is_path = "/" in value or any(one in name for one in ("path", "dir", "folder", "data"))
        if _is_readable(path):
            yield f"{name} = {value}", path
        elif is_path and "cache" not in name and os.path.isdir(path):
            found = sorted([*path.glob("*"), *path.glob("*/*")])
            tables = [one for one in found if one.suffix in _TABLES and _is_readable(one)]
            for one in tables[:_MOST_TABLES]:
                yield f"{name} = {value}/{one.relative_to(path).as_posix()}", one


def _is_readable(path: Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK)


class _Sources:
    """The modules of an environment that are not installed, from the first import on."""

    def __init__(self, search_path: Sequence[str], module: str) -> None:
        self._search_path = [*search_path]
        self._top = module.partition(".")[0]
        self._specs: dict[str, ModuleSpec | None] = {}
        self._digests: dict[str, str] = {}
        self._waiting = [module]

    def digests(self) -> dict[str, str]:
        """Return the digest of each source and of each data file that one names."""
        seen: set[str] = set()
        while self._waiting:
            parts = self._waiting.pop().split(".")
            # Importing a.b runs a first.
            for name in (".".join(parts[: end + 1]) for end in range(len(parts))):
                if name not in seen:
                    seen.add(name)
                    self._add(name)
        return self._digests

    def _add(self, module: str) -> None:
        spec = self._spec(module)
        if spec is None or spec.origin is None or not self._is_own(module, spec.origin):
            return
        path = Path(spec.origin)
        is_package = spec.submodule_search_locations is not None
        name = module.replace(".", "/") + ("/__init__" if is_package else "") + path.suffix
        self._digests[name] = quick_digest(path)
        if path.suffix != ".py":
            return
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except (SyntaxError, ValueError):
            return  # said where it is imported
        package = module if is_package else module.rpartition(".")[0]
        self._waiting += _imports(tree, package)
        folder = name.rpartition("/")[0]
        for data in _data_files(tree, path.parent):
            beside = data.relative_to(path.parent).as_posix()
            self._digests[f"{folder}/{beside}" if folder else beside] = quick_digest(data)

    def _is_own(self, module: str, origin: str) -> bool:
        top = module.partition(".")[0]
        if not Path(origin).is_file() or (
            top.startswith("telescope_") and not top.startswith("telescope_env_")
        ):
            return False
        if any(part in _INSTALLED for part in Path(origin).parts):
            # The package itself may be given as module:Class, without any record of its wheel.
            return top == self._top
        return not Path(origin).is_relative_to(sysconfig.get_path("stdlib"))

    def _spec(self, module: str) -> ModuleSpec | None:
        """Return the location of a module, importing none of its packages."""
        if module not in self._specs:
            parent = module.rpartition(".")[0]
            if not parent:
                self._specs[module] = self._top_level(module)
            else:
                above = self._spec(parent)
                places = None if above is None else above.submodule_search_locations
                self._specs[module] = PathFinder.find_spec(module, [*places]) if places else None
        return self._specs[module]

    def _top_level(self, module: str) -> ModuleSpec | None:
        own = PathFinder.find_spec(module, self._search_path) if self._search_path else None
        if own is not None and own.origin is not None:
            return own
        if module in sys.builtin_module_names or module in sys.stdlib_module_names:
            return None
        try:
            # Also by the finders that editable installs put in place.
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        # A folder without __init__.py is imported only where there is no other of the name.
        return found if found is not None and found.origin is not None else own or found


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield every module that a source may import, and names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{one.name}" for one in node.names if one.name != "*")


def _data_files(tree: ast.AST, folder: Path) -> list[Path]:
    """Return the files in `folder` or below that the texts of a source name."""
    found: set[Path] = set()
    for pattern in {*_patterns(tree)}:
        if pattern.endswith(_DATA) and len(pattern) <= _LONGEST_NAME and "\n" not in pattern:
            relative = pattern.removeprefix("./").lstrip("/")
            if ".." not in relative:
                found |= {path for path in folder.glob(relative) if path.is_file()}
    return sorted(found)


def _patterns(tree: ast.AST) -> Iterator[str]:
    """Yield texts that may name files: constants, `a / "b"`, `join(a, "b")`, f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield glob.escape(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield _text(node) or ""
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield _joined(_divided(node))
        elif isinstance(node, ast.Call):
            yield _joined(node.args)


def _divided(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [*_divided(node.left), node.right]
    return [node]


def _joined(nodes: Sequence[ast.expr]) -> str:
    """Return the last of `nodes` that are texts, as one path."""
    parts: list[str] = []
    for node in reversed(nodes):
        text = _text(node)
        if text is None:
            break
        parts.insert(0, text)
    return "/".join(parts)


def _text(node: ast.expr) -> str | None:
    """Return a text as a file pattern with `*` for inserted values; None if it is no text."""
    if isinstance(node, ast.Constant):
        return glob.escape(node.value) if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        glob.escape(str(part.value)) if isinstance(part, ast.Constant) else "*"
        for part in node.values
    )
