"""Names of settings in other systems, each with its name here.

A name may be the end of a path (`wandb.project`) if its last part alone would be ambiguous. The
names are from verifiers, TRL, AReaL, prime-rl, verl, SkyRL, slime, OpenRLHF and NeMo-RL.
`no_equal_names` has the names without an equivalent here.
"""

_PROMPTS = "prompts_batch_size_for_trainer: which counts prompts, each with group_size rollouts"
_CLIP_BOTH = "clip_low: and clip_high; both with use_ppo_clip"
_BETAS = "adam_betas: the list of both"
_ASYNC = "max_async_rollout: in steps, 0 = synchronous"
_TIMEOUT = "rollout_timeout_s: of a whole rollout, in seconds"
_EVALS = "eval_every: in steps, of each evaluation"
_BF16 = 'mixed_precision_dtype: "bfloat16" or "float32"'
_NORM = "advantage_norm: or an algorithm that does not divide, such as rloo and dr_grpo"
_LOSS = "algorithm: which decides advantage, loss and weights of tokens together"
_MINIBATCHES = "number_of_minibatches: how many optimizer steps a batch makes"
_LENGTH = "seq_len: of a packed row; max_model_len bounds one prompt with its answer"
_RANKS = "trainer_num_workers: in all, one for each GPU"
_STAGING = "weight_broadcast_bucket_mb: in MiB"
_WARMUP = "warmup_steps: in optimizer steps"
_KEEP = "resume_from_checkpoint: a folder, or latest; --resume on the command line"

_SAMPLES = {
    **dict.fromkeys(
        (
            *("num_generations", "rollouts_per_example", "n_samples_per_prompt", "n_samples"),
            *("num_generations_per_prompt", "rollout.n", "group_rollout_num"),
        ),
        "group_size",
    ),
    **dict.fromkeys(
        (
            *("batch_size", "train_batch_size", "rollout_batch_size", "generation_batch_size"),
            *("num_prompts_per_step", "global_batch_size", "train_global_batch_size"),
            *("consumer_batch_size", "max_batch_size"),
        ),
        _PROMPTS,
    ),
    **dict.fromkeys(
        (
            *("max_new_tokens", "max_completion_length", "max_response_length", "response_length"),
            *("max_generate_length", "generate_max_len", "rollout_max_response_len"),
            *("max_completion_tokens", "max_response_len"),
        ),
        "max_tokens",
    ),
    **dict.fromkeys(
        ("max_seq_len", "max_seq_length", "max_total_sequence_length", "max_length"), _LENGTH
    ),
    **dict.fromkeys(
        (
            *("max_tokens_per_mb", "max_tokens_per_gpu", "ppo_max_token_len_per_gpu"),
            *("train_mb_tokens", "max_token_len_per_gpu", "tokens_per_microbatch"),
        ),
        "seq_len: tokens of one packed row",
    ),
    **dict.fromkeys(
        ("rollout_max_context_len", "vllm_max_model_length", "context_length"), "max_model_len"
    ),
    "rollout_temperature": "temperature",
    **dict.fromkeys(("rollout_stop", "stop_strings", "stop_sequences"), "stop"),
    **dict.fromkeys(
        ("generation_timeout", "async_generation_timeout", "request_timeout", "rollout_timeout"),
        _TIMEOUT,
    ),
    **dict.fromkeys(
        ("zero_variance_filter", "filter_zero_advantage", "online_difficulty_filtering"),
        "discard_group_zero_advantage",
    ),
    **dict.fromkeys(
        (
            *("dynamic_filtering", "dynamic_sampling_filter_path", "filter_groups.enable"),
            *("dynamic_sampling.type", "use_dynamic_sampling", "dynamic_sampling"),
        ),
        "should_accept_fn: has_signal, or module:function",
    ),
    **dict.fromkeys(
        ("chat_template_path", "custom_chat_template", "chat_template.name_or_path"),
        "chat_template",
    ),
    **dict.fromkeys(("trajectory_strategy", "retokenize"), "interleaved_rollouts"),
    **dict.fromkeys(("over_sampling_batch_size", "over_sample_rate"), "max_open_rollouts"),
    "dynamic_filtering_reward_range": "should_accept_fn: module:function",
    "queue_size": _ASYNC,
    **dict.fromkeys(("env.args", "environment.args"), "env: its own settings, a table"),
    "agent.num_workers": "env_workers",
    **dict.fromkeys(("rollout_seed", "random_seed"), "seed"),
}
"""Prompts, rollouts and sampling."""

