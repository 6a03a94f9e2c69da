"""`separate_eval_samples`: an example of an eval is never sampled for training."""

import asyncio
import random
from dataclasses import replace

import pytest
from tests.envs.projects import write_project
from tests.train.rollouts.samplers import EventList

from telescope_core import (
    ConfigError,
    Example,
    GeneratedSource,
    Group,
    ListSource,
    Rollout,
    SingleTurnEnvironment,
    Split,
    TelescopeError,
    group_reward,
    reward,
)
from telescope_core.evals import EvalFolder
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records import RunFolder
from telescope_core.scripted import ScriptedClient
from telescope_envs.records.links import write_link
from telescope_envs.records.projects import read_project
from telescope_train.config.schema import EnvironmentEntry
from telescope_train.evals.beside import LiveEvals
from telescope_train.plan.load import load_train_config
from telescope_train.rollouts import environments
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.draw import Drawn, ExampleDraw, Source
from telescope_train.rollouts.held_out import Cleared, HeldOut, held_out_problems, require_untrained
from telescope_train.rollouts.mix import (
    left_out_of_training,
    make_sampler,
    train_size,
    training_environments,
)
from telescope_train.rollouts.prefetch import first_messages


class Toy(SingleTurnEnvironment):
    """Answers are not looked at."""

    @reward
    def paid(self, rollout, example):
        return 1.0


class OneList(Toy):
    """Both splits come from one finite source."""

    def examples(self, split):
        return ListSource([Example(id=f"row-{i}", prompt="p") for i in range(12)])


class Shuffled(Toy):
    """One source in two orders: the ids of the eval stand anywhere in the training split."""

    def examples(self, split):
        rows = [Example(id=f"row-{i}", prompt="p") for i in range(30)]
        random.Random(str(split)).shuffle(rows)
        return ListSource(rows)


class TrainOnly(OneList):
    def splits(self):
        return (Split.TRAIN,)


class EvalOnly(OneList):
    def splits(self):
        return (Split.EVAL,)


class Apart(Toy):
    """Each split has ids of its own, and the group is paid for it."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-{i}", prompt=f"{split} {i}") for i in range(6)])

    @group_reward
    def of_group(self, rollouts, example):
        return [0.0 if example.id.startswith("eval") else -0.5] * len(rollouts)


class SameSeed(Toy):
    """Endless, and the same in both splits."""

    def examples(self, split):
        return GeneratedSource(lambda rng, i: Example(id=f"row-{i}", prompt="p"), seed=0)


class Repeats(Toy):
    """Endless, few ids: those of the eval come up again and again, at other places."""

    def examples(self, split):
        def make(rng, index):
            return Example(id=f"row-{rng.randrange(9)}", prompt="p")

        return GeneratedSource(make, seed=f"{split}")


def config_of(
    tmp_path,
    *,
    separate=True,
    num_samples=4,
    name="toy:Toy",
    eval_name="toy:Toy",
    splits=("train", "eval"),
):
    path = tmp_path / "run.toml"
    path.write_text(f"""
name = "held-out"
number_of_steps = 6
model = "a/b"
output_dir = "{tmp_path / "runs"}"
prompts_batch_size_for_trainer = 3
group_size = 2
max_async_rollout = 0
eval_before_training = true

[[environments]]
name = "{name}"
split = "{splits[0]}"

[[evals]]
name = "{eval_name}"
split = "{splits[1]}"
num_samples = {num_samples}
separate_eval_samples = {str(separate).lower()}
""")
    return load_train_config([path], [])


def records_of(config):
    return environments.records_of(environments.find_environments(config)[0])


def mixed_config(tmp_path, *, num_batches):
    path = tmp_path / "run.toml"
    path.write_text(f"""
name = "held-out"
number_of_steps = {num_batches}
model = "a/b"
output_dir = "{tmp_path / "runs"}"
prompts_batch_size_for_trainer = 20
group_size = 2
max_async_rollout = 3
should_accept_fn = "tests.train.rollouts.test_held_out:every_third_is_rejected"

[[environments]]
name = "toy:Shuffled"

[[environments]]
name = "toy:Repeats"
weight = 0.5

[[evals]]
name = "toy:Shuffled"
num_samples = 9
eval_every = 50
separate_eval_samples = true

