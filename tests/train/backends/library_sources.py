"""What a library's Python sources define, read without importing or installing it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.Attribute


@dataclass(frozen=True)
class Found:
    """A definition, and the module that it stands in."""

    module: str
    node: Definition | ast.Module


@dataclass(frozen=True)
class Parameters:
    """What a call may give; `self` is left out."""

    positional: tuple[str, ...]
    names: frozenset[str]
    takes_any: bool
    """It takes keywords of any name."""


@dataclass(frozen=True)
class Sources:
    """The sources of one version, below a folder such as site-packages."""

    root: Path

    @cache  # noqa: B019 - as long as the tests of this file
    def tree(self, module: str) -> ast.Module | None:
        """Return the parsed module; None if there is none."""
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str) -> Found | None:
        """Return what `name` is in `module`, through imports from one module to another."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in _statements(tree):
            match node:
                case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                    return Found(module, node)
                case ast.Assign() if any(_is_name(target, name) for target in node.targets):
                    return Found(module, node)
                case ast.ImportFrom():
                    source = self._source(module, node)
                    for alias in node.names:
                        # A package that imports a module of its own is answered below.
                        if (alias.asname or alias.name) == name and source != module:
                            found = self.find(source, alias.name)
                            if found is not None:
                                return found
        submodule = self.tree(f"{module}.{name}")
        return None if submodule is None else Found(f"{module}.{name}", submodule)

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = self.root.joinpath(*module.split("."))
        up = node.level - 1 if (base / "__init__.py").is_file() else node.level
        parts = module.split(".")
        parts = parts[: len(parts) - up]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def bases(self, found: Found) -> Iterator[Found]:
        """Yield a class and all that it inherits from in this library."""
        yield found
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            if isinstance(base, ast.Name):
                parent = self.find(found.module, base.id)
                if parent is not None and isinstance(parent.node, ast.ClassDef):
                    yield from self.bases(parent)

    def member(self, found: Found, name: str) -> Found | None:
        """Return a method or attribute of a class; None if nothing of it has that name."""
        for one in self.bases(found):
            for node in ast.walk(one.node):
                match node:
                    case ast.FunctionDef() if node.name == name:
                        return Found(one.module, node)
                    case ast.AnnAssign() if _is_name(node.target, name):
                        return Found(one.module, node)
                    case ast.Attribute(ctx=ast.Store()) if node.attr == name:
                        if _is_name(node.value, "self"):
                            return Found(one.module, node)
        return None

    def parameters(self, found: Found, *, is_method: bool = False) -> Parameters | None:
        """Return what a function, method or class is called with; None if that is not known."""
        if isinstance(found.node, ast.FunctionDef):
            return _of_function(found.node, is_method=is_method)
        if not isinstance(found.node, ast.ClassDef):
            return None
        for one in self.bases(found):
            for node in one.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    return _of_function(node, is_method=True)
        fields = [
            node.target.id
            for one in reversed(list(self.bases(found)))
            for node in one.node.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        return Parameters(tuple(fields), frozenset(fields), takes_any=False) if fields else None


def _of_function(node: ast.FunctionDef, *, is_method: bool) -> Parameters:
    arguments = node.args
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    is_static = any(_is_name(one, "staticmethod") for one in node.decorator_list)
    if is_method and not is_static:
        positional = positional[1:]
    names = frozenset([*positional, *(one.arg for one in arguments.kwonlyargs)])
    return Parameters(tuple(positional), names, takes_any=arguments.kwarg is not None)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield statements of a module, also those under `if` and `try`."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _statements(node)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
