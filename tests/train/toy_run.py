"""The real loop over a toy engine: rollouts are written by a script, one rank trains in process."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tests.train.rollouts.samplers import EventList
from toy_digits import LastDigit

from telescope_core.base.chains import sampled_tokens
from telescope_core.in_process import InProcessEnvironment
from telescope_core.protocols import Policy
from telescope_core.records import RunFolder
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Completion, Message, Sampling
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import Packing
from telescope_train.config.schema import TrainConfig
from telescope_train.loop import LoopParts
from telescope_train.models.facts import read_model_facts
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.compared import RewardRange
from telescope_train.rollouts.mix import make_sampler, training_environments
from telescope_train.step.credit import CreditRules
from telescope_train.step.stream_rules import streams_gradients
from telescope_train.step.throughput import Machine
from telescope_train.trainer.ranks import LocalRanks
from telescope_train.trainer.worker import TrainerWorker

VOCAB = 103


def toy_config(model: Path, *, steps=2, rollout=None, scheduling=None, **algorithm) -> TrainConfig:
    """Return the settings of a run on the last digit of a number."""
    return TrainConfig.model_validate(
        {
            "run": {"name": "toy", "number_of_steps": steps, "seed": 1},
            "model": {"model": str(model)},
            "environments": [{"name": "toy"}],
            "rollout": {
                "group_size": 4,
                "prompts_batch_size_for_trainer": 4,
                "max_tokens": 8,
                **(rollout or {}),
            },
            "algorithm": algorithm,
            "scheduling": scheduling or {},
            "trainer": {"learning_rate": 1e-3, "seq_len": 64, "entropy_chunk_size": 16},
        }
    )


class ToyPolicies(ScriptedClient):
    """Answers with the last digit half of the time, at most 3 tokens, with made-up log-probs.

    What is drawn follows from the rollout, not from the order in which rollouts ask; the tokens of
    a prompt follow from its text, so that a group shares them.
    """

    def __init__(self, *, prompt_tokens: int = 5) -> None:
        super().__init__([])
        self._prompt_tokens = prompt_tokens

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> Policy:
        generator = np.random.default_rng(list(rollout_id.encode()))
        return ScriptedClient(partial(self._reply, generator)).policy(rollout_id, sampling)

    def _reply(self, generator: np.random.Generator, messages: Sequence[Message]) -> Completion:
        is_right = generator.random() < 0.5
        num_tokens = int(generator.integers(1, 4))
        prompt = np.random.default_rng(list(messages[-1].content.encode()))
        return Completion(
            message=Message(
                role="assistant", content=messages[-1].content[-2] if is_right else "x"
            ),
            finish_reason="stop" if generator.random() < 0.8 else "length",
            tokens=sampled_tokens(
                prompt.integers(7, VOCAB, self._prompt_tokens).tolist(),
                generator.integers(7, VOCAB, num_tokens).tolist(),
                (-4.6 - 0.1 * generator.random(num_tokens)).tolist(),
            ),
            num_prompt_tokens=self._prompt_tokens,
            num_completion_tokens=num_tokens,
        )


class ToyRanks(LocalRanks):
    """One rank in this process, which remembers what it was asked."""

    def __init__(self, worker: TrainerWorker) -> None:
        super().__init__(worker)
        self.plans: list[StepPlan] = []
        self.num_steps = 0
        self.reference_updates: list[int] = []

    async def train_step(self, plan: StepPlan, version: int) -> dict[str, float]:
        self.plans.append(plan)
        self.num_steps += 1
        return await super().train_step(plan, version)

    async def apply_gradient(self, scale: float) -> dict[str, float]:
        self.num_steps += 1
        return await super().apply_gradient(scale)

    async def update_reference(self) -> None:
        self.reference_updates.append(self.num_steps)
        await super().update_reference()


class NoServers:
    """Publishes to nobody."""

    async def weights_change(self) -> None:
        """Take note of nothing."""

    async def publish(self, version: int) -> None:
        return None


async def toy_parts(
    config: TrainConfig,
    folder: Path,
    start: Callable[[BackendSettings], TrainerWorker],
    *,
    policies: ScriptedClient | None = None,
) -> LoopParts:
    """Return everything that one run of the loop touches."""
    clients = {"toy": InProcessEnvironment(LastDigit(), name="toy")}
    mix = await training_environments(config, clients, {}, {})
    facts = read_model_facts(config.model.model)
    return LoopParts(
        config=config,
        rules=CreditRules(
            algorithm=load_algorithm(config.algorithm.algorithm),
            config=config,
            sampling={"toy": Sampling(max_tokens=8)},
            vocab_size=VOCAB,
            declared={"toy": RewardRange(0.0, 1.0)},
        ),
        packing=Packing(seq_len=64, num_ranks=1, hidden_size=128, max_tokens=8),
        sampler=make_sampler(
            config,
            mix,
            policies or ToyPolicies(),
            Attempts.from_config(config, EventList(), num_servers=1),
        ),
        trainer=ToyRanks(start(BackendSettings.from_config(config, device="cpu"))),
        publisher=NoServers(),
        folder=RunFolder.create(folder, config=config.model_dump(mode="json")),
        machine=Machine(facts=facts, seq_len=64, hidden_size=128, gpu_name=None),
        streams_gradients=streams_gradients(config),
    )
