"""What an eval is sampled with, and what it tells of the examples that it has played."""

from telescope_core import Example, ListSource, SingleTurnEnvironment, reward
from telescope_core.in_process import InProcessEnvironment
from telescope_core.records import RunFolder
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Message, Sampling
from telescope_train.config.schema import EvalEntry, TrainConfig
from telescope_train.evals.beside import LiveEvals, eval_settings
from telescope_train.plan.load import load_train_config
from telescope_train.rollouts.held_out import question_of


def config() -> TrainConfig:
    return load_train_config(
        [],
        [
            *("--name", "run", "--number_of_steps", "2", "--model", "none", "--max_tokens", "40"),
            *("--environments", '[{"name": "math-reasoning"}]'),
        ],
    )


def sampling_of(**fields) -> Sampling:
    entry = EvalEntry(name="math-reasoning", eval_every=1, **fields)
    return eval_settings(entry, config(), concurrency=4).sampling


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
