"""A tiny model plays against itself, and then beats its first version.

Real rollouts, credit of seats, packing, loss and FSDP2; only the inference server is replaced by
the model itself. Each seat writes a line; who has more digits in it wins.
"""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.ports import free_port

from telescope_core import Example, GeneratedSource, Sampling
from telescope_core.matches import MatchEnvironment
from telescope_core.records import RunFolder
from telescope_core.records.servers import ServerRole, ServerState
from telescope_train.inference.opponents import KeptVersions
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command
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


POOL = """
[run]
name = "pool"
number_of_steps = 3
[[environments]]
name = {nim}
env = {{ opponents = {{ others = {{ older_version = true }} }} }}
[rollout]
discard_group_zero_advantage = false
[trainer]
seq_len = 1024
[inference]
max_model_len = 1024
inference_num_workers = 2
opponent_num_servers = 1
opponent_update_every = 2
[checkpoint]
checkpoint_every = 1
"""


@pytest.mark.nightly
def test_a_run_plays_against_its_older_versions_also_after_a_resume(tmp_path, tiny_model):
    nim = f"{Path(__file__).parents[2] / 'examples' / 'nim.py'}:Nim"
    command = train_command(tmp_path, tiny_model, POOL.format(nim=json.dumps(nim)))
    finish(command, tmp_path)
    folder = RunFolder.open(tmp_path / "runs" / "pool")

    def versions_sent() -> list[int]:
        return [
            event.version
            for event in folder.server_events()
            if event.role is ServerRole.OPPONENT and event.state is ServerState.SERVING
        ]

    assert versions_sent() == [0, 2]
    more = ["--resume", "--number_of_steps", "4", "--inference_base_port", str(free_port())]
    finish([*command, *more], tmp_path)
    # It begins at version 0, and then gets what it held after step 3, when the run ended.
    assert versions_sent()[2:] == [0, 2, 4]
    kept = KeptVersions(num_servers=1, update_every=2)
    for step in range(1, 5):
        rows = folder.rollouts([step])
        assert [row.error for row in rows] == [None] * 16
        # A rollout may have begun two versions before, and one may come while it is played.
        allowed = {*kept.at(max(0, step - 2)), *kept.at(step - 1), *kept.at(step)}
        for row in rows:
            seats = [who for tag, who in row.tags.items() if tag.startswith("seat/")]
            (opponent,) = [who for who in seats if who != "policy"]
            assert {int(one) for one in opponent.removeprefix("version ").split()} <= allowed
