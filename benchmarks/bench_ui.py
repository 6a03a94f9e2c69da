"""`telescope ui` on a run of a million rollouts: index, pages, search, memory, beside SQLite.

Writes a run with text and tokens into a temporary folder, starts `telescope ui` on it as a process
of its own, and asks over loopback as a browser would. The same scalars and texts go into an
ordinary SQLite store with indexes, for the same questions. The pages of four runs of other shapes
are asked for too. `--rollouts 20000` for a small run. `--folder FOLDER --only-write` writes the
runs; without `--only-write`, runs that are there are taken.
"""

import argparse
import http.client
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow.parquet as pq
from machine import facts_of_run, table, write_results
from ui.generated import EXAMPLE, GROUP_SIZE, PER_STEP, RARE, Shape, write_run

from telescope_core.records import RunFolder

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.chromium import browser  # noqa: E402

TIMES = 9
NUM_ROWS = 10
SCALARS = (
    *("step", "environment", "example_id", "group_id", "index", "attempt", "status", "reward"),
    *("advantage", "num_completion_tokens", "is_truncated", "newest_version", "generate_s"),
)
SHAPES = {
    "steps": Shape(num_steps=10_000, per_step=8),
    "giant": Shape(num_steps=1, per_step=100_000),
    "turns": Shape(num_steps=8, per_step=64, num_turns=100),
    "wide": Shape(num_steps=20, num_metrics=300),
}
"""Runs of other shapes, which `--rollouts` leaves as they are."""
PAGE = """# `telescope ui` on a large run

{facts}

A run of {rollouts:,} rollouts (about 1.2 kB of text, 256 token ids and 192 log-probs each), as many
model calls, spans of 8 ranks, meters of 8 GPUs: {size_gb:.2f} GB in {files:,} files.

| | measured | at most |
|---|---|---|
| making the index | {index_s:.1f} s | 10 s |
| the same in processor time | {index_cpu_s:.1f} s | |
| its size on disk | {index_mb:.0f} MB | 50 MB |
| first page of the run, without an index | {first_page_ms:.0f} ms | |
| resident memory after all questions | {memory_mb:.0f} MB | 1,000 MB |
| a new step: from its file to its rollouts in an answer | {new_step_ms:.0f} ms | 1,000 ms |
| a new row of metrics: until a Chromium shows it, median | {row_to_page_ms:.0f} ms | 1,000 ms |
| the slowest of {num_rows} such rows | {slowest_row_ms:.0f} ms | 1,000 ms |
| a text of the oldest step, searched as the page does: until its hit | {searched_s:.1f} s | 10 s |
| the same in processor time | {searched_cpu_s:.1f} s | |
| summing up the stages of all rollouts for the timeline | {stages_s:.1f} s | |
| SQLite with the same scalars and texts: loading | {sqlite_load_s:.0f} s | |
| its size on disk | {sqlite_mb:,.0f} MB | |

Median of {times} answers over loopback, in milliseconds, with the transfer and the JSON; processor
time of the process that serves is a mean of them. SQLite is asked in the same process, without
transfer and JSON.

{table}

The same pages of runs of other shapes: the one that takes the most processor time, and the one with
the largest answer.

{shapes}
"""


class Question(NamedTuple):
    """An address, how long its answer may take, and the same in SQL for SQLite."""

    name: str
    address: str
    limit_ms: int
    sql: str = ""


RUN = "/runs/large"
COLUMNS = ", ".join(f'"{name}"' for name in SCALARS)


