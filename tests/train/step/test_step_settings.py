"""The settings of a step: each has an effect where it is accepted, and is refused elsewhere."""

import pytest

from telescope_core.errors import ConfigError
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.checks.step import SWITCHES
from telescope_train.plan.load import load_train_config

RUN = ["--name", "toy", "--number_of_steps", "10", "--model", "a/b", "--max_tokens", "512"]
MATHS = ["--environments", '[{"name": "math-reasoning"}]']
ALONE = ["--group_size", "1", "--algorithm", "reinforce_pp"]
ENTRY_ALONE = ["--environments", '[{"name": "math-reasoning", "group_size": 1}]']
ENTRY_OF_TWO = ["--environments", '[{"name": "math-reasoning", "group_size": 2}]']
OF_THE_STEP = {
    "number_of_minibatches": "2",
    "ppo_epochs": "2",
    "filter_overlong": "true",
    "filter_timeout": "false",
    "overlong_penalty_factor": "0.5",
    "overlong_buffer_tokens": "32",
    "filter_gibberish": "true",
    "gibberish_token_threshold": "500",
    "filter_repetition": "true",
    "repetition_compression_threshold": "8.0",
    "kl_in_reward": "true",
    "reference_update_every": "5",
}
"""Setting -> a value other than its default."""
ENABLES = {
    "overlong_penalty_factor": "0.5",
    "filter_gibberish": "true",
    "filter_repetition": "true",
    "kl_penalty_tau": "0.1",
}


def load(*flags: str) -> TrainConfig:
    return load_train_config([], [*RUN, *MATHS, *flags])


@pytest.mark.parametrize("name", OF_THE_STEP)
def test_every_setting_of_the_step_is_accepted_only_with_what_it_needs(name):
    value = OF_THE_STEP[name]
    needed, _ = SWITCHES.get(name, (None, None))
    if needed is None:
        changed = load(f"--{name}", value, "--use_ppo_clip", "true")
    else:
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} has no effect without {needed}"):
            load(f"--{name}", value)
        changed = load(f"--{name}", value, f"--{needed}", ENABLES[needed])
    assert getattr(changed.algorithm, name) != getattr(load().algorithm, name)


def test_the_walk_covers_every_setting_with_a_switch():
    assert set(SWITCHES) <= set(OF_THE_STEP)


@pytest.mark.parametrize(
    ("flags", "facts", "fixed"),
    [
        (
            ["--number_of_minibatches", "5"],
            r"\(5\).*prompts_batch_size_for_trainer \(16\).*\b4\b",
            ["--number_of_minibatches", "4"],
        ),
        (
            ["--number_of_minibatches", "32"],
            r"\(32\).*prompts_batch_size_for_trainer \(16\).*\b16\b",
            ["--number_of_minibatches", "16"],
        ),
        (
            ["--overlong_penalty_factor", "1", "--overlong_buffer_tokens", "512"],
            r"overlong_buffer_tokens \(512\).*max_tokens \(512\)",
            ["--overlong_penalty_factor", "1", "--overlong_buffer_tokens", "511"],
        ),
        (
            ["--overlong_penalty_factor", "1", "--max_tokens", "200"],
            r"overlong_buffer_tokens \(256\).*max_tokens \(200\)",
            ["--overlong_penalty_factor", "1", "--max_tokens", "257"],
        ),
        (
            ["--kl_penalty_tau", "0.1", "--reference_update_every", "10"],
            r"reference_update_every \(10\).*number_of_steps \(10\)",
            ["--kl_penalty_tau", "0.1", "--reference_update_every", "9"],
        ),
        (
            ["--ppo_epochs", "2", "--use_tis", "false"],
            r"ppo_epochs \(2\).*grpo.*use_tis is false.*use_ppo_clip",
            ["--ppo_epochs", "2", "--use_tis", "false", "--use_ppo_clip", "true"],
        ),
        (
            ["--filter_repetition", "true", "--repetition_compression_threshold", "1.0"],
            "repetition_compression_threshold.*greater than 1",
            ["--filter_repetition", "true", "--repetition_compression_threshold", "1.1"],
        ),
        (
            ["--should_accept_fn", "no-colon"],
            "should_accept_fn.*has_signal.*module:function",
            ["--should_accept_fn", "has_signal"],
        ),
        (
            [*ALONE, "--should_accept_fn", "has_signal"],
            r"should_accept_fn = 'has_signal'.*math-reasoning.*rollout\.group_size is 1",
            [*ALONE, "--should_accept_fn", "mine:keep"],
        ),
        (
            [*ALONE[2:], "--should_accept_fn", "has_signal", *ENTRY_ALONE],
            r"should_accept_fn = 'has_signal'.*math-reasoning.*environments\[0\]\.group_size is 1",
            [*ALONE, "--should_accept_fn", "has_signal", *ENTRY_OF_TWO],
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(flags, facts, fixed):
    with pytest.raises(ConfigError, match=facts):
        load(*flags)
    assert load(*fixed).algorithm != load().algorithm or load(*fixed).rollout != load().rollout


def test_the_schedule_counts_optimizer_steps():
    config = load(
        *("--number_of_minibatches", "4", "--ppo_epochs", "2", "--use_ppo_clip", "true"),
        *("--warmup_steps", "80"),
    )
    assert config.num_optimizer_steps == 80
    with pytest.raises(ConfigError, match="must not exceed the 10 optimizer steps"):
        load("--warmup_steps", "11")
