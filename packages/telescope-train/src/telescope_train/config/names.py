"""Names of settings that users may expect and that are not accepted.

For a foreign name, the error gives the name used here, and for a refused one the reason.
"""

FOREIGN_NAMES = {
    "num_generations": "group_size",
    "rollouts_per_example": "group_size",
    "max_head_offpolicyness": "max_async_rollout",
    "ppo_n_minibatches": "number_of_minibatches",
    "beta": "kl_penalty_tau",
    "max_new_tokens": "max_tokens",
    "max_grad_norm": "grad_clip",
    "lr_scheduler_type": "lr_scheduler",
    "max_steps": "number_of_steps",
}
"""Name in other systems -> name here."""

_TRUNCATED = (
    "it takes tokens out of the distribution that is sampled, and the trainer computes log-probs "
    "of the whole distribution, so every importance ratio would be wrong; shape rollouts with "
    "temperature, and set it in [[evals]], which may use any value"
)
_PENALIZED = (
    "it changes the distribution that is sampled by what came before, and the trainer computes "
    "log-probs without it, so every importance ratio would be wrong; set it in [[evals]], which "
    "may use any value"
)
REFUSED_NAMES = {
    "top_p": _TRUNCATED,
    "top_k": _TRUNCATED,
    "min_p": _TRUNCATED,
    "repetition_penalty": _PENALIZED,
}
"""Setting of evals -> why rollouts that are trained on do not have it."""

_SUPERVISED = "it is a setting of `telescope sft`, and this is `telescope train`"
SUPERVISED_NAMES = dict.fromkeys(
    ("make_tiny_model", "output", "dataset", "num_examples", "num_held_out", "stop_at_accuracy"),
    _SUPERVISED,
)
"""Setting of `telescope sft` that a file for it often has -> that it is one."""
