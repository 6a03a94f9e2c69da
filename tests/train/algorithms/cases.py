"""Every algorithm with every modifier that it takes, and ragged steps to try them on."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from slow import PLAIN, Rollout, Token

from telescope_train.algorithms import (
    Terms,
    TokenLoss,
    dr_grpo,
    load_algorithm,
    objective,
    resolved,
    sapo,
)
from telescope_train.algorithms.terms import metric_sums
from telescope_train.batches.batch import TrainingSample
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection

LIMIT = 24
load = cache(load_algorithm)
"""Looking up entry points takes longer than a test."""
BATCH = {"ppo_clip_ref_logprobs": "batch"}
ALWAYS = {
    "as_it_is": {},
    "masked_sequences": {"seq_is_masking": True, "seq_is_mask_range": (0.7, 1.4)},
    "kl_1": {"kl_penalty_tau": 0.3, "kl_estimator": "k1"},
    "kl_2": {"kl_penalty_tau": 0.3},
    "kl_3": {"kl_penalty_tau": 0.3, "kl_estimator": "k3"},
    "entropy": {"entropy_coef": 0.2},
}
WITH_RATIO = {
    "batch": BATCH,
    "batch_not_recomputed": {**BATCH, "recompute_logprob": False},
    "batch_tis": {**BATCH, "use_tis": True, "tis_cap": 1.3},
    "batch_icepop": {
        **BATCH,
        **{"use_tis": True, "tis_mode": "icepop", "tis_floor": 0.6, "tis_cap": 1.7},
    },
    "decoupled": {"use_decoupled_loss": True},
    "decoupled_tight": {"use_decoupled_loss": True, "behave_imp_weight_cap": 1.2},
    "all_at_once": {
        **{"use_decoupled_loss": True, "behave_imp_weight_cap": 1.5, "seq_is_masking": True},
        **{"seq_is_mask_range": (0.5, 2.5)},
        **{"kl_penalty_tau": 0.1, "kl_estimator": "k3", "entropy_coef": 0.05},
    },
}
WITHOUT_RATIO = {
    "tis": {"use_tis": True},
    "icepop": {"use_tis": True, "tis_mode": "icepop", "tis_floor": 0.7, "tis_cap": 1.5},
}
CLIP = {"use_ppo_clip": True, "clip_ratio_c": 1e38}
CLIPPED = {
    "clip": CLIP,
    "clip_by_default": {"use_ppo_clip": True},
    "clip_wide": {**CLIP, "clip_low": 0.6, "clip_high": 1.5},
    "clip_dual": {**CLIP, "clip_ratio_c": 1.5},
    **{f"clip_{name}": {**CLIP, **form} for name, form in WITH_RATIO.items()},
}
PER_TOKEN = replace(dr_grpo.ALGORITHM, name="dr_grpo_per_token", weighting="token")
STEEP = replace(sapo.ALGORITHM, name="steep", loss=partial(sapo.loss, tau_pos=2.0, tau_neg=0.7))
"""Variants as their modules describe them."""
OWN = {
    "grpo": {"batch_norm": {"advantage_norm": "batch"}},
    "dr_grpo": {"per_token": {"algorithm": "cases:PER_TOKEN"}},
    "cispo": {"bounds": {"clip_low": 0.3, "clip_high": 0.4}},
    "gspo": {"bounds": {"clip_low": 0.2, "clip_high": 0.3}},
    "gmpo": {
        "tight": {"clip_low": 0.02, "clip_high": 0.03},
        "bounds": {"clip_low": 0.2, "clip_high": 0.6, "clip_ratio_c": 1.1},
    },
    "sapo": {"steep": {"algorithm": "cases:STEEP", "advantage_norm": "batch"}},
    "dppo": {
        "tight": {"dppo_threshold": 0.02},
        "kl": {"dppo_divergence": "kl"},
        "kl_tight": {"dppo_divergence": "kl", "dppo_threshold": 1e-3, "clip_ratio_c": 1.2},
    },
    "dapo": {"unclipped": {"use_ppo_clip": False}},
}


def forms_of(algorithm: str) -> dict[str, dict]:
    forms = {**ALWAYS, **OWN.get(algorithm, {})}
    if algorithm in PLAIN:
        return {**forms, **WITHOUT_RATIO, **CLIPPED}
    return {**forms, **WITH_RATIO, **(CLIPPED if algorithm == "dapo" else {})}


ALGORITHMS = (*PLAIN, "cispo", "gspo", "gmpo", "sapo", "dppo", "dapo")


def section_of(algorithm: str, form: str) -> AlgorithmSection:
    return AlgorithmSection(**{"algorithm": algorithm, **forms_of(algorithm)[form]})


def loss_of(section: AlgorithmSection) -> Callable[[Terms], TokenLoss]:
    """What `loss_function` returns."""
    algorithm = load(section.algorithm)
    return partial(objective, algorithm=algorithm, config=resolved(section, algorithm))


def _rollout(generator: np.random.Generator, reward: float, lengths: list[int]) -> Rollout:
    policy, proximal, reference = generator.normal(0, [[0.5], [0.3], [0.7]], (3, 1))[:, 0]
    rollout = Rollout(0, reward)
    for length in lengths:
        behavior = -generator.exponential(1.0, length) - 0.01
        noise = generator.normal(0, 0.3, (3, length))
        rows = (
            behavior + policy + noise[0],
            behavior,
            behavior + proximal + noise[1],
            behavior + reference + noise[2],
            generator.random(length) * 3,
        )
        rollout.chains.append([Token(*map(float, column)) for column in zip(*rows, strict=True)])
    return rollout


@st.composite
def steps(draw) -> list[Rollout]:
    """Groups of two or three rollouts of one or two chains; every group carries signal."""
    chains = st.lists(st.integers(1, 9), min_size=1, max_size=2)
    groups = draw(st.lists(st.lists(chains, min_size=2, max_size=3), min_size=1, max_size=3))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards = (1.0, 0.0, 0.25)
    return [
        replace(_rollout(generator, reward, lengths), group=number)
        for number, group in enumerate(groups)
        for reward, lengths in zip(rewards, group, strict=False)
    ]


def advantages_of(rollouts: list[Rollout], section: AlgorithmSection) -> np.ndarray:
    return load(section.algorithm).advantage(
        np.array([rollout.reward for rollout in rollouts]),
        np.array([rollout.group for rollout in rollouts]),
        section.advantage_norm,
    )


def weights_of(rollouts: list[Rollout], section: AlgorithmSection, dtype) -> torch.Tensor:
    """The weight of every token, in order."""
    samples = [
        TrainingSample(
            token_ids=np.zeros(len(chain) + 1, np.int32),
            mask=np.arange(len(chain) + 1) > 0,
            behavior_logprobs=np.zeros(len(chain) + 1, np.float32),
            advantage=0.0,
            temperature=1.0,
            oldest_version=0,
            newest_version=0,
            group_id=str(rollout.group),
            rollout_index=index,
            environment="toy",
        )
        for index, rollout in enumerate(rollouts)
        for chain in rollout.chains
    ]
    weighting = load(section.algorithm).weighting
    weights_N = token_weights(samples, weighting, max_tokens=LIMIT)
    lengths = [len(sample) - 1 for sample in samples]
    return torch.tensor(np.repeat(weights_N, lengths), dtype=dtype)


def terms_of(rollouts: list[Rollout], advantages_N, dtype=torch.float64) -> Terms:
    """All tokens of the step as one batch."""
    chains = [chain for rollout in rollouts for chain in rollout.chains]
    tokens = [token for chain in chains for token in chain]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    lengths_N = [sum(map(len, rollout.chains)) for rollout in rollouts]
    return Terms(
        logprobs_T=column("policy").requires_grad_(),
        behavior_logprobs_T=column("behavior"),
        advantages_T=torch.tensor(np.repeat(advantages_N, lengths_N), dtype=dtype),
        mask_T=torch.ones(len(tokens), dtype=torch.bool),
        sequence_ids_T=torch.tensor(np.repeat(np.arange(len(chains)), [len(c) for c in chains])),
        entropy_T=column("entropy").requires_grad_(),
        proximal_logprobs_T=column("proximal"),
        reference_logprobs_T=column("reference"),
    )


def run(rollouts: list[Rollout], section: AlgorithmSection, dtype=torch.float64):
    """Return the step's loss, its gradient by log-prob and by entropy, and its metrics."""
    terms = terms_of(rollouts, advantages_of(rollouts, section), dtype)
    token_loss = loss_of(section)(terms)
    loss = (token_loss.loss_T * weights_of(rollouts, section, dtype)).sum()
    loss.backward()
    by_entropy = terms.entropy_T.grad
    if by_entropy is None:
        by_entropy = torch.zeros_like(terms.entropy_T)
    sums = metric_sums(token_loss.metrics, terms.mask_T)
    return loss.item(), terms.logprobs_T.grad, by_entropy, sums
