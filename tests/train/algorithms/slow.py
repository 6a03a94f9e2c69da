"""Every algorithm and modifier once more: plain Python in float64, one token at a time.

Written from the formulas, and shares nothing with the package. `total` returns the loss of a step
and its derivative by the log-prob and by the entropy of every token.
"""

import math
from dataclasses import dataclass, field

PLAIN = ("grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dr_grpo", "maxrl", "opd")
CLIPS = {"cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4), "gmpo": (0.33, 0.49), "dapo": (0.2, 0.28)}
WEIGHTING = {"dr_grpo": "constant", **dict.fromkeys(("gspo", "gmpo", "sapo"), "sequence")}
DEFAULTS = {
    "advantage_norm": "group",
    "use_ppo_clip": False,
    "clip_low": None,
    "clip_high": None,
    "clip_ratio_c": None,
    "dppo_divergence": "tv",
    "dppo_threshold": None,
    "ppo_clip_ref_logprobs": "rollout",
    "use_tis": False,
    "tis_cap": 2.0,
    "tis_mode": "truncate",
    "tis_floor": 0.0,
    "seq_is_masking": False,
    "seq_is_mask_range": (0.8, 1.2),
    "use_decoupled_loss": False,
    "recompute_logprob": True,
    "behave_imp_weight_cap": 5.0,
    "kl_penalty_tau": 0.0,
    "kl_estimator": "k2",
    "entropy_coef": 0.0,
}
TAUS = {"cases:STEEP": (2.0, 0.7)}


@dataclass
class Token:
    policy: float
    behavior: float
    proximal: float
    reference: float
    entropy: float


@dataclass
class Rollout:
    group: int
    reward: float
    chains: list[list[Token]] = field(default_factory=list)


@dataclass
class Total:
    loss: float
    by_logprob: list[float]
    by_entropy: list[float]


def settings_of(algorithm: str, given: dict) -> dict:
    chosen = {**DEFAULTS, **given}
    if algorithm == "dapo" and "use_ppo_clip" not in given:
        chosen["use_ppo_clip"] = True
    low, high = CLIPS.get(algorithm, (0.2, 0.2))
    chosen["clip_low"] = low if chosen["clip_low"] is None else chosen["clip_low"]
    chosen["clip_high"] = high if chosen["clip_high"] is None else chosen["clip_high"]
    return chosen


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / max(len(values) - 1, 1))


def advantages(algorithm: str, rollouts: list[Rollout], norm: str) -> list[float]:
    rewards = [rollout.reward for rollout in rollouts]
    peers = [[r.reward for r in rollouts if r.group == one.group] for one in rollouts]
    pairs = list(zip(rewards, peers, strict=True))
    if algorithm == "opd":
        return [1.0 for _ in rewards]
    if algorithm == "reinforce_pp":
        return [(reward - mean(rewards)) / (deviation(rewards) + 1e-4) for reward in rewards]
    if algorithm == "rloo":
        return [r - (sum(group) - r) / (len(group) - 1) for r, group in pairs]
    if algorithm == "maxrl":
        return [(r - mean(group)) / mean(group) if mean(group) else 0.0 for r, group in pairs]
    centered = [r - mean(group) for r, group in pairs]
    if algorithm == "dr_grpo":
        return centered
    if algorithm == "reinforce_pp_baseline" or norm == "batch":
        return [value / (deviation(centered) + 1e-4) for value in centered]
    return [c / (deviation(g) + 1e-4) for c, g in zip(centered, peers, strict=True)]


def weight(algorithm: str, s: dict, rollouts: list[Rollout], one: Rollout, limit: int) -> float:
    def length(rollout: Rollout) -> int:
        return sum(len(chain) for chain in rollout.chains)

    weighting = WEIGHTING.get(algorithm, "token")
    if s.get("algorithm") == "cases:PER_TOKEN":
        weighting = "token"
    if weighting == "token":
        return 1 / sum(length(rollout) for rollout in rollouts)
    if weighting == "constant":
        return 1 / (len(rollouts) * limit)
    return 1 / (len(rollouts) * length(one))


def old_logprob(s: dict, token: Token) -> float:
    if s["ppo_clip_ref_logprobs"] == "batch" or s["use_decoupled_loss"]:
        return token.proximal if s["recompute_logprob"] else token.behavior
    return token.behavior


def clipped(ratio: float, advantage: float, s: dict) -> tuple[float, float]:
    """PPO: the loss, and its derivative by the log of the ratio."""
    bounded = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
    loss, slope = -ratio * advantage, -ratio * advantage
    if bounded * advantage < ratio * advantage:
        loss, slope = -bounded * advantage, 0.0
    c = 3.0 if s["clip_ratio_c"] is None else s["clip_ratio_c"]
    if advantage < 0 and loss > -c * advantage:
        loss, slope = -c * advantage, 0.0
    return loss, slope


