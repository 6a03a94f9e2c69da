"""What a process of its own costs an environment: rollouts per second, and one tool call.

The same environment with the same scripted policy, in this process and in worker processes, taking
turns. The policy answers at once, so that all that is measured is ours.
Run: python benchmarks/bench_environment_processes.py
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from machine import facts_of_run, table, write_results

from telescope_core import Example, ListSource, SingleTurnEnvironment, ToolEnvironment, reward
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.protocols import EnvironmentClient, PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import RolloutStatus, Sampling, Split

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_environment_processes.py"
NUM_ROLLOUTS, REPEATS, NUM_CALLS = 1024, 5, 200
CONCURRENCY = (1, 64, 256, 1024)
PLACES = {
    "in this process": ProcessSettings(isolation=Isolation.NONE),
    "1 process": ProcessSettings(isolation=Isolation.PROCESS),
    "2 processes": ProcessSettings(isolation=Isolation.PROCESS, num_workers=2),
}
NOTE = """# Environments in processes of their own

A single-turn environment with one reward, 256 words per answer, {rollouts} rollouts; medians of
{repeats} rounds in which the places take turns. `added` is the time per rollout beyond that of
this process; `driver CPU` is what one rollout costs the process that has the event loop, at 256 at
a time. The tool call goes from the policy's answer through the worker's tool to the next
request at the policy; the target is below 5 ms.

{facts}
"""


class Words(SingleTurnEnvironment):
    """Counts words."""

    def examples(self, split: Split) -> ListSource:
        """Return a few prompts."""
        return ListSource([Example(id=f"{split}-{i}", prompt=f"say {i}") for i in range(64)])

    @reward
    def half(self, rollout: Any, example: Example) -> float:
        """Pay a half for each answer."""
        return 0.5 * bool(rollout.completion_text.count(" "))


class Adder(ToolEnvironment, Words):
    """Adds with a tool."""

    max_turns = NUM_CALLS + 1

    def tools(self) -> list[Any]:
        """Return the one tool."""
        return [self.add]

    async def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b


def request(index: int) -> PlayRequest:
    """Return the request of rollout `index`."""
    return PlayRequest(
        split=Split.TRAIN,
        example_index=index % 64,
        group_id=f"g{index}",
        index=0,
        sampling=Sampling(max_tokens=256),
        deadline_s=120.0,
    )


async def rollouts_per_s(client: EnvironmentClient, concurrency: int) -> float:
    """Play NUM_ROLLOUTS, so many at a time."""
    source = ScriptedClient(["word " * 256])
    numbers = iter(range(NUM_ROLLOUTS if concurrency > 1 else NUM_ROLLOUTS // 4))
    num_played = 0

    async def player() -> None:
        nonlocal num_played
        for index in numbers:
            rollout = await client.play(request(index), source.policy(str(index)))
            assert rollout.status is RolloutStatus.KEPT, rollout.error
            num_played += 1

    began_s = time.perf_counter()
    await asyncio.gather(*(player() for _ in range(concurrency)))
    return num_played / (time.perf_counter() - began_s)


async def tool_call_ms(client: EnvironmentClient) -> float:
    """Return the median time between an answer with a call and the request that follows it."""
    answered: list[float] = []
    asked: list[float] = []
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    scripted = ScriptedClient([*[call] * NUM_CALLS, "3"]).policy("r")

    class Timed:
        endpoint = None

        async def complete(self, messages: Any, sampling: Sampling, *, tools: Any = ()) -> Any:
            asked.append(time.perf_counter())
            completion = await scripted.complete(messages, sampling, tools=tools)
            answered.append(time.perf_counter())
            return completion

    rollout = await client.play(request(0), Timed())
    assert len(asked) == NUM_CALLS + 1, rollout.error
    return 1e3 * statistics.median(
        later - earlier for later, earlier in zip(asked[1:], answered, strict=False)
    )


async def measure() -> list[dict[str, Any]]:
    """Return one row for each place."""
    module = Path(__file__).stem
    clients = {
        place: (
            open_environment(f"{module}:Words", {}, settings),
            open_environment(f"{module}:Adder", {}, settings),
        )
        for place, settings in PLACES.items()
    }
    rates: dict[tuple[str, int], list[float]] = {}
    calls: dict[str, list[float]] = {}
    driver_ms: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for place, (words, adder) in clients.items():
            for concurrency in CONCURRENCY:
                before_s = time.process_time()
                rate = await rollouts_per_s(words, concurrency)
                if concurrency == 256:
                    used_s = time.process_time() - before_s
                    driver_ms.setdefault(place, []).append(1e3 * used_s / NUM_ROLLOUTS)
                rates.setdefault((place, concurrency), []).append(rate)
            calls.setdefault(place, []).append(await tool_call_ms(adder))
    for pair in clients.values():
        for client in pair:
            await client.close()
    return [
        {
            "place": place,
            "tool_call_ms": statistics.median(calls[place]),
            "driver_cpu_ms": statistics.median(driver_ms[place]),
            **{f"at_{n}": statistics.median(rates[place, n]) for n in CONCURRENCY},
        }
        for place in PLACES
    ]


def cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return one row of the table."""
    shown = []
    for concurrency in CONCURRENCY:
        rate, own = row[f"at_{concurrency}"], base[f"at_{concurrency}"]
        added = "" if row is base else f" ({1e3 * (1 / rate - 1 / own):+.2f} ms)"
        shown.append(f"{rate:.0f}{added}")
    return [row["place"], *shown, f"{row['driver_cpu_ms']:.2f}", f"{row['tool_call_ms']:.2f}"]


def main() -> None:
    """Measure, print and write the results."""
    sys.path.insert(0, str(Path(__file__).parent))
    facts = facts_of_run(COMMAND, "msgspec")
    rows = asyncio.run(measure())
    head = [
        "where",
        *(f"rollouts/s at {n} (added)" for n in CONCURRENCY),
        "driver CPU, ms",
        "tool call, ms",
    ]
    note = NOTE.replace("{rollouts}", str(NUM_ROLLOUTS)).replace("{repeats}", str(REPEATS))
    page = f"{note}\n{table(head, [cells(row, rows[0]) for row in rows])}"
    print(page)
    write_results("environment_processes", page, facts, rows)


if __name__ == "__main__":
    main()
