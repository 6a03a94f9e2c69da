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
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from in_process_sampler import InProcessPolicy, learn, learning_config, play_groups

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
    def look(version, groups, credit):
        played = [rollout for group in groups for rollout in group.rollouts]
        assert {rollout.reward for rollout in played} == {0.5}, played[0].error
        samples = Counter(sample.rollout_key for sample in credit.samples)
        # In the end both seats write digits alone, and nothing is learned from a draw.
        assert set(samples.values()) <= {2}, "each seat is a branch, and is trained once"

    config = learning_config(
        model, "grpo", num_steps=STEPS, group_size=GROUP_SIZE, max_tokens=PLACES
    )
    policy = InProcessPolicy(model, seed=0)
    await learn(policy, MoreDigits(), config, num_prompts=PROMPTS, look=look)
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
