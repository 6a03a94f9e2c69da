"""Running `print(1)`: bare Python, a new local sandbox each time, and one that a pool has ready.

All sides run in one process and take turns, so that a busy machine slows each alike. Then 500
programs at once, and what is left of them: processes, open files, control groups and memory.
Run: python benchmarks/bench_sandboxes.py
"""

import asyncio
import gc
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from machine import facts_of_run, table, write_results

from telescope_core.sandboxes import SandboxPool, SandboxSpec
from telescope_core.sandboxes.local.interpreter import find_interpreter
from telescope_core.sandboxes.local.provider import LocalProvider

COMMAND = "python benchmarks/bench_sandboxes.py"
ROUNDS = 60
PROGRAMS = 500
PLACES = 16
NOTE = """# Local sandboxes

Milliseconds until `print(1)` has run and its output is there. `bare Python` is the interpreter
that the sandboxes have too, started from asyncio. `new sandbox` makes one, runs the program and
closes it; `from the pool` takes one that is ready, while the next is made behind it; `one more
program` runs a further program in a sandbox that is there. The sides take turns. Ratios are to
bare Python, by the median. Targets: a new sandbox at most 1.5, from the pool at most 1. `processor
ms` is the processor time of everything that a program took, its sandbox included: of this process,
of its children, and of the template of which sandboxes are forked, with all that ran in them.
`without template` has bubblewrap start each sandbox, as where no template can be had; as root it
starts one program more, which becomes another user.

{facts}
"""


async def bare(python: str) -> None:
    """Run the program without a sandbox."""
    child = await asyncio.create_subprocess_exec(
        *(python, "-c", "print(1)"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, _ = await child.communicate()
    assert out == b"1\n"


async def cold(provider: LocalProvider) -> None:
    """Run the program in a sandbox of its own."""
    box = await provider.create(SandboxSpec())
    assert (await box.run(["python3", "-c", "print(1)"])).text == "1\n"
    await box.close()


async def pooled(pool: SandboxPool) -> float:
    """Run the program in a sandbox of the pool; returns the ms until its output is there."""
    began_s = time.perf_counter()
    async with pool.take() as box:
        assert (await box.run(["python3", "-c", "print(1)"])).text == "1\n"
        return (time.perf_counter() - began_s) * 1e3


def template_s() -> float:
    """Return the seconds of processor time of this process's templates and of their forks."""
    used = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if _read(path).endswith(f"of-{os.getpid()}\0".encode()):
            # Of the fields behind the name: this process's time, and that of what it reaped.
            fields = _read(path.with_name("stat")).rpartition(b")")[2].split()
            used += sum(map(int, fields[11:15]))
    return used / os.sysconf("SC_CLK_TCK")


async def processor_ms(run: Callable[[], Awaitable[object]]) -> float:
    """Return the milliseconds of processor time of all that takes part.

    On a machine that is busy with other work it says more than the time that passes.
    """

    def used_s() -> float:
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        both = [resource.getrusage(kind) for kind in kinds]
        return sum(one.ru_utime + one.ru_stime for one in both) + template_s()

    began_s = used_s()
    for _ in range(ROUNDS):
        await run()
    return (used_s() - began_s) / ROUNDS * 1e3


async def timed(run: Callable[[], Awaitable[None]]) -> float:
    """Return the milliseconds that `run` takes."""
    began_s = time.perf_counter()
    await run()
    return (time.perf_counter() - began_s) * 1e3


async def latencies() -> dict[str, list[float]]:
    """Return the milliseconds of each side, in turns."""
    provider, python = LocalProvider(), find_interpreter().path
    plain = LocalProvider(use_template=False)
    for one in (provider, plain):
        await (await one.create(SandboxSpec())).close()
    found: dict[str, list[float]] = {
        "bare Python": [],
        "new sandbox": [],
        "without template": [],
        "from the pool": [],
        "one more program": [],
    }
    again = await provider.create(SandboxSpec())
    async with SandboxPool(provider, max_open=4, num_warm=2) as pool:
        for _ in range(ROUNDS):
            found["bare Python"].append(await timed(lambda: bare(python)))
            found["new sandbox"].append(await timed(lambda: cold(provider)))
            found["without template"].append(await timed(lambda: cold(plain)))
            while pool.usage().num_open < 2:  # noqa: ASYNC110 - it is not part of what is timed
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # what is made behind the last one is not part of the next
            found["from the pool"].append(await pooled(pool))
            took = await timed(lambda: again_once(again))
            found["one more program"].append(took)
    await provider.close()
    return found


async def processor_times() -> dict[str, float]:
    """Return the milliseconds of processor time of each side that starts what it runs in."""
    provider, python = LocalProvider(), find_interpreter().path
    plain = LocalProvider(use_template=False)
    for one in (provider, plain):
        await (await one.create(SandboxSpec())).close()
    found = {
        "bare Python": await processor_ms(lambda: bare(python)),
        "new sandbox": await processor_ms(lambda: cold(provider)),
        "without template": await processor_ms(lambda: cold(plain)),
    }
    await provider.close()
    return found


async def again_once(box: Any) -> None:
    """Run the program in a sandbox that is there."""
    assert (await box.run(["python3", "-c", "print(1)"])).text == "1\n"


def state() -> dict[str, int]:
    """Return what a leak would show in."""
    gc.collect()
    own = f"of-{os.getpid()}\0".encode()
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _read(p).endswith(own)]
    resident = Path("/proc/self/statm").read_text().split()[1]
    return {
        "processes": len(mine),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(list(Path("/sys/fs/cgroup").rglob(f"telescope-sandbox-{os.getpid()}-*"))),
        "resident KiB": int(resident) * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def many() -> dict[str, Any]:
    """Run 500 programs at once through a pool of 16 places; returns the rate and what is left."""
    provider = LocalProvider()
    async with SandboxPool(provider, max_open=PLACES) as pool:

        async def one(number: int) -> None:
            async with pool.take() as box:
                done = await box.run(["python3", "-c", f"print({number})"], timeout_s=120)
                assert done.text == f"{number}\n"

        await asyncio.gather(*(one(number) for number in range(PLACES)))
        before, began_s = state(), time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(PROGRAMS)))
        took_s = time.perf_counter() - began_s
        after = state()
    await provider.close()
    return {"programs_per_s": PROGRAMS / took_s, "before": before, "after": after}


