"""Listing and searching a registry of 10,000 releases: whole commands, and reading alone.

The registry, written into a temporary folder, has 2,000 environments of 200 owners with 5 releases
and a status record each. Commands are timed whole, from the start of the process to its end, in
turns with the peer's: `pip index versions`, which reads the page of one project out of the simple
index of the same folder. The peers of reading make the same rows from the same files: every line
through the pydantic record, and every line through `json` with versions compared by `packaging`.
Run: python benchmarks/bench_hub.py
"""

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from machine import facts_of_run, table, write_results
from packaging.version import Version

from telescope_envs.records.catalog import (
    CatalogRow,
    read_catalog,
    search,
    write_catalog,
)
from telescope_envs.records.model import converted
from telescope_envs.records.release import (
    Release,
    Status,
)
from telescope_envs.registry.static_view import (
    project_page,
    simple_files,
)
from telescope_envs.registry.stores.folder import LocalStore

NUM_OWNERS, NUM_ENVIRONMENTS, NUM_RELEASES = 200, 2000, 5
REPEATS = 9
COMMAND = "python benchmarks/bench_hub.py"
TEMPLATE = Path(__file__).parents[1] / "registry/index/telescope/math-reasoning.jsonl"
WORDS = ("agent", "chess", "code", "json", "logic", "math", "maze", "plan", "proof", "sort", "web")


