"""Sizes, docstrings, imports and characters: the rules of style that a machine can see."""

import ast
import graphlib
import importlib
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL = {
    "pynvml": "telescope-train on a GPU: NVIDIA's meters, where its library is there",
    "aiohttp": "takes 0.2 s, and core imports in 0.3 s: only once a request is made",
    "cryptography": "telescope-envs[sigstore]: comes with sigstore",
    "datasets": "[datasets] of telescope-train and environments: only for data of that kind",
    "huggingface_hub": "comes with datasets: only where a gated dataset is read",
    "docker": "telescope-core[docker]: only once a container is asked for",
    "gguf": "telescope-train[gguf]: only for `telescope model import`",
    "httpx": "telescope-core[e2b], [prime]: what their SDKs speak HTTP with",
    "httpx2": "telescope-core[mcp]: the HTTP client that mcp takes",
    "keyring": "telescope-envs[keyring]: only where a token is looked for",
    "math_verify": "telescope-core[math]: takes 0.3 s, and answers that are numbers do not need it",
    "megatron": "telescope-train[megatron]: its import already asks for a GPU, see `library`",
    "mcp": "telescope-core[mcp]: only once an MCP server is connected",
    "py3langid": "ifeval: its model takes half a second, and most instructions need no language",
    "pyarrow": "telescope-core[records]: only to read and write rollouts",
    "peft": "telescope-train[lora]: only with use_lora",
    "requests": "telescope-envs[sigstore], telescope-core[docker]: what their SDKs speak HTTP with",
    "sigstore": "telescope-envs[sigstore]: only where attestations are made or asked for",
    "torchao": "telescope-train[low-bit-optimizers]: only for adamw_8bit",
    "torch": "telescope-train without torch still checks settings and plans a run",
    "transformers": "takes seconds: only where a model's files are read",
    "vllm": "telescope-train[vllm] or [vllm-cpu]: exists only inside a server",
}
"""What may be imported inside a function, and the extra or the reason."""
BROAD_EXCEPT = {
    "packages/telescope-adapters/src/telescope_adapters/verifiers.py": (
        "an author's package that does not load is told with the place in its code"
    ),
    "packages/telescope-adapters/src/telescope_adapters/inspect_ai.py": "so for a task",
    "packages/telescope-train/src/telescope_train/observability/trackers/tracking.py": (
        "whatever a tracker's library raises ends the tracker and not the run"
    ),
    "packages/telescope-train/src/telescope_train/models/source.py": (
        "libraries meet a damaged folder with whatever they trip over: the folder is named"
    ),
    "packages/telescope-train/src/telescope_train/models/attention/choice.py": (
        "compilers of kernels have exceptions of their own: the next kind of attention is tried"
    ),
    "packages/telescope-train/src/telescope_train/inference/vllm_plugin/executor.py": (
        "every worker of a server answers, whatever has ended its call"
    ),
    "packages/telescope-cli/src/telescope_cli/main.py": "the top of the command line",
    "packages/telescope-cli/src/telescope_cli/env/install.py": (
        "raised again in the main thread, which waits for it"
    ),
    "packages/telescope-core/src/telescope_core/base/interruptible.py": (
        "raised again as the signal that asked for the end"
    ),
    "packages/telescope-train/src/telescope_train/run.py": (
        "written into the run's folder, and raised again as what a person is told"
    ),
    "packages/telescope-train/src/telescope_train/cluster/ray_cluster.py": (
        "Ray has no class for a start that takes long: raised again as a ConfigError"
    ),
    "packages/telescope-core/src/telescope_core/diagnosis/rules.py": (
        "a rule that fails is logged, and costs a run neither its end nor its summary"
    ),
    "packages/telescope-core/src/telescope_core/playing/rollout.py": "a rollout that fails is data",
    "packages/telescope-core/src/telescope_core/playing/rescoring.py": "a part that fails, too",
    "packages/telescope-adapters/src/telescope_adapters/inspect_scores.py": (
        "a scorer that is tried on answers that nobody gave may raise whatever it likes"
    ),
    "packages/telescope-core/src/telescope_core/playing/in_process.py": (
        "what was played outlives its end"
    ),
    "packages/telescope-core/src/telescope_core/environments/score_worker.py": "so in its parent",
    "packages/telescope-core/src/telescope_core/evals/runner.py": "so is a group reward that fails",
    "packages/telescope-core/src/telescope_core/evals/rescoring.py": "and one that is given again",
    "packages/telescope-train/src/telescope_train/rollouts/playing.py": "and so in training",
    "packages/telescope-core/src/telescope_core/environments/running.py": (
        "thrown into the awaited code, as await does"
    ),
    "packages/telescope-core/src/telescope_core/sandboxes/local/supervisor.py": (
        "the end of a program that runs in its fork, told as Python would"
    ),
    "packages/telescope-core/src/telescope_core/graders/mathematics/comparing.py": (
        "whatever a parser raises about an answer, the answer is not equal"
    ),
    "packages/telescope-envs/environments/humaneval/src/telescope_env_telescope_humaneval/"
    "checking.py": "whatever a test raises about a value, it has not passed",
    "packages/telescope-core/src/telescope_core/finding/locate.py": (
        "as for sources: the import of code"
    ),
    **{
        f"packages/telescope-core/src/telescope_core/environments/{name}.py": (
            "raised again as an error that names the author's code"
        )
        for name in ("building", "author_errors")
    },
    "packages/telescope-core/src/telescope_core/environments/sources.py": (
        "whatever an author's code raises is told with its file and line"
    ),
    "packages/telescope-core/src/telescope_core/environments/toolbox.py": (
        "the policy is told what its tool call caused"
    ),
    "packages/telescope-core/src/telescope_core/environments/tool_threads.py": (
        "carried from a thread to whoever awaits it"
    ),
    "packages/telescope-core/src/telescope_core/processes/main_thread.py": (
        "carried from the thread of the event loop to the main thread"
    ),
    "packages/telescope-core/src/telescope_core/environments/mcp.py": (
        "carried from a connection's task to whoever opened it"
    ),
    **{
        f"packages/telescope-core/src/telescope_core/probes/{name}.py": (
            "whatever an environment raises while it is tried is a finding"
        )
        for name in ("answers", "leakage", "load", "playing", "reward")
    },
    "packages/telescope-train/src/telescope_train/simulation/virtual_time.py": (
        "carried from a function for a thread to whoever awaits it"
    ),
    "packages/telescope-train/src/telescope_train/inference/vllm_plugin/token_plane.py": (
        "the client is told why its request failed"
    ),
    "packages/telescope-train/src/telescope_train/inference/vllm_plugin/engine_thread.py": (
        "a request that cannot be added ends as an error; an engine that fails is declared dead"
    ),
}
"""Where everything is caught, and why. A handler that raises again is not counted."""

