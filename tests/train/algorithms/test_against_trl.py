"""Losses and gradients against TRL 1.16 on the same log-probs, where definitions coincide.

They coincide per token for all algorithms below. They differ in:
- weighting: TRL's `grpo` averages within each sequence first; GRPO here weighs tokens alike, which
  TRL calls `dapo` (and `bnpo`, per device batch). Both are compared.
- CISPO: TRL's epsilon_high is the bound itself (5), clip_high is its distance from 1 (4); the lower
  side is open in both.
- TRL divides in each accumulation window of each process; only with one window, as here, are
  `grpo`, `bnpo`, `dr_grpo` and `sapo` sums over the whole step.
- TRL keeps the temperatures of SAPO in float32, whatever the log-probs are in.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "benchmarks")]
from cases import LIMIT, loss_of, terms_of, weights_of  # noqa: E402
from slow import Rollout, Token  # noqa: E402

from telescope_train.config.schema import AlgorithmSection  # noqa: E402

CLIP = {"use_ppo_clip": True, "clip_ratio_c": 1e38}
GSPO = {"loss_type": "grpo", "level": "sequence"}
CASES = {
    "grpo, tokens alike": (CLIP, {"loss_type": "dapo"}),
    "grpo, tokens alike, one window": (CLIP, {"loss_type": "bnpo"}),
    "grpo, sequences alike": (CLIP, {"loss_type": "grpo"}),
    "grpo with a dual clip": ({**CLIP, "clip_ratio_c": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "grpo with k3": (
        {**CLIP, "kl_penalty_tau": 0.1, "kl_estimator": "k3"},
        {"loss_type": "dapo", "beta": 0.1},
    ),
    "grpo with tis": (
        {**CLIP, "ppo_clip_ref_logprobs": "batch", "use_tis": True, "tis_cap": 1.2},
        {"loss_type": "dapo"},
    ),
    "dr_grpo": (
        {"algorithm": "dr_grpo", **CLIP},
        {"loss_type": "dr_grpo", "max_completion_length": LIMIT},
    ),
    "dapo": ({"algorithm": "dapo", "clip_ratio_c": 1e38}, {"loss_type": "dapo", "high": 0.28}),
    "cispo": ({"algorithm": "cispo"}, {"loss_type": "cispo", "high": 5.0}),
    "gspo": ({"algorithm": "gspo", "clip_ratio_c": 1e38}, {**GSPO, "low": 3e-4, "high": 4e-4}),
    "gspo, wide": (
        {"algorithm": "gspo", "clip_low": 0.3, "clip_high": 0.5, "clip_ratio_c": 1e38},
        {**GSPO, "low": 0.3, "high": 0.5},
    ),
    "sapo": ({"algorithm": "sapo"}, {"loss_type": "sapo"}),
}


@pytest.fixture(scope="module")
def trl_loss():
    from trl_loss import trl_loss

    return trl_loss


def ragged_step(seed: int) -> tuple[list[Rollout], list[float]]:
    generator = np.random.default_rng(seed)
    rollouts = []
    for index in range(8):
        old = -generator.exponential(1.0, int(generator.integers(1, LIMIT)))
        new, proximal, reference = old + generator.normal(0, 0.4, (3, old.size))
        rows = zip(*(part.tolist() for part in (new, old, proximal, reference)), strict=True)
        chain = [Token(*row, 1.0) for row in rows]
        rollouts.append(Rollout(index // 4, 0.0, [chain]))
    return rollouts, generator.normal(0, 1, 8).tolist()


def padded(rollouts, advantages, policy_T: torch.Tensor, section: AlgorithmSection):
    """The rows that TRL takes; the policy's log-probs stay attached to `policy_T`."""
    lengths = [len(rollout.chains[0]) for rollout in rollouts]

    def rows(values) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)

    def column(name: str) -> torch.Tensor:
        return rows(
            torch.tensor([getattr(t, name) for t in rollout.chains[0]], dtype=torch.float64)
            for rollout in rollouts
        )

    behavior, proximal = column("behavior"), column("proximal")
    ratio = (proximal - behavior).exp().clamp(max=section.tis_cap)
    return {
        **({"ratio": ratio} if section.use_tis else {}),
        "policy": rows(policy_T.split(lengths)),
        "old": proximal if section.needs_proximal else behavior,
        "reference": column("reference"),
        "mask": rows(torch.ones(length, dtype=torch.long) for length in lengths),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_agree_with_trl(case, seed, trl_loss):
    ours, theirs = CASES[case]
    section, (rollouts, advantages) = AlgorithmSection(**ours), ragged_step(seed)
    terms = terms_of(rollouts, advantages)
    weighing = AlgorithmSection(algorithm="gspo") if case == "grpo, sequences alike" else section
    weights_T = weights_of(rollouts, weighing, torch.float64)
    loss = (loss_of(section)(terms).loss_T * weights_T).sum()
    loss.backward()
    policy_T = terms.logprobs_T.detach().clone().requires_grad_()
    expected = trl_loss(padded(rollouts, advantages, policy_T, section), **theirs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
    difference = (terms.logprobs_T.grad - policy_T.grad).norm()
    assert difference <= 1e-5 * policy_T.grad.norm()


def test_where_definitions_differ_so_do_the_losses(trl_loss):
    """GRPO's default weighting against TRL's `grpo`: unequal lengths tell them apart."""
    rollouts, advantages = ragged_step(0)
    section = AlgorithmSection(use_ppo_clip=True)
    terms = terms_of(rollouts, advantages)
    ours = (loss_of(section)(terms).loss_T * weights_of(rollouts, section, torch.float64)).sum()
    theirs = trl_loss(padded(rollouts, advantages, terms.logprobs_T, section), loss_type="grpo")
    assert abs(ours.item() - theirs.item()) > 1e-3 * abs(theirs.item())
