"""Convert recorded settings of earlier versions to their present names.

If a user writes such a name, `names` answers. This module reads recorded settings, so that a run of
an earlier version can be resumed and forked as if it had been started today.
"""

from collections.abc import Collection, Mapping
from typing import Any

ONE_VALUE: Mapping[str, Any] = {
    "algorithm.tis_logprob_clamp": 20.0,
    "algorithm.gibberish_logprob_offset": 2.0,
    "algorithm.sapo_tau_pos": 1.0,
    "algorithm.sapo_tau_neg": 1.05,
    "algorithm.dr_grpo_loss_agg_mode": "token_sum_norm",
    "trainer.fsdp_gradient_sync": "microbatch",
    "trainer.fsdp_prefetch_layers": 0,
    "megatron.megatron_overlap_cpu_optimizer_d2h_h2d": True,
    "evals.eval_start_end_use_all_servers": True,
}
"""Removed setting -> the value that always applies now."""
FREE = frozenset({"observability.wandb_run_name", "ray.ray_namespace"})
"""Removed settings that never changed a result."""
_OPTIMIZER = ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
TAKEN_IN: Mapping[str, str] = {
    "algorithm.seq_is_mask_low": "algorithm.seq_is_mask_range",
    "algorithm.seq_is_mask_high": "algorithm.seq_is_mask_range",
    "weights.weight_broadcast_mode": "weights.weight_broadcast_bucket_mb",
    "weights.weight_broadcast_cpu_staging": "weights.weight_broadcast_staging",
    "weights.weight_broadcast_pin_memory": "weights.weight_broadcast_staging",
    "inference.max_num_batched_tokens": "inference.vllm_arguments",
    "megatron.megatron_use_precision_aware_optimizer": "megatron.megatron_optimizer_dtypes",
    **{
        f"megatron.megatron_{name}_dtype": "megatron.megatron_optimizer_dtypes"
        for name in _OPTIMIZER
    },
}
"""Removed setting -> the setting that replaces it."""
STOP_TEXTS = "include_stop_str_in_output"
"""Setting of `rollout` that earlier versions lacked: they cut the texts of `stop` off."""


def names_of_today(names: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Return the settings that were set in a recorded `config`, as `section.key` of today.

    `names` are those that the run recorded as set.
    """
    rollout = config.get("rollout", {})
    had_none = rollout.get("stop") and STOP_TEXTS not in rollout
    lacked = {f"rollout.{STOP_TEXTS}"} if had_none else set[str]()
    return lacked | {TAKEN_IN.get(name, name) for name in names}


def in_names_of_today(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings by section, as the present version would record them.

    A setting that has one value today stays if it had another: it is refused or told as a change
    where the settings are used.
    """
    found = {key: dict(one) if isinstance(one, Mapping) else one for key, one in config.items()}
    for name in {*ONE_VALUE, *FREE}:
        section, key = name.split(".")
        values = found.get(section, {})
        if name in FREE or values.get(key) == ONE_VALUE[name]:
            values.pop(key, None)
    algorithm = found.get("algorithm", {})
    if "seq_is_mask_low" in algorithm:
        low, high = algorithm.pop("seq_is_mask_low"), algorithm.pop("seq_is_mask_high")
        algorithm["seq_is_mask_range"] = [low, high]
    weights = found.get("weights", {})
    if weights.pop("weight_broadcast_mode", "bucket") == "per_tensor":
        weights["weight_broadcast_bucket_mb"] = 0
    if "weight_broadcast_cpu_staging" in weights:
        how = "pinned" if weights.pop("weight_broadcast_pin_memory") else "pageable"
        is_staged = weights.pop("weight_broadcast_cpu_staging")
        weights["weight_broadcast_staging"] = how if is_staged else "none"
    inference = found.get("inference", {})
    if (num_tokens := inference.pop("max_num_batched_tokens", None)) is not None:
        own = ["--max-num-batched-tokens", str(num_tokens)]
        inference["vllm_arguments"] = [*inference["vllm_arguments"], *own]
    megatron = found.get("megatron", {})
    if "megatron_use_precision_aware_optimizer" in megatron:
        dtypes = {name: megatron.pop(f"megatron_{name}_dtype") for name in _OPTIMIZER}
        is_used = megatron.pop("megatron_use_precision_aware_optimizer")
        megatron["megatron_optimizer_dtypes"] = dtypes if is_used else None
    rollout = found.get("rollout", {})
    rollout.setdefault(STOP_TEXTS, not rollout.get("stop"))
    for values in (found, found.get("trainer", {})):
        if values.get("lr_scheduler") == "none":
            values["lr_scheduler"] = "constant"
    return found
