"""What holds for every algorithm: zeros, extremes, masks, on-policy gradients, metrics."""

import itertools
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from cases import ALGORITHMS, LIMIT, forms_of, loss_of, section_of, terms_of, weights_of
from slow import Rollout, Token

from telescope_core.errors import ConfigError
from telescope_train.algorithms import load_algorithm, loss_function
from telescope_train.algorithms.objective import (
    estimator_of,
    kl_estimate,
    objective,
    tis_weights,
)
from telescope_train.algorithms.terms import Terms, TokenLoss, metric_sums, shared_metrics
from telescope_train.algorithms.token_metrics import metric_row, reduce_metrics
from telescope_train.config.schema import AlgorithmSection


def policy_only(algorithm: str) -> list[str]:
    """The forms without terms of their own gradient."""
    others = {"kl_penalty_tau", "entropy_coef"}
    return [name for name, form in forms_of(algorithm).items() if not others & set(form)]


def on_policy_step() -> list[Rollout]:
    """Three rollouts of 1, 4 and 2 tokens; every log-prob is that of the policy itself."""
    generator = np.random.default_rng(3)
    return [
        Rollout(0, 0.0, [[Token(x, x, x, x, 1.0) for x in -generator.random(length)]])
        for length in (1, 4, 2)
    ]


def far_apart(*log_ratios: float) -> list[Rollout]:
    """Sequences of one token, on which sampler, proximal and reference policy all disagree."""
    rollouts = []
    for log_ratio in log_ratios:
        old = min(-1.0, -1.0 - log_ratio)
        token = Token(old + log_ratio, old, old + log_ratio / 2, old - log_ratio / 2, 1.0)
        rollouts.append(Rollout(0, 0.0, [[token]]))
    return rollouts


