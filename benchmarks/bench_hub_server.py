"""The registry server beside plain file servers: reads per second, unchanged and whole.

The peers hand out the rendered files of the same registry: Starlette's StaticFiles on the same
uvicorn, and the http.server of Python. The servers take turns; each is a process of its own, and
so is what asks, over kept connections.
Run: python benchmarks/bench_hub_server.py
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from machine import facts_of_run, table, write_results

from telescope_envs.records.reading import Publication
from telescope_envs.registry import Registry
from telescope_envs.registry.static_view import render
from telescope_envs.server.hub import HubStore

COMMAND = "python benchmarks/bench_hub_server.py"
ROOT = Path(__file__).parents[1]
CONNECTIONS, SECONDS, REPEATS = 16, 2.0, 3
INDEX = "index/telescope/math-reasoning.jsonl"
HUB, STATIC, PLAIN = "telescope hub serve", "StaticFiles", "http.server"
HUB_PROGRAM = "from telescope_cli.main import main; main()"
STATIC_PROGRAM = """
import sys, uvicorn
from starlette.staticfiles import StaticFiles
uvicorn.run(StaticFiles(directory=sys.argv[1]), port=int(sys.argv[2]), log_level="warning")
"""
PLAIN_PROGRAM = """
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *arguments): pass
handler = partial(Handler, directory=sys.argv[1])
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), handler).serve_forever()
"""
NOTE = f"""# The registry server beside file servers

Requests per second over {CONNECTIONS} kept connections, median of {REPEATS} turns of {SECONDS:g} s;
in brackets the ratio to {STATIC}. *unchanged* asks with the ETag (http.server: the date) that the
first answer gave, and gets 304. The hub answers from records: it looks at the database for every
request, checks limits and tokens, and adds the headers that keep browsers safe.

{{facts}}
"""


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, int]]:
    """Start the three on the same registry; yields their ports."""
    source = Registry.at(ROOT / "registry")
    hub = HubStore(folder / "hub")
    hub.rename(source.config.name)
    hub.add_namespace("telescope", [])
    for row in source.catalog():
        for release in source.releases(row.id):
            hub.publish(Publication(release=release, wheel=source.wheel_bytes(release)))
    hub.close()
    render(ROOT / "registry", folder / "view")
    ports = dict(zip((HUB, STATIC, PLAIN), range(8480, 8483), strict=True))
    view, python = str(folder / "view"), sys.executable
    options = ["--port", str(ports[HUB]), "--reads-per-minute", "0"]
    commands = [
        [python, "-c", HUB_PROGRAM, "hub", "serve", "--data", str(folder / "hub"), *options],
        [python, "-c", STATIC_PROGRAM, view, str(ports[STATIC])],
        [python, "-c", PLAIN_PROGRAM, view, str(ports[PLAIN])],
    ]
    quiet = subprocess.DEVNULL
    running = [subprocess.Popen(command, stdout=quiet, stderr=quiet) for command in commands]
    try:
        yield ports
    finally:
        for process in running:
            process.terminate()
            process.wait(timeout=10)


async def ask(port: int, request: bytes, until_s: float) -> int:
    """Send `request` again and again on one connection; returns how many were answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    while time.monotonic() < until_s:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(length_of(head))
        count += 1
    writer.close()
    return count


def length_of(head: bytes) -> int:
    """Return how many bytes of body follow."""
    if head.startswith(b"HTTP/1.1 304"):
        return 0
    assert head.startswith(b"HTTP/1.1 200"), head
    lines = head.lower().split(b"\r\n")
    return int(next(line for line in lines if line.startswith(b"content-length:"))[15:])


async def first_answer(port: int, path: str) -> dict[str, str]:
    """Return the headers of the first answer, waiting for the server to start."""
    end = time.monotonic() + 20
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except OSError:
            assert time.monotonic() < end, f"nothing listens on {port}"
            await asyncio.sleep(0.1)
    writer.write(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(length_of(head))
    assert body
    writer.close()
    lines = head.decode().split("\r\n")[1:]
    return {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


async def per_second(port: int, path: str, *, unchanged: bool) -> float:
    """Return the rate of one server for one path."""
    headers = await first_answer(port, path)
    known = ""
    if unchanged and "etag" in headers:
        known = f"If-None-Match: {headers['etag']}\r\n"
    elif unchanged:
        known = f"If-Modified-Since: {headers['last-modified']}\r\n"
    request = f"GET /{path} HTTP/1.1\r\nHost: x\r\n{known}\r\n".encode()
    begun = time.monotonic()
    asking = [ask(port, request, begun + SECONDS) for _ in range(CONNECTIONS)]
    counts = await asyncio.gather(*asking)
    return sum(counts) / (time.monotonic() - begun)


def measure(folder: Path) -> list[dict[str, object]]:
    """Return one row per kind of read."""
    line = (ROOT / "registry" / INDEX).read_text().splitlines()[-1]
    wheel = json.loads(line)["wheel"]["urls"][0]
    kinds = {
        "index file, unchanged": (INDEX, True),
        "index file": (INDEX, False),
        "wheel, unchanged": (wheel, True),
        f"wheel of {len((ROOT / 'registry' / wheel).read_bytes()) / 1024:.0f} KiB": (wheel, False),
    }
    rows: list[dict[str, object]] = []
    with servers(folder) as ports:
        for kind, (path, unchanged) in kinds.items():
            turns: dict[str, list[float]] = {name: [] for name in ports}
            for _ in range(REPEATS):
                for name, port in ports.items():
                    turns[name].append(asyncio.run(per_second(port, path, unchanged=unchanged)))
            rates = {name: statistics.median(found) for name, found in turns.items()}
            rows.append({"read": kind, **rates, "turns": turns})
    return rows


def as_cells(row: dict) -> list[str]:
    """Return the row of the table."""
    base = row[STATIC]
    cells = [f"{row[name]:,.0f} ({row[name] / base:.2f})" for name in (HUB, PLAIN)]
    return [row["read"], cells[0], f"{base:,.0f}", cells[1]]


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "fastapi", "uvicorn", "starlette")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    page = table(["read", HUB, STATIC, PLAIN], [as_cells(row) for row in rows])
    print(page)
    write_results("hub_server", f"{NOTE}\n{page}", facts, rows)


if __name__ == "__main__":
    main()