_AHEAD = {
    **dict.fromkeys(
        (
            *("max_head_offpolicyness", "num_batches_ahead", "max_async_level", "async_level"),
            *("max_staleness_steps", "max_trajectory_age_steps", "staleness_threshold"),
            *("async_queue_size", "async_max_queue_size", "max_staleness", "steps_off_policy"),
        ),
        _ASYNC,
    ),
    **dict.fromkeys(
        (
            *("max_concurrent", "max_concurrent_rollouts", "max_inflight_rollouts"),
            *("num_parallel_generation_workers", "sglang_server_concurrency"),
        ),
        "max_concurrent_prompts_per_server: which counts groups for each server",
    ),
    **dict.fromkeys(("partial_rollout", "in_flight_weight_updates"), "in_flight_update"),
    "async_train": "max_async_rollout: above 0",
    "async_grpo.enabled": "max_async_rollout: above 0",
    "oversampling_factor": "max_open_rollouts: rollouts that have begun and not ended",
}
"""Lead of sampling over training."""

_LOSSES = {
    **dict.fromkeys(
        (
            *("loss_type", "adv_estimator", "advantage_estimator", "policy_loss_type", "loss_mode"),
            *(
                "loss_agg_mode",
                "loss_reduction",
                "importance_sampling_level",
                "ppo_actor_loss_type",
            ),
            *("sequence_level_importance_ratios", "token_level_loss", "use_leave_one_out_baseline"),
            *("loss.type", "advantage.type"),
        ),
        _LOSS,
    ),
    **dict.fromkeys(
        (
            *("scale_rewards", "norm_adv_by_std_in_grpo", "grpo_norm_by_std", "normalize_rewards"),
            *("advantage_batch_normalize", "adv_norm.std_level", "std_level", "normalize_reward"),
        ),
        _NORM,
    ),
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "eps_clip_low_high"), _CLIP_BOTH),
    **dict.fromkeys(
        ("epsilon_low", "clip_ratio_low", "eps_clip_low", "ratio_clip_min", "cispo_eps_clip_low"),
        "clip_low",
    ),
    **dict.fromkeys(
        (
            *("epsilon_high", "clip_ratio_high", "eps_clip_high", "ratio_clip_max"),
            *("eps_clip_higher", "cispo_eps_clip_high"),
        ),
        "clip_high",
    ),
    **dict.fromkeys(("delta", "eps_clip_c", "ratio_clip_c", "c_clip"), "clip_ratio_c"),
    **dict.fromkeys(
        (
            *("beta", "kl_loss_coef", "kl_coef", "init_kl_coef", "kl_ctl", "kl_tau"),
            "reference_policy_kl_penalty",
        ),
        "kl_penalty_tau: 0 = no reference model",
    ),
    **dict.fromkeys(
        ("kl_loss_type", "kl_penalty", "kl_estimator_type", "kl_type"), "kl_estimator: k1, k2 or k3"
    ),
    "use_kl_in_reward": "kl_in_reward",
    "use_kl_loss": "kl_penalty_tau: above 0, with kl_in_reward = false",
    **dict.fromkeys(
        ("ref_model_sync_steps", "ref_update_interval", "update_ref_every_epoch", "sync_ref_model"),
        "reference_update_every: in steps",
    ),
    **dict.fromkeys(
        (*("entropy_coeff", "entropy_loss_coef", "ent_coef", "use_entropy_loss"),),
        "entropy_coef",
    ),
    **dict.fromkeys(
        (
            *("tis_imp_ratio_cap", "tis_clip", "vllm_importance_sampling_cap"),
            *("token_tis_ratio_clip_high", "rollout_is_threshold", "vllm_is_truncated_threshold"),
        ),
        "tis_cap: with use_tis",
    ),
    "tis_clip_low": 'tis_floor: with tis_mode = "icepop"',
    **dict.fromkeys(
        (
            *("vllm_importance_sampling_correction", "enable_vllm_is_correction", "tis_ratio_type"),
            *("use_importance_sampling_correction", "rollout_is"),
        ),
        "use_tis",
    ),
    **dict.fromkeys(("sequence_mask_metric", "rollout_rs"), "seq_is_masking"),
    **dict.fromkeys(("geo_mask_low", "geo_mask_high"), "seq_is_mask_range: both bounds"),
    "behav_imp_weight_cap": "behave_imp_weight_cap",
    "adv_norm.mean_level": _NORM,
    "use_on_policy_kl_approximation": "kl_estimator: k1, k2 or k3",
    "ref_model_mixup_alpha": "reference_update_every: which takes over the weights whole",
    "use_pf_ppo": _LOSS,
    **dict.fromkeys(("recompute_logprobs", "recompute_log_prob"), "recompute_logprob"),
    **dict.fromkeys(
        ("overlong_filtering", "mask_truncated_completions", "mask_no_eos_with_zero"),
        "filter_overlong",
    ),
    **dict.fromkeys(
        ("overlong_reward_penalty", "overlong_penalty", "overlong_buffer.penalty_factor"),
        "overlong_penalty_factor",
    ),
    **dict.fromkeys(("overlong_tokens", "overlong_buffer.len"), "overlong_buffer_tokens"),
    **dict.fromkeys(
        (
            *("ppo_n_minibatches", "num_steps_per_rollout", "steps_per_generation"),
            *("ppo_mini_batch_size", "policy_mini_batch_size", "mini_batch_size"),
        ),
        _MINIBATCHES,
    ),
    **dict.fromkeys(
        ("num_iterations", "update_epochs_per_batch", "max_epochs", "ppo_n_epochs"),
        "ppo_epochs: how often a batch is gone through",
    ),
}
"""From rewards to a loss, and the optimizer steps of a batch."""

