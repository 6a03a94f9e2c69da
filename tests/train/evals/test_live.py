"""What an eval is sampled with, and what it tells of the examples that it has played."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope_core import (
    ConfigError,
    Example,
    ListSource,
    SingleTurnEnvironment,
    Split,
    ToolConfig,
    ToolEnvironment,
    reward,
    tool,
)
from telescope_core.images import image_of, message_of
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records import RunFolder
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Message, Sampling
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.evals.beside import LiveEvals, eval_settings
from telescope_train.evals.num_examples import check_num_examples
from telescope_train.observability.terminal import LiveView
from telescope_train.plan.load import load_train_config
from telescope_train.resources import open_renderer
from telescope_train.rollouts.environments import OpenedEnvironments
from telescope_train.rollouts.held_out import question_of


def config(model: str = "none", name: str = "math-reasoning") -> TrainConfig:
    return load_train_config(
        [],
        [
            *("--name", "run", "--number_of_steps", "2", "--model", model, "--max_tokens", "40"),
            *("--environments", f'[{{"name": "{name}"}}]'),
        ],
    )


def sampling_of(**fields) -> Sampling:
    entry = EvalEntry(name="math-reasoning", eval_every=1, **fields)
    return eval_settings(entry, config(), num_examples=4, concurrency=4).sampling


def test_an_eval_may_shape_its_distribution_in_any_way():
    shaped = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    assert sampling_of(**shaped, top_k=20) == Sampling(max_tokens=40, **shaped, top_k=20)


def test_what_is_left_out_takes_nothing_out_of_the_distribution():
    assert sampling_of() == Sampling(max_tokens=40)


class Sums(SingleTurnEnvironment):
    """The same question stands there twice, under two ids."""

    def examples(self, split):
        numbers = (1, 2, 1)
        return ListSource(
            [
                Example(id=f"{split}-{i}", prompt=f"{n} + 1?", answer=str(n + 1))
                for i, n in enumerate(numbers)
            ]
        )

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.answer)


async def test_what_was_asked_is_known_whatever_its_ids_are(tmp_path):
    run = RunFolder.create(tmp_path / "run", config={})
    live = LiveEvals(
        config=config(),
        environments={"sums": InProcessEnvironment(Sums(), name="sums")},
        policies=ScriptedClient(["2"]),
        folder=run,
        concurrency=2,
    )
    await live.play(EvalEntry(name="sums", eval_every=1, num_samples=3), "before")

    def asked(text, answer):
        said = (Message(role="user", content=text), Message(role="assistant", content="?"))
        return question_of(said, 1, {"answer": answer})

    assert live.questions == {asked("1 + 1?", "2"), asked("2 + 1?", "3")}


class TrainOnly(Sums):
    def splits(self):
        return (Split.TRAIN,)


@pytest.mark.parametrize(
    ("environment", "fields", "problem"),
    [
        (Sums, {"num_samples": 4}, r"evals\[1\] \(sums\): num_samples is 4.* 3 examples"),
        (Sums, {"num_samples": 3}, None),
        (TrainOnly, {}, r"evals\[1\] \(sums\): .* no eval split, only train"),
        (TrainOnly, {"separate_eval_samples": True, "num_samples": 9}, "at most 3"),
    ],
)
async def test_an_eval_of_more_examples_than_there_are_is_refused(environment, fields, problem):
    fine = EvalEntry(name="fine", eval_every=1, num_samples=3)
    entry = EvalEntry(name="sums", eval_every=1, **fields)
    environments = {
        "fine": InProcessEnvironment(Sums(), name="fine"),
        "sums": InProcessEnvironment(environment(), name="sums"),
    }
    if problem is None:
        assert await check_num_examples([fine, entry], environments) == []
        return
    settings = config()
    settings = settings.model_copy(
        update={"evals": settings.evals.model_copy(update={"evals": (fine, entry)})}
    )
    opened = OpenedEnvironments(
        training={}, evals=environments, clients=tuple(environments.values())
    )
    prepared = SimpleNamespace(config=settings, environments=SimpleNamespace(opened=opened))
    with pytest.raises(ConfigError, match=problem):
        # The first thing that a run opens, before its servers.
        await open_renderer(prepared, RunFolder(Path("unused")), LiveView(1, []))


async def test_prompts_with_pictures_are_refused_before_any_server_starts():
    picture = image_of(b"\x89PNG\r\n\x1a\n")

    class Sees(Sums):
        def examples(self, split):
            return [Example(id="1", prompt=(message_of("user", "What?", picture),), answer="2")]

    sees = InProcessEnvironment(Sees(), name="sees")
    opened = OpenedEnvironments(training={"sees": sees}, evals={}, clients=(sees,))
    prepared = SimpleNamespace(
        config=config(name="sees"), environments=SimpleNamespace(opened=opened)
    )
    with pytest.raises(ConfigError, match=r"environment sees: a user message has a picture"):
        await open_renderer(prepared, RunFolder(Path("unused")), LiveView(1, []))


@pytest.mark.parametrize(
    ("has_split", "problem"), [(False, "no train split"), (True, "no examples")]
)
async def test_nothing_to_train_on_is_refused_before_any_server_starts(has_split, problem):
    class Held(Sums):
        def splits(self):
            return (Split.TRAIN, Split.EVAL) if has_split else (Split.EVAL,)

        def examples(self, split):
            return ListSource([]) if split is Split.TRAIN else super().examples(split)

    held = InProcessEnvironment(Held(), name="held")
    opened = OpenedEnvironments(training={"held": held}, evals={}, clients=(held,))
    prepared = SimpleNamespace(
        config=config(name="held"), environments=SimpleNamespace(opened=opened)
    )
    with pytest.raises(ConfigError, match=problem):
        await open_renderer(prepared, RunFolder(Path("unused")), LiveView(1, []))


async def test_rewards_that_cannot_be_taken_apart_are_refused_before_any_server_starts():
    sums = InProcessEnvironment(Sums(), name="sums")
    opened = OpenedEnvironments(training={"sums": sums}, evals={}, clients=(sums,))
    settings = config(name="sums")
    algorithm = settings.algorithm.model_copy(update={"advantage_norm": "parts"})
    prepared = SimpleNamespace(
        config=settings.model_copy(update={"algorithm": algorithm}),
        environments=SimpleNamespace(opened=opened),
    )
    with pytest.raises(ConfigError, match="sums has no reward that is a sum of parts"):
        await open_renderer(prepared, RunFolder(Path("unused")), LiveView(1, []))


async def test_tools_that_a_template_cannot_take_are_refused_before_any_server_starts(tiny):
    class Offers(ToolEnvironment):
        def examples(self, split):
            return [Example(id="1", prompt="1+1=", answer="2")]

        class Config(ToolConfig):
            tool_call_format: str = "native"

        @tool
        def add(self, a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @reward
        def correct(self, completion, answer):
            return completion == answer

    offers = InProcessEnvironment(Offers(), name="offers")
    opened = OpenedEnvironments(training={"offers": offers}, evals={}, clients=(offers,))
    prepared = SimpleNamespace(
        config=config(str(tiny), "offers"), environments=SimpleNamespace(opened=opened)
    )
    with pytest.raises(ConfigError, match="tool_call_parser"):
        await open_renderer(prepared, RunFolder(Path("unused")), LiveView(1, []))


async def test_an_eval_without_a_number_of_examples_plays_what_there_is(tmp_path):
    entry = EvalEntry(name="sums", eval_every=1, rollouts=1)
    environments = {"sums": InProcessEnvironment(Sums(), name="sums")}
    (note,) = await check_num_examples([entry], environments)
    assert "evals[0] (sums): plays all 3 examples" in note
    live = LiveEvals(
        config=config(),
        environments=environments,
        policies=ScriptedClient(["2"]),
        folder=RunFolder.create(tmp_path / "run", config={}),
        concurrency=1,
    )
    assert (await live.play(entry, "before")).result.num_tasks == 3
