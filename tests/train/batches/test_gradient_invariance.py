"""The gradient of a step is one number, however its samples are packed and dealt to ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope_train.algorithms import Terms, known_algorithms, loss_function
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection
from telescope_train.models.logprobs import chunked_logprobs

VOCAB, HIDDEN = 11, 4
EVERYTHING = {
    **{"use_decoupled_loss": True, "seq_is_masking": True},
    **{"seq_is_mask_range": (0.03, 30.0), "kl_penalty_tau": 0.1, "kl_estimator": "k3"},
}
"""Corrections and penalties at once, for losses with a ratio."""
FORMS = {
    **{name: {"algorithm": name} for name in known_algorithms()},
    "tis": {"use_tis": True},
    "clip": {"use_ppo_clip": True},
    "dapo_everything": {"algorithm": "dapo", **EVERYTHING},
    "gspo_everything": {"algorithm": "gspo", **EVERYTHING},
}
LOSSES = {name: loss_function(AlgorithmSection(**form)) for name, form in FORMS.items()}


def bigram_model() -> tuple[torch.Tensor, torch.Tensor]:
    """A model whose next token depends on the last one alone: embedding and head."""
    generator = torch.Generator().manual_seed(1)
    shapes = (VOCAB, HIDDEN), (VOCAB, HIDDEN)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )


def summed(loss_T, batch, num_batches):
    """The rule: every token has its weight already."""
    return (loss_T * torch.from_numpy(batch.weights_T)).sum()


def mean_of_means(loss_T, batch, num_batches):
    """The mistake: average each batch by itself, then average the batches."""
    return loss_T.sum() / max(batch.num_trained_tokens, 1) / num_batches


def recomputed(batch, shift: float) -> torch.Tensor:
    """What another model would say of a token; the same wherever it is packed."""
    wave_T = np.sin(batch.token_ids_T + 2.0 * batch.positions_T)
    return torch.from_numpy(np.where(batch.mask_T, batch.behavior_logprobs_T + shift * wave_T, 0))


def step_gradient(samples, *, seq_len, num_ranks=1, form="grpo", weighting="token", rule=summed):
    """Return the gradient of one step, one batch at a time, all batches of all ranks summed."""
    embedding, head = bigram_model()
    weights_N = token_weights(samples, weighting, max_tokens=16)
    ranks = pack(samples, weights_N, seq_len=seq_len, num_ranks=num_ranks)
    batches = [batch for rank in ranks for batch in rank]
    for batch in batches:
        ids_T = torch.from_numpy(batch.token_ids_T).long()
        temperatures_T = torch.from_numpy(batch.temperatures_T)[1:]
        logprobs_T, entropy_T = chunked_logprobs(
            embedding[ids_T[:-1]], head, ids_T[1:], temperatures_T, chunk_size=5
        )
        terms = Terms(
            logprobs_T=torch.cat([torch.zeros(1, dtype=torch.float64), logprobs_T]),
            behavior_logprobs_T=torch.from_numpy(batch.behavior_logprobs_T),
            advantages_T=torch.from_numpy(batch.advantages_T),
            mask_T=torch.from_numpy(batch.mask_T),
            sequence_ids_T=torch.from_numpy(batch.sequence_ids_T).long(),
            entropy_T=torch.cat([torch.zeros(1, dtype=torch.float64), entropy_T]),
            proximal_logprobs_T=recomputed(batch, 0.4),
            reference_logprobs_T=recomputed(batch, -0.9),
        )
        rule(LOSSES[form](terms).loss_T, batch, len(batches)).backward()
    return torch.cat([embedding.grad.flatten(), head.grad.flatten()])


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).norm() <= 1e-13 * one.norm()


@pytest.fixture(scope="module")
def step(make_sample):
    """Twelve samples of three groups, lengths far apart."""
    return [
        make_sample(
            1 + number % 3,
            1 + (number * 5) % 17,
            rollout=number % 4,
            group=f"group-{number // 4}",
            advantage=[1.2, -0.7, 0.4, -2.0][number % 4],
        )
        for number in range(12)
    ]


WEIGHTINGS = ("token", "sequence", "constant")
FAST = {("grpo", one) for one in WEIGHTINGS} | {
    (form, WEIGHTINGS[number % 3]) for number, form in enumerate(FORMS)
}
"""Each form once, and grpo with each weighting."""


@pytest.mark.parametrize(
    ("form", "weighting"),
    [
        pytest.param(form, one, marks=[] if (form, one) in FAST else pytest.mark.slow)
        for form in FORMS
        for one in WEIGHTINGS
    ],
)
def test_micro_batches_ranks_and_order_do_not_change_the_gradient(step, form, weighting):
    arguments = {"form": form, "weighting": weighting}
    expected = step_gradient(step, seq_len=1000, **arguments)
    assert expected.norm() > 1e-3
    for seq_len in (20, 41, 80):
        assert_same(expected, step_gradient(step, seq_len=seq_len, **arguments))
    for num_ranks in (2, 5):
        assert_same(expected, step_gradient(step, seq_len=30, num_ranks=num_ranks, **arguments))
    assert_same(expected, step_gradient(step[::-1], seq_len=30, **arguments))


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), seq_len=st.integers(20, 90), num_ranks=st.integers(1, 4))
def test_any_repacking_gives_the_same_gradient(step, seed, seq_len, num_ranks):
    shuffled = [step[i] for i in np.random.default_rng(seed).permutation(len(step))]
    expected = step_gradient(step, seq_len=1000)
    assert_same(expected, step_gradient(shuffled, seq_len=seq_len, num_ranks=num_ranks))


def test_a_mean_of_micro_batch_means_is_caught(step):
    whole = step_gradient(step, seq_len=1000, rule=mean_of_means)
    assert_same(whole, step_gradient(step, seq_len=1000))
    packed = step_gradient(step, seq_len=30, rule=mean_of_means)
    with pytest.raises(AssertionError):
        assert_same(whole, packed)
    assert (whole - packed).norm() > 0.05 * whole.norm()