_OPTIMIZER = {
    **dict.fromkeys(("lr", "actor_learning_rate", "policy_lr"), "learning_rate"),
    **dict.fromkeys(
        (*("max_grad_norm", "clip_grad", "gradient_clipping", "max_norm", "grad_norm_clip"),),
        "grad_clip",
    ),
    **dict.fromkeys(
        (
            "lr_scheduler_type",
            "warmup_style",
            "lr_decay_style",
            "trainer.scheduler.type",
            "lr_schedule",
        ),
        "lr_scheduler",
    ),
    "optimizer_config.scheduler": "lr_scheduler",
    **dict.fromkeys(
        ("num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters", "lr_warmup_steps_ratio"), _WARMUP
    ),
    **dict.fromkeys(("warmup_ratio", "warmup_steps_proportion", "lr_warmup_ratio"), _WARMUP),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "beta1", "beta2", "betas", "betas1", "betas2"), _BETAS
    ),
    **dict.fromkeys(("adam_epsilon", "optimizer.eps", "kwargs.eps", "optim.eps"), "adam_eps"),
    "l2": "weight_decay",
    **dict.fromkeys(
        ("optimizer.name", "optim", "optimizer_type", "optimizer.type", "optim.type"), "optimizer"
    ),
    **dict.fromkeys(("min_lr", "lr_min", "min_lr_rate"), "min_lr_ratio: a share of learning_rate"),
    **dict.fromkeys(
        (
            *("max_steps", "total_training_steps", "max_num_steps", "num_rollout"),
            *("total_train_steps", "num_episodes", "num_training_steps"),
        ),
        "number_of_steps",
    ),
}
"""The optimizer, its schedule, and the length of the run."""

