"""A whole run in one process: the real loop, sampler, credit, packing and backend.

Only the inference engine is replaced, by a policy whose answers depend on nothing but the prompt,
the rollout and the weights that were live when its batch was admitted.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from tests.train.rollouts.samplers import EventList

from telescope_core.base.chains import sampled_tokens
from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.environments import SingleTurnEnvironment, reward
from telescope_core.examples import GeneratedSource, ListSource
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records import RunFolder
from telescope_core.types import Completion, Example, Message
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.protocol import BackendSettings, RankDiedError
from telescope_train.batches.packing import Packing
from telescope_train.checkpoints.resume import (
    drop_repeated,
    newest_to_go_on,
    open_run_folder,
    resume_point,
)
from telescope_train.checkpoints.saver import Checkpointer, SavedRun
from telescope_train.config.schema import TrainConfig
from telescope_train.loop import LoopParts, train
from telescope_train.models.facts import read_model_facts
from telescope_train.models.tiny import END, character_tokenizer
from telescope_train.plan.load import load_train_config
from telescope_train.restarts import Restarts, restart_at, run_with_restarts
from telescope_train.rollouts import environments
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.compared import RewardRange
from telescope_train.rollouts.mix import make_sampler, training_environments
from telescope_train.rollouts.sampled import BEGINNING
from telescope_train.step.credit import CreditRules
from telescope_train.step.throughput import Machine
from telescope_train.trainer.ranks import AllRanks
from telescope_train.trainer.worker import TrainerWorker

TOKENIZER = character_tokenizer()


class Digit(SingleTurnEnvironment):
    """The answer is a digit; 7 examples, so that ten steps see several epochs."""

    def examples(self, split):
        return ListSource(
            [Example(id=f"{split}-{n}", prompt=f"{n} again=", answer=str(n)) for n in range(7)]
        )

    @reward
    def nearness(self, rollout, example):
        return 1.0 - abs(int(rollout.completion_text[-1]) - int(example.answer)) / 10


class Endless(Digit):
    """The same, endless."""

    def examples(self, split):
        def make(random, index):
            n = random.randrange(10)
            return Example(id=f"{split}-{index}", prompt=f"{index} {n}=", answer=str(n))

        return GeneratedSource(make, seed=f"endless/{split}")


class ScriptedTokens:
    """Gives each rollout a policy; `ahead` is how far the sampler runs ahead."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def policy(self, rollout_id, sampling=None):
        return _Scripted(rollout_id, max(0, int(rollout_id.partition(".")[0]) - self.ahead))

    async def close(self):
        """Nothing to release."""


class _Scripted:
    def __init__(self, rollout_id: str, version: int) -> None:
        self.rollout_id, self.version = rollout_id, version

    async def complete(self, messages, sampling, *, tools=()):
        key = f"{messages[-1].content}/{self.rollout_id}/{self.version}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
        random = np.random.default_rng(seed)
        text = "".join(str(n) for n in random.integers(0, 10, int(random.integers(1, 5))))
        ids = (*TOKENIZER(text)["input_ids"], TOKENIZER.convert_tokens_to_ids(END))
        prompt = TOKENIZER.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages],
            add_generation_prompt=True,
        )["input_ids"]
        return Completion(
            message=Message(role="assistant", content=text),
            finish_reason="stop",
            tokens=sampled_tokens(prompt, ids, -4.6 + random.random(len(ids)) / 5),
            oldest_version=self.version,
            newest_version=self.version,
            num_prompt_tokens=len(prompt),
            num_completion_tokens=len(ids),
        )


class NoServers:
    """Publishing to nobody."""

    async def weights_change(self):
        """Take note of nothing."""

    async def publish(self, version):
        """Nothing to do."""


def is_mixed(group) -> bool:
    """Turn down about a third of the groups, so that others are drawn in their place."""
    return sum(rollout.num_completion_tokens for rollout in group.rollouts) % 3 > 0


class Killed(Exception):
    """What ends a run in the middle."""


def config_of(folder: Path, model: Path, *flags: str) -> TrainConfig:
    entries = '[{"name": "digit", "weight": 2.0}, {"name": "endless", "weight": 1.0}]'
    return load_train_config(
        [],
        [
            *("--name", "run", "--number_of_steps", "10", "--output_dir", str(folder)),
            *("--model", str(model), "--environments", entries, "--max_tokens", "8"),
            *("--group_size", "4", "--prompts_batch_size_for_trainer", "2"),
            *("--gradient_checkpointing", "false"),
            *("--learning_rate", "1e-3", "--lr_scheduler", "cosine", "--warmup_steps", "2"),
            *("--weight_decay", "0.1", "--use_tis", "true", "--seq_len", "64"),
            *flags,
        ],
    )


def records_of(config: TrainConfig) -> dict[str, EnvironmentRecord]:
    """Return the code that the names in the settings mean now."""
    return environments.records_of(environments.find_environments(config)[0])


def settings_of(config: TrainConfig) -> BackendSettings:
    return BackendSettings.from_config(config, device="cpu")