def main() -> None:
    """Measure, print and write the results."""
    found = asyncio.run(latencies())
    busy = asyncio.run(processor_times())
    crowd = asyncio.run(many())
    medians = {name: statistics.median(times) for name, times in found.items()}
    ratios = {name: median / medians["bare Python"] for name, median in medians.items()}
    rows = [
        [
            *(name, f"{min(found[name]):.1f}", f"{median:.1f}", f"{ratios[name]:.2f}"),
            f"{busy[name]:.1f}" if name in busy else "",
        ]
        for name, median in medians.items()
    ]
    text = table(["side", "least ms", "median ms", "to bare Python", "processor ms"], rows)
    left = {name: crowd["after"][name] - crowd["before"][name] for name in crowd["before"]}
    text += (
        f"\n\nBy processor time a new sandbox takes {busy['new sandbox'] / busy['bare Python']:.2f}"
    )
    text += f" times bare Python, as {'root' if os.getuid() == 0 else 'an ordinary user'}.\n"
    text += (
        f"\n{PROGRAMS} programs at once, {PLACES} sandboxes at a time: "
        f"{crowd['programs_per_s']:.0f} a second. More afterwards than before: "
        + ", ".join(f"{number} {name}" for name, number in left.items())
        + "."
    )
    print(text)
    facts = facts_of_run(COMMAND, "telescope-core")
    results = [
        {
            **{"side": name, "ms": found[name], "median_ms": medians[name]},
            **{"ratio": ratios[name], "processor_ms": busy.get(name)},
        }
        for name in found
    ]
    write_results("sandboxes", f"{NOTE}\n{text}", facts, [*results, {"side": "crowd", **crowd}])
    for name in ("processes", "files", "groups"):
        assert left[name] <= 0, f"{left[name]} {name} are left"


if __name__ == "__main__":
    main()
