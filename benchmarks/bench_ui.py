"""`telescope ui` on a run of a million rollouts: index, pages, search, memory, beside SQLite.

Writes a run with text and tokens into a temporary folder, starts `telescope ui` on it as a process
of its own, and asks over loopback as a browser would. The same scalars and texts go into an
ordinary SQLite store with indexes, for the same questions. `--rollouts 20000` for a small one.
`--folder FOLDER --only-write` writes the run; without `--only-write`, a run that is there is taken.
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
from ui.generated import PER_STEP, RARE, write_run

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
PAGE = """# `telescope ui` on a large run

{facts}

A run of {rollouts:,} rollouts (about 1.2 kB of text, 256 token ids and 192 log-probs each), as many
model calls, spans of 8 ranks, meters of 8 GPUs: {size_gb:.2f} GB in {files:,} files.

| | measured | at most |
|---|---|---|
| making the index | {index_s:.1f} s | 10 s |
| its size on disk | {index_mb:.0f} MB | 50 MB |
| first page of the run, without an index | {first_page_ms:.0f} ms | |
| resident memory after all questions | {memory_mb:.0f} MB | 1,000 MB |
| a new step: from its file to its rollouts in an answer | {new_step_ms:.0f} ms | 1,000 ms |
| a new row of metrics: until a Chromium shows it, median | {row_to_page_ms:.0f} ms | 1,000 ms |
| the slowest of {num_rows} such rows | {slowest_row_ms:.0f} ms | 1,000 ms |
| a text of the oldest step, searched as the page does: until its hit | {searched_s:.1f} s | 10 s |
| summing up the stages of all rollouts for the timeline | {stages_s:.1f} s | |
| SQLite with the same scalars and texts: loading | {sqlite_load_s:.0f} s | |
| its size on disk | {sqlite_mb:,.0f} MB | |

Median of {times} answers over loopback, in milliseconds, with the transfer and the JSON. SQLite is
asked in the same process, without either.

