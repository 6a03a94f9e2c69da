"""What recording costs: steps of the real loop with everything recorded and with nothing.

One run alternates blocks of steps, in random order within each pair, so that whatever else the
machine does falls on both. The rank, the loop and all recording are real and on this machine;
answers are written by a script, and traces, vLLM's page of metrics and Prometheus are a process of
somebody else. Run: python benchmarks/bench_recording.py
"""

import argparse
import asyncio
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts_of_run, table, write_results
from recording.switch import (
    SWITCH,
    SwitchedCalls,
    SwitchedEvents,
    SwitchedFolder,
    SwitchedSpans,
    switched_timeline,
)
from small_run import make_model

from telescope_core import Example, Message, Sampling, SingleTurnEnvironment, reward
from telescope_core.base.chains import sampled_tokens
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import Policy
from telescope_core.records import RunFolder
from telescope_core.records.logs import Logs
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.packing import Packing
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.client import TokenClient
from telescope_train.loop import LoopParts, train
from telescope_train.models.facts import read_model_facts
from telescope_train.models.tiny import character_tokenizer
from telescope_train.observability.calls import CallEnd, Caller, ServerTiming
from telescope_train.observability.meters import MeteredNode, Meters
from telescope_train.observability.prometheus import PrometheusEndpoint
from telescope_train.observability.recording import Recording, RecordingSettings, recording
from telescope_train.observability.system import NodeMeters, Reading
from telescope_train.observability.timeline import RankSpans
from telescope_train.observability.trackers.tracker import TrackedRun, load_tracker
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.mix import make_sampler, training_environments
from telescope_train.step.credit import CreditRules, RewardRange
from telescope_train.step.throughput import Machine
from telescope_train.trainer import worker as worker_module
from telescope_train.trainer.ranks import LocalRanks

GROUPS, GROUP_SIZE, PROMPT, ANSWER = 4, 8, 64, 384
BLOCK = 4
"""Steps of a block, of which the first one, with what is left of the block before, is dropped."""
WARM_UP = 3
EVERY_S = 1.0
LOGGER = logging.getLogger("telescope_train.benchmark")


class Letters(SingleTurnEnvironment):
    """Pays for vowels, so that no two answers earn the same."""

    def draw(self, random: random.Random) -> Example:
        """Return a task."""
        return Example(id=str(random.random()), prompt=f"{random.randrange(10**8):08d}")

    @reward
    def vowels(self, rollout: Any) -> float:
        """Return the share of vowels."""
        text = rollout.completion_text or "."
        return sum(one in "aeiou" for one in text) / len(text)


class Answers(ScriptedClient):
    """Answers at once with random letters, and says where the time of the call went."""

    def __init__(self, calls: SwitchedCalls, vocabulary: int) -> None:
        super().__init__([])
        self._calls = calls
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(0)

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        """Return the policy of a rollout."""
        return ScriptedClient(lambda messages: self._reply(rollout_id)).policy(rollout_id, sampling)

    def _reply(self, rollout_id: str) -> Completion:
        sent_s = time.monotonic()
        caller = Caller(
            environment="letters", group_id=rollout_id, index=0, attempt=1, call=1, step=1
        )
        watching = self._calls.watching(caller)
        watching.on_sent("http://127.0.0.1:8100", 1)
        draw = self._random
        text = "".join(draw.choice(list("abcdefghij"), ANSWER))
        tokens = sampled_tokens(
            draw.integers(8, self._vocabulary, PROMPT).tolist(),
            draw.integers(8, self._vocabulary, ANSWER).tolist(),
            (-4.6 - 0.1 * draw.random(ANSWER)).tolist(),
        )
        watching.on_end(
            CallEnd(
                server="http://127.0.0.1:8100",
                version=1,
                sent_s=sent_s,
                ended_s=time.monotonic(),
                num_prompt_tokens=PROMPT,
                num_completion_tokens=ANSWER,
                timing=ServerTiming(
                    queue_s=0.1, first_token_s=0.4, prefill_s=0.3, decode_s=1.5, num_cached_tokens=0
                ),
            )
        )
        return Completion(
            message=Message(role="assistant", content=text),
            finish_reason="stop",
            tokens=tokens,
            num_prompt_tokens=PROMPT,
            num_completion_tokens=ANSWER,
        )


