"""A tiny model plays against itself, and then beats its first version.

Real rollouts, credit of seats, packing, loss and FSDP2; only the inference server is replaced by
the model itself. Each seat writes a line; who has more digits in it wins.
"""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from telescope_core import Example, GeneratedSource, Sampling
from telescope_core.matches import MatchEnvironment
from telescope_train.algorithms import load_algorithm
from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.packing import Packing
from telescope_train.config.schema import TrainConfig
from telescope_train.models.tiny import make_tiny_model
from telescope_train.step.credit import CreditRules, assign_credit
from telescope_train.step.minibatches import plan_step
from telescope_train.trainer.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parent))
from in_process_sampler import InProcessPolicy, play_groups

pytestmark = pytest.mark.engine

STEPS, PROMPTS, GROUP_SIZE, PLACES = 12, 8, 8, 4
SAMPLING = Sampling(max_tokens=PLACES)


class MoreDigits(MatchEnvironment):
    """The seat with more digits wins; equally many are half a victory for both."""

    seats = ("black", "white")

    def examples(self, split):
        def make(random, index):
            return Example(id=f"{split}-{index}", prompt=f"{random.randrange(1000):03d}")

        return GeneratedSource(make, seed=f"more-digits/{split}")

    async def play_match(self, match):
        said = {name: await seat.ask("=") for name, seat in match.seats.items()}
        black, white = (sum(map(str.isdigit, said[name][:PLACES])) for name in self.seats)
        won = 0.5 if black == white else float(black > white)
        return {"black": won, "white": 1 - won}


class FirstVersion:
    """An opponent that is never trained."""

    def __init__(self, policy: InProcessPolicy) -> None:
        self.policy = policy

    async def ask(self, messages, read, *, wanted):
        return read((await self.policy.complete(messages, SAMPLING)).message.content)


class Both:
    """The policy and its opponent, which are asked in turn."""

    def __init__(self, policy: InProcessPolicy, opponent: InProcessPolicy) -> None:
        self._all = (policy, opponent)
        self.complete = policy.complete

    def answer_all(self) -> None:
        for one in self._all:
            one.answer_all()


def interval(won: float, num_matches: int) -> tuple[float, float]:
    """Return the 95 % interval of Wilson for a share of `won` of `num_matches`."""
    share, z = won / num_matches, 1.96
    middle = (share + z * z / (2 * num_matches)) / (1 + z * z / num_matches)
    spread = share * (1 - share) / num_matches + (z / (2 * num_matches)) ** 2
    half = z * math.sqrt(spread) / (1 + z * z / num_matches)
    return middle - half, middle + half


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=3)


async def trained_against_itself(model: Path) -> InProcessPolicy:
    config = TrainConfig.model_validate(
        {
            "run": {"name": "self-play", "number_of_steps": STEPS, "seed": 0},
            "model": {"model": str(model)},
            "environments": [{"name": "toy"}],
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": PLACES},
            "algorithm": {"algorithm": "grpo", "number_of_minibatches": 2},
            "trainer": {"learning_rate": 1e-3, "seq_len": 1024, "gradient_checkpointing": False},
        }
    )
    rules = CreditRules(
        algorithm=load_algorithm("grpo"),
        config=config,
        sampling={"toy": SAMPLING},
        vocab_size=103,
    )
    packing = Packing(seq_len=1024, num_ranks=1, hidden_size=128, max_tokens=PLACES)
    policy, environment = InProcessPolicy(model, seed=0), MoreDigits()
    worker = TrainerWorker(BackendSettings.from_config(config, device="cpu"))
    try:
        for version in range(STEPS):
            groups = await play_groups(
                environment,
                policy,
                examples=range(version * PROMPTS, (version + 1) * PROMPTS),
                group_size=GROUP_SIZE,
                sampling=SAMPLING,
            )
            played = [rollout for group in groups for rollout in group.rollouts]
            assert {rollout.reward for rollout in played} == {0.5}, played[0].error
            credit = assign_credit(groups, rules)
            samples = Counter(sample.rollout_key for sample in credit.samples)
            assert set(samples.values()) <= {2}, "each seat is a branch, and is trained once"
            if not credit.samples:
                break  # both seats write digits alone, and every match is a draw
            plan = plan_step(credit.samples, rules, packing, version=version)
            worker.train_minibatches(plan.of_rank(0), plan.order, version=version)
            policy.take_weights(worker.export_weights(), version=version + 1)
    finally:
        worker.close()
    return policy


async def test_a_policy_that_played_against_itself_beats_its_first_version(tiny, monkeypatch):
    policy = await trained_against_itself(tiny)
    first = FirstVersion(InProcessPolicy(tiny, seed=7))
    # As the setting `opponents.others` has it, without an endpoint.
    monkeypatch.setattr(
        MoreDigits,
        "player_of",
        lambda self, seat, example: (
            first if (seat == "black") == (example.id[-1] in "13579") else None
        ),
    )
    groups = await play_groups(
        MoreDigits(),
        Both(policy, first.policy),
        examples=range(10_000, 10_200),
        group_size=1,
        sampling=SAMPLING,
    )
    played = [group.rollouts[0] for group in groups]
    seats = Counter(name for one in played for name, who in one.tags.items() if who == "policy")
    assert len(seats) == 2, "it plays both seats"
    won = sum(one.reward for one in played)
    low, high = interval(won, len(played))
    print(f"it won {won:g} of {len(played)} matches: {low:.1%} to {high:.1%}")
    assert low > 0.65