LINES = {"core": 45825, "adapters": 6945, "train": 52185, "envs": 18765, "cli": 8795, "ui": 9140}
"""Most lines of each package. A feature that needs more raises it; a merge lowers it."""
CALLED_ONCE = {"core": 74, "adapters": 8, "train": 134, "envs": 48, "cli": 13, "ui": 31}
"""Most private functions of 8 lines or fewer that are named once, where they are called: a new one
is written where it is used. The number only falls."""


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the sources of all packages, parsed once."""
    sources = tracked("packages/*.py")
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short():
    lines = {name_of(path): path.read_text().count("\n") for path in tracked("*.py")}
    assert {name: count for name, count in lines.items() if count > 900} == {}


@pytest.mark.slow
def test_functions_fit_a_screen():
    lengths = {
        f"{name_of(path)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > 100} == {}


def of_package(package: str) -> dict[Path, ast.Module]:
    """Return the sources of `telescope-PACKAGE` alone."""
    inside = f"packages/telescope-{package}/src/"
    return {path: tree for path, tree in trees().items() if name_of(path).startswith(inside)}


@pytest.mark.slow
@pytest.mark.parametrize("package", LINES)
def test_a_package_has_no_more_lines_than_its_budget(package):
    assert sum(path.read_text().count("\n") for path in of_package(package)) <= LINES[package]


@pytest.mark.parametrize("package", CALLED_ONCE)
def test_small_helpers_that_are_called_once_become_no_more(package):
    nodes = [node for tree in of_package(package).values() for node in ast.walk(tree)]
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
    }
    found = [
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match("_[^_]", node.name)
        and not node.decorator_list
        and (node.end_lineno or 0) - node.lineno < 8
        and named[node.name] == 1
        and node.name in called
    ]
    assert len(found) <= CALLED_ONCE[package], found


def test_a_class_name_stands_once_in_a_package():
    found: dict[tuple[str, str], list[str]] = {}
    for path, tree in trees().items():
        package, inside, _ = name_of(path).partition("/src/")
        for node in tree.body if inside else ():
            if isinstance(node, ast.ClassDef):
                found.setdefault((package, node.name), []).append(name_of(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_modules_open_with_what_they_are():
    wrong = {}
    for path, tree in trees().items():
        text = (ast.get_docstring(tree) or "").strip()
        # A drawing is indented; it says in one look what would take many lines.
        lines = [line for line in text.splitlines() if not line.startswith("    ")]
        if not 1 <= len(lines) <= (12 if "algorithms" in path.parts else 8):
            wrong[name_of(path)] = len(lines)
    assert wrong == {}, "expected a docstring of 1 to 8 lines; 12 for an algorithm's formulas"


def test_no_stub_and_no_note_to_self():
    marks = re.compile(r"#\s*TODO|FIXME|raise NotImplementedError")
    found = [name_of(path) for path in trees() if marks.search(path.read_text(encoding="utf-8"))]
    assert found == []


def late_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    yield from ((node.lineno, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    yield node.lineno, node.module


@pytest.mark.slow
def test_imports_stand_at_the_top_but_for_optional_dependencies():
    found = {
        f"{name_of(path)}:{line} {module}"
        for path, tree in trees().items()
        if "telescope_cli" not in path.parts
        for line, module in late_imports(tree)
        if module.partition(".")[0] not in OPTIONAL
    }
    assert found == set(), "move to the top, or add the optional dependency to OPTIONAL"


@pytest.mark.slow
def test_everything_is_caught_only_where_it_can_be_told():
    found = {
        name_of(path)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
        and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)
    }
    assert found <= set(BROAD_EXCEPT)


@pytest.mark.slow
def test_no_wait_loses_a_cancellation():
    found = {
        f"{name_of(path)}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.attr, getattr(node.value, "id", "")) == ("wait_for", "asyncio")
    }
    # On Python 3.11 it drops a cancellation that comes as its result does (cpython 86296), and the
    # task goes on as if nobody had asked for its end.
    assert found == set(), "use `async with asyncio.timeout(...)`"


def test_a_failed_test_does_not_wait_for_its_program():
    # On leaving the block, Popen waits without a limit, and the test hangs where it has failed.
    waits = re.compile(r"with (?:subprocess\.)?Popen\(")
    found = [name_of(path) for path in tracked("tests/*.py") if waits.search(path.read_text())]
    assert found == [], "use tests.processes.Program"


ONE_THREAD = {"decoders.py", "replies.py", "sampler_state.py", "client.py", "token_plane.py"}
"""Files that build decoders in functions: under the lock, as they are imported, or in a loop."""


@pytest.mark.slow
def test_decoders_are_built_by_one_thread_at_a_time():
    found = {
        f"{name_of(path)}:{call.lineno}"
        for path, tree in trees().items()
        if path.name not in ONE_THREAD
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and (name := ast.unparse(call.func)).startswith("msgspec.")
        and (
            name.endswith((".Decoder", ".convert"))
            or (name.endswith(".decode") and any(one.arg == "type" for one in call.keywords))
        )
    }
    assert found == set(), "use telescope_core.base.decoders"


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[parts.index("src") + 1 :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.Module, known: set[str]) -> Iterator[str]:
    statements = list(tree.body)
    for node in statements:
        if isinstance(node, ast.Try):
            statements += node.body
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def test_no_import_cycles():
    modules = {module_of(path): tree for path, tree in trees().items() if "src" in path.parts}
    graph = {
        name: {target for target in imported_modules(tree, set(modules)) if target != name}
        for name, tree in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


IMPORT = re.compile(r"from (telescope_[\w.]+) import (?:\(([^)]*)\)|([\w, ]+))")


def names_in(module: str, known: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the names that can be imported from `module`."""
    yield from (one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == module)
    for node in ast.walk(known[module]):
        match node:
            case ast.FunctionDef(name="__getattr__"):
                yield from dir(importlib.import_module(module))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.alias():
                yield node.asname or node.name