{table}
"""


class Question(NamedTuple):
    """An address, how long its answer may take, and the same in SQL for SQLite."""

    name: str
    address: str
    limit_ms: int
    sql: str = ""


RUN = "/runs/large"
COLUMNS = ", ".join(f'"{name}"' for name in SCALARS)


def questions(steps: int) -> list[Question]:
    """Return what is asked of a run with so many steps, in the order of the pages."""
    half = steps // 2
    return [
        *questions_of_lists(half),
        *questions_of_rollouts(half),
        *questions_of_searches(),
        *questions_of_times(half),
    ]


def questions_of_lists(half: int) -> list[Question]:
    """Return questions about many rollouts at once."""
    run, columns = RUN, COLUMNS
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
        Question("compare with another run", "/compare?run=large&run=small", 200),
        Question("examples of both runs", "/compare/examples?run=large&run=small", 200),
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


def questions_of_rollouts(half: int) -> list[Question]:
    """Return questions about few rollouts in the middle of the run."""
    run = RUN
    return [
        Question(
            "one rollout with its tokens",
            f"{run}/rollouts/{half}-5/3/1",
            50,
            f"SELECT * FROM r JOIN t USING (id) WHERE group_id = '{half}-5' AND \"index\" = 3",
        ),
        Question(
            "a group",
            f"{run}/groups/{half}-5",
            200,
            f"SELECT * FROM r JOIN t USING (id) WHERE group_id = '{half}-5'",
        ),
        Question(
            "one example over all steps",
            f"{run}/examples/math/math%2F17",
            200,
            "SELECT step, reward FROM r WHERE environment = 'math' AND example_id = 'math/17' "
            "ORDER BY step",
        ),
        Question(
            "difference of two rollouts",
            f"/difference?left=large%2F{half}-5%2F3%2F1&right=large%2F{half}-5%2F4%2F1",
            200,
        ),
    ]


def questions_of_searches() -> list[Question]:
    """Return searches in the texts of all rollouts."""
    run = RUN
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


def questions_of_times(half: int) -> list[Question]:
    """Return questions about moments, and the rest of the pages."""
    run, begin_s = RUN, 1_750_000_000
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"authorization": f"Bearer {self.token}", "accept": "application/json"}
        connection.request("GET", address, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{address}: {answer.status} {content[:500]!r}")
        return json.loads(content)


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


def median_ms(ask: Callable[[], object], times: int = TIMES) -> float:
    """Return the median of `times` calls, after one that is not counted."""
    ask()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def indexed(server: Server, folder: Path) -> float:
    """Return the seconds until the index of a run is complete."""
    began = time.perf_counter()
    while not server.ask("/runs/large/rollouts?limit=1")["index"]["is_complete"]:
        pass
    return time.perf_counter() - began


def new_step_ms(server: Server, run: Path, steps: int) -> float:
    """Return the milliseconds from a new file to an answer that has its rollouts."""
    found = []
    for step in range(steps + 1, steps + 6):
        temporary = run / "rollouts" / ".new"
        shutil.copy(run / "rollouts" / "step-000001.parquet", temporary)
        began = time.perf_counter()
        os.replace(temporary, run / "rollouts" / f"step-{step:06d}.parquet")
        while server.ask("/runs/large/rollouts?limit=1")["steps"]["last"] != step:
            pass
        found.append(1000 * (time.perf_counter() - began))
    for step in range(steps + 1, steps + 6):
        (run / "rollouts" / f"step-{step:06d}.parquet").unlink()
    return statistics.median(found)


def searched_s(server: Server) -> float:
    """Return the seconds until a text that only the oldest step has is found, newest step first."""
    began = time.perf_counter()
    address = f"{RUN}/rollouts?q=%20{PER_STEP + 3}%20"
    found = server.ask(address)
    while not found["columns"]["address"]:
        cursor = found["search"]["next_cursor"]
        assert cursor is not None, "the text is not found"
        found = server.ask(f"{address}&cursor={cursor}")
    return time.perf_counter() - began


def summed_up_s(server: Server) -> float:
    """Return the seconds until the stages of all rollouts are on the timeline of the whole run."""
    began = time.perf_counter()
    while not server.ask("/runs/large/timeline")["index"]["is_complete"]:
        time.sleep(0.1)
    return time.perf_counter() - began


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
    for file in sorted((run / "rollouts").glob("step-*.parquet")):
        read = pq.read_table(file, columns=[*SCALARS, "messages"])
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


def written(path: Path, num_rollouts: int) -> RunFolder:
    """Return the run in `path`, which is written if it is not there."""
    if not path.exists():
        return write_run(path, num_rollouts=num_rollouts)
    run = RunFolder.open(path)
    expected = max(1, num_rollouts // PER_STEP)
    if len(run.rollout_steps()) != expected:
        raise SystemExit(f"{path} has not the {expected} steps of such a run; remove it")
    return run


def measure(folder: Path, rollouts: int) -> dict[str, Any]:
    run = written(folder / "runs" / "large", rollouts)
    written(folder / "runs" / "small", min(rollouts, 5120))
    live = RunFolder.create(folder / "runs" / "live", config={}, replace=True)
    live.log_metrics({"step": 1, "task_reward/mean": 0.5})
    steps = len(run.rollout_steps())
    found: dict[str, Any] = {
        "rollouts": rollouts,
        "size_gb": size_of(run.path) / 1e9,
        "files": sum(1 for path in run.path.rglob("*") if path.is_file()),
        "times": TIMES,
    }
    with serving(folder / "runs", folder / "cache") as server:
        server.ask("/")
        began = time.perf_counter()
        server.ask("/runs/large")
        found["first_page_ms"] = 1000 * (time.perf_counter() - began)
        found["index_s"] = time.perf_counter() - began + indexed(server, folder)
        stages_s = summed_up_s(server)
        found["searched_s"] = searched_s(server)
        found["index_mb"] = max(f.stat().st_size for f in folder.rglob("*.duckdb")) / 1e6
        found["rows"] = [
            {
                **one._asdict(),
                "ms": median_ms(lambda address=one.address: server.ask(address)),
            }
            for one in questions(steps)
        ]
        found["stages_s"] = stages_s
        found["new_step_ms"] = new_step_ms(server, run.path, steps)
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
            row["sqlite_ms"] = median_ms(
                lambda sql=row["sql"]: store.execute(sql).fetchall(), times=3
            )
    store.close()
    return found


def page_of(found: dict[str, Any]) -> str:
    rows: list[Sequence[str]] = [
        (
            row["name"],
            f"{row['ms']:.0f}",
            f"{row['limit_ms']}",
            f"{row['sqlite_ms']:.1f}" if "sqlite_ms" in row else "",
        )
        for row in found["rows"]
    ]
    shown = table(("question", "ms", "at most", "SQLite"), rows)
    return PAGE.replace("{facts}", "{{facts}}").format(**{**found, "table": shown})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the run is written, and kept")
    parser.add_argument("--only-write", action="store_true", help="write the run into --folder")
    arguments = parser.parse_args()
    if arguments.only_write:
        if arguments.folder is None:
            parser.error("--only-write needs --folder")
        written(arguments.folder / "runs" / "large", arguments.rollouts)
        return
    with tempfile.TemporaryDirectory(prefix="bench-ui-") as temporary:
        found = measure(arguments.folder or Path(temporary), arguments.rollouts)
    page = page_of(found)
    command = f"python benchmarks/bench_ui.py --rollouts {arguments.rollouts}"
    facts = facts_of_run(command, "duckdb", "pyarrow", "fastapi", "uvicorn")
    numbers = {name: value for name, value in found.items() if name != "rows"}
    print(page.replace("{facts}", ""))
    if arguments.rollouts == 1_000_000:
        write_results("ui", page, facts, [{"name": "the whole run", **numbers}, *found["rows"]])


if __name__ == "__main__":
    main()
