"""One run of the real loop, over a live vLLM server, with a fault that may be planted on the way.

Everything but Ray is what `telescope train` uses: sampler, slots, token-exact policy, credit, the
trainer of one rank, and weights that are sent to the server after each step. The trainer is in this
process, so that one server serves all runs: each begins by sending its own first weights. Without a
server, an engine in this process samples from the same weights (`local_engine`).
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagnosis.local_engine import LocalEngine
from diagnosis.tasks import Sums
from telescope_core.diagnosis import Finding, History, diagnose
from telescope_core.environments.base import Environment
from telescope_core.errors import TelescopeError
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records import RunFolder
from telescope_core.records.events import AttemptEvent
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.packing import Packing
from telescope_train.chat.renderer import load_renderer
from telescope_train.config.schema import TrainConfig
from telescope_train.diagnostics.engine_check import check_engine
from telescope_train.evals.beside import LiveEvals
from telescope_train.inference.client import TokenClient
from telescope_train.inference.policy import TokenPolicySource
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.server import ServerProcess
from telescope_train.loop import LoopParts, train
from telescope_train.models.facts import read_model_facts
from telescope_train.plan.checks.config import check_config
from telescope_train.rollouts.attempts import Attempts, LimitedPool
from telescope_train.rollouts.mix import make_sampler, training_environments
from telescope_train.rollouts.slots import Concurrency, Slots
from telescope_train.step.credit import credit_rules
from telescope_train.step.stream_rules import streams_gradients
from telescope_train.step.throughput import Machine
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.worker import TrainerWorker
from telescope_train.weights.publish import WeightPublisher

HEALTHY_STEPS = 6
"""Steps before a fault is planted in a run that goes on."""
STEPS_TO_NAME_IT = 20
HIDDEN_SIZE, MAX_MODEL_LEN = 128, 1024
SETTINGS: dict[str, dict[str, Any]] = {
    "rollout": {"group_size": 8, "prompts_batch_size_for_trainer": 16, "max_tokens": 8},
    "trainer": {
        "learning_rate": 3e-4,
        "adam_betas": [0.9, 0.99],
        "seq_len": 1024,
        "gradient_checkpointing": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Running:
    """A run in progress, for whoever plants something in it."""

    config: TrainConfig
    parts: LoopParts
    tasks: Mapping[str, Environment]
    pool: ServerPool | LocalEngine
    publisher: WeightPublisher | LocalEngine
    worker: TrainerWorker
    slots: Slots
    servers: Sequence[ServerProcess]
    """Those that rollouts ask; none = the engine in this process."""


Plant = Callable[[Running], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and what should be said of it."""

    name: str
    what: str
    """One sentence for the table."""
    expects: tuple[str, ...] = ()
    """The rules that would name it; empty = a healthy run."""
    tasks: Callable[[], Mapping[str, Environment]] = lambda: {"sums": Sums()}
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the environments; 1 if not given."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, Any])
    """reward_min and reward_max of environments, in the settings of the run."""
    plant: Plant | None = None
    """What is done after `HEALTHY_STEPS`; None = the fault is in tasks or settings, or there is
    none."""
    steps: int = HEALTHY_STEPS + STEPS_TO_NAME_IT
    model: str = "start"
    """Which of the models it begins with."""
    num_servers: int = 1
    vllm: tuple[str, ...] = ()
    """Arguments of vLLM for a server of its own, in place of the one of all runs."""

    @property
    def needs_servers(self) -> bool:
        """Whether it is played over vLLM even where an engine in this process samples for others.

        That engine is slow where answers are long: the run would wait for it, as a rule then says.
        """
        return self.num_servers > 1 or bool(self.vllm) or self.model != "start"

    @property
    def planted_after(self) -> int:
        """Steps that are healthy."""
        return HEALTHY_STEPS if self.plant is not None else 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was said of a run."""

    case: str
    findings: tuple[tuple[str, int, str], ...]
    """(rule, step after which it was first said, its text), in the order of the steps."""
    stopped: str = ""
    """Why the run ended early."""
    steps: int
    seconds: float
    engine: str = "in the trainer's process"
    """What sampled."""


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Exchange an attribute, also of what is frozen, for as long as the block lasts."""
    before = getattr(owner, name)
    has_own = name in vars(owner) if hasattr(owner, "__dict__") else True
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if has_own:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)


class NoEvents:
    """Keeps no events of attempts."""

    def add(self, event: AttemptEvent) -> None:
        """Forget it."""

    def pack(self, step: int) -> None:
        """Do nothing."""