class Here:
    """This machine."""

    name = "here"

    def __init__(self) -> None:
        self._meters = NodeMeters()

    async def read(self) -> Sequence[Reading]:
        """Return what its meters show."""
        return await asyncio.to_thread(self._meters.read)


class NoServers:
    """Publishes to nobody."""

    async def weights_change(self) -> None:
        """Take note of nothing."""

    async def publish(self, version: int) -> None:
        """Return at once."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps that were taken one after the other."""

    is_on: bool
    wall_s: float
    """Mean of a step."""
    cpu_s: float
    """Processor time of the process with all its threads, mean of a step."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model that is trained, and how many pairs of blocks it is measured with."""

    parameters: str
    layers: int
    heads: int
    pairs: int

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return 64 * self.heads

    def write(self, folder: Path) -> Path:
        """Write such a model with random weights."""
        return make_model(folder, layers=self.layers, heads=self.heads, positions=512)


SIZES = (
    Size(parameters="0.6M", layers=3, heads=2, pairs=10),
    Size(parameters="2M", layers=4, heads=3, pairs=6),
    Size(parameters="4M", layers=5, heads=4, pairs=6),
)


def settings(model: Path, steps: int) -> TrainConfig:
    """Return the settings of the run."""
    return TrainConfig.model_validate(
        {
            "run": {"name": "recording", "number_of_steps": steps, "seed": 1},
            "model": {"model": str(model)},
            "environments": [{"name": "letters"}],
            "rollout": {
                "group_size": GROUP_SIZE,
                "prompts_batch_size_for_trainer": GROUPS,
                "max_tokens": ANSWER,
            },
            "scheduling": {"max_async_rollout": 0, "stream_gradients": False},
            "trainer": {"learning_rate": 1e-9, "seq_len": 1024},
        }
    )


class Measuring:
    """Counts the time of steps, and turns recording on and off between blocks."""

    def __init__(self, opened: Recording, pairs: int) -> None:
        order = random.Random(0)
        halves = [order.sample((True, False), 2) for _ in range(pairs)]
        self._opened = opened
        self._arms = [False] * WARM_UP
        for pair in halves:
            self._arms += [one for one in pair for _ in range(BLOCK)]
        self._times: list[tuple[float, float]] = []

    async def after_step(self, step: int, row: dict[str, float]) -> None:
        """Record the row, as a run does, and note the time."""
        if SWITCH.is_on:
            self._opened.row(row)
            LOGGER.info("step %d reward %.3f", step, row["reward/mean"])
        self._times.append((time.perf_counter(), time.process_time()))
        SWITCH.is_on = step < len(self._arms) and self._arms[step]

    def blocks(self) -> list[Block]:
        """Return the blocks, pair by pair."""
        found: list[Block] = []
        for first in range(WARM_UP, len(self._arms), BLOCK):
            # The time of step n is between the ends of steps n - 1 and n.
            begin, end = self._times[first], self._times[first + BLOCK - 1]
            wall_s, cpu_s = ((end[part] - begin[part]) / (BLOCK - 1) for part in (0, 1))
            found.append(Block(is_on=self._arms[first], wall_s=wall_s, cpu_s=cpu_s))
        return found


async def every_second(work: Callable[[], Any]) -> None:
    """Do `work` each second in which something is recorded.

    Seconds are those of the process: on a machine that others use as well, steps last longer.
    """
    done_s = time.process_time()
    while True:
        await asyncio.sleep(EVERY_S / 10)
        if time.process_time() - done_s >= EVERY_S:
            done_s = time.process_time()
            if SWITCH.is_on:
                await work()