def gradient(terms, section) -> torch.Tensor:
    terms.logprobs_T.grad = None
    loss_of(section)(terms).loss_T.sum().backward()
    return terms.logprobs_T.grad


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_zero_advantage_gives_exactly_zero_gradient(algorithm):
    terms = terms_of(far_apart(0.5, -3.0, 60.0, -90.0), [0.0] * 4, torch.float32)
    for form in policy_only(algorithm):
        assert not gradient(terms, section_of(algorithm, form)).any(), form


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extreme_ratios_stay_finite_in_float32(algorithm):
    rollouts = far_apart(*[50.0, -50.0, 100.0, -100.0, 700.0, -700.0] * 2)
    terms = terms_of(rollouts, [2.0] * 6 + [-2.0] * 6, torch.float32)
    shared = metric_row(shared_metrics(terms, same_version_T=terms.mask_T))
    assert all(math.isfinite(value) for value in shared.values())
    for form in forms_of(algorithm):
        section = section_of(algorithm, form)
        token_loss = loss_of(section)(terms)
        assert token_loss.loss_T.isfinite().all(), form
        assert gradient(terms, section).isfinite().all(), form
        assert all(value.isfinite().all() for value in token_loss.metrics.values()), form


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_the_policy_did_not_write_cannot_matter(algorithm):
    trained = terms_of(far_apart(0.4, -0.2), [1.5, -1.0])
    padding = torch.tensor([-700.0, 0.0], dtype=torch.float64)

    def padded(values_T, more_T):
        return torch.cat([values_T.detach(), more_T.to(values_T.dtype)])

    both = replace(
        trained,
        logprobs_T=padded(trained.logprobs_T, padding).requires_grad_(),
        behavior_logprobs_T=padded(trained.behavior_logprobs_T, padding.flip(0)),
        advantages_T=padded(trained.advantages_T, torch.tensor([5.0, -5.0])),
        mask_T=padded(trained.mask_T, torch.tensor([False, False])),
        sequence_ids_T=padded(trained.sequence_ids_T, torch.tensor([1, 0])),
        entropy_T=padded(trained.entropy_T, padding),
        proximal_logprobs_T=padded(trained.proximal_logprobs_T, padding.flip(0)),
        reference_logprobs_T=padded(trained.reference_logprobs_T, padding),
    )
    for form in forms_of(algorithm):
        section = section_of(algorithm, form)
        alone, with_padding = loss_of(section)(trained), loss_of(section)(both)
        assert with_padding.loss_T.tolist() == [*alone.loss_T.tolist(), 0.0, 0.0], form
        sums = metric_sums(with_padding.metrics, both.mask_T)
        assert sums == metric_sums(alone.metrics, trained.mask_T), form
        assert gradient(both, section).tolist() == [*gradient(trained, section).tolist(), 0.0, 0.0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_policy_the_gradient_is_that_of_the_paper(algorithm):
    """-A per token, in the paper's average: over tokens, or over sequences and their tokens."""
    rollouts, advantages, lengths = on_policy_step(), [2.0, -1.0, 0.5], [1, 4, 2]
    terms = terms_of(rollouts, advantages)
    for form in policy_only(algorithm):
        section = section_of(algorithm, form)
        weights_T = weights_of(rollouts, section, torch.float64)
        terms.logprobs_T.grad = None
        (loss_of(section)(terms).loss_T * weights_T).sum().backward()
        if algorithm == "dr_grpo" and form != "per_token":
            shares = [1 / (3 * LIMIT)] * 3
        elif algorithm in ("gspo", "gmpo", "sapo"):
            shares = [1 / (3 * length) for length in lengths]
        else:
            shares = [1 / 7] * 3
        # Of on-policy distillation, the teacher is the policy itself in this step.
        unit = 0.0 if algorithm == "opd" else -1.0
        expected = [unit * a * share for a, share in zip(advantages, shares, strict=True)]
        np.testing.assert_allclose(
            terms.logprobs_T.grad, np.repeat(expected, lengths), rtol=1e-12, err_msg=form
        )


def test_gspo_is_the_paper_s_sequence_objective_without_another_length_factor():
    """Eq. 5 as it stands, ratios of whole sequences, differentiated by autograd."""
    generator = np.random.default_rng(0)
    advantages, lengths = [1.0, -1.0, 0.5], (40, 200, 7)
    rollouts = [
        Rollout(
            0,
            0.0,
            [
                [
                    Token(b + d, b, 0, 0, 1.0)
                    for b, d in zip(
                        -generator.random(length), generator.normal(0, 0.1, length), strict=True
                    )
                ]
            ],
        )
        for length in lengths
    ]
    section = AlgorithmSection(algorithm="gspo", clip_low=0.5, clip_high=0.5)
    terms = terms_of(rollouts, advantages)
    (loss_of(section)(terms).loss_T * weights_of(rollouts, section, torch.float64)).sum().backward()
    policy_T = terms.logprobs_T.detach().clone().requires_grad_()
    parts = (policy_T - terms.behavior_logprobs_T).split(lengths)
    ratios = torch.stack([part.mean().exp() for part in parts])
    (-(ratios * torch.tensor(advantages)).mean()).backward()
    torch.testing.assert_close(terms.logprobs_T.grad, policy_T.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("low", "high"), [(0.33, 0.49), (0.02, 0.03), (0.9, 50.0)])
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(low, high):
    """The paper's objective over whole sequences, in plain ratios, differentiated by autograd."""
    generator = np.random.default_rng(1)
    advantages, lengths = [1.0, -1.0, 0.5, -0.2], (40, 200, 7, 1)
    rollouts = []
    for length in lengths:
        old = -generator.random(length) - 1
        new = old + generator.normal(0, 0.4, length)
        tokens = [Token(a, b, 0, 0, 1.0) for a, b in zip(new, old, strict=True)]
        rollouts.append(Rollout(0, 0.0, [tokens]))
    section = AlgorithmSection(algorithm="gmpo", clip_low=low, clip_high=high)
    terms = terms_of(rollouts, advantages)
    found = loss_of(section)(terms)
    loss = (found.loss_T * weights_of(rollouts, section, torch.float64)).sum()
    loss.backward()
    policy_T = terms.logprobs_T.detach().clone().requires_grad_()
    expected = 0.0
    for new_T, old_T, advantage in zip(
        policy_T.split(lengths), terms.behavior_logprobs_T.split(lengths), advantages, strict=True
    ):
        ratios_T = (new_T - old_T).exp()
        bounded_T = ratios_T.clamp(1 - low, 1 + high)
        least_T = torch.minimum(ratios_T * advantage, bounded_T * advantage) / advantage
        expected = expected - advantage * least_T.prod() ** (1 / len(new_T)) / len(lengths)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(terms.logprobs_T.grad, policy_T.grad, rtol=1e-11, atol=1e-16)
    assert found.metrics["clip_fraction/low"].any() == (low < 0.9)
    assert found.metrics["clip_fraction/high"].any() == (high < 50.0)


def test_what_a_teacher_would_never_write_counts_as_ten_nats():
    tokens = [Token(-1.0, -1.0, -1.0, -1.0 + gap, 1.0) for gap in (-50.0, -9.0, 0.5)]
    terms = terms_of([Rollout(0, 0.0, [tokens])], [1.0])
    section = AlgorithmSection(algorithm="opd", reference_model="a/teacher")
    assert gradient(terms, section).tolist() == [10.0, 9.0, -0.5]


def test_fractions_count_where_a_bound_binds():
    pairs = [(-0.5, -1.0, 1.0), (-0.5, -1.0, -1.0), (-1.0, -0.5, 1.0), (-1.0, -0.5, -1.0)]
    pairs.append((-9.0, -1.0, -1.0))
    rollouts = [Rollout(0, 0.0, [[Token(new, b, b, b, 1.0)]]) for new, b, _ in pairs]
    terms = terms_of(rollouts, [advantage for _, _, advantage in pairs])

    def row(**settings) -> dict[str, float]:
        found = loss_of(AlgorithmSection(**settings))(terms).metrics
        return metric_row(metric_sums(found, terms.mask_T))

    clip = row(use_ppo_clip=True)
    assert (clip["clip_fraction/low"], clip["clip_fraction/high"]) == (0.4, 0.2)
    assert row(use_ppo_clip=True, clip_ratio_c=1.5)["clip_fraction/dual"] == 0.2
    assert row(use_tis=True, tis_cap=1.5)["tis/capped_fraction"] == 0.4
    icepop = row(use_tis=True, tis_mode="icepop", tis_floor=0.5, tis_cap=1.5)
    assert icepop["tis/masked_fraction"] == pytest.approx(0.6)
    assert row(seq_is_masking=True)["seq_is_mask/fraction"] == 1.0
    assert row(algorithm="cispo", clip_high=0.5)["clip_fraction/high"] == 0.4
    assert row(kl_penalty_tau=1.0)["loss/kl"] == pytest.approx((4 * 0.125 + 32) / 5)


def test_the_parts_of_a_loss_add_up_to_it_and_those_that_are_off_are_absent():
    terms = terms_of(far_apart(0.3, -0.4), [1.0, -0.5])
    both = {"kl_penalty_tau": 0.3, "entropy_coef": 0.25}
    for settings in ({}, both, *({name: value} for name, value in both.items())):
        found = loss_of(AlgorithmSection(**settings))(terms)
        parts = {name: one for name, one in found.metrics.items() if name.startswith("loss/")}
        torch.testing.assert_close(sum(parts.values()), found.loss_T)
        others = {"kl_penalty_tau": "loss/kl", "entropy_coef": "loss/entropy"}
        assert parts.keys() == {"loss/policy", *(others[name] for name in settings)}
    assert (parts["loss/entropy"] == -0.25).all(), "an entropy of 1"


def test_effective_sample_size_reduces_exactly():
    policy = [(-1.0, -1.0), (-1.0, -2.0), (-3.0, -1.0), (-0.5, -0.7)]
    rollouts = [Rollout(0, 0.0, [[Token(new, b, b, b, 1.0)]]) for new, b in policy]

    def sums(chosen: list[Rollout]):
        terms = terms_of(chosen, [0.0] * len(chosen))
        return shared_metrics(terms, same_version_T=terms.mask_T)

    weights = np.exp([new - b for new, b in policy])
    expected = weights.sum() ** 2 / (4 * (weights**2).sum())
    for parts in ([rollouts], [rollouts[:1], rollouts[1:]], [[one] for one in rollouts]):
        row = metric_row(reduce_metrics(map(sums, parts)))
        (size,) = (value for name, value in row.items() if "sample_size" in name)
        assert size == pytest.approx(expected)


def test_with_a_recomputed_policy_two_ratios_are_told_apart():
    rollouts = [Rollout(0, 0.0, [[Token(-1.0, -2.0, -1.5, -3.0, 1.0)]])]
    terms = terms_of(rollouts, [0.0])
    row = metric_row(shared_metrics(terms, same_version_T=terms.mask_T))
    assert row["importance_weight/mean"] == pytest.approx(math.exp(0.5))
    assert row["behave_imp_weight/max"] == pytest.approx(math.exp(0.5))
    assert row["kl/reference"] == pytest.approx(math.exp(-2.0) - 1 + 2.0)
    without = replace(terms, proximal_logprobs_T=None, reference_logprobs_T=None)
    row = metric_row(shared_metrics(without, same_version_T=terms.mask_T))
    assert row["importance_weight/mean"] == pytest.approx(math.exp(1.0))
    assert not any(name.startswith(("behave", "kl")) for name in row)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_of_kl_estimators_are_as_documented(estimator):
    """Exact means over four outcomes: k2 pulls along KL(pi, f), k3 along KL(f, pi), k1 nowhere."""
    logits = torch.tensor([0.1, -0.4, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.3, 0.2, -0.5, 0.1], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    sampled = policy.detach().exp()
    (found,) = torch.autograd.grad(
        (sampled * kl_estimate(policy - reference, estimator)).sum(), logits, retain_graph=True
    )
    true = {
        "k1": 0 * policy.sum(),
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }[estimator]
    torch.testing.assert_close(found, torch.autograd.grad(true, logits)[0])
    value = (sampled * kl_estimate(policy - reference, estimator)).sum().item()
    divergence = (sampled * (policy - reference)).sum().item()
    assert estimator == "k2" or value == pytest.approx(divergence)


def kl_gradients(estimator):
    """Return exact gradients over eight outcomes: as a reward, and of KL(policy, reference)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(8, dtype=torch.float64, generator=generator).log_softmax(0)
    policy = logits.log_softmax(0)
    sampled = policy.detach().exp()
    # The policy gradient of the reward -k is the mean of -k * grad(log pi).
    values = kl_estimate((policy - reference).detach(), estimator)
    as_reward = torch.autograd.grad((sampled * values * policy).sum(), logits, retain_graph=True)
    divergence = (policy.exp() * (policy - reference)).sum()
    return as_reward[0], torch.autograd.grad(divergence, logits)[0]


def test_only_k1_has_the_gradient_of_the_divergence_in_a_reward():
    used = estimator_of(AlgorithmSection(kl_penalty_tau=0.1, kl_in_reward=True))
    torch.testing.assert_close(*kl_gradients(used))
    for other in ("k2", "k3"):
        assert torch.cosine_similarity(*kl_gradients(other), dim=0) < 0.99


OUTLIERS = [-100.0, -81.0, -40.0, -10.0, 0.0, 3.0, 10.0, 40.0, 60.0, 79.0, 81.0, 100.0]
LARGEST_SHARE = 6 / 200
"""Of the gradient that a single token of 200 may have."""


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", OUTLIERS)
@pytest.mark.parametrize(
    "settings",
    [
        *({"algorithm": name} for name in ALGORITHMS),
        {"use_ppo_clip": True},
        {"use_ppo_clip": True, "use_decoupled_loss": True},
        {"use_tis": True},
        {"use_tis": True, "tis_mode": "icepop"},
    ],
    ids=lambda settings: "+".join(map(str, settings.values())),
)
def test_no_token_outweighs_all_others(settings, log_ratio, advantage):
    """Ten samples of twenty tokens with as many good as bad ones, one token far from the others."""
    logprobs_T = torch.full((200,), -120.0, dtype=torch.float32)
    behavior_T = logprobs_T.clone()
    behavior_T[7] -= log_ratio
    logprobs_T.requires_grad_()
    signs_T = torch.arange(200).div(20, rounding_mode="floor").remainder(2) * 2.0 - 1.0
    terms = Terms(
        logprobs_T=logprobs_T,
        behavior_logprobs_T=behavior_T,
        # The samples that the engine disagrees on with the trainer, where the loss recomputes them.
        proximal_logprobs_T=behavior_T.clone(),
        advantages_T=-advantage * signs_T,
        mask_T=torch.ones(200, dtype=torch.bool),
        sequence_ids_T=torch.arange(200).div(20, rounding_mode="floor"),
        entropy_T=torch.zeros(200),
        reference_logprobs_T=logprobs_T.detach() + 1.0,
    )
    assert terms.advantages_T[7] == advantage
    found = loss_function(AlgorithmSection(**settings))(terms)
    (gradient_T,) = torch.autograd.grad(found.loss_T.sum(), logprobs_T)
    assert found.loss_T.isfinite().all()
    assert gradient_T.isfinite().all()
    assert gradient_T.abs().sum() > 0
    # A ratio of a whole sample acts on all its tokens alike, so its share is that of a sample.
    largest = gradient_T.abs().max() / gradient_T.abs().sum()
    assert largest <= LARGEST_SHARE, f"one token of 200 has {largest:.1%} of the gradient"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_losses_are_linear_in_the_advantage(algorithm):
    rollouts = far_apart(0.3, -0.1)
    section = AlgorithmSection(algorithm=algorithm)
    once, threefold = (terms_of(rollouts, [2.0 * k, -1.0 * k]) for k in (1, 3))
    torch.testing.assert_close(gradient(threefold, section), 3 * gradient(once, section))


@pytest.mark.parametrize("mode", ["truncate", "icepop"])
def test_weights_of_tis_are_those_of_at_most_20_nats_whatever_their_cap(mode):
    section = AlgorithmSection(use_tis=True, tis_cap=1e12, tis_mode=mode)
    log_ratios = [19.0, 21.0, 70.0, -19.0, -21.0, -70.0]
    terms = terms_of(far_apart(*log_ratios), [1.0] * 6)
    for has_ratio, share in ((False, 1.0), (True, 0.5)):
        found = tis_weights(terms, section, has_ratio=has_ratio).weights_T.log().tolist()
        assert found == pytest.approx([min(max(share * one, -20.0), 20.0) for one in log_ratios])


@pytest.mark.parametrize("form", ["clip", "clip_dual", "clip_wide"])
def test_slopes_written_by_hand_are_derivatives(form):
    _assert_derivative(section_of("grpo", form))


def test_the_slope_of_sapo_is_the_derivative():
    _assert_derivative(section_of("sapo", "steep"))


def _assert_derivative(section: AlgorithmSection) -> None:
    rollouts = far_apart(0.05, -0.05, 0.4, -0.4, 1.7, -1.7, 3.0) * 2
    terms = terms_of(rollouts, [1.5] * 7 + [-0.5] * 7)

    def loss(logprobs_T: torch.Tensor) -> torch.Tensor:
        return loss_of(section)(replace(terms, logprobs_T=logprobs_T)).loss_T

    assert torch.autograd.gradcheck(loss, terms.logprobs_T)


DPPO_MOVES = [0.0, 0.01, -0.01, 0.1, -0.1, 0.5, -0.5, 0.9, -0.9, 2.5, -2.5]


def dppo_terms() -> Terms:
    """Tokens of every probability, moved both ways, with advantages of both signs."""
    pairs = [
        (math.log(sampler) + move, math.log(sampler))
        for sampler in (0.999, 0.9, 0.5, 0.1, 1e-3, 1e-7)
        for move in DPPO_MOVES
        if math.log(sampler) + move < 0
    ]
    tokens = [Token(policy, sampler, -9.0, -9.0, 1.0) for policy, sampler in pairs * 2]
    rollouts = [Rollout(0, 0.0, [[token]]) for token in tokens]
    return terms_of(rollouts, [1.5] * len(pairs) + [-0.5] * len(pairs))


@pytest.mark.parametrize(("kind", "threshold"), [("tv", 0.15), ("tv", 0.01), ("kl", 0.05)])
def test_dppo_leaves_out_exactly_what_leaves_the_trust_region(kind, threshold):
    """Divergences of torch's own distributions, and autograd of the ratio, in float64."""
    terms, section = dppo_terms(), AlgorithmSection(algorithm="dppo", dppo_divergence=kind)
    section = section.model_copy(update={"dppo_threshold": threshold, "clip_ratio_c": 1e38})
    policy_T = terms.logprobs_T.detach().clone().requires_grad_()
    new, old = (
        torch.distributions.Bernoulli(logs_T.exp())
        for logs_T in (policy_T, terms.behavior_logprobs_T)
    )
    distance_T = (new.probs - old.probs).abs()
    if kind == "kl":
        distance_T = torch.distributions.kl_divergence(old, new)
    is_outward_T = (new.probs > old.probs) == (terms.advantages_T > 0)
    is_out_T = (distance_T > threshold) & is_outward_T & (new.probs != old.probs)
    assert 0 < is_out_T.sum() < ((distance_T > threshold) | is_outward_T).sum()
    surrogate_T = (policy_T - terms.behavior_logprobs_T).exp() * terms.advantages_T
    (-surrogate_T * ~is_out_T).sum().backward()
    found = gradient(terms, section)
    torch.testing.assert_close(found, policy_T.grad, rtol=1e-12, atol=0)
    row = metric_row(metric_sums(loss_of(section)(terms).metrics, terms.mask_T))
    share = row["clip_fraction/low"] + row["clip_fraction/high"]
    assert share == pytest.approx(is_out_T.double().mean().item())
    # Cut into parts and put together in another order, each token keeps its gradient.
    order_T = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    for part_T in order_T.split(7):
        columns = {
            name: value[part_T].detach()
            for name in Terms.__slots__
            if (value := getattr(terms, name)) is not None
        }
        columns["logprobs_T"].requires_grad_()
        assert torch.equal(gradient(Terms(**columns), section), found[part_T])


@pytest.mark.parametrize(
    ("kind", "inside", "outside"), [("tv", 0.649, 0.651), ("kl", 0.654, 0.6545)]
)
def test_the_default_thresholds_of_dppo_are_those_of_the_paper(kind, inside, outside):
    """From 0.5, the total variation is 0.15 at 0.65, and the KL divergence 0.05 at 0.65424."""
    tokens = [Token(math.log(p), math.log(0.5), 0, 0, 1) for p in (inside, outside)]
    terms = terms_of([Rollout(0, 0.0, [[token]]) for token in tokens], [1.0, 1.0])
    slopes_T = gradient(terms, AlgorithmSection(algorithm="dppo", dppo_divergence=kind))
    assert slopes_T.ne(0).tolist() == [True, False]


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_the_weighted_policy_gradient_where_nothing_is_left_out(kind):
    terms = dppo_terms()
    section = AlgorithmSection(algorithm="dppo", dppo_divergence=kind, dppo_threshold=0.9999)
    section = section.model_copy(update={"dppo_threshold": 50.0} if kind == "kl" else {})
    ratios_T = (terms.logprobs_T - terms.behavior_logprobs_T).detach().exp()
    for largest in (1.5, 1e38):
        cut = section.model_copy(update={"clip_ratio_c": largest})
        expected_T = -ratios_T.clamp(max=largest) * terms.advantages_T
        torch.testing.assert_close(gradient(terms, cut), expected_T, rtol=1e-12, atol=0)
        row = metric_row(metric_sums(loss_of(cut)(terms).metrics, terms.mask_T))
        assert row["clip_fraction/low"] == row["clip_fraction/high"] == 0
        dual = (ratios_T > largest).double().mean().item()
        assert row["clip_fraction/dual"] == pytest.approx(dual)


def test_the_trust_region_of_dppo_is_around_the_sampler_whatever_the_ratio_is_to():
    """The proximal policy is far from both in `dppo_terms`."""
    terms = dppo_terms()
    forms = ({}, {"ppo_clip_ref_logprobs": "batch"}, {"use_decoupled_loss": True})
    left_out = [
        loss_of(AlgorithmSection(algorithm="dppo", **form))(terms).metrics["clip_fraction/high"]
        for form in forms
    ]
    assert left_out[0].any()
    assert all(torch.equal(left_out[0], other) for other in left_out[1:])


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_takes_tokens_whose_log_prob_was_rounded_to_0(kind):
    tokens = [Token(0.0, 0.0, 0, 0, 1), Token(0.0, -1.0, 0, 0, 1), Token(-1.0, 0.0, 0, 0, 1)]
    tokens.append(Token(0.0, -1e-7, 0, 0, 1))
    rollouts = [Rollout(0, 0.0, [[token]]) for token in tokens]
    section = AlgorithmSection(algorithm="dppo", dppo_divergence=kind)
    for advantage, kept in ((1.0, [1, 0, 1, 1]), (-1.0, [1, 1, 0, 1])):
        terms = terms_of(rollouts, [advantage] * 4, torch.float32)
        slopes_T = gradient(terms, section)
        assert slopes_T.isfinite().all()
        assert slopes_T.ne(0).int().tolist() == kept


def test_a_token_that_no_float_can_weigh_has_no_gradient():
    terms = terms_of(far_apart(79.0, 81.0, 700.0), [-1.0] * 3, torch.float32)
    slopes = gradient(terms, section_of("grpo", "clip")).tolist()
    assert slopes == [pytest.approx(math.exp(79.0), rel=1e-4), 0.0, 0.0]


def test_a_loss_that_was_reduced_is_refused():
    section = AlgorithmSection(algorithm="grpo")
    mine = replace(
        load_algorithm("grpo"),
        name="mine",
        loss=lambda terms, _: TokenLoss(loss_T=-terms.logprobs_T.mean()),
    )
    terms = terms_of(far_apart(0.4, -0.2), [1.5, -1.0])
    with pytest.raises(ConfigError, match=r"'mine' .* per token, shape \(2,\); got shape \(\);"):
        objective(terms, algorithm=mine, config=section)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_loss_leaves_its_inputs_as_they_were(algorithm):
    """Losses and metrics work in place: on memory of their own, whatever the dtype."""
    for dtype in (torch.float32, torch.float64):
        terms = terms_of(far_apart(0.4, -0.2, 3.0, -90.0), [1.5, -1.0, -2.0, 0.5], dtype)
        columns = {name: getattr(terms, name) for name in Terms.__slots__}
        before = {name: value.detach().clone() for name, value in columns.items()}
        for form in forms_of(algorithm):
            gradient(terms, section_of(algorithm, form))
            shared_metrics(terms, same_version_T=terms.mask_T)
            for name, value in columns.items():
                assert torch.equal(value, before[name]), (form, name)


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("rate", [Fraction(1, 20), Fraction(1, 2)])
def test_maxrl_is_maximum_likelihood_up_to_the_order_of_its_page(size, rate):
    """The exact mean over all groups of a policy whose only parameter is its success rate."""
    advantage, mean = load_algorithm("maxrl").advantage, 0.0
    for group in itertools.product((0, 1), repeat=size):
        chance = math.prod(rate if success else 1 - rate for success in group)
        found = advantage(np.array(group, float), np.zeros(size, int), "group")
        # The score of a success is 1 / p, that of a failure -1 / (1 - p).
        scores = [1 / rate if success else -1 / (1 - rate) for success in group]
        mean += float(chance) * sum(
            a * float(score) for a, score in zip(found, scores, strict=True)
        )
    expected = sum((1 - rate) ** (k - 1) for k in range(1, size))
    assert mean / size == pytest.approx(float(expected))
