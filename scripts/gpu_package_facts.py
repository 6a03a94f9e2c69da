"""Writes tests/contracts/gpu_packages.json: names and parameters in the GPU builds of packages.

Without a GPU these builds cannot be run, but their Python sources can be read. The test beside the
file compares our calls with it, so a call that a new version refuses is seen without a GPU. Run
`make gpu-facts` after each change of a version in constraints/gpu.txt; it downloads the packages.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from telescope_train.inference.server import ACTIVITIES

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "tests" / "contracts" / "gpu_packages.json"
SOURCES = ROOT / "packages" / "telescope-train" / "src" / "telescope_train"
PACKAGES = {
    "vllm": "vllm",
    "nvidia-ml-py": "pynvml",
    "flash-attn": "flash_attn",
    "flash-attn-4": "flash_attn",
}
"""Name on the index -> name of the module."""
MORE_NAMES = (
    "flash_attn.flash_attn_interface:flash_attn_varlen_func",
    "flash_attn.cute.interface:flash_attn_varlen_func",
)
"""What transformers calls for us, without an import in our sources."""
FLAG_CLASSES = (
    "vllm.engine.arg_utils:AsyncEngineArgs",
    "vllm.entrypoints.launchers.cli_args:FrontendArgs",
)
"""The fields of these are the options of `vllm serve`, beside --model's own."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Library:
    """The Python sources of packages, by module."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """`sources`: path inside a package's parent folder -> text."""
        self._sources = sources
        self._trees: dict[str, ast.Module] = {}

    def find(self, name: str) -> tuple[str, ast.AST] | None:
        """Return (module, definition) of `module:name`, followed through imports; None = absent."""
        module, _, wanted = name.partition(":")
        tree = self._tree(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, Definition) and node.name == wanted and node in tree.body:
                return module, node
            if isinstance(node, ast.ImportFrom) and (found := self._followed(module, node, wanted)):
                return found
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            if any(isinstance(one, ast.Name) and one.id == wanted for one in targets):
                return module, node
        in_package = self._tree(f"{module}.{wanted}")
        return None if in_package is None else (f"{module}.{wanted}", in_package)

    def texts(self, folder: str) -> Iterator[str]:
        """Yield the text of each file in `folder`."""
        yield from (text for path, text in self._sources.items() if path.startswith(folder))

    def _followed(
        self, module: str, node: ast.ImportFrom, wanted: str
    ) -> tuple[str, ast.AST] | None:
        for alias in node.names:
            if (alias.asname or alias.name) != wanted:
                continue
            source = node.module or ""
            if node.level:
                is_package = f"{module.replace('.', '/')}/__init__.py" in self._sources
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                source = ".".join([*parts, *filter(None, [node.module])])
            if source != module and (found := self.find(f"{source}:{alias.name}")):
                return found
        return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = module.replace(".", "/")
            text = self._sources.get(f"{path}.py", self._sources.get(f"{path}/__init__.py"))
            if text is None:
                return None
            self._trees[module] = ast.parse(text)
        return self._trees[module]

    def class_facts(self, module: str, node: ast.ClassDef, used: set[str]) -> dict[str, Any]:
        """Return the fields of a class and the parameters of those methods that are in `used`."""
        fields, methods = list[str](), dict[str, Any]()
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name) and (found := self.find(f"{module}:{plain.id}")):
                source, definition = found
                if isinstance(definition, ast.ClassDef):
                    inherited = self.class_facts(source, definition, used)
                    fields += inherited["fields"]
                    methods |= inherited["methods"]
        for one in node.body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name in used:
                methods[one.name] = parameters(one)
            elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                fields += [one.target.id] if one.target.id not in fields else []
            elif isinstance(one, ast.Assign):
                fields += [t.id for t in one.targets if isinstance(t, ast.Name)]
        return {"fields": fields, "methods": methods}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters: `name`, `name=` with a default, `*name`, and `**name`."""
    every = node.args.posonlyargs + node.args.args
    first_default = len(every) - len(node.args.defaults)
    found = [one.arg + "=" * (index >= first_default) for index, one in enumerate(every)]
    if any(getattr(one, "id", "") in {"staticmethod"} for one in node.decorator_list):
        found.insert(0, "self")  # so that all methods begin alike
    if node.args.vararg or node.args.kwonlyargs:
        found.append("*" + (node.args.vararg.arg if node.args.vararg else ""))
    for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        found.append(one.arg + "=" * (default is not None))
    return [*found, "**" + node.args.kwarg.arg] if node.args.kwarg else found


def our_names(folder: Path = SOURCES) -> tuple[dict[Path, dict[str, str]], set[str]]:
    """Return what each file imports from the packages, by its name there, and all names it uses."""
    imports, used = dict[Path, dict[str, str]](), {"__init__", "create"}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = dict(_imported(tree))
        if own:
            imports[path] = own
            used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            used |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    return imports, used


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    modules = tuple(PACKAGES.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in modules:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"
            continue
        if isinstance(node, ast.Import) and any(one.name == "pynvml" for one in node.names):
            # Its functions are called through the module, also where that has another name.
            calls = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
            for one in calls:
                if re.match("nvml|NVML", one.attr):
                    yield one.attr, f"pynvml:{one.attr}"


def facts_of(library: Library, names: set[str], used: set[str]) -> dict[str, Any]:
    """Return the facts of each name that is there."""
    found: dict[str, Any] = {}
    for name in sorted(names):
        if (place := library.find(name)) is None:
            continue
        module, node = place
        if isinstance(node, ast.ClassDef):
            found[name] = library.class_facts(module, node, used)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[name] = {"parameters": parameters(node)}
        else:
            found[name] = {}
        if "fields" in found[name]:
            found[name]["fields"] = [one for one in found[name]["fields"] if one in used]
    return found


def server_facts(library: Library) -> dict[str, list[str]]:
    """Return the options, routes and environment variables of vLLM's server."""
    flags, routes = {"model"}, set[str]()
    for name in FLAG_CLASSES:
        if (place := library.find(name)) and isinstance(place[1], ast.ClassDef):
            flags |= set(library.class_facts(place[0], place[1], set())["fields"])
    for text in library.texts("vllm/entrypoints/"):
        routes |= set(re.findall(r"@\w+\.(?:get|post)\(\s*\"(/[\w/]+)\"", text))
    variables = {
        name
        for text in library.texts("vllm/envs.py")
        for name in re.findall(r"^    \"(VLLM_\w+)\":", text, re.MULTILINE)
    }
    printed = [text for text, _ in ACTIVITIES if any(text in one for one in library.texts("vllm/"))]
    return {
        "flags": sorted(flags),
        "printed": printed,
        "routes": sorted(routes),
        "variables": sorted(variables),
    }