def questions(key: str, shape: Shape) -> list[Question]:
    """Return what is asked of the run `key`, in the order of the pages."""
    run, half = f"/runs/{key}", max(1, shape.num_steps // 2)
    return [
        *questions_of_lists(key, half),
        *questions_of_rollouts(key, half, group=shape.per_step // GROUP_SIZE // 2),
        *questions_of_searches(run),
        *questions_of_times(run, half),
    ]


def questions_of_lists(key: str, half: int) -> list[Question]:
    """Return questions about many rollouts at once."""
    run, columns = f"/runs/{key}", COLUMNS
    return [
        Question("runs", "/", 200),
        Question(
            "overview",
            run,
            200,
            "SELECT environment, step, avg(mean), count(*) FROM (SELECT environment, step, "
            "avg(reward) AS mean FROM r GROUP BY environment, step, group_id) "
            "GROUP BY environment, step",
        ),
        Question("compare with another run", f"/compare?run={key}&run=small", 200),
        Question("examples of both runs", f"/compare/examples?run={key}&run=small", 200),
        Question(
            "newest rollouts",
            f"{run}/rollouts",
            200,
            f"SELECT {columns} FROM r ORDER BY step DESC LIMIT 50",
        ),
        Question(
            "filter and sort",
            f"{run}/rollouts?environment=math&truncated=true&reward_from=1&step_from={half}"
            "&sort=-num_completion_tokens",
            200,
            f"SELECT {columns} FROM r WHERE environment = 'math' AND is_truncated AND reward >= 1 "
            f"AND step >= {half} ORDER BY num_completion_tokens DESC LIMIT 50",
        ),
        Question(
            "filter by a metric and a tag",
            f"{run}/rollouts?where=metrics/format=0&tag=level=3&group=mixed&sort=reward",
            200,
        ),
        Question(
            "rollouts of one server",
            f"{run}/rollouts?server=http://127.0.0.1:8003",
            200,
        ),
        Question(
            "histogram of lengths",
            f"{run}/rollouts?distribution=num_completion_tokens",
            200,
            "SELECT num_completion_tokens / 50, count(*) FROM r GROUP BY 1",
        ),
        Question("histogram of a tag", f"{run}/rollouts?distribution=tags/level", 200),
    ]


def questions_of_rollouts(key: str, half: int, *, group: int) -> list[Question]:
    """Return questions about few rollouts in the middle of the run, and of their step."""
    run, group_id = f"/runs/{key}", f"{half}-{group}"
    return [
        Question(
            "one rollout with its tokens",
            f"{run}/rollouts/{group_id}/3/1",
            50,
            f"SELECT * FROM r JOIN t USING (id) WHERE group_id = '{group_id}' AND \"index\" = 3",
        ),
        Question(
            "a group",
            f"{run}/groups/{group_id}",
            200,
            f"SELECT * FROM r JOIN t USING (id) WHERE group_id = '{group_id}'",
        ),
        Question(
            "one example over all steps",
            f"{run}/examples/math/math%2F{EXAMPLE}",
            200,
            "SELECT step, reward FROM r WHERE environment = 'math' "
            f"AND example_id = 'math/{EXAMPLE}' ORDER BY step",
        ),
        Question(
            "difference of two rollouts",
            f"/difference?left={key}%2F{group_id}%2F3%2F1&right={key}%2F{group_id}%2F4%2F1",
            200,
        ),
    ]


def questions_of_searches(run: str) -> list[Question]:
    """Return searches in the texts of all rollouts."""
    return [
        Question(
            "search: first hits of a common word",
            f"{run}/rollouts?q=triangle%20angle&limit=20",
            100,
            "SELECT id FROM t WHERE text LIKE '%triangle angle%' ORDER BY id DESC LIMIT 20",
        ),
        Question(
            "search: first hits of a word in 1 of 1000",
            f"{run}/rollouts?q={RARE}&limit=5",
            100,
            f"SELECT id FROM t WHERE text LIKE '%{RARE}%' ORDER BY id DESC LIMIT 5",
        ),
    ]


def questions_of_times(run: str, half: int) -> list[Question]:
    """Return questions about moments, and the rest of the pages."""
    begin_s = 1_750_000_000
    return [
        Question("timeline of the whole run", f"{run}/timeline", 200),
        Question(
            "timeline of ten minutes",
            f"{run}/timeline?from={begin_s + 10 * half}&to={begin_s + 10 * half + 600}",
            200,
        ),
        Question(
            "timeline of one second",
            f"{run}/timeline?from={begin_s + 10 * half}&to={begin_s + 10 * half + 1}",
            200,
        ),
        Question("meters", f"{run}/infra", 200),
        Question("evals", f"{run}/evals", 200),
        Question("logs", f"{run}/logs", 200),
        Question("settings", f"{run}/config", 200),
    ]


class Server(NamedTuple):
    """`telescope ui` as a process of its own."""

    process: psutil.Process
    port: int
    token: str

    def ask(self, address: str) -> Any:
        """Return the data of a page."""
        return json.loads(self.answer(address))

    def cpu_s(self) -> float:
        """Return the processor time of the process so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def asked(self, address: str, times: int = TIMES) -> "Asked":
        """Return what `times` answers took, after one that is not counted."""
        content = self.answer(address)
        cpu_s = self.cpu_s()
        found_ms: list[float] = []
        for _ in range(times):
            began = time.perf_counter()
            content = self.answer(address)
            found_ms.append(1000 * (time.perf_counter() - began))
        cpu_ms = 1000 * (self.cpu_s() - cpu_s) / times
        return Asked(ms=statistics.median(found_ms), cpu_ms=cpu_ms, kb=len(content) / 1e3)

    def answer(self, address: str) -> bytes:
        """Return the content of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"authorization": f"Bearer {self.token}", "accept": "application/json"}
        connection.request("GET", address, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{address}: {answer.status} {content[:500]!r}")
        return content


class Asked(NamedTuple):
    """What answers to an address took: median time, mean processor time, and kB of one."""

    ms: float
    cpu_ms: float
    kb: float


@contextmanager
def serving(folder: Path, cache: Path) -> Iterator[Server]:
    """Start `telescope ui` on `folder`, and end it."""
    command = [sys.executable, "-c", "from telescope_cli.main import main; main()", "ui"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(
        [*command, str(folder), "--json", "--port", "0"],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        port = int(said["address"].rpartition(":")[2])
        try:
            yield Server(psutil.Process(process.pid), port, said["token"])
        finally:
            process.terminate()


class Took(NamedTuple):
    """Seconds of something, and those of processor time of the process that serves."""

    s: float
    cpu_s: float


def took(server: Server, do: Callable[[], object]) -> Took:
    began, cpu_s = time.perf_counter(), server.cpu_s()
    do()
    return Took(time.perf_counter() - began, server.cpu_s() - cpu_s)


def index_fully(server: Server, run: str) -> None:
    """Ask until the index of a run is complete."""
    while not server.ask(f"{run}/rollouts?limit=1")["index"]["is_complete"]:
        pass


def new_step_ms(server: Server, run: Path, steps: int) -> float:
    """Return the milliseconds from a new file to an answer that has its rollouts."""
    found = []
    for step in range(steps + 1, steps + 6):
        temporary = run / "rollouts" / ".new"
        shutil.copy(run / "rollouts" / f"step-{steps:06d}.parquet", temporary)
        began = time.perf_counter()
        os.replace(temporary, run / "rollouts" / f"step-{step:06d}.parquet")
        while server.ask("/runs/large/rollouts?limit=1")["steps"]["last"] != step:
            pass
        found.append(1000 * (time.perf_counter() - began))
    for step in range(steps + 1, steps + 6):
        (run / "rollouts" / f"step-{step:06d}.parquet").unlink()
    return statistics.median(found)


def search_oldest(server: Server, run: str, shape: Shape) -> None:
    """Ask until a text that only the oldest step has is found, newest step first."""
    address = f"{run}/rollouts?q=%20{shape.per_step + 3}%20"
    found = server.ask(address)
    while not found["columns"]["address"]:
        cursor = found["search"]["next_cursor"]
        assert cursor is not None, "the text is not found"
        found = server.ask(f"{address}&cursor={cursor}")


def sum_up_stages(server: Server, run: str) -> None:
    """Ask until the stages of all rollouts are on the timeline of the whole run."""
    while not server.ask(f"{run}/timeline")["index"]["is_complete"]:
        time.sleep(0.1)


def shape_row(server: Server, key: str, shape: Shape) -> dict[str, Any]:
    """Return what the index, a search and the pages of a run took."""
    run = f"/runs/{key}"
    index = took(server, lambda: index_fully(server, run))
    sum_up_stages(server, run)
    search = took(server, lambda: search_oldest(server, run, shape))
    asked = {one.name: server.asked(one.address) for one in questions(key, shape)}
    slowest = max(asked, key=lambda name: asked[name].cpu_ms)
    largest = max(asked, key=lambda name: asked[name].kb)
    return {
        **{"name": key, "rollouts": shape.num_rollouts, "steps": shape.num_steps},
        **{"turns": shape.num_turns, "metrics": shape.num_metrics},
        **{"index_cpu_s": index.cpu_s, "searched_s": search.s, "searched_cpu_s": search.cpu_s},
        **{"slowest": slowest, "ms": asked[slowest].ms, "cpu_ms": asked[slowest].cpu_ms},
        **{"largest": largest, "kb": asked[largest].kb},
        "pages": {name: one._asdict() for name, one in asked.items()},
    }


def rows_to_page_ms(server: Server, run: RunFolder, profile: Path) -> list[float]:
    """Return the milliseconds from each new row of metrics until a real browser shows its step."""
    found: list[float] = []
    step = "document.querySelector('.facts dd')?.innerText"
    with browser(profile) as page:
        address = f"http://127.0.0.1:{server.port}"
        page.open(f"{address}/?token={server.token}")
        page.open(f"{address}/runs/{run.path.name}")
        page.until(f"{step} === '1' && document.querySelector('.live').innerText === 'live'")
        for number in range(2, 2 + NUM_ROWS):
            # A step takes longer than the pages wait between two questions.
            time.sleep(1.5)
            began = time.perf_counter()
            run.log_metrics({"step": number, "task_reward/mean": 0.5})
            page.until(f"{step} === '{number}'")
            found.append(1000 * (time.perf_counter() - began))
    return found


def fill_sqlite(run: Path, path: Path) -> float:
    """Put scalars and texts into SQLite with the indexes that one would make; return seconds."""
    began = time.perf_counter()
    store = sqlite3.connect(path)
    store.execute("PRAGMA journal_mode = OFF")
    store.execute("PRAGMA synchronous = OFF")
    columns = ", ".join(f'"{name}"' for name in SCALARS)
    store.execute(f"CREATE TABLE r (id INTEGER PRIMARY KEY, {columns})")
    store.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text)")
    number = 0
    marks = ", ".join("?" * (len(SCALARS) + 1))
    files = [pq.ParquetFile(path) for path in sorted((run / "rollouts").glob("*.parquet"))]
    for file, group in [(one, at) for one in files for at in range(one.num_row_groups)]:
        read = file.read_row_group(group, columns=[*SCALARS, "messages"])
        ids = range(number, number + read.num_rows)
        number += read.num_rows
        lists = [read.column(name).to_pylist() for name in SCALARS]
        store.executemany(f"INSERT INTO r VALUES ({marks})", zip(ids, *lists, strict=True))
        texts = [
            "\n".join(one["content"] for one in said)
            for said in read.column("messages").to_pylist()
        ]
        store.executemany("INSERT INTO t VALUES (?, ?)", zip(ids, texts, strict=True))
    for name in ("step", "group_id", "example_id", "num_completion_tokens"):
        store.execute(f'CREATE INDEX i_{name} ON r ("{name}")')
    store.commit()
    store.close()
    return time.perf_counter() - began


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def written(path: Path, shape: Shape) -> RunFolder:
    """Return the run in `path`, which is written if it is not there."""
    if not path.exists():
        return write_run(path, shape)
    run = RunFolder.open(path)
    if len(run.rollout_steps()) != shape.num_steps:
        raise SystemExit(f"{path} has not the {shape.num_steps} steps of such a run; remove it")
    return run


def write_runs(folder: Path, large: Shape) -> RunFolder:
    """Write the runs that are not there, and return the large one."""
    written(folder / "small", Shape(num_steps=min(large.num_steps, 10)))
    for name, shape in SHAPES.items():
        written(folder / name, shape)
    return written(folder / "large", large)


def measure(folder: Path, large: Shape) -> dict[str, Any]:
    run = write_runs(folder / "runs", large)
    live = RunFolder.create(folder / "runs" / "live", config={}, replace=True)
    live.log_metrics({"step": 1, "task_reward/mean": 0.5})
    found: dict[str, Any] = {
        "rollouts": large.num_rollouts,
        "size_gb": size_of(run.path) / 1e9,
        "files": sum(1 for path in run.path.rglob("*") if path.is_file()),
        "times": TIMES,
    }
    with serving(folder / "runs", folder / "cache") as server:
        server.ask("/")
        first = took(server, lambda: server.ask(RUN))
        rest = took(server, lambda: index_fully(server, RUN))
        found["first_page_ms"] = 1000 * first.s
        found |= {"index_s": first.s + rest.s, "index_cpu_s": first.cpu_s + rest.cpu_s}
        found["stages_s"] = took(server, lambda: sum_up_stages(server, RUN)).s
        search = took(server, lambda: search_oldest(server, RUN, large))
        found |= {"searched_s": search.s, "searched_cpu_s": search.cpu_s}
        found["index_mb"] = max(f.stat().st_size for f in folder.rglob("*.duckdb")) / 1e6
        found["rows"] = [
            {**one._asdict(), **server.asked(one.address)._asdict()}
            for one in questions("large", large)
        ]
        found["shapes"] = [shape_row(server, key, shape) for key, shape in SHAPES.items()]
        found["new_step_ms"] = new_step_ms(server, run.path, large.num_steps)
        delays_ms = rows_to_page_ms(server, live, folder / "profile")
        found["row_to_page_ms"] = statistics.median(delays_ms)
        found["slowest_row_ms"] = max(delays_ms)
        found["num_rows"] = NUM_ROWS
        found["memory_mb"] = server.process.memory_info().rss / 1e6
    path = folder / "store.sqlite3"
    found["sqlite_load_s"] = fill_sqlite(run.path, path)
    found["sqlite_mb"] = path.stat().st_size / 1e6
    store = sqlite3.connect(path)
    for row in found["rows"]:
        if row["sql"]:
            times_ms: list[float] = []
            for _ in range(4):
                began = time.perf_counter()
                store.execute(row["sql"]).fetchall()
                times_ms.append(1000 * (time.perf_counter() - began))
            row["sqlite_ms"] = statistics.median(times_ms[1:])
    store.close()
    return found


def page_of(found: dict[str, Any]) -> str:
    rows: list[Sequence[str]] = [
        (
            row["name"],
            f"{row['ms']:.0f}",
            f"{row['cpu_ms']:.0f}",
            f"{row['kb']:,.0f}",
            f"{row['limit_ms']}",
            f"{row['sqlite_ms']:.1f}" if "sqlite_ms" in row else "",
        )
        for row in found["rows"]
    ]
    shown = table(("question", "ms", "processor ms", "kB", "at most", "SQLite"), rows)
    shapes = table(
        ("run", "oldest text, s", "slowest page", "ms", "processor ms", "largest page", "kB"),
        [
            (
                f"{one['rollouts']:,} rollouts, steps: {one['steps']:,}, turns of each: "
                f"{one['turns']}, metrics of each: {one['metrics']}",
                f"{one['searched_s']:.1f}",
                one["slowest"],
                f"{one['ms']:.0f}",
                f"{one['cpu_ms']:.0f}",
                one["largest"],
                f"{one['kb']:,.0f}",
            )
            for one in found["shapes"]
        ],
    )
    tables = {"table": shown, "shapes": shapes}
    return PAGE.replace("{facts}", "{{facts}}").format(**{**found, **tables})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the runs are written, and kept")
    parser.add_argument("--only-write", action="store_true", help="write the runs into --folder")
    arguments = parser.parse_args()
    large = Shape(num_steps=max(1, arguments.rollouts // PER_STEP))
    if arguments.only_write:
        if arguments.folder is None:
            parser.error("--only-write needs --folder")
        write_runs(arguments.folder / "runs", large)
        return
    with tempfile.TemporaryDirectory(prefix="bench-ui-") as temporary:
        found = measure(arguments.folder or Path(temporary), large)
    page = page_of(found)
    command = f"python benchmarks/bench_ui.py --rollouts {arguments.rollouts}"
    facts = facts_of_run(command, "duckdb", "pyarrow", "fastapi", "uvicorn")
    numbers = {name: value for name, value in found.items() if name not in ("rows", "shapes")}
    print(page.replace("{facts}", ""))
    if arguments.rollouts == 1_000_000:
        rows = [{"name": "the whole run", **numbers}, *found["rows"], *found["shapes"]]
        write_results("ui", page, facts, rows)


if __name__ == "__main__":
    main()
