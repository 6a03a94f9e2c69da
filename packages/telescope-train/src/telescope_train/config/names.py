"""Names of settings that users may expect: those of later versions and those of other systems.

None of them is accepted. For a planned name, the error is "not available in this version". For a
foreign name, the error gives the name used here. A `*` stands for any ending.
"""

_PLANNED = """
    top_p top_k min_p repetition_penalty
    megatron megatron_*
    inference_tensor_parallel_size max_num_batched_tokens vllm_scheduling_policy
    enable_vllm_tracing otlp_receiver_port
    weight_broadcast_mode weight_broadcast_bucket_mb weight_broadcast_cpu_staging
    weight_broadcast_pin_memory weight_broadcast_free_grad_buffers
    eval_num_servers eval_start_end_use_all_servers
    observability use_wandb wandb_* track_gpu_events system_metrics_collection_interval_seconds
    ray_namespace ray_runtime_env ray_inference_placement_strategy ray_trainer_placement_strategy
"""

PLANNED_NAMES = frozenset(_PLANNED.split())
"""Settings and sections that this version of Telescope does not have."""

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

PLANNED_BACKENDS = ("megatron",)
PLANNED_TRANSPORTS = ("nccl", "ipc", "disk")