[[evals]]
name = "toy:Repeats"
num_samples = 4
eval_every = 50
separate_eval_samples = true
""")
    return load_train_config([path], [])


def every_third_is_rejected(group):
    return sum(map(ord, group.id)) % 3 != 0


async def trained_and_evaluated(environment_class, config, tmp_path):
    """Return the example ids that training sampled, and those that the eval played."""
    name, eval_name = config.environments[0].name, config.evals.evals[0].name
    clients = {name: InProcessEnvironment(environment_class(), name=name)}
    evals = {eval_name: InProcessEnvironment(environment_class(), name=eval_name)}
    script = ScriptedClient(["yes"])
    records = records_of(config)
    mix = await training_environments(config, clients, evals, records)
    sampler = make_sampler(
        config, mix, script, Attempts.from_config(config, EventList(), num_servers=1)
    )
    trained = set()
    for step in range(config.run.number_of_steps):
        sampler.advance(step)
        batch = await sampler.take(step)
        trained |= {group.example_id for group in batch.groups}
    await sampler.close()
    folder = RunFolder.create(tmp_path / "run", config={})
    live = LiveEvals(
        config=config, environments=evals, policies=script, folder=folder, concurrency=4
    )
    played = {entry.name: await live.play(entry, "before") for entry in config.evals.evals}
    for client in (*clients.values(), *evals.values()):
        await client.close()
    return trained, {task.example_id for task in played[eval_name].result.tasks}


@pytest.mark.parametrize("environment", [OneList, Shuffled, TrainOnly, SameSeed, Repeats])
async def test_an_eval_example_is_never_trained_on(environment, tmp_path):
    config = config_of(tmp_path)
    trained, evaluated = await trained_and_evaluated(environment, config, tmp_path)
    assert trained
    assert evaluated
    assert trained & evaluated == set()


@pytest.mark.slow
async def test_no_eval_example_in_two_thousand_accepted_groups(tmp_path):
    config = mixed_config(tmp_path, num_batches=100)
    classes = {"toy:Shuffled": Shuffled, "toy:Repeats": Repeats}
    clients = {name: InProcessEnvironment(one(), name=name) for name, one in classes.items()}
    evals = {name: InProcessEnvironment(one(), name=name) for name, one in classes.items()}
    mix = await training_environments(config, clients, evals, records_of(config))
    sampler = make_sampler(
        config,
        mix,
        ScriptedClient(["yes"]),
        Attempts.from_config(config, EventList(), num_servers=1),
    )
    accepted, rejected = [], []
    for step in range(config.run.number_of_steps):
        sampler.advance(step)
        batch = await sampler.take(step)
        accepted += batch.groups
        rejected += batch.rejected
    await sampler.close()
    held_out = {(name, one) for name, held in mix.held_out.items() for one in held.ids}
    trained = {(group.environment, group.example_id) for group in accepted}
    assert len(accepted) == 2000
    assert len(rejected) > 500
    assert {name for name, _ in held_out} == set(classes)
    assert trained & held_out == set()
    # Every example that is left takes its turn, as a replacement too.
    assert len([one for name, one in trained if name == "toy:Shuffled"]) == 30 - 9
    for client in (*clients.values(), *evals.values()):
        await client.close()


def test_a_group_of_another_example_than_was_shown_is_refused():
    cleared = Cleared(Drawn(environment="a", example_index=7), frozenset({"row-3"}))

    def group(example_id):
        one = Rollout(environment="a", example_id=example_id, group_id="g", index=0)
        return Group(id="g", environment="a", example_id=example_id, rollouts=(one,))

    assert cleared.require(group("row-9")).example_id == "row-9"
    with pytest.raises(TelescopeError, match=r"played example 'row-3', .* as example 7 of"):
        cleared.require(group("row-3"))


async def test_only_the_examples_of_evals_are_read_at_the_start(tmp_path):
    asked = []

    class Large(Toy):
        """A split that nobody should read as a whole."""

        def examples(self, split):
            class Rows:
                num_examples = 1_000_000

                def example(self, index):
                    asked.append((split, index))
                    return Example(id=f"{split}-{index}", prompt="p")

            return Rows()

    config = config_of(tmp_path)
    client = InProcessEnvironment(Large(), name="toy:Toy")
    await training_environments(
        config, {"toy:Toy": client}, {"toy:Toy": client}, records_of(config)
    )
    await client.close()
    assert sorted(asked) == [(Split.EVAL, index) for index in range(4)]


def test_what_was_trained_on_cannot_be_held_out_when_a_run_goes_on():
    held_out = {"a": HeldOut(ids=frozenset({"x", "y"}))}
    require_untrained(held_out, {("a", "z"), ("b", "x")})
    with pytest.raises(ConfigError, match=r"\b1\b.*'y'") as caught:
        require_untrained(held_out, {("a", "y"), ("b", "x")})
    assert "'x'" not in str(caught.value), "it is another environment's"


def test_nothing_is_held_out_from_a_checkpoint_of_which_nobody_knows_what_it_was_trained_on():
    require_untrained({"a": HeldOut()}, None)
    held_out = {"a": HeldOut(ids=frozenset({"x"}))}
    name = "separate_eval_samples"
    with pytest.raises(ConfigError) as caught:
        require_untrained(held_out, None)
    assert name in str(caught.value)
    require_untrained(held_out, set())


@pytest.mark.parametrize("order", ["drawn", "finished"])
async def test_what_a_checkpoint_holds_is_not_trained_on_if_evals_hold_it_out_now(order, tmp_path):
    def ahead(config):
        scheduling = config.scheduling.model_copy(
            update={"max_async_rollout": 1, "batch_order": order}
        )
        return config.model_copy(update={"scheduling": scheduling})

    async def sampler_of(config):
        clients = {"toy:Toy": InProcessEnvironment(OneList(), name="toy:Toy")}
        mix = await training_environments(config, clients, clients, records_of(config))
        attempts = Attempts.from_config(config, EventList(), num_servers=1)
        return make_sampler(config, mix, ScriptedClient(["yes"]), attempts), mix

    before = ahead(config_of(tmp_path, num_samples=1))
    first, _ = await sampler_of(before)
    first.advance(0)
    await first.take(0)
    # Both batches that are under way have ended when the state is taken.
    for _ in range(10_000):
        state = await first.settled(1)
        if groups := list(state.groups):
            break
        await asyncio.sleep(0)
    await first.close()
    again, _ = await sampler_of(before)
    again.restore(state)
    await again.close()
    other, mix = await sampler_of(ahead(config_of(tmp_path, num_samples=11)))
    assert {group.example_id for group in groups} & mix.held_out["toy:Toy"].ids
    with pytest.raises(ConfigError, match="sampled and are not trained on yet, such as 'row-"):
        other.restore(state)
    await other.close()


async def test_without_the_setting_one_source_is_used_for_both(tmp_path):
    config = config_of(tmp_path, separate=False)
    trained, evaluated = await trained_and_evaluated(OneList, config, tmp_path)
    assert evaluated <= trained


@pytest.mark.parametrize("trained_on", ["train", "eval"])
@pytest.mark.parametrize("played", ["train", "eval"])
@pytest.mark.parametrize("separate", [True, False])
async def test_a_run_trains_on_and_plays_the_splits_that_it_names(
    trained_on, played, separate, tmp_path
):
    config = config_of(tmp_path, separate=separate, splits=(trained_on, played))
    trained, evaluated = await trained_and_evaluated(Apart, config, tmp_path)
    assert evaluated == {f"{played}-{i}" for i in range(4)}
    left = {f"{trained_on}-{i}" for i in range(6)} - (evaluated if separate else set())
    assert trained == left
    (path,) = (tmp_path / "run" / "evals").iterdir()
    assert EvalFolder(path).manifest()["split"] == played


async def test_rollouts_and_their_groups_are_of_the_split_that_is_trained_on(tmp_path):
    config = config_of(tmp_path, separate=False, splits=("eval", "eval"))
    client = InProcessEnvironment(Apart(), name="toy:Toy")
    clients = {"toy:Toy": client}
    mix = await training_environments(config, clients, clients, records_of(config))
    sampler = make_sampler(
        config,
        mix,
        ScriptedClient(["yes"]),
        Attempts.from_config(config, EventList(), num_servers=1),
    )
    sampler.advance(0)
    batch = await sampler.take(0)
    await sampler.close()
    rollouts = [one for group in batch.groups for one in group.rollouts]
    assert {one.messages[0].content.split()[0] for one in rollouts} == {"eval"}
    assert {one.rewards["of_group"] for one in rollouts} == {0.0}
    drawn = mix_draw(config).next()
    guess = await first_messages(client, drawn, {"toy:Toy": ""})
    assert guess[0].content.startswith("eval ")
    await client.close()


def mix_draw(config):
    source = Source(environment="toy:Toy", weight=1.0, num_examples=6, split=Split.EVAL)
    return ExampleDraw([source], seed=config.run.seed)


@pytest.mark.parametrize(
    ("environment", "split", "size"),
    [(EvalOnly, "eval", 12), (EvalOnly, "train", None), (TrainOnly, "eval", None)],
)
async def test_the_split_that_is_trained_on_must_be_there(environment, split, size):
    client = InProcessEnvironment(environment(), name="toy")
    description = await client.describe()
    await client.close()
    entry = EnvironmentEntry(name="toy", split=split)
    if size is not None:
        assert train_size(entry, description) == size
        return
    with pytest.raises(ConfigError, match=f"no {split} split"):
        train_size(entry, description)
    empty = replace(description, num_examples={Split(split): 0})
    with pytest.raises(ConfigError, match=f"the {split} split of 'toy' has no examples"):
        train_size(entry, empty)


async def test_everything_that_is_left_is_trained_on(tmp_path):
    trained, evaluated = await trained_and_evaluated(OneList, config_of(tmp_path), tmp_path)
    assert len(trained) == 12 - len(evaluated) == 8


@pytest.mark.parametrize(
    ("environment", "num_samples", "message"),
    [
        (OneList, 12, r"\b12\b.*'toy:Toy'"),
        (TrainOnly, 400, r"\b12\b.*'toy:Toy'"),
        (EvalOnly, 4, r"'?toy:Toy'?.*\btrain split"),
        (Repeats, 400, r"\b1000 draws"),
    ],
)
async def test_nothing_left_to_train_on_is_one_message(environment, num_samples, message, tmp_path):
    config = config_of(tmp_path, num_samples=num_samples)
    with pytest.raises(ConfigError, match=message):
        await trained_and_evaluated(environment, config, tmp_path)
    assert not (tmp_path / "run").exists(), "nothing was evaluated"


def test_names_of_one_environment_are_one_and_another_has_no_effect(tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    write_link(read_project(write_project(tmp_path / "project")))
    config = config_of(tmp_path, name="toy", eval_name="acme/toy")
    assert [record.id for record in records_of(config).values()] == ["acme/toy"] * 2
    assert list(held_out_problems(config, records_of(config))) == []
    config = config_of(tmp_path, name="toy", eval_name=f"{__name__}:OneList")
    (problem,) = held_out_problems(config, records_of(config))
    assert f"({__name__}:OneList)" in problem
    assert "separate_eval_samples" in problem


@pytest.mark.parametrize("keeps_spares", [True, False])
def test_draws_and_replacements_skip_what_is_held_out(keeps_spares):
    source = Source(environment="a", weight=1.0, num_examples=None, held_out=frozenset({0, 1, 4}))
    draw = ExampleDraw([source], seed=0, keeps_spares=keeps_spares)
    found = [draw.next().example_index for _ in range(5)]
    assert found == ([2, 5, 7, 9, 11] if keeps_spares else [2, 3, 5, 6, 7])
    if keeps_spares:
        one = Drawn(environment="a", example_index=5, number=1)
        spares = {draw.replacement(one, f"0.0-{n}").example_index for n in range(500)}
        assert spares.isdisjoint({0, 1, 4, *found})
        assert max(spares) < 200, "no replacement lies far beyond what the run has drawn"


@pytest.mark.parametrize("size", [5, 6, 7])
def test_replacements_in_a_finite_split_skip_what_is_held_out(size):
    held = frozenset({0, 2, 3})
    draw = ExampleDraw(
        [Source(environment="a", weight=1.0, num_examples=size, held_out=held)], seed=0
    )
    for rejected in set(range(size)) - held:
        one = Drawn(environment="a", example_index=rejected)
        found = {draw.replacement(one, f"0.0-{n}").example_index for n in range(200)}
        assert found == set(range(size)) - held - {rejected}


async def test_rows_that_are_no_training_examples_are_told_by_environment():
    class Repeating(Toy):
        def examples(self, split):
            return [{"prompt": f"{split} {n % 2}"} for n in range(5)]

    described = {}
    for name, environment in (("repeats", Repeating()), ("plain", OneList())):
        client = InProcessEnvironment(environment, name=name)
        described[name] = await client.describe()
        await client.close()
    assert described["repeats"].num_dropped == {Split.TRAIN: 3, Split.EVAL: 3}
    entries = [EnvironmentEntry(name=name, split="eval") for name in described]
    for one in (entries, [EnvironmentEntry(name=name) for name in described]):
        (line,) = left_out_of_training(one, described)
        assert line.startswith("repeats: ")
        assert line.endswith(": 3")