class MortalRank:
    """A rank in this process that dies at given calls, and can be started again."""

    def __init__(self, config: TrainConfig, deaths: Mapping[int, bool]) -> None:
        """`deaths`: number of the call -> whether it was carried out before the rank died."""
        self._config = config
        self._deaths = deaths
        self._num_calls = 0
        self._calls = asyncio.Lock()
        self.worker: TrainerWorker | None = None
        self.died_in: list[str] = []

    async def call(self, name, *arguments):
        # One after the other, as in a process of its own.
        async with self._calls:
            return await self._call(name, *arguments)

    async def _call(self, name, *arguments):
        if self.worker is None:
            raise RankDiedError("trainer rank 0 died")
        # How often it is asked depends on the clock.
        if name != "checkpoint_is_written":
            self._num_calls += 1
        is_carried_out = self._deaths.get(self._num_calls)
        if is_carried_out is not False:
            answer = await asyncio.to_thread(getattr(self.worker, name), *arguments)
        if is_carried_out is None or name == "checkpoint_is_written":
            return answer
        self.died_in.append(name)
        self.close()
        raise RankDiedError("trainer rank 0 died")

    async def address(self):
        return "127.0.0.1", 0

    def start(self) -> None:
        self.close()
        self.worker = TrainerWorker(settings_of(self._config))

    def close(self) -> None:
        if self.worker is not None:
            self.worker.finish_checkpoint()
            self.worker.close()
        self.worker = None


async def run(
    config: TrainConfig,
    *,
    killed_after: int | None = None,
    deaths: Mapping[int, bool] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Take the steps of `config`; returns the weights.

    `killed_after` a step nothing is closed. `deaths` of the rank: see `MortalRank`.
    """
    rank = MortalRank(config, deaths)
    rank.start()
    try:
        await _run(config, rank, killed_after)
        assert len(rank.died_in) == len(deaths)
        return {name: value.numpy().copy() for name, value in rank.worker.export_weights()}
    finally:
        rank.close()


async def _run(config: TrainConfig, rank: MortalRank, killed_after: int | None) -> None:
    records = records_of(config)
    point = resume_point(config, records)
    folder = open_run_folder(config, point, records)
    ranks = AllRanks([rank])
    restarts = Restarts(3)
    if point is not None:
        await ranks.load_checkpoint(point.checkpoint.state_path, point.checkpoint.state_proofs)
    drop_repeated(point, folder)

    async def go_back(died):
        begun = newest_to_go_on(config, point)
        folder.go_back(restart_at(begun, died, folder.last_step(), time_s=0.0))
        rank.start()
        if begun is not None:
            await ranks.load_checkpoint(begun.state_path, begun.state_proofs)
        return begun

    await run_with_restarts(
        None if point is None else point.checkpoint,
        lambda begun: _take_steps(config, ranks, folder, begun, killed_after),
        go_back=go_back,
        died=lambda died: restarts.count(died, folder.last_step()),
    )
    folder.finish()


async def _take_steps(config, ranks, folder, begun, killed_after) -> None:
    clients = {
        "digit": InProcessEnvironment(Digit(), name="digit"),
        "endless": InProcessEnvironment(Endless(), name="endless"),
    }
    mix = await training_environments(config, clients, {}, {})
    policies = ScriptedTokens(config.scheduling.max_async_rollout)
    sampler = make_sampler(
        config, mix, policies, Attempts.from_config(config, EventList(), num_servers=1)
    )
    sampler.restore(BEGINNING if begun is None else begun.sampler_state())
    checkpointer = Checkpointer(
        SavedRun.from_config(config, records_of(config)),
        ranks,
        sampler,
        resumed_from=begun.path if begun else None,
    )
    parts = LoopParts(
        config=config,
        rules=CreditRules(
            algorithm=load_algorithm(config.algorithm.algorithm),
            config=config,
            sampling={name: one.sampling for name, one in mix.playing.items()},
            vocab_size=len(TOKENIZER),
            declared=dict.fromkeys(clients, RewardRange(0.0, 1.0)),
        ),
        packing=Packing(seq_len=64, num_ranks=1, hidden_size=128, max_tokens=8),
        sampler=sampler,
        trainer=ranks,
        publisher=NoServers(),
        folder=folder,
        machine=Machine(
            facts=read_model_facts(config.model.model), seq_len=64, hidden_size=128, gpu_name=None
        ),
        first_version=begun.step if begun else 0,
    )

    async def after_step(step, row):
        await checkpointer.after_step(step)
        if step == killed_after:
            await checkpointer.written()
            raise Killed

    try:
        await train(parts, after_step=after_step)
        await checkpointer.finish(config.run.number_of_steps)
    finally:
        await checkpointer.close()
        await sampler.close()


def numbers(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run without what depends on the clock."""

    def depends(key: str, row: Mapping[str, float]) -> bool:
        # Where the batch has no token of its version, engine and trainer are compared on rollouts
        # of later batches that have ended by then.
        of_others = key.startswith("mismatch/") and not row.get("staleness/share_0")
        return of_others or key.startswith(("time", "queue/")) or key.endswith("_s")

    return [
        {key: row[key] for key in row if not depends(key, row)}
        for row in RunFolder.open(folder).metrics()
    ]


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a folder by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