def is_outside(s: dict, token: Token, advantage: float) -> bool:
    """DPPO: whether the token is beyond the trust region, and would be pushed further away."""
    policy, sampler = math.exp(token.policy), math.exp(token.behavior)
    distance = abs(policy - sampler)
    if s["dppo_divergence"] == "kl":
        others, policy_others = max(1 - sampler, 1e-8), max(1 - policy, 1e-8)
        distance = sampler * math.log(sampler / policy)
        distance += others * math.log(others / policy_others)
    default = {"tv": 0.15, "kl": 0.05}[s["dppo_divergence"]]
    limit = default if s["dppo_threshold"] is None else s["dppo_threshold"]
    return distance > limit and (policy > sampler if advantage > 0 else policy < sampler)


def geometric(s: dict, chain: list[Token], token: Token, advantage: float) -> tuple[float, float]:
    """GMPO: the product of the clipped ratios, to the power of one over their number."""

    def held(one: Token) -> tuple[float, bool]:
        ratio = math.exp(one.policy - old_logprob(s, one))
        bounded = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
        chosen = min(ratio * advantage, bounded * advantage)
        return abs(chosen / advantage), chosen != ratio * advantage

    if not advantage:
        return 0.0, 0.0
    loss = -(math.prod(held(one)[0] for one in chain) ** (1 / len(chain))) * advantage
    c = 3.0 if s["clip_ratio_c"] is None else s["clip_ratio_c"]
    if advantage < 0 and loss > -c * advantage:
        return -c * advantage, 0.0
    return loss, 0.0 if held(token)[1] else loss


def policy_term(
    algorithm: str, s: dict, chain: list[Token], token: Token, advantage: float
) -> tuple[float, float]:
    ratio = math.exp(token.policy - old_logprob(s, token))
    if algorithm == "cispo":
        weight = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
        return -weight * advantage * token.policy, -weight * advantage
    if algorithm == "gspo":
        ratio = math.exp(mean([t.policy - old_logprob(s, t) for t in chain]))
        return clipped(ratio, advantage, s)
    if algorithm == "gmpo":
        return geometric(s, chain, token, advantage)
    if algorithm == "dppo":
        largest = 5.0 if s["clip_ratio_c"] is None else s["clip_ratio_c"]
        weight = 0.0 if is_outside(s, token, advantage) else min(ratio, largest)
        return -weight * advantage * token.policy, -weight * advantage
    if algorithm == "opd":
        advantage *= min(max(token.reference - token.policy, -10.0), 10.0)
    if algorithm == "sapo":
        tau_pos, tau_neg = TAUS.get(s.get("algorithm"), (1.0, 1.05))
        tau = tau_pos if advantage > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -gate * 4 / tau * advantage, -4 * gate * (1 - gate) * ratio * advantage
    if s["use_ppo_clip"]:
        return clipped(ratio, advantage, s)
    return -advantage * token.policy, -advantage


def correction(algorithm: str, s: dict, chain: list[Token], token: Token) -> float:
    weight = 1.0
    proximal = token.proximal if s["recompute_logprob"] else token.behavior
    if s["use_tis"]:
        has_ratio = algorithm in ("cispo", "gspo", "gmpo", "sapo", "dppo") or s["use_ppo_clip"]
        x = (proximal if has_ratio else token.policy) - token.behavior
        w = math.exp(min(max(x, -20.0), 20.0))
        if s["tis_mode"] == "icepop":
            weight *= w if s["tis_floor"] <= w <= s["tis_cap"] else 0.0
        else:
            weight *= min(w, s["tis_cap"])
    if s["use_decoupled_loss"]:
        w = math.exp(proximal - token.behavior)
        weight *= w if w <= s["behave_imp_weight_cap"] else 0.0
    if s["seq_is_masking"]:
        ratio = math.exp(mean([t.policy - t.behavior for t in chain]))
        low, high = s["seq_is_mask_range"]
        weight *= 1.0 if low <= ratio <= high else 0.0
    return weight


def penalty(s: dict, token: Token) -> tuple[float, float]:
    d = token.policy - token.reference
    if s["kl_estimator"] == "k1":
        return d, 1.0
    if s["kl_estimator"] == "k2":
        return d * d / 2, d
    return math.exp(-d) - 1 + d, 1 - math.exp(-d)


def total(algorithm: str, given: dict, rollouts: list[Rollout], limit: int) -> Total:
    s = settings_of(algorithm, given)
    result = Total(0.0, [], [])
    credit = advantages(algorithm, rollouts, s["advantage_norm"])
    for rollout, advantage in zip(rollouts, credit, strict=True):
        share = weight(algorithm, s, rollouts, rollout, limit)
        for chain in rollout.chains:
            for token in chain:
                loss, slope = policy_term(algorithm, s, chain, token, advantage)
                factor = correction(algorithm, s, chain, token)
                kl, kl_slope = penalty(s, token)
                loss = factor * loss + s["kl_penalty_tau"] * kl
                result.loss += share * (loss - s["entropy_coef"] * token.entropy)
                slope = factor * slope + s["kl_penalty_tau"] * kl_slope
                result.by_logprob.append(share * slope)
                result.by_entropy.append(-share * s["entropy_coef"])
    return result