_MODELS = {
    **dict.fromkeys(
        (
            *("model_name_or_path", "model_name", "model_path", "hf_checkpoint", "pretrain"),
            *("model.name", "model.path", "actor.path", "vllm.model", "base_model"),
        ),
        "model",
    ),
    **dict.fromkeys(("bf16", "fp16", "precision", "mixed_precision", "param_dtype"), _BF16),
    **dict.fromkeys(("actor.dtype", "torch_dtype", "dtype"), "model_dtype"),
    **dict.fromkeys(
        (
            *("enable_gradient_checkpointing", "activation_checkpointing"),
            *("recompute_granularity", "recompute_method", "recompute_num_layers"),
        ),
        "gradient_checkpointing",
    ),
    **dict.fromkeys(("use_torch_compile", "torch_compile", "compile_model"), "compile"),
    "use_peft": "use_lora",
    **dict.fromkeys(("lora_r", "lora.rank", "peft.dim"), "lora_rank: with use_lora"),
    **dict.fromkeys(("lora.alpha", "peft.alpha"), "lora_alpha: with use_lora"),
    **dict.fromkeys(("lora.dropout", "peft.dropout"), "lora_dropout: with use_lora"),
    "exclude_modules": "lora_target_modules: those that get one",
    "external_lib": "trust_remote_code: for code that comes with the model",
    "make_sequence_length_divisible_by": "pad_to_multiple_of",
    **dict.fromkeys(("lora.target_modules", "target_modules"), "lora_target_modules"),
    **dict.fromkeys(
        ("cast_lm_head_to_fp32", "fp32_lm_head_logits", "defer_fp32_logits"), "fp32_lm_head"
    ),
    **dict.fromkeys(
        (
            "entropy_from_logits_with_chunking",
            "entropy_checkpointing",
            "log_probs_chunk_size",
            "logprob_chunk_size",
            "fused_lm_head_chunk_size",
        ),
        "entropy_chunk_size",
    ),
    **dict.fromkeys(
        ("use_rollout_routing_replay", "enable_router_replay", "enable_return_routed_experts"),
        "routing_replay",
    ),
}
"""The model and its dtypes."""

_PARALLEL = {
    **dict.fromkeys(
        (
            *("actor_num_gpus_per_node", "policy_num_gpus_per_node", "n_gpus_per_node"),
            *("num_trainer_gpus", "trainer_gpu_ids", "num_train_gpus", "gpus_per_node"),
            *("actor_num_nodes", "policy_num_nodes", "nnodes", "n_nodes", "num_nodes"),
        ),
        _RANKS,
    ),
    **dict.fromkeys(("strategy", "fsdp_backend", "training_backend"), "train_backend"),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "megatron.tensor_parallel_size"),
        "megatron_tensor_parallel_size: inference_tensor_parallel_size for servers",
    ),
    "pipeline_model_parallel_size": "megatron_pipeline_parallel_size",
    "expert_model_parallel_size": "megatron_expert_parallel_size",
    "sequence_parallel": "megatron_sequence_parallel",
    **dict.fromkeys(
        (
            *("context_parallel_size", "ulysses_sequence_parallel_size", "ring_attn_size"),
            *("sequence_parallel_size", "model.cp", "cp_size"),
        ),
        "fsdp_context_parallel_size: megatron_context_parallel_size with that backend",
    ),
    **dict.fromkeys(("fsdp_size", "dp_replicate"), "fsdp_replicate_size: whole copies"),
    **dict.fromkeys(
        ("param_offload", "cpu_offload", "fsdp_cpu_offload_params", "offload_policy"),
        "fsdp_cpu_offload",
    ),
    **dict.fromkeys(
        (
            *("optimizer_offload", "adam_offload", "offload_after_step", "optim_cpu_offload"),
            "enable_offload",
        ),
        "optimizer_cpu_offload",
    ),
    "use_distributed_optimizer": "megatron_use_distributed_optimizer",
    "use_precision_aware_optimizer": "megatron_optimizer_dtypes",
    "overlap_grad_reduce": "megatron_overlap_grad_reduce",
    "grad_reduce_in_fp32": "megatron_grad_reduce_in_fp32",
    "fp8_cfg": "megatron_fp8",
    **dict.fromkeys(
        (
            *("colocate_all", "colocate_all_models", "colocated.enabled", "hybrid_engine"),
            *("enable_sleep_mode", "vllm_enable_sleep", "vllm_enable_sleep_mode"),
        ),
        "colocate",
    ),
    "trainer.gpus": _RANKS,
    "megatron_cfg.enabled": 'train_backend: "megatron"',
    "sequence_parallel_backend": "fsdp_context_parallel_size",
    "ray_wait_register_center_timeout": "ray_placement_timeout_s",
}
"""Division of the model among ranks."""

