"""`separate_eval_samples`: an example of an eval is never sampled for training."""

import random

import pytest

from telescope_core import (
    ConfigError,
    Example,
    GeneratedSource,
    ListSource,
    SingleTurnEnvironment,
    Split,
    reward,
)
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records import RunFolder
from telescope_core.scripted import ScriptedClient
from telescope_train.evals.live import LiveEvals
from telescope_train.plan.load import load_train_config
from telescope_train.rollouts import environments
from telescope_train.rollouts.draw import ExampleDraw, Source
from telescope_train.rollouts.held_out import held_out_problems
from telescope_train.rollouts.mix import make_sampler, training_environments


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


def config_of(tmp_path, *, separate=True, num_samples=4, name="toy:Toy", eval_name="toy:Toy"):
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

[[evals]]
name = "{eval_name}"
num_samples = {num_samples}
separate_eval_samples = {str(separate).lower()}
""")
    return load_train_config([path], [])


def records_of(config):
    return environments.records_of(environments.find_environments(config)[0])


async def trained_and_evaluated(environment_class, config, tmp_path):
    """Return the example ids that training sampled, and those that the eval played."""
    name, eval_name = config.environments[0].name, config.evals.evals[0].name
    clients = {name: InProcessEnvironment(environment_class(), name=name)}
    evals = {eval_name: InProcessEnvironment(environment_class(), name=eval_name)}
    script = ScriptedClient(["yes"])
    records = records_of(config)
    mix = await training_environments(config, clients, evals, records)
    sampler = make_sampler(config, mix, script, num_servers=1)
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
    results = await live.run(config.evals.evals, "before", on_progress=lambda text: None)
    for client in (*clients.values(), *evals.values()):
        await client.close()
    return trained, {task.example_id for task in results[eval_name].tasks}


@pytest.mark.parametrize("environment", [OneList, Shuffled, TrainOnly, SameSeed, Repeats])
async def test_an_eval_example_is_never_trained_on(environment, tmp_path):
    config = config_of(tmp_path)
    trained, evaluated = await trained_and_evaluated(environment, config, tmp_path)
    assert trained
    assert evaluated
    assert trained & evaluated == set()


async def test_without_the_setting_one_source_is_used_for_both(tmp_path):
    config = config_of(tmp_path, separate=False)
    trained, evaluated = await trained_and_evaluated(OneList, config, tmp_path)
    assert evaluated <= trained


async def test_everything_that_is_left_is_trained_on(tmp_path):
    trained, evaluated = await trained_and_evaluated(OneList, config_of(tmp_path), tmp_path)
    assert len(trained) == 12 - len(evaluated) == 8


@pytest.mark.parametrize(
    ("environment", "num_samples", "message"),
    [
        (OneList, 12, "evals hold out all 12 examples of 'toy:Toy'"),
        (EvalOnly, 4, "has no train split, only eval; use it in"),
        (Repeats, 400, "1000 draws in a row gave examples of evals"),
    ],
)
async def test_nothing_left_to_train_on_is_one_message(environment, num_samples, message, tmp_path):
    config = config_of(tmp_path, num_samples=num_samples)
    with pytest.raises(ConfigError, match=message):
        await trained_and_evaluated(environment, config, tmp_path)


def test_names_of_one_environment_are_one_and_another_has_no_effect(tmp_path):
    config = config_of(tmp_path, name="math-reasoning", eval_name="telescope/math-reasoning")
    assert len({record.id for record in records_of(config).values()}) == 1
    assert list(held_out_problems(config, records_of(config))) == []
    config = config_of(tmp_path, name="math-reasoning", eval_name="countdown")
    (problem,) = held_out_problems(config, records_of(config))
    assert "evals (countdown): separate_eval_samples has no effect" in problem


def test_endless_draws_skip_what_is_held_out():
    source = Source(environment="a", weight=1.0, num_examples=None, held_out=frozenset({0, 1, 4}))
    draw = ExampleDraw([source], seed=0)
    assert [draw.next().example_index for _ in range(5)] == [2, 3, 5, 6, 7]