@pytest.mark.slow
def test_what_tests_docs_and_benchmarks_import_is_there():
    """In programs that they hold as text, too, which no type checker sees."""
    known = {module_of(path): tree for path, tree in trees().items() if "src" in path.parts}
    offered = cache(lambda module: set(names_in(module, known)) if module in known else set())
    found, missing = 0, []
    for path in tracked("tests/*", "benchmarks/*", "scripts/*", "docs/*", "examples/*", "*.md"):
        if path.suffix not in (".py", ".sh", ".md"):
            continue
        for module, inner, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
            names = re.sub("#.*", "", inner or plain).split(",")
            names = [one.split()[0] for one in names if one.strip()]
            if module.startswith("telescope_env_"):
                continue  # of an environment
            found += len(names)
            gone = [one for one in names if one not in offered(module)]
            missing += [f"{name_of(path)}: {module} has no {one}" for one in gone]
    assert found > 1000
    assert missing == ["tests/core/base/test_lazy.py: telescope_core has no nothing"]


def test_code_is_ascii():
    code = tracked("*.py", "*.sh", "*.toml", "Makefile", ".ci/*", "constraints/*")
    assert [name_of(path) for path in code if not path.read_bytes().isascii()] == []


@pytest.mark.slow
def test_nothing_names_a_registry_host_or_a_path_of_one_machine():
    parts = [
        *(("py", "pi.org"), ("python", "hosted.org"), ("registry.", "npmjs")),
        *(("deb.", "debian.org"), ("/wo", "rk/"), ("/opt", "/wheels"), ("/opt", "/pypi")),
        *(("file:", "///"), ("/ro", "ot/"), ("/ho", "me/")),
    ]
    forbidden = re.compile("|".join(re.escape(first + second) for first, second in parts))
    found = []
    for path in tracked():
        if path.suffix in (".whl", ".png", ".parquet") or path.stat().st_size > 2_000_000:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if forbidden.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:80]}")
    assert found == []


@pytest.mark.slow
def test_algorithms_cite_their_paper():
    folder = ROOT / "packages/telescope-train/src/telescope_train/algorithms"
    pages = [path for path in folder.glob("*.py") if "ALGORITHM =" in path.read_text()]
    assert pages
    for path in pages:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert re.search(r"Paper: arXiv:\d{4}\.\d{5}", docstring), name_of(path)