_SERVERS = {
    **dict.fromkeys(
        (
            *("vllm_num_engines", "num_inference_engines", "inference_gpu_ids", "num_infer_gpus"),
            *("rollout_num_gpus", "num_inference_servers"),
        ),
        "inference_num_workers: servers, each of one GPU or inference_tensor_parallel_size",
    ),
    **dict.fromkeys(
        (
            *("vllm_tensor_parallel_size", "inference_engine_tensor_parallel_size"),
            *("rollout_num_gpus_per_engine", "tensor_parallel_size", "parallel.tp"),
            "rollout.tensor_model_parallel_size",
        ),
        "inference_tensor_parallel_size",
    ),
    **dict.fromkeys(
        ("inference_engine_data_parallel_size", "vllm_data_parallel_size", "parallel.dp"),
        "inference_data_parallel_size",
    ),
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "mem_fraction_static", "sglang_mem_fraction_static"),
        "gpu_memory_utilization",
    ),
    **dict.fromkeys(("vllm_server_host", "http_endpoint_host", "server.host"), "inference_host"),
    **dict.fromkeys(
        ("vllm_server_port", "http_endpoint_port", "server.port"), "inference_base_port"
    ),
    "vllm_server_timeout": "inference_startup_timeout_s",
    **dict.fromkeys(
        (
            *("enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "engine_kwargs"),
            *("engine_init_kwargs", "vllm_kwargs", "vllm_extra", "load_format", "swap_space"),
        ),
        'vllm_arguments: such as ["--enforce-eager"]',
    ),
    "max_running_requests": "max_num_seqs",
    **dict.fromkeys(
        ("weight_sync_backend", "weight_update_mode", "vllm_sync_backend", "weight_broadcast.type"),
        "weight_transport",
    ),
    **dict.fromkeys(
        (
            *("update_weights_bucket_megabytes", "update_weight_buffer_size"),
            "weight_transfer_threshold_cuda_ipc_GB",
        ),
        _STAGING,
    ),
    "enable_rollout_tracing": "enable_vllm_tracing",
    "trace.backend": "otlp_export_endpoint",
    "inference.gpus": "inference_num_workers: servers",
    "free_cache_engine": "colocate_sleep_level: with colocate",
    "layered_summon": "weight_broadcast_bucket_mb: 0 = each tensor by itself",
    "enable_auto_tool_choice": "tool_call_parser",
}
"""The servers and their weights."""

