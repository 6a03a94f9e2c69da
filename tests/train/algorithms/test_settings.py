"""Every setting of `[algorithm]` either changes what is computed or is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import advantages_of, loss_of, terms_of, weights_of
from slow import Rollout, Token

from telescope_core.errors import ConfigError
from telescope_train.config.schema import AlgorithmSection
from telescope_train.plan.load import load_train_config

RUN = ["--name", "toy", "--number_of_steps", "10", "--model", "a/b"]
MATHS = ["--environments", '[{"name": "math-reasoning"}]']
CLIP = "--use_ppo_clip"
BATCH = ["--ppo_clip_ref_logprobs", "batch"]
TIS = "--use_tis"
IN_STEP = "--max_async_rollout=0"
ICEPOP = [TIS, "--tis_mode", "icepop"]
GSPO, GMPO, SAPO, DPPO = (["--algorithm", name] for name in ("gspo", "gmpo", "sapo", "dppo"))
OPD, TEACHER = ["--algorithm", "opd"], ["--reference_model", "a/teacher"]

EFFECTIVE: dict[str, tuple[list[str], str]] = {
    "algorithm": ([], "rloo"),
    "advantage_norm": ([], "batch"),
    "use_ppo_clip": ([], "true"),
    "clip_low": ([CLIP], "0.01"),
    "clip_high": (GSPO, "0.01"),
    "clip_ratio_c": ([CLIP], "1.05"),
    "dppo_divergence": ([*DPPO, "--dppo_threshold", "0.1"], "kl"),
    "dppo_threshold": (DPPO, "0.01"),
    "ppo_clip_ref_logprobs": (SAPO, "batch"),
    "use_tis": ([], "false"),
    "tis_cap": ([TIS], "1.1"),
    "tis_mode": ([TIS, "--tis_cap", "1.1"], "icepop"),
    "tis_floor": (ICEPOP, "0.9"),
    "seq_is_masking": ([], "true"),
    "seq_is_mask_range": (["--seq_is_masking"], "[0.3, 1.2]"),
    "use_decoupled_loss": ([CLIP], "true"),
    "recompute_logprob": ([CLIP, *BATCH], "false"),
    "behave_imp_weight_cap": ([CLIP, "--use_decoupled_loss"], "1.05"),
    "kl_penalty_tau": ([], "0.1"),
    "kl_estimator": (["--kl_penalty_tau", "0.1"], "k3"),
    "entropy_coef": ([], "0.1"),
}
"""Setting -> flags beside which this value of it changes loss, gradient, advantage or weight."""

NO_EFFECT: dict[str, list[tuple[list[str], str]]] = {
    "advantage_norm": [(["--algorithm", name], "batch") for name in ("rloo", "dr_grpo", "maxrl")],
    "use_ppo_clip": [
        (["--algorithm", name], "true") for name in ("cispo", "gspo", "gmpo", "sapo", "dppo")
    ],
    "clip_low": [([], "0.1"), (SAPO, "0.1"), (["--algorithm", "dapo", CLIP, "false"], "0.1")],
    "clip_high": [([], "0.1"), (SAPO, "0.1"), (DPPO, "0.1")],
    "clip_ratio_c": [([], "3"), (["--algorithm", "cispo"], "3"), (SAPO, "3")],
    "dppo_divergence": [([], "kl"), (SAPO, "kl")],
    "dppo_threshold": [([], "0.1"), (SAPO, "0.1")],
    "ppo_clip_ref_logprobs": [([], "batch"), ([CLIP, "--use_decoupled_loss"], "rollout")],
    "tis_cap": [([IN_STEP], "3"), ([CLIP], "3")],
    "tis_mode": [([IN_STEP], "icepop")],
    "tis_floor": [([IN_STEP], "0.5"), ([TIS], "0.5")],
    "seq_is_mask_range": [([], "[0.5, 1.2]")],
    "use_decoupled_loss": [([CLIP, "--recompute_logprob", "false"], "true")],
    "behave_imp_weight_cap": [([CLIP], "3")],
    "kl_estimator": [([], "k3")],
}
"""Setting -> flags beside which it would have no effect, with a value."""

SAYS_WHAT_IS_SO: dict[str, list[tuple[list[str], str]]] = {
    "advantage_norm": [
        (["--algorithm", "reinforce_pp"], "batch"),
        (["--algorithm", "reinforce_pp_baseline"], "batch"),
        (["--algorithm", "rloo"], "group"),
    ],
    "use_ppo_clip": [(["--algorithm", "cispo"], "false")],
    "clip_low": [([], "0.2")],
    "ppo_clip_ref_logprobs": [([CLIP, "--use_decoupled_loss"], "batch"), ([], "rollout")],
    "tis_cap": [([IN_STEP], "2.0")],
    "recompute_logprob": [([], "false"), ([CLIP], "false"), ([CLIP], "true")],
}
"""Setting -> flags beside which it has no effect, with a value that holds there without it."""

IN_EVERY_COMBINATION = {
    "algorithm",
    "use_tis",
    "seq_is_masking",
    "kl_penalty_tau",
    "entropy_coef",
}
"""These change something wherever they are allowed."""

ELSEWHERE = {
    "pass_at_k",
    "reference_model",
    "branch_credit",
    "number_of_minibatches",
    "ppo_epochs",
    "filter_overlong",
    "filter_timeout",
    "overlong_penalty_factor",
    "overlong_buffer_tokens",
    "filter_gibberish",
    "gibberish_token_threshold",
    "filter_repetition",
    "repetition_compression_threshold",
    "kl_in_reward",
    "reference_update_every",
}
"""What becomes of a batch before the loss: tests/train/step/test_credit.py, test_minibatches.py,
test_filters.py, test_pass_at_k.py and test_loop.py, and the teacher, test_other_reference.py."""


def section(flags: list[str]) -> AlgorithmSection:
    return load_train_config([], [*RUN, *MATHS, *flags]).algorithm


def step() -> list[Rollout]:
    """Two groups; ratios on both sides of 1, for tokens and for whole sequences."""
    generator = np.random.default_rng(5)
    rollouts = []
    for number, reward in enumerate((0.0, 1.0, 0.25, 1.0, 0.0, 0.5)):
        shift, tokens = (-0.8, 0.9, 0.02)[number % 3], []
        for behavior in -generator.random(6) - 0.5:
            policy, proximal, reference = behavior + shift + generator.normal(0, [0.3, 0.2, 0.4])
            tokens.append(Token(policy, behavior, proximal, reference, generator.random()))
        rollouts.append(Rollout(number // 3, reward, [tokens]))
    return rollouts


def everything_computed(flags: list[str]) -> np.ndarray:
    chosen, rollouts = section(flags), step()
    terms = terms_of(rollouts, advantages_of(rollouts, chosen))
    loss_T = loss_of(chosen)(terms).loss_T
    weights_T = weights_of(rollouts, chosen, torch.float64)
    (loss_T * weights_T).sum().backward()
    parts = (loss_T, weights_T, terms.logprobs_T.grad, terms.advantages_T)
    return torch.cat([part.detach() for part in parts]).numpy()


def test_every_setting_is_walked():
    fields = set(AlgorithmSection.model_fields)
    assert set(EFFECTIVE) | ELSEWHERE == fields
    assert set(NO_EFFECT) | set(SAYS_WHAT_IS_SO) | IN_EVERY_COMBINATION | ELSEWHERE == fields


@pytest.mark.parametrize("field", EFFECTIVE)
def test_a_setting_that_is_accepted_changes_what_is_computed(field):
    flags, value = EFFECTIVE[field]
    changed = everything_computed([*flags, f"--{field}", value])
    assert np.abs(changed - everything_computed(flags)).max() > 1e-6


@pytest.mark.parametrize("field", NO_EFFECT)
def test_a_setting_without_effect_is_refused_with_the_fix(field):
    for flags, value in NO_EFFECT[field]:
        section(flags)
        with pytest.raises(ConfigError, match=rf"\Aalgorithm\.{field} .*\bremove ") as caught:
            section([*flags, f"--{field}", value])
        # And nothing else is said, such as of a value that nobody gave.
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("field", SAYS_WHAT_IS_SO)
def test_a_value_that_holds_anyway_changes_nothing(field):
    for flags, value in SAYS_WHAT_IS_SO[field]:
        written = everything_computed([*flags, f"--{field}", value])
        np.testing.assert_array_equal(written, everything_computed(flags))


@pytest.mark.slow
def test_a_refused_value_would_indeed_have_changed_nothing():
    """Past the checks, the same value changes no advantage and no loss."""
    set_ones = {"clip_low": 0.1, "clip_high": 0.1, "clip_ratio_c": 2.0, "kl_estimator": "k2"}
    some = AlgorithmSection(**set_ones, use_ppo_clip=True, dppo_threshold=0.2)
    cases = [(field, *case) for field in NO_EFFECT for case in NO_EFFECT[field]]
    for field, flags, value in cases:
        if value == "true":
            continue
        kind = type(getattr(some, field))
        chosen, rollouts = section(flags), step()
        other = chosen.model_copy(update={field: kind(value) if kind is not bool else False})
        credit = advantages_of(rollouts, chosen)
        np.testing.assert_array_equal(credit, advantages_of(rollouts, other))
        terms = terms_of(rollouts, credit)
        losses = [loss_of(one)(terms).loss_T.detach() for one in (chosen, other)]
        assert torch.equal(*losses), (field, flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([TIS, CLIP], 'twice; turn use_tis off, or set ppo_clip_ref_logprobs = "batch"'),
        ([TIS, "--algorithm", "dapo"], "use_tis and use_ppo_clip both weight a token"),
        ([TIS, "--algorithm", "cispo"], "use_tis and the loss of cispo both weight a token"),
        ([TIS, *GSPO], "use_tis and the loss of gspo"),
        ([TIS, *GMPO], "use_tis and the loss of gmpo"),
        ([TIS, *SAPO], "use_tis and the loss of sapo"),
        ([TIS, *DPPO], "use_tis and the loss of dppo"),
        ([*DPPO, "--dppo_threshold", "1"], "dppo_threshold must be below 1 with the divergence tv"),
        ([*DPPO, "--dppo_threshold", "0"], "dppo_threshold: expected greater than 0, got 0"),
        ([*DPPO, "--dppo_divergence", "js"], "dppo_divergence"),
        ([*DPPO, "--clip_low", "0.2"], "set dppo_threshold, or remove clip_low"),
        ([*DPPO, "--clip_ratio_c", "1"], "clip_ratio_c: expected greater than 1, got 1"),
        ([TIS, CLIP, *BATCH, "--recompute_logprob", "false"], "(with recompute_logprob)"),
        ([TIS, CLIP, "--use_decoupled_loss"], "use_tis and use_decoupled_loss both weight"),
        (["--use_decoupled_loss"], "only with use_ppo_clip; set use_ppo_clip = true"),
        ([CLIP, "--clip_low", "1"], "algorithm.clip_low must be below 1, got 1"),
        ([*GSPO, "--clip_low", "1"], "algorithm.clip_low must be below 1, got 1"),
        ([*GMPO, "--clip_low", "1"], "algorithm.clip_low must be below 1, got 1"),
        (OPD, "opd learns from a teacher: set algorithm.reference_model"),
        (
            [*OPD, *TEACHER, "--kl_penalty_tau", "1"],
            "counts the divergence from reference_model",
        ),
        (
            [*OPD, *TEACHER, "--overlong_penalty_factor", "1"],
            "overlong_penalty_factor has no effect with opd, which does not learn from rewards",
        ),
        (
            [*OPD, *TEACHER, "--should_accept_fn", "has_signal"],
            "should_accept_fn = 'has_signal' with opd rejects groups of equal rewards",
        ),
        (TEACHER, "reference_model has no effect with grpo without kl_penalty_tau"),
        (
            [*TEACHER, "--kl_penalty_tau", "1", "--reference_update_every", "2"],
            "reference_update_every has no effect with reference_model, which stays as it is",
        ),
        ([*GMPO, "--clip_low", "0", "--clip_high", "0"], "clip_low and clip_high are both 0"),
        ([*ICEPOP, "--tis_floor", "2.5"], "tis_floor (2.5) must be below tis_cap (2)"),
        (["--group_size", "1"], "use reinforce_pp, which needs no group"),
        (["--group_size", "1", "--algorithm", "maxrl"], "at least 2 for maxrl, got 1"),
        (
            ["--algorithm", "maxrl", "--overlong_penalty_factor", "1"],
            "algorithm.overlong_penalty_factor would push rewards below 0, which maxrl",
        ),
        (
            ["--algorithm", "maxrl", "--kl_in_reward", "--kl_penalty_tau", "0.1"],
            "algorithm.kl_in_reward would push rewards below 0",
        ),
        (["--algorithm", "nowhere:MINE"], "cannot import 'nowhere'"),
        (
            ["--kl_penalty_tau", "0.1", "--kl_in_reward", "--kl_estimator", "k3"],
            "in a reward only k1 has its gradient; remove kl_estimator",
        ),
        (["--kl_penalty_tau", "0.1", "--kl_estimator", "k1"], "whose gradient is 0 on average"),
        (["--clip_ratio_c", "1"], "clip_ratio_c: expected greater than 1, got 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(flags, expected):
    with pytest.raises(ConfigError) as caught:
        section(flags)
    assert expected in str(caught.value)


def test_one_rollout_per_example_is_enough_for_reinforce_pp():
    assert section(["--group_size", "1", "--algorithm", "reinforce_pp"]).algorithm


def test_what_the_trainer_has_to_provide():
    def needs(*flags: str) -> tuple[bool, bool]:
        chosen = section(list(flags))
        return chosen.needs_proximal, chosen.needs_reference

    assert needs() == (False, False)
    assert needs(CLIP, *BATCH) == (True, False)
    assert needs(CLIP, *BATCH, "--recompute_logprob", "false") == (False, False)
    assert needs(CLIP, "--use_decoupled_loss", "--kl_penalty_tau", "0.1") == (True, True)
    assert needs(*OPD, *TEACHER) == (False, True)
