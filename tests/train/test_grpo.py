import math
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_core.errors import ConfigError, UnknownNameError
from telescope_train.algorithms import known_algorithms, load_algorithm
from telescope_train.algorithms.terms import Terms
from telescope_train.config.schema import AlgorithmSection
from telescope_train.metrics import metric_row

GRPO = load_algorithm("grpo")

FORMS = {
    "plain": {},
    "tis": {"use_tis": True},
    "tis_tight": {"use_tis": True, "tis_cap": 0.5},
    "clip": {"use_ppo_clip": True},
    "clip_wide": {"use_ppo_clip": True, "clip_low": 0.9, "clip_high": 5.0},
}


@dataclass
class Token:
    logprob: float
    behavior: float
    advantage: float
    is_trained: bool = True


def terms_of(tokens: list[Token], dtype=torch.float64) -> Terms:
    return Terms(
        logprobs_T=torch.tensor([t.logprob for t in tokens], dtype=dtype).requires_grad_(),
        behavior_logprobs_T=torch.tensor([t.behavior for t in tokens], dtype=dtype),
        advantages_T=torch.tensor([t.advantage for t in tokens], dtype=dtype),
        mask_T=torch.tensor([t.is_trained for t in tokens]),
        sequence_ids_T=torch.zeros(len(tokens), dtype=torch.long),
        entropy_T=torch.ones(len(tokens), dtype=dtype),
    )


def slow_loss(token: Token, section: AlgorithmSection) -> tuple[float, float]:
    """One token: the loss and its derivative by the log-prob, written out from the formulas."""
    if not token.is_trained:
        return 0.0, 0.0
    ratio, advantage = math.exp(token.logprob - token.behavior), token.advantage
    if not section.use_ppo_clip:
        weight = min(ratio, section.tis_cap) if section.use_tis else 1.0
        return -weight * advantage * token.logprob, -weight * advantage
    low = 1 - (0.2 if section.clip_low is None else section.clip_low)
    high = 1 + (0.2 if section.clip_high is None else section.clip_high)
    clipped = min(max(ratio, low), high)
    is_flat = clipped * advantage < ratio * advantage
    return -min(ratio * advantage, clipped * advantage), 0.0 if is_flat else -ratio * advantage


def gradient(terms: Terms, section: AlgorithmSection) -> torch.Tensor:
    terms.logprobs_T.grad = None
    GRPO.loss(terms, section).loss_T.sum().backward()
    return terms.logprobs_T.grad


TOKENS = st.lists(
    st.builds(
        Token,
        logprob=st.floats(-6, -0.01),
        behavior=st.floats(-6, -0.01),
        advantage=st.floats(-3, 3),
        is_trained=st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(tokens=TOKENS)
def test_loss_and_gradient_equal_the_slow_version(form, tokens):
    section, terms = AlgorithmSection(**FORMS[form]), terms_of(tokens)
    expected = [slow_loss(token, section) for token in tokens]
    loss_T = GRPO.loss(terms, section).loss_T
    assert loss_T.tolist() == pytest.approx([loss for loss, _ in expected], abs=1e-12)
    assert gradient(terms, section).tolist() == pytest.approx([g for _, g in expected], abs=1e-12)


@pytest.mark.parametrize("form", ["plain", "tis", "clip", "clip_wide"])
def test_on_policy_every_form_has_the_gradient_of_reinforce(form):
    tokens = [Token(-0.5, -0.5, 2.0), Token(-1.5, -1.5, -1.0), Token(-3.0, -3.0, 0.3)]
    assert gradient(terms_of(tokens), AlgorithmSection(**FORMS[form])).tolist() == [-2.0, 1.0, -0.3]


@pytest.mark.parametrize("form", FORMS)
def test_zero_advantage_gives_exactly_zero_gradient(form):
    tokens = [Token(-0.5, -1.0, 0.0), Token(-4.0, -0.1, 0.0), Token(-80.0, -0.1, 0.0)]
    assert not gradient(terms_of(tokens), AlgorithmSection(**FORMS[form])).any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("log_ratio", [50.0, -50.0, 500.0, -500.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_extreme_ratios_stay_finite_in_float32(form, log_ratio, advantage):
    behavior = min(-1.0, -1.0 - log_ratio)
    tokens = [Token(behavior + log_ratio, behavior, advantage), Token(-1.0, -1.0, 1.0)]
    terms = terms_of(tokens, torch.float32)
    token_loss = GRPO.loss(terms, AlgorithmSection(**FORMS[form]))
    assert token_loss.loss_T.isfinite().all()
    assert gradient(terms, AlgorithmSection(**FORMS[form])).isfinite().all()
    assert all(math.isfinite(value) for value in metric_row(token_loss.metrics).values())


@pytest.mark.parametrize("form", FORMS)
def test_what_the_policy_did_not_write_cannot_matter(form):
    section = AlgorithmSection(**FORMS[form])
    trained = [Token(-0.5, -1.0, 2.0), Token(-2.0, -1.9, -1.0)]
    padding = [Token(-700.0, 0.0, 5.0, False), Token(0.0, -700.0, -5.0, False)]
    assert gradient(terms_of(trained + padding), section)[2:].tolist() == [0.0, 0.0]
    alone = GRPO.loss(terms_of(trained), section)
    with_padding = GRPO.loss(terms_of(trained + padding), section)
    assert with_padding.loss_T.tolist() == [*alone.loss_T.tolist(), 0.0, 0.0]
    assert metric_row(with_padding.metrics) == metric_row(alone.metrics)


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_linear_in_the_advantage(form):
    section = AlgorithmSection(**FORMS[form])
    tokens = [Token(-0.5, -1.0, 2.0), Token(-2.0, -1.9, -1.0)]
    threefold = [Token(t.logprob, t.behavior, 3 * t.advantage) for t in tokens]
    torch.testing.assert_close(
        gradient(terms_of(threefold), section), 3 * gradient(terms_of(tokens), section)
    )


def test_fractions_count_where_the_clip_binds():
    tokens = [
        Token(-0.5, -1.0, 1.0),
        Token(-0.5, -1.0, -1.0),
        Token(-1.0, -0.5, 1.0),
        Token(-1.0, -0.5, -1.0),
        Token(-9.0, -1.0, -1.0),
    ]
    clip = GRPO.loss(terms_of(tokens), AlgorithmSection(use_ppo_clip=True))
    assert metric_row(clip.metrics) == {"clip_fraction/low": 0.4, "clip_fraction/high": 0.2}
    tis = GRPO.loss(terms_of(tokens), AlgorithmSection(use_tis=True, tis_cap=1.5))
    assert metric_row(tis.metrics) == {"tis/capped_fraction": 0.4}


def test_a_ratio_is_never_counted_twice():
    with pytest.raises(ConfigError, match="use_ppo_clip and use_tis"):
        GRPO.loss(terms_of([Token(-1, -1, 1)]), AlgorithmSection(use_ppo_clip=True, use_tis=True))


def test_algorithms_are_found_by_name_and_cite_their_paper():
    assert "grpo" in known_algorithms()
    assert (GRPO.name, GRPO.weighting, GRPO.clip_low, GRPO.clip_high) == ("grpo", "token", 0.2, 0.2)
    for name in known_algorithms():
        algorithm = load_algorithm(name)
        assert f"Paper: {algorithm.paper}" in (import_module(algorithm.loss.__module__).__doc__)
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        load_algorithm("GRPOO")