def write_registry(root: Path) -> str:
    """Write the registry and the page of one of its projects; returns that project's name."""
    line = json.loads(TEMPLATE.read_text().splitlines()[-1])
    rng = random.Random(0)
    for number in range(NUM_ENVIRONMENTS):
        owner = f"team{number % NUM_OWNERS:03d}"
        name = f"{'-'.join(rng.sample(WORDS, 2))}-{number}"
        releases = []
        for minor in range(NUM_RELEASES):
            distribution = f"telescope-env-{owner}-{name}"
            module, version = distribution.replace("-", "_"), f"0.{minor}.0"
            filename = f"{module}-{version}-py3-none-any.whl"
            wheel = {"filename": filename, "urls": [f"artifacts/{filename}"]}
            fields = {"owner": owner, "name": name, "version": version, "module": module}
            fields |= {"distribution": distribution, "tags": rng.sample(WORDS, 3)}
            fields |= {"wheel": {**line["wheel"], **wheel}}
            releases.append(converted(Release, {**line, **fields}))
        lines = "".join(f"{one.as_json().decode()}\n" for one in releases)
        for path, text in (
            (f"index/{owner}/{name}.jsonl", lines),
            (f"status/{owner}/{name}.json", Status().as_json(indent=2).decode()),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    (root / "config.json").write_text('{"format": 1, "name": "benchmark"}')
    (root / "simple" / distribution).mkdir(parents=True)
    files = simple_files(releases, Status(), to_root="../../", has_metadata=False)
    page = project_page(distribution, files, is_json=False)
    (root / "simple" / distribution / "index.html").write_text(page)
    return distribution


def json_rows(root: Path) -> list[CatalogRow]:
    """The plain way, through `json`, which checks nothing."""
    rows = []
    for path in sorted((root / "index").glob("*/*.jsonl")):
        releases = [json.loads(line) for line in path.read_bytes().splitlines()]
        status_path = root / "status" / path.parent.name / f"{path.stem}.json"
        yanked = json.loads(status_path.read_bytes())["yanked"]
        newest = max(
            (one for one in releases if one["version"] not in yanked),
            key=lambda one: Version(one["version"]),
        )
        rows.append(as_row(f"{path.parent.name}/{path.stem}", newest, len(releases)))
    return rows


def as_row(environment_id: str, release: dict, num_releases: int) -> CatalogRow:
    """Return the row of one release."""
    return CatalogRow(
        id=environment_id,
        version=release["version"],
        summary=release["summary"],
        tags=tuple(release["tags"]),
        license=release["license"],
        published_at=release["published_at"],
        verdict=release["validation"]["verdict"],
        num_releases=num_releases,
    )


def take_turns(calls: dict[str, Callable[[], object]]) -> list[dict]:
    """Time each call `REPEATS` times in turns, after one that is not counted."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            started, used = time.perf_counter(), cpu_s()
            call()
            if repeat:
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(cpu_s() - used)
    return [
        {
            "what": name,
            "wall_ms": 1e3 * statistics.median(wall[name]),
            "best_wall_ms": 1e3 * min(wall[name]),
            "cpu_ms": 1e3 * statistics.median(cpu[name]),
        }
        for name in calls
    ]


def cpu_s() -> float:
    """Return the CPU time of this process and of those it has waited for."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def program(*command: str) -> Callable[[], None]:
    """Return a call that runs a command and reads what it prints."""
    return lambda: (subprocess.run(command, capture_output=True, check=True), None)[1]


def commands_of(root: Path, project: str) -> dict[str, Callable[[], object]]:
    """Return the commands to time, ours before the peer's."""
    telescope = str(Path(sys.executable).parent / "telescope")
    ours = {
        "telescope env list": ("env", "list"),
        "telescope env list --json": ("env", "list", "--json"),
        "telescope env search math": ("env", "search", "math"),
        "telescope env --help (imports nothing)": ("env", "--help"),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, arguments in ours.items():
        place = () if "--help" in arguments else ("--registry", str(root))
        calls[name] = program(telescope, *arguments, *place)
    index = (root / "simple").as_uri()
    calls["pip index versions, of one project"] = program(
        *(sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "index"),
        *("versions", project, "--index-url", index),
    )
    return calls


def functions_of(root: Path) -> dict[str, Callable[[], object]]:
    """Return the functions to time; all that read make the same rows."""
    store = LocalStore(root)
    rows = store.catalog()
    data = write_catalog(rows)
    assert json_rows(root) == rows == read_catalog(data, "").rows
    return {
        "LocalStore.catalog": store.catalog,
        "peer: json for each line": lambda: json_rows(root),
        "read_catalog of v1/index.json": lambda: read_catalog(data, ""),
        "search for 'math'": lambda: search(rows, "math"),
        "search for 'mzae plan', a typo": lambda: search(rows, "mzae plan"),
    }


HEAD = ("what", "median, ms", "best, ms", "CPU, ms", "over ours")
NOTE = f"""\
# Listing and searching

{NUM_ENVIRONMENTS:,} environments of {NUM_OWNERS} owners, {NUM_RELEASES} releases each:
{NUM_ENVIRONMENTS * NUM_RELEASES:,} releases and {NUM_ENVIRONMENTS:,} status records in as many
files, in a folder. Medians of {REPEATS} runs in turns; files are in the page cache. `over ours` is
the CPU time over that of the first row, which the neighbours of a busy machine change least.

{{facts}}

## Whole commands

`pip index versions` reads the page of one project in the simple index of the same folder; pip has
no command that lists or searches an index.

"""
FUNCTIONS_NOTE = """
## Reading alone, in a process that runs

Both readers make equal rows from the same files; ours checks every field of every record, `json`
none.

"""


def cells(rows: Sequence[dict]) -> list[list[str]]:
    """Return the lines of a table."""
    ours = rows[0]["cpu_ms"]
    return [
        [
            row["what"],
            *(f"{row[key]:.1f}" for key in ("wall_ms", "best_wall_ms", "cpu_ms")),
            f"{row['cpu_ms'] / ours:.2f}x",
        ]
        for row in rows
    ]


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "msgspec", "pip")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        project = write_registry(root)
        commands = take_turns(commands_of(root, project))
        functions = take_turns(functions_of(root))
    tables = [table(HEAD, cells(rows)) for rows in (commands, functions)]
    print("\n\n".join(tables))
    page = [NOTE, tables[0], FUNCTIONS_NOTE, tables[1]]
    write_results("hub", "\n".join(page), facts, [*commands, *functions])


if __name__ == "__main__":
    main()