async def measure(folder: Path, outside: "subprocess.Popen[str]", size: Size) -> list[Block]:
    """Train, and return what the steps took."""
    assert outside.stdout is not None
    assert outside.stdin is not None
    address = f"http://127.0.0.1:{int(outside.stdout.readline())}"
    config = settings(size.write(folder / "model"), WARM_UP + 2 * size.pairs * BLOCK)
    run = RunFolder.create(folder / "run", config=config.model_dump(mode="json"))
    shown = PrometheusEndpoint("127.0.0.1", 0, environments=["letters"])
    recorded = RecordingSettings(
        folder=run.path,
        run="recording",
        model="tiny",
        export_to=f"{address}/v1/traces",
        trackers={"tensorboard": load_tracker("tensorboard")},
        tracked=TrackedRun(name="recording", folder=run.path, config={}, first_step=1, options={}),
        prometheus=shown,
    )
    worker_module.SpanRecorder = SwitchedSpans  # type: ignore[misc]
    async with AsyncExitStack() as stack:
        stack.enter_context(Logs(folder=run.logs_path).begin("driver", shows_warnings=False))
        opened = await stack.enter_async_context(recording(recorded, run.events_path, warn=print))
        ranks = LocalRanks(
            worker_module.TrainerWorker(BackendSettings.from_config(config, device="cpu"))
        )
        stack.push_async_callback(ranks.close)
        server = TokenClient(address)
        stack.push_async_callback(server.close)
        parts = await loop_parts(config, run, opened, ranks, size.hidden)
        here = Here()

        async def nodes() -> list[MeteredNode]:
            return [here]

        meters = Meters(
            nodes, lambda: [server], opened.meter, interval_s=EVERY_S, show=shown.meters
        )
        spans = RankSpans(lambda: ranks.timed, opened.timeline)

        async def scrape() -> None:
            outside.stdin.write(f"{shown.address}\n")
            outside.stdin.flush()

        beside = [
            asyncio.create_task(every_second(work)) for work in (meters.read, spans.ask, scrape)
        ]
        measuring = Measuring(opened, size.pairs)
        await train(parts, after_step=measuring.after_step)
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await parts.sampler.close()
        return measuring.blocks()