def pinned() -> dict[str, str]:
    """Return the version that constraints/gpu.txt pins each package to."""
    text = (ROOT / "constraints" / "gpu.txt").read_text(encoding="utf-8")
    found = {name: re.search(rf"^{name}={{2,3}}(\S+)", text, re.MULTILINE) for name in PACKAGES}
    return {name: match[1] for name, match in found.items() if match}


def archives(folder: Path) -> Library:
    """Return the sources in the wheels and source archives of `folder`."""
    sources: dict[str, str] = {}
    # Wheels last: the sources of flash-attn hold an older flash-attn-4 too.
    for path in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for member in archive:
                inside = member.name.partition("/")[2]
                if inside.startswith(tuple(PACKAGES.values())) and inside.endswith(".py"):
                    file = archive.extractfile(member)
                    sources[inside] = file.read().decode() if file else ""
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py")]
            sources |= {name: wheel.read(name).decode() for name in names}
    return Library(sources)


def download(folder: Path, versions: Mapping[str, str]) -> None:
    """Download each package in its pinned version; flash-attn has only sources."""
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    for name, version in versions.items():
        more = ["--no-build-isolation"] if name == "flash-attn" else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *more]
        command += ["--dest", str(folder), f"{name}=={version}"]
        subprocess.run(command, check=True, env=environment)


def written(library: Library, versions: Mapping[str, str]) -> str:
    """Return the text of the file of facts."""
    imports, used = our_names()
    names = {name for own in imports.values() for name in own.values()} | set(MORE_NAMES)
    facts = {
        "versions": dict(versions),
        "names": facts_of(library, names, used),
        "server": server_facts(library),
    }
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def server_uses() -> dict[str, set[str]]:
    """Return the options, routes and variables of vLLM's server that our sources name."""
    found = {"flags": set[str](), "routes": set[str](), "variables": set[str]()}
    files = [*SOURCES.glob("inference/*.py"), *SOURCES.glob("weights/*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if match := re.fullmatch(r"--(?:no-)?([a-z][a-z-]+)", node.value):
                found["flags"].add(match[1].replace("-", "_"))
            elif re.fullmatch(r"/[a-z_0-9]+(/[a-z_]+)*", node.value):
                found["routes"].add(node.value)
            elif re.fullmatch(r"VLLM_[A-Z_]+", node.value):
                found["variables"].add(node.value)
    return found


def main(arguments: list[str]) -> None:
    """Write the file from a folder of archives, or from what is downloaded."""
    versions = pinned()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments[0]) if arguments else Path(temporary)
        if not arguments:
            download(folder, versions)
        TARGET.write_text(written(archives(folder), versions), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