class Watched:
    """Reads the rows of a run as `telescope doctor` would after each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.found: dict[tuple[str, str | None], tuple[int, Finding]] = {}

    def after_step(self, step: int, row: dict[str, float]) -> None:
        """Note what is said for the first time."""
        self.rows.append(row)
        for one in diagnose(History.of_rows(self.rows)):
            if not one.is_over:
                self.found.setdefault((one.rule, one.environment), (step, one))


def config_of(case: Case, model: Path, seed: int = 0) -> TrainConfig:
    """Return the settings of a run."""
    names = list(case.tasks())
    ranges = {
        name: {"reward_min": low, "reward_max": high} for name, (low, high) in case.ranges.items()
    }
    given: dict[str, Any] = {
        "run": {"name": "run", "number_of_steps": case.steps, "seed": seed},
        "model": {"model": str(model)},
        "environments": [
            {"name": name, "weight": case.weights.get(name, 1.0), **ranges.get(name, {})}
            for name in names
        ],
    }
    for section in {*SETTINGS, *case.settings}:
        given[section] = {
            **given.get(section, {}),
            **SETTINGS.get(section, {}),
            **case.settings.get(section, {}),
        }
    return TrainConfig.model_validate(given)


async def run(
    case: Case,
    servers: Sequence[ServerProcess],
    model: Path,
    *,
    keep: Path,
    seed: int = 0,
) -> Outcome:
    """Take the steps of `case`; what stops the run is part of its outcome.

    Without `servers`, an engine in this process samples. `keep`: where its metrics are left.
    """
    begun_s, watched, stopped = time.monotonic(), Watched(), ""
    config = config_of(case, model, seed)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            check_config(config)
            running = await _open(case, config, servers, folder / "run", stack)
            with ExitStack() as planted:
                thrown_out = 0

                async def after_step(step: int, row: dict[str, float]) -> None:
                    nonlocal thrown_out
                    before, thrown_out = thrown_out, running.slots.num_thrown_out
                    new = {"servers/thrown_out": float(thrown_out - before)}
                    watched.after_step(step, row | running.parts.take_known() | new)
                    if case.plant is not None and step == case.planted_after:
                        planted.enter_context(case.plant(running))

                await train(running.parts, after_step=after_step)
        except* TelescopeError as errors:
            stopped = " ".join(str(errors.exceptions[0]).split())
    lines = [json.dumps(row) + "\n" for row in watched.rows]
    (keep / f"{case.name}.jsonl").write_text("".join(lines))
    said = [(one.rule, step, one.text) for step, one in watched.found.values()]
    return Outcome(
        case=case.name,
        findings=tuple(sorted(said, key=lambda one: one[1])),
        stopped=stopped,
        steps=len(watched.rows),
        seconds=time.monotonic() - begun_s,
        **({"engine": "vLLM"} if servers else {}),
    )


async def _open(
    case: Case,
    config: TrainConfig,
    servers: Sequence[ServerProcess],
    folder: Path,
    stack: AsyncExitStack,
) -> Running:
    """Open everything that a run touches, and make its first weights live."""
    tasks = dict(case.tasks())
    clients = {name: InProcessEnvironment(one, name=name) for name, one in tasks.items()}
    evals = {
        entry.name: InProcessEnvironment(case.tasks()[entry.name], name=entry.name)
        for entry in config.evals.evals
    }
    for client in (*clients.values(), *evals.values()):
        stack.push_async_callback(client.close)
    mix = await training_environments(config, clients, evals, {})
    worker = await asyncio.to_thread(
        TrainerWorker, BackendSettings.from_config(config, device="cpu")
    )
    ranks = LocalRanks(worker)
    stack.push_async_callback(ranks.close)
    attempts = Attempts.from_config(config, NoEvents(), num_servers=max(1, len(servers)))
    if servers:
        pool = ServerPool([TokenClient(server.root) for server in servers])
        reading = asyncio.create_task(Concurrency.from_config(config, attempts.slots, pool).run())
        stack.callback(reading.cancel)
        publisher = WeightPublisher(pool, ranks, in_flight=config.scheduling.in_flight_update)
        await publisher.connect()
        await publisher.restore(0)
    else:
        pool = publisher = LocalEngine(Path(config.model.model), worker, seed=config.run.seed)
    stack.push_async_callback(pool.close)
    source = TokenPolicySource(
        pool,
        load_renderer(config.model),
        max_model_len=config.inference.max_model_len or MAX_MODEL_LEN,
        interleaved=config.rollout.interleaved_rollouts,
        servers_of=(lambda name: LimitedPool(pool, attempts, name)) if servers else None,
    )
    sampling = {name: one.sampling for name, one in mix.playing.items()}
    packing = Packing(
        seq_len=config.trainer.seq_len,
        num_ranks=1,
        hidden_size=HIDDEN_SIZE,
        max_tokens=max(one.max_tokens for one in sampling.values()),
        share_prefixes=ranks.why_nothing_is_shared is None,
    )
    await check_engine(source, sampling, packing, ranks.logprobs, dtype="float32")
    sampler = make_sampler(config, mix, source, attempts, prepare=source.prepare)
    stack.push_async_callback(sampler.close)
    facts = read_model_facts(config.model.model)
    run_folder = RunFolder.create(folder, config=config.model_dump(mode="json"))
    live = LiveEvals(
        config=config, environments=evals, policies=source, folder=run_folder, concurrency=64
    )
    if config.evals.eval_before_training:
        for entry in config.evals.evals:
            await live.play(entry, "before")
    parts = LoopParts(
        config=config,
        rules=credit_rules(config, mix, vocab_size=facts.vocab_size),
        packing=packing,
        sampler=sampler,
        trainer=ranks,
        publisher=publisher,
        folder=run_folder,
        machine=Machine(
            facts=facts,
            seq_len=config.trainer.seq_len,
            hidden_size=HIDDEN_SIZE,
            gpu_name=None,
        ),
        streams_gradients=streams_gradients(config),
        take_known=lambda: {"servers/lost": float(pool.num_lost)},
        held_out=live.questions,
    )
    return Running(
        config=config,
        parts=parts,
        tasks=tasks,
        pool=pool,
        publisher=publisher,
        worker=worker,
        slots=attempts.slots,
        servers=servers,
    )
