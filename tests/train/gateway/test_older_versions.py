"""Older versions of the policy play in its rollouts, and are not trained on."""

from itertools import count

from scripted_pool import ScriptedPool, make_renderer
from tests.asking import ask

from telescope_core import Example, ListSource
from telescope_core.base.seeds import derived_seed
from telescope_core.gateway import recording
from telescope_core.gateway.request import OLDER_VERSION
from telescope_core.in_process import InProcessEnvironment
from telescope_core.matches import MatchEnvironment
from telescope_core.types import Group, Sampling
from telescope_train.algorithms import load_algorithm
from telescope_train.config.schema import TrainConfig
from telescope_train.step.credit import CreditRules, assign_credit

SAMPLING = Sampling(max_tokens=40, seed=7)


class Higher(MatchEnvironment):
    """Each seat names two numbers; the one with the larger sum wins."""

    seats = ("left", "right")

    def examples(self, split):
        return ListSource([Example(id=f"game-{n}", prompt="") for n in range(8)])

    async def play_match(self, match):
        sums = {
            name: sum([int(await seat.ask("A number?")) for _ in range(2)])
            for name, seat in match.seats.items()
        }
        won = float(sums["left"] > sums["right"])
        return {"left": won, "right": 1 - won}


async def test_tokens_of_an_older_version_never_enter_the_loss(serve):
    numbers, groups = count(1), []
    older = ScriptedPool(make_renderer(), lambda prompt: "4")

    def older_of(group_id):
        groups.append(group_id)
        return older

    opened = serve(lambda prompt: str(next(numbers)), older_of=older_of)
    settings = {"opponents": {"left": {"older_version": True}}}
    environment = recording(InProcessEnvironment(Higher.from_settings(settings), name="match"))
    rollouts = [
        await environment.play(
            ask(index=index, sampling=SAMPLING), opened.source.policy(f"g/{index}", SAMPLING)
        )
        for index in range(4)
    ]
    await environment.close()
    assert [one.error for one in rollouts] == [None] * 4
    assert [one.reward for one in rollouts] == [0.0, 0.0, 1.0, 1.0]
    assert groups[1:] == ["g"] * 4, "who plays is decided for a group"
    assert {one.tags["seat/left"] for one in rollouts} == {"version 3 4"}
    assert {one.tags["seat/right"] for one in rollouts} == {"policy"}
    # The opponent is as exact as the policy: its second prompt begins with all of the first turn.
    first, second = older.prompts[:2]
    assert second[: len(first)] == first
    assert older.sampling[0].temperature == opened.pool.sampling[0].temperature
    assert older.sampling[0].seed != opened.pool.sampling[0].seed
    assert older.sampling[0].seed == derived_seed(derived_seed(7, OLDER_VERSION), 0)

    config = TrainConfig.model_validate(
        {"run": {"name": "r", "number_of_steps": 1}, "model": {"model": "none"}}
        | {"environments": [{"name": "match"}]}
    )
    rules = CreditRules(
        algorithm=load_algorithm("grpo"),
        config=config,
        sampling={"match": SAMPLING},
        vocab_size=103,
    )
    group = Group(id="g", environment="match", example_id="game-0", rollouts=tuple(rollouts))
    credit = assign_credit([group], rules)
    assert len(credit.samples) == 4
    assert {sample.advantage > 0 for sample in credit.samples} == {True, False}
    trained = sum(int(sample.mask.sum()) for sample in credit.samples)
    assert trained == 4 * 2 * 2, "of each rollout two answers of the policy: a digit and the end"
    four = opened.renderer.encode("4")[0]
    for sample, rollout in zip(credit.samples, rollouts, strict=True):
        said = [one.content for one in rollout.conversations[1] if one.role == "assistant"]
        assert (four in sample.token_ids[sample.mask]) == ("4" in said)


async def test_a_run_without_older_versions_says_so_in_its_rollouts(serve):
    opened = serve("4")
    settings = {"opponents": {"others": {"older_version": True}}}
    environment = recording(InProcessEnvironment(Higher.from_settings(settings), name="match"))
    policy = opened.source.policy("g/0", SAMPLING)
    played = await environment.play(ask(sampling=SAMPLING), policy)
    await environment.close()
    assert "opponent_num_servers" in played.error
