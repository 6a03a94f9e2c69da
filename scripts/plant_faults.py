"""Plants small faults in a file, one at a time, and says which of them the tests catch.

    python scripts/plant_faults.py packages/telescope-core/src/telescope_core/evals/stats.py
    python scripts/plant_faults.py FILE --faults 10 --tests "tests/core/evals -m 'not slow'"
    python scripts/plant_faults.py FILE OTHER_FILE --seed 1 --workers 2 --json faults.json

A fault is a swapped comparison, operator, `and`/`or` or min/max, a number plus one, a flipped truth
value, a dropped `not`, call, raise or `+=`, a result of None, a shifted bound of a slice. The same
seed chooses the same faults, from as many functions as there are. They are planted in copies of the
repository, never in it. First the tests that execute the line are tried, the quickest first, then
all others; processes that tests start with a PYTHONPATH of their own see no fault. A run that hangs
has caught the fault. Exit code: 0, whatever is caught; 2 for wrong usage or tests that fail anyway.
"""

import ast
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAST = ["-m", "not slow and not engine and not nightly and not gpu"]
FIRST = 60
"""How many of the tests that execute a line are tried before all others are."""
VARIABLE = "TELESCOPE_PLANT_FAULTS"  # names the file that tells the plugin below what to do
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
    (ast.FloorDiv, ast.Mod),
)
SWAPPED = {old: new for one, other in PAIRS for old, new in ((one, other), (other, one))}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "iter"}
UNCHANGED_FIELDS = ("annotation", "returns", "decorator_list", "msg")
LOGGING = re.compile(r"([\w.]+\.)?_?(log|logger|logging|warnings)\.\w+\(")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One change of one file, and the whole `source` of the file with it."""

    function: str
    line: int
    last_line: int
    what: str
    source: str


def faults_of(source: str) -> list[Fault]:
    """Return the faults that can be planted in `source`."""
    found: list[Fault] = []
    for node, function in _nodes(ast.parse(source), ""):
        for what, text in _changes(node):
            place = {"function": function, "line": node.lineno, "last_line": node.end_lineno}
            found.append(Fault(what=what, source=_replaced(source, node, text), **place))
    return found


def chosen_faults(faults: Sequence[Fault], number: int, seed: str) -> list[Fault]:
    """Return `number` of those that compile, one of each function in turn; set by the seed."""
    by_function: dict[str, list[Fault]] = {}
    for one in random.Random(seed).sample(faults, len(faults)):
        by_function.setdefault(one.function, []).append(one)
    chosen: list[Fault] = []
    while len(chosen) < number and any(by_function.values()):
        for one in [rest.pop() for rest in by_function.values() if rest]:
            with suppress(SyntaxError):
                compile(one.source, "", "exec")
                chosen.append(one)
    return sorted(chosen[:number], key=lambda one: one.line)


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[Any, str]]:
    """Yield the nodes that may be changed, each with the function that it is in."""
    if isinstance(node, ast.Expr) and LOGGING.match(ast.unparse(node)):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    elif isinstance(node, ast.expr | ast.stmt):
        yield node, function
    # A part of an f-string has no place of its own, and a pattern takes no expression.
    if not isinstance(node, ast.JoinedStr | ast.Raise | ast.pattern):
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in UNCHANGED_FIELDS:
                    yield from _nodes(child, function)


def _changes(node: Any) -> Iterator[tuple[str, str]]:
    """Yield (what is changed, the new text of `node`)."""
    match node:
        case ast.expr():
            for new in (*_with_other_operator(node), *_with_other_value(node)):
                yield f"{_short(node)} became {_short(new)}", f"({ast.unparse(new)})"
        case ast.AugAssign() | ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            yield f"{_short(node)} was dropped", "pass"
        case ast.Return(value=ast.expr()) if _short(node) != "return None":
            yield f"{_short(node)} became return None", "return None"


def _with_other_operator(node: Any) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[op, *more]):
            yield ast.Compare(node.left, [SWAPPED[type(op)](), *more], node.comparators)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(SWAPPED[type(op)](), node.values)
        case ast.BinOp(left=ast.JoinedStr() | ast.Constant(value=str())):
            return  # text cannot be subtracted: that fault would be too easy to find
        case ast.BinOp(op=op) if type(op) in SWAPPED:
            yield ast.BinOp(node.left, SWAPPED[type(op)](), node.right)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand


def _with_other_value(node: Any) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            yield ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            yield ast.Call(ast.Name(CALLED[name]), node.args, node.keywords)
        case ast.Call(func=ast.Name(id="sorted")) if "reverse=" not in ast.unparse(node):
            down = ast.keyword("reverse", ast.Constant(True))
            yield ast.Call(node.func, node.args, [*node.keywords, down])
        case ast.Subscript(slice=ast.Slice(lower=low, upper=high, step=step)) if low or high:
            more = ast.BinOp(high or low, ast.Add(), ast.Constant(1))
            bounds = (low, more) if high else (more, None)
            yield ast.Subscript(node.value, ast.Slice(*bounds, step))


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _replaced(source: str, node: Any, text: str) -> str:
    """Return `source` with `text` in the place of `node`; all other lines stay where they are."""
    content = source.encode()
    lines = content.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    gone = (content[start:end].count(b"\n") - text.count("\n")) * "\n"
    # An expression may go on over lines within its parentheses only.
    new = f"{text[:-1]}{gone})" if text.endswith(")") else text + gone
    return (content[:start] + new.encode() + content[end:]).decode()


class Copy:
    """A copy of what git knows of the working tree, in which a fault is planted and tests run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        self._wish, self._out = folder / "wish.json", folder / "out.json"
        self._environ = {**os.environ, "CI": "1", "OMP_NUM_THREADS": "1", VARIABLE: f"{self._wish}"}
        self._environ.pop("TELESCOPE_TEST_TIMES", None)
        sources = [*sorted(self.root.glob("packages/*/src")), Path(__file__).resolve().parent]
        self._environ["PYTHONPATH"] = os.pathsep.join(map(str, sources))

    def plant(self, name: str, source: str) -> None:
        """Write the file `name`, and forget what was compiled of it."""
        path = self.root / name
        path.write_text(source, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def require_ours(self, name: str) -> None:
        """Assert that Python imports the file `name` of this copy, and no installed one."""
        package, _, inside = name.partition("/src/")
        if inside and package.count("/") == 1:
            module = inside.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            code = f"from importlib.util import find_spec; print(find_spec({module!r}).origin)"
            command = [sys.executable, "-c", code]
            found = subprocess.check_output(command, env=self._environ, text=True).strip()
            assert found == str(self.root / name), f"{found} is imported instead of {name}"

    def run(self, arguments: Sequence[str], limit_s: float, **wish: object) -> dict[str, Any]:
        """Run pytest; returns its exit code, None if it hung, and what the plugin wrote."""
        self._wish.write_text(json.dumps({**wish, "out": str(self._out)}))
        self._out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", Path(__file__).stem, *arguments]
        about = {"cwd": self.root, "env": self._environ, "start_new_session": True}
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **about)
            code = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the tests have left behind
            process.wait()
            said.seek(0)
            told = json.loads(self._out.read_text()) if self._out.exists() else {}
            return {**told, "code": code, "said": said.read()}

    def catch(self, name: str, fault: Fault, known: Mapping[str, Any]) -> dict[str, Any]:
        """Plant `fault` in the file `name` and run tests; returns what came of it."""
        began_s, times = time.monotonic(), known["times"]
        lines = {*range(fault.line, fault.last_line + 1)}
        there = {test for test, files in known["lines"].items() if lines & {*files.get(name, ())}}
        first = [test for test in sorted(times, key=times.get) if test in there][:FIRST]
        caught = None
        self.plant(name, fault.source)
        for tests in (first, [test for test in times if test not in first]):
            if tests and caught is None:
                files = dict.fromkeys(test.partition("::")[0] for test in tests)
                limit_s = 60 + 10 * sum(times[test] for test in tests)
                done = self.run([*known["options"], *files], limit_s, only=tests)
                if done["code"] is None:
                    caught = "a run that hangs"
                elif done["code"] != 0:
                    caught = done.get("failed") or "the import of tests"
        self.plant(name, (ROOT / name).read_text(encoding="utf-8"))
        about = {"file": name, "line": fault.line, "function": fault.function, "what": fault.what}
        return {**about, "caught_by": caught, "seconds": round(time.monotonic() - began_s, 1)}


