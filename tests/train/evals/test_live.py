"""The settings of an eval become what its rollouts are sampled with."""

from telescope_core.types import Sampling
from telescope_train.config.schema import EvalEntry
from telescope_train.evals.live import eval_settings
from telescope_train.plan.load import load_train_config


def sampling_of(**fields) -> Sampling:
    config = load_train_config(
        [],
        [
            *("--name", "run", "--number_of_steps", "2", "--model", "none", "--max_tokens", "40"),
            *("--environments", '[{"name": "math-reasoning"}]'),
        ],
    )
    entry = EvalEntry(name="math-reasoning", eval_every=1, **fields)
    return eval_settings(entry, config, concurrency=4).sampling


def test_an_eval_may_shape_its_distribution_in_any_way():
    shaped = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    assert sampling_of(**shaped, top_k=20) == Sampling(max_tokens=40, **shaped, top_k=20)


def test_what_is_left_out_takes_nothing_out_of_the_distribution():
    assert sampling_of() == Sampling(max_tokens=40)