async def loop_parts(
    config: TrainConfig, run: RunFolder, opened: Recording, ranks: LocalRanks, hidden: int
) -> LoopParts:
    """Return what the loop touches; all that records can be turned off."""
    mix = await training_environments(
        config, {"letters": InProcessEnvironment(Letters(), name="letters")}, {}, {}
    )
    vocabulary = len(character_tokenizer())
    calls = SwitchedCalls(opened.calls)
    attempts = Attempts.from_config(config, SwitchedEvents(opened), num_servers=1, calls=calls)
    return LoopParts(
        config=config,
        rules=CreditRules(
            algorithm=load_algorithm(config.algorithm.algorithm),
            config=config,
            sampling={"letters": Sampling(max_tokens=ANSWER)},
            vocab_size=vocabulary,
            declared={"letters": RewardRange(0.0, 1.0)},
        ),
        packing=Packing(seq_len=1024, num_ranks=1, hidden_size=hidden, max_tokens=ANSWER),
        sampler=make_sampler(config, mix, Answers(calls, vocabulary), attempts),
        trainer=ranks,
        publisher=NoServers(),
        folder=SwitchedFolder(run),
        machine=Machine(
            facts=read_model_facts(config.model.model),
            seq_len=1024,
            hidden_size=hidden,
            gpu_name=None,
        ),
        timeline=switched_timeline(opened.timeline),
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """How much longer steps are with recording, in percent of those without."""

    mean: float
    low: float
    high: float
    """95 % interval of the mean over pairs, by resampling pairs."""
    off_s: float
    on_s: float


def cost_of(blocks: Sequence[Block], name: str) -> Cost:
    """Compare the blocks of each pair in one kind of time."""
    values = [(one.is_on, getattr(one, name)) for one in blocks]
    pairs = [dict(values[first : first + 2]) for first in range(0, len(values), 2)]
    ratios = np.log([pair[True] / pair[False] for pair in pairs])
    draw = np.random.default_rng(0).choice(ratios, (10_000, len(ratios))).mean(axis=1)
    mean, low, high = np.expm1([ratios.mean(), *np.quantile(draw, (0.025, 0.975))]) * 100
    return Cost(
        mean=float(mean),
        low=float(low),
        high=float(high),
        off_s=statistics.median(value for is_on, value in values if not is_on),
        on_s=statistics.median(value for is_on, value in values if is_on),
    )


PAGE = """# What recording costs

Steps of {rollouts} rollouts of {answer} tokens on models of two sizes, one rank on CPU, in one
run: pairs of blocks of {block} steps with everything recorded and with nothing (a step's row of
metrics is written in both). Everything is: rollouts and attempts with tokens, events, model calls,
the timeline of the driver and the rank, the meters of this machine and of a server with vLLM's page
each second, Prometheus scraped each second, TensorBoard, traces sent to a collector, the log.

{table}

Intervals are of the mean over pairs (95 %, bootstrap over pairs). Processor time counts all threads
of the process, so that it holds what recording does beside the steps, and does not hold what other
processes of the machine took away: where the load average below is above the number of cores, it is
the line to look at. With the smallest model it comes to {each:.2f} ms for each rollout. That cost
does not grow with the model; the cost of training does.

{verdict}

{{facts}}
"""
SHOWN = "With {size} parameters, recording costs under 1 % of a step: both intervals are below."
NOT_SHOWN = "With {size} parameters, **not shown** to be under 1 %: an interval reaches beyond it."
MISSED = "With {size} parameters, **missed**: an interval lies above 1 % as a whole."
TITLES = {"wall_s": "time of a step", "cpu_s": "processor time of a step"}


def verdict_of(size: Size, costs: Iterable[Cost]) -> str:
    """Return what intervals say of the goal of 1 %."""
    found = list(costs)
    verdict = SHOWN if all(cost.high < 1 for cost in found) else NOT_SHOWN
    if any(cost.low > 1 for cost in found):
        verdict = MISSED
    return "- " + verdict.format(size=size.parameters)


def blocks_of(size: Size) -> list[Block]:
    """Train a model of this size beside a process that plays the servers and the collector."""
    outside = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "recording/outside.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(measure(Path(folder), outside, size))
    finally:
        outside.kill()
        outside.wait()


def row_of(size: Size, name: str, cost: Cost) -> list[str]:
    """Return a line of the table."""
    return [
        size.parameters,
        str(size.pairs),
        TITLES[name],
        f"{cost.off_s * 1e3:.0f} ms",
        f"{cost.on_s * 1e3:.0f} ms",
        f"{cost.mean:+.2f} % ({cost.low:+.2f} to {cost.high:+.2f})",
    ]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="What recording costs of a step.")
    parser.add_argument("--quick", action="store_true", help="few steps; write nothing")
    options = parser.parse_args()
    sizes = [replace(size, pairs=2) for size in SIZES[:1]] if options.quick else list(SIZES)
    # Five times as often as by default, so that spans are sent within the block that they are of.
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "1000"
    facts = facts_of_run("python benchmarks/bench_recording.py", "torch")
    rows: list[list[str]] = []
    verdicts: list[str] = []
    records: list[dict[str, Any]] = []
    each: list[float] = []
    for size in sizes:
        blocks = blocks_of(size)
        found = {name: cost_of(blocks, name) for name in TITLES}
        rows += [row_of(size, name, cost) for name, cost in found.items()]
        verdicts.append(verdict_of(size, found.values()))
        each.append((found["cpu_s"].mean / 100) * found["cpu_s"].off_s * 1e3)
        parameters = {"parameters": size.parameters}
        records += [{**parameters, "what": name, **asdict(cost)} for name, cost in found.items()]
        records += [{**parameters, **asdict(block)} for block in blocks]
    head = ["parameters", "pairs", "", "nothing recorded", "everything recorded", "difference"]
    text = table(head, rows)
    print(text)
    if not options.quick:
        page = PAGE.format(
            rollouts=GROUPS * GROUP_SIZE,
            answer=ANSWER,
            block=BLOCK,
            verdict="\n".join(verdicts),
            table=text,
            each=each[0] / (GROUPS * GROUP_SIZE),
        )
        write_results("recording", page, facts, records)


if __name__ == "__main__":
    main()