def plant_all(
    planted: Sequence[tuple[str, Fault]], arguments: Sequence[str], num_workers: int
) -> list[dict[str, Any]]:
    """Return what came of each (file, fault); ends the program if tests fail without one."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_workers) as workers:
        copies = [Copy(Path(folder) / f"{number}") for number in range(num_workers)]
        print(f"without a fault: pytest {shlex.join(arguments)}", flush=True)
        names = list(dict.fromkeys(name for name, _ in planted))
        for name in names:
            copies[0].require_ours(name)
        known = copies[0].run(arguments, 3600.0, trace=names)
        if known["code"] != 0:
            print(f"{known['said'][-4000:]}\nthese tests fail without a fault", file=sys.stderr)
            sys.exit(2)
        known["options"] = [word for word in arguments if word not in known["paths"]]
        print(f"{len(known['times'])} tests pass; planting {len(planted)} faults", flush=True)

        def try_one(pair: tuple[str, Fault]) -> dict[str, Any]:
            copied = copies.pop()
            found = copied.catch(*pair, known)
            copies.append(copied)
            return found

        results: list[dict[str, Any]] = []
        for found in workers.map(try_one, planted):
            results.append(found)
            how = f"caught by {found['caught_by']}" if found["caught_by"] else "SURVIVED"
            where = f"{found['file']}:{found['line']}: {found['what']}"
            print(f"[{len(results)}/{len(planted)}] {where}: {how}", flush=True)
        return results


def main(words: Sequence[str] | None = None) -> int:
    """Plant what the command line asks for."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="Python files of this repository")
    parser.add_argument("--faults", type=int, default=30, help="of each file (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="chooses other faults (default 0)")
    parser.add_argument("--tests", help="arguments of pytest (default: fast tests of the package)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write what came of each")
    parser.add_argument("--workers", type=int, default=1, help="copies that run side by side")
    asked = parser.parse_args(words)
    if min(asked.faults, asked.workers) < 1:
        parser.error("--faults and --workers take numbers from 1 on")
    planted: list[tuple[str, Fault]] = []
    folders: set[str] = set()
    for path in (Path(one).resolve() for one in asked.files):
        if not (path.is_file() and path.suffix == ".py" and path.is_relative_to(ROOT)):
            parser.error(f"expected a Python file of {ROOT}, got {path}")
        name = str(path.relative_to(ROOT))
        chosen = chosen_faults(faults_of(path.read_text()), asked.faults, f"{asked.seed}{name}")
        planted += [(name, one) for one in chosen]
        folders.add(f"tests/{name.partition('/telescope-')[2].partition('/')[0]}")
    if asked.tests is None and "tests/" in folders:
        parser.error("say which tests are to catch the faults, such as --tests tests/core")
    arguments = [*FAST, *sorted(folders)] if asked.tests is None else shlex.split(asked.tests)
    results = plant_all(planted, arguments, asked.workers)
    for name in dict.fromkeys(one["file"] for one in results):
        own = [bool(one["caught_by"]) for one in results if one["file"] == name]
        print(f"{sum(own):4} of {len(own)} caught  {name}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


class _InPytest:
    """The plugin: chooses and orders tests, or records which lines of some files each executes."""

    def __init__(self, wish: Mapping[str, Any]) -> None:
        self._wish, self._failed = wish, ""
        self._names = {str(Path.cwd() / name): name for name in wish.get("trace", ())}
        self._now: dict[str, set[int]] = {}
        self._lines: dict[str, dict[str, set[int]]] = {}
        self._times: dict[str, float] = {}
        if self._names:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _trace(self, frame: Any, event: str, _: object) -> Any:
        name = self._names.get(frame.f_code.co_filename)
        if name is not None and event == "line":
            self._now.setdefault(name, set()).add(frame.f_lineno)
        return None if name is None else self._trace

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if "only" in self._wish:
            place = {test: number for number, test in enumerate(self._wish["only"])}
            items[:] = [one for one in items if one.nodeid in place]
            items.sort(key=lambda one: place[one.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._now = self._lines[nodeid] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._times[report.nodeid] = self._times.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed = self._failed or report.nodeid

    def pytest_sessionfinish(self, session: Any) -> None:
        lines = {t: {n: sorted(a) for n, a in files.items()} for t, files in self._lines.items()}
        told = {"paths": session.config.option.file_or_dir, "failed": self._failed}
        Path(self._wish["out"]).write_text(
            json.dumps({**told, "lines": lines, "times": self._times})
        )


def pytest_configure(config: Any) -> None:
    """Register the plugin in the processes that this script starts."""
    wish = Path(os.environ[VARIABLE])
    config.pluginmanager.register(_InPytest(json.loads(wish.read_text())), "plant-faults")


if __name__ == "__main__":
    sys.exit(main())