_RUNS = {
    **dict.fromkeys(
        ("experiment_name", "trial_name", "run_name", "exp_name"),
        "name: of the run and its folder",
    ),
    **dict.fromkeys(
        ("wandb.name", "wandb.run_name", "wandb_name", "wandb_run_name"),
        "name: of the run, here and at W&B",
    ),
    **dict.fromkeys(("wandb.project", "project_name", "wandb_project_name"), "wandb_project"),
    **dict.fromkeys(("wandb.tags", "wandb.group", "wandb_group"), "wandb_tags"),
    **dict.fromkeys(
        (
            *("report_to", "trainer.logger", "log_with", "wandb_enabled", "wandb.enabled"),
            *("wandb.mode", "use_tracking"),
        ),
        "use_wandb: or use_tensorboard, or trackers",
    ),
    "tensorboard_enabled": "use_tensorboard",
    **dict.fromkeys(
        ("gpu_monitoring.collection_interval", "monitor_gpus"),
        "system_metrics_collection_interval_seconds",
    ),
    **dict.fromkeys(("log.level", "log_level", "logging_level"), "debug: messages of that level"),
    **dict.fromkeys(
        ("fileroot", "default_local_dir", "log_dir", "save_path", "export_path"), "output_dir"
    ),
    **dict.fromkeys(
        (
            *("save_steps", "save_freq", "save_interval", "ckpt_interval", "save_period"),
            *("ckpt.interval", "saver.freq_steps", "hf_save_interval"),
        ),
        "checkpoint_every: in steps",
    ),
    **dict.fromkeys(("ckpt_path", "checkpoints_path"), "checkpoint_dir"),
    **dict.fromkeys(
        (
            *("save_total_limit", "max_ckpts_to_keep", "max_actor_ckpt_to_keep", "max_ckpt_num"),
            *("keep_top_k", "ckpt.keep_last"),
        ),
        "checkpoint_keep_last",
    ),
    **dict.fromkeys(
        ("save_only_model", "weights_only", "checkpoint.save_contents", "load_contents"),
        "checkpoint_save_training_state",
    ),
    **dict.fromkeys(("save_strategy", "checkpointing.enabled"), "checkpoint_every: in steps"),
    "load": _KEEP,
    "save": "checkpoint_dir",
    "log_path": "output_dir",
    **dict.fromkeys(
        (
            *("resume_mode", "resume_from_path", "load_checkpoint", "resume_path"),
            *("ckpt.resume_step", "recover.mode"),
        ),
        _KEEP,
    ),
    **dict.fromkeys(
        (
            *("eval_strategy", "eval_steps", "test_freq", "eval_interval", "val_period"),
            *("eval.interval", "evaluator.freq_steps", "val.interval"),
        ),
        _EVALS,
    ),
    **dict.fromkeys(
        ("val_before_train", "eval_before_train", "val_at_start", "eval_on_start"),
        "eval_before_training",
    ),
    **dict.fromkeys(
        ("num_eval_examples", "max_val_samples", "eval.num_examples", "val.num_examples"),
        "num_samples: of each evaluation",
    ),
    **dict.fromkeys(
        ("n_samples_per_eval_prompt", "eval.rollouts_per_example", "num_eval_rollouts"),
        "rollouts: of each evaluation",
    ),
    **dict.fromkeys(
        ("env.id", "env_id", "environment_id", "env_name", "env_class"),
        "environments: entries with a name",
    ),
    "reward_clip_range": "reward_max: and reward_min, of each environment",
}
"""The run, its records, checkpoints and evaluations."""

_EARLIER = {
    **dict.fromkeys(
        ("seq_is_mask_low", "seq_is_mask_high"), "seq_is_mask_range: both bounds, [0.8, 1.2]"
    ),
    **dict.fromkeys(
        (
            *("megatron_use_precision_aware_optimizer", "megatron_main_grads_dtype"),
            *("megatron_main_params_dtype", "megatron_exp_avg_dtype", "megatron_exp_avg_sq_dtype"),
        ),
        "megatron_optimizer_dtypes: a table of main_grads, main_params, exp_avg and exp_avg_sq",
    ),
    "weight_broadcast_mode": "weight_broadcast_bucket_mb: 0 = each tensor by itself",
    **dict.fromkeys(
        ("weight_broadcast_cpu_staging", "weight_broadcast_pin_memory"),
        "weight_broadcast_staging: none, pinned or pageable",
    ),
    "max_num_batched_tokens": 'vllm_arguments: ["--max-num-batched-tokens", "8192"]',
}
"""Settings of earlier versions that became parts of others; `earlier` converts recorded ones."""

FOREIGN_NAMES = (
    _SAMPLES | _AHEAD | _LOSSES | _OPTIMIZER | _MODELS | _PARALLEL | _SERVERS | _RUNS | _EARLIER
)
"""Name in other systems -> name here; a remark may follow after a colon."""
