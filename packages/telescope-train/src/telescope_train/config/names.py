"""Names of settings in other systems: each with its name here, or with why there is none.

A name may be the end of a path (`wandb.project`) if its last part alone would be ambiguous. The
names are from verifiers, TRL, AReaL, prime-rl, verl, SkyRL, slime, OpenRLHF, NeMo-RL and Atropos,
from `telescope sft`, and from evaluations. `critic.**` is a whole section, and `data.*` covers its
names that have no answer of their own.
"""

from collections.abc import Mapping


def _by_name(answers: Mapping[str, str]) -> dict[str, str]:
    """Return name -> answer; the keys of `answers` hold several names, apart by white space."""
    return {name: answer for names, answer in answers.items() for name in names.split()}


_ASYNC = "max_async_rollout: in steps, 0 = synchronous"

_SAMPLES = {
    """
        num_generations rollouts_per_example n_samples_per_prompt n_samples
        num_generations_per_prompt n group_rollout_num
    """: "group_size",
    """
        batch_size train_batch_size rollout_batch_size generation_batch_size num_prompts_per_step
        global_batch_size train_global_batch_size consumer_batch_size max_batch_size
    """: "prompts_batch_size_for_trainer: which counts prompts, each with group_size rollouts",
    """
        max_new_tokens max_completion_length max_response_length response_length max_generate_length
        generate_max_len rollout_max_response_len max_completion_tokens max_response_len
        max_token_length
    """: "max_tokens",
    "max_seq_len max_seq_length max_total_sequence_length max_length": (
        "seq_len: of a packed row; max_model_len bounds one prompt with its answer"
    ),
    """
        max_tokens_per_mb max_tokens_per_gpu ppo_max_token_len_per_gpu train_mb_tokens
        max_token_len_per_gpu tokens_per_microbatch max_tokens_per_microbatch token_budget
        ppo_infer_max_token_len_per_gpu
    """: "seq_len: tokens of one packed row",
    "rollout_max_context_len vllm_max_model_length context_length data.max_len": "max_model_len",
    "rollout_temperature": "temperature",
    "rollout_stop stop_strings stop_sequences": "stop",
    "generation_timeout async_generation_timeout request_timeout rollout_timeout": (
        "rollout_timeout_s: of a whole rollout, in seconds"
    ),
    """
        zero_variance_filter filter_zero_advantage online_difficulty_filtering
        ensure_scores_are_not_same
    """: "discard_group_zero_advantage",
    """
        dynamic_filtering dynamic_sampling_filter_path filter_groups.enable dynamic_sampling.type
        use_dynamic_sampling dynamic_sampling dynamic_filtering_enable
    """: "should_accept_fn: has_signal, or module:function",
    """
        chat_template_path custom_chat_template chat_template.name_or_path tokenizer.chat_template
    """: "chat_template",
    """
        apply_chat_template_kwargs.enable_thinking chat_template_kwargs.enable_thinking
        chat_template_kwargs apply_chat_template_kwargs thinking_mode
    """: "enable_thinking: other values of a template are written into chat_template",
    "trajectory_strategy retokenize": "interleaved_rollouts",
    "over_sampling_batch_size over_sample_rate vllm_generate_batch_size": "max_open_rollouts",
    "dynamic_filtering_reward_range dynamic_filtering_range": "should_accept_fn: module:function",
    "queue_size": _ASYNC,
    "env.args environment.args environments.args evals.args environments.env_args evals.env_args": (
        "env: its own settings, a table"
    ),
    "agent.num_workers": "env_workers",
    "rollout_seed random_seed data_seed data_loader_seed fsdp_config.seed": "seed",
}
"""Prompts, rollouts and sampling."""

_AHEAD = {
    """
        max_head_offpolicyness num_batches_ahead max_async_level async_level max_staleness_steps
        max_trajectory_age_steps staleness_threshold async_queue_size async_max_queue_size
        max_staleness steps_off_policy max_batches_offpolicy queue_maxsize
    """: _ASYNC,
    "sampler.max_off_policy_threshold": "max_off_policy_steps",
    """
        max_concurrent max_concurrent_rollouts max_inflight_rollouts num_parallel_generation_workers
        sglang_server_concurrency max_inflight_tasks concurrent_samples_per_replica max_connections
    """: "max_concurrent_prompts_per_server: which counts groups for each server",
    "partial_rollout partial_rollout_enable in_flight_weight_updates": "in_flight_update",
    "async_train async_enable async_grpo.enabled fully_async.enabled": "max_async_rollout: above 0",
    "oversampling_factor": "max_open_rollouts: rollouts that have begun and not ended",
}
"""Lead of sampling over training."""

_LOSSES = {
    """
        loss_type adv_estimator advantage_estimator policy_loss_type loss_mode loss_agg_mode
        loss_reduction importance_sampling_level ppo_actor_loss_type
        sequence_level_importance_ratios token_level_loss use_leave_one_out_baseline loss.type
        advantage.type advantage.estimator use_sapo_loss use_pf_ppo
    """: "algorithm: which decides advantage, loss and weights of tokens together",
    """
        scale_rewards norm_adv_by_std_in_grpo grpo_norm_by_std normalize_rewards
        advantage_batch_normalize adv_norm.std_level std_level normalize_reward adv_norm.mean_level
        normalize_advantages no_std_norm normalize_enable
    """: "advantage_norm: or an algorithm that does not divide, such as rloo and dr_grpo",
    "multi_objective_aggregation gdpo_reward_keys gdpo_reward_weights": (
        'advantage_norm: "parts" normalizes each part of a reward; environments give the weights'
    ),
    "epsilon clip_ratio eps_clip clip_eps eps_clip_low_high": (
        "clip_low: and clip_high; both with use_ppo_clip"
    ),
    "epsilon_low clip_ratio_low eps_clip_low ratio_clip_min cispo_eps_clip_low": "clip_low",
    """
        epsilon_high clip_ratio_high eps_clip_high ratio_clip_max eps_clip_higher
        cispo_eps_clip_high
    """: "clip_high",
    "delta eps_clip_c ratio_clip_c c_clip dual_clip": "clip_ratio_c",
    "dppo_type divergence_type": 'dppo_divergence: tv or kl, with algorithm = "dppo"',
    "delta_low delta_high": 'dppo_threshold: one for both, with algorithm = "dppo"',
    """
        beta kl_loss_coef kl_coef init_kl_coef kl.init_coef kl_ctl kl_tau
        reference_policy_kl_penalty
    """: "kl_penalty_tau: 0 = no reference model",
    """
        kl_loss_type kl_penalty kl_estimator_type kl_type kl.estimator use_kl_estimator_k3
        use_on_policy_kl_approximation
    """: "kl_estimator: k1, k2 or k3",
    "kl.unbiased_gradient use_bias_correction_kl": (
        "kl_estimator: null takes the one whose gradient is that of the divergence"
    ),
    "use_kl_in_reward": "kl_in_reward",
    """
        teacher_model teacher_model_name_or_path opd_teacher_load opd_teacher_model ref_model_path
        reference_model_path kl_reference_config kl_reference_model
    """: ('reference_model: another model than the initial one, such as a teacher for "opd"'),
    "use_kl_loss kl.use_loss": "kl_penalty_tau: above 0, with kl_in_reward = false",
    "ref_model_sync_steps ref_update_interval update_ref_every_epoch sync_ref_model": (
        "reference_update_every: in steps"
    ),
    "entropy_coeff entropy_loss_coef ent_coef use_entropy_loss": "entropy_coef",
    """
        tis_imp_ratio_cap tis_clip vllm_importance_sampling_cap token_tis_ratio_clip_high
        rollout_is_threshold vllm_is_truncated_threshold vllm_importance_sampling_clip_max
        is_correction_threshold token_mask_is_threshold_high
    """: "tis_cap: with use_tis",
    "tis_clip_low vllm_importance_sampling_clip_min token_mask_is_threshold_low": (
        'tis_floor: with tis_mode = "icepop"'
    ),
    "vllm_importance_sampling_mode is_correction_mode is_correction_gating": (
        "tis_mode: truncate or icepop, which masks; both weigh tokens, and seq_is_masking leaves "
        "out whole samples"
    ),
    """
        vllm_importance_sampling_correction enable_vllm_is_correction tis_ratio_type
        use_importance_sampling_correction rollout_is is_correction_level
    """: "use_tis",
    "sequence_mask_metric rollout_rs rejection_sampling.metric": "seq_is_masking",
    """
        geo_mask_low geo_mask_high rollout_rs_threshold rejection_sampling.lower
        rejection_sampling.upper
    """: "seq_is_mask_range: both bounds",
    "behav_imp_weight_cap": "behave_imp_weight_cap",
    "ref_model_mixup_alpha": "reference_update_every: which takes over the weights whole",
    "recompute_logprobs recompute_log_prob": "recompute_logprob",
    """
        overlong_filtering mask_truncated_completions mask_no_eos_with_zero
        apply_overlong_filtering
    """: "filter_overlong",
    "overlong_reward_penalty overlong_penalty overlong_buffer.penalty_factor": (
        "overlong_penalty_factor"
    ),
    "overlong_tokens overlong_buffer.len overlong_buffer_len": "overlong_buffer_tokens",
    """
        ppo_n_minibatches num_steps_per_rollout steps_per_generation ppo_mini_batch_size
        policy_mini_batch_size mini_batch_size
    """: "number_of_minibatches: how many optimizer steps a batch makes",
    "num_iterations update_epochs_per_batch max_epochs ppo_n_epochs": (
        "ppo_epochs: how often a batch is gone through"
    ),
}
"""From rewards to a loss, and the optimizer steps of a batch."""

_OPTIMIZER = {
    "lr actor_learning_rate policy_lr": "learning_rate",
    "max_grad_norm clip_grad gradient_clipping max_norm grad_norm_clip": "grad_clip",
    """
        lr_scheduler_type warmup_style lr_decay_style lr_schedule
        optimizer_config.scheduler
    """: "lr_scheduler",
    "scheduler.type": "lr_scheduler: if that of the learning rate is meant; processes go by [ray]",
    """
        num_warmup_steps lr_warmup_steps lr_warmup_iters lr_warmup_steps_ratio warmup_ratio
        warmup_steps_proportion lr_warmup_ratio
    """: "warmup_steps: in optimizer steps",
    "adam_beta1 adam_beta2 beta1 beta2 betas betas1 betas2": "adam_betas: the list of both",
    "adam_epsilon adam.eps optimizer.eps kwargs.eps optim.eps": "adam_eps",
    "muon.momentum optim.mu optim_args.momentum": "muon_momentum",
    "muon.lr": "learning_rate: of optimizer = 'muon' too",
    "l2": "weight_decay",
    "optimizer.name optim optimizer_type optimizer.type optim.type optimizer_impl": "optimizer",
    "lr_wsd_decay_steps num_decay_steps": "cooldown_steps",
    "min_lr lr_min min_lr_rate": "min_lr_ratio: a share of learning_rate",
    """
        max_steps total_training_steps max_num_steps num_rollout total_train_steps
        num_training_steps training_steps max_training_steps total_steps num_steps
    """: "number_of_steps",
}
"""The optimizer, its schedule, and the length of the run."""

_MODELS = {
    """
        model_name_or_path model_name model_path hf_checkpoint pretrain model.name model.path
        actor.path vllm.model base_model
    """: "model",
    "bf16 fp16 precision mixed_precision param_dtype": (
        'mixed_precision_dtype: "bfloat16" or "float32"'
    ),
    "actor.dtype torch_dtype dtype fsdp_config.model_dtype": "model_dtype",
    """
        enable_gradient_checkpointing activation_checkpointing recompute_granularity
        recompute_method recompute_num_layers recompute_modules gradient_checkpointing_enable
        gradient_checkpointing_kwargs gradient_checkpointing_reentrant
        gradient_checkpointing_use_reentrant
    """: "gradient_checkpointing",
    "use_torch_compile torch_compile torch_compile_mode compile_model enable_compile": "compile",
    "use_peft": "use_lora",
    "lora_r lora.rank peft.dim": "lora_rank: with use_lora",
    "lora.alpha peft.alpha": "lora_alpha: with use_lora",
    "lora.dropout peft.dropout": "lora_dropout: with use_lora",
    "exclude_modules": "lora_target_modules: those that get one",
    "external_lib tokenizer.trust_remote_code": (
        "trust_remote_code: for code that comes with the model"
    ),
    "make_sequence_length_divisible_by": "pad_to_multiple_of",
    "lora.target_modules target_modules": "lora_target_modules",
    "cast_lm_head_to_fp32 fp32_lm_head_logits defer_fp32_logits": "fp32_lm_head",
    """
        entropy_from_logits_with_chunking entropy_checkpointing log_probs_chunk_size
        logprob_chunk_size logprobs_chunk_size vocab_entropy_chunk_size fused_lm_head_chunk_size
        entropy_from_logits_chunk_size
    """: "entropy_chunk_size",
    "rollout.quantization vllm.quantization vllm_cfg.precision": "inference_quantization",
    """
        use_rollout_routing_replay enable_rollout_routing_replay enable_router_replay
        enable_return_routed_experts return_routed_experts moe_enable_routing_replay
        router_replay.mode
    """: "routing_replay",
}
"""The model and its dtypes."""

_PARALLEL = {
    """
        actor_num_gpus_per_node policy_num_gpus_per_node n_gpus_per_node num_trainer_gpus
        trainer_gpu_ids num_train_gpus gpus_per_node actor_num_nodes policy_num_nodes nnodes n_nodes
        num_nodes trainer.gpus actor.num_nodes actor.num_gpus_per_node
    """: "trainer_num_workers: in all, one for each GPU",
    "strategy fsdp_backend training_backend": "train_backend",
    """
        tensor_model_parallel_size megatron.tensor_parallel_size dtensor_cfg.tensor_parallel_size
        ds.tensor_parallel_size
    """: ("megatron_tensor_parallel_size: inference_tensor_parallel_size for servers"),
    "pipeline_model_parallel_size": "megatron_pipeline_parallel_size",
    "expert_model_parallel_size": "megatron_expert_parallel_size",
    "sequence_parallel": "megatron_sequence_parallel",
    """
        context_parallel_size ulysses_sequence_parallel_size ring_attn_size sequence_parallel_size
        model.cp cp_size
    """: "fsdp_context_parallel_size: megatron_context_parallel_size with that backend",
    "dp_replicate": "fsdp_replicate_size: whole copies",
    "fsdp_size": "fsdp_replicate_size: whole copies, which are trainer_num_workers / fsdp_size",
    "param_offload cpu_offload fsdp_cpu_offload_params offload_policy": "fsdp_cpu_offload",
    "optimizer_offload adam_offload offload_after_step optim_cpu_offload enable_offload": (
        "optimizer_cpu_offload"
    ),
    "use_distributed_optimizer": "megatron_use_distributed_optimizer",
    "use_precision_aware_optimizer": "megatron_optimizer_dtypes",
    "overlap_grad_reduce": "megatron_overlap_grad_reduce",
    "grad_reduce_in_fp32": "megatron_grad_reduce_in_fp32",
    "fp8_cfg": "megatron_fp8",
    """
        colocate_all colocate_all_models colocated.enabled hybrid_engine enable_sleep_mode
        vllm_enable_sleep vllm_enable_sleep_mode vllm.enable_sleep
    """: "colocate",
    "megatron_cfg.enabled": 'train_backend: "megatron"',
    "sequence_parallel_backend": "fsdp_context_parallel_size",
    "ray_wait_register_center_timeout": "ray_placement_timeout_s",
}
"""Division of the model among ranks."""

_SERVERS = {
    """
        vllm_num_engines num_inference_engines inference_gpu_ids num_infer_gpus rollout_num_gpus
        num_inference_servers inference_engine.num_engines rollout.nnodes rollout.n_gpus_per_node
        vllm.num_engines num_inference_nodes
    """: "inference_num_workers: servers, each of one GPU or inference_tensor_parallel_size",
    """
        vllm_tensor_parallel_size inference_engine_tensor_parallel_size rollout_num_gpus_per_engine
        tensor_parallel_size parallel.tp rollout.tensor_model_parallel_size
    """: "inference_tensor_parallel_size",
    """
        inference_engine_data_parallel_size vllm_data_parallel_size parallel.dp
        rollout.data_parallel_size inference_engine.data_parallel_size
    """: "inference_data_parallel_size",
    """
        vllm_gpu_memory_utilization mem_fraction_static sglang_mem_fraction_static
        standalone_gpu_memory_utilization
    """: "gpu_memory_utilization",
    "vllm_server_host http_endpoint_host server.host": "inference_host",
    "vllm_server_port http_endpoint_port server.port vllm_port": "inference_base_port",
    "vllm_server_timeout": "inference_startup_timeout_s",
    """
        enforce_eager enable_prefix_caching enable_chunked_prefill engine_kwargs engine_init_kwargs
        vllm_kwargs vllm_extra load_format swap_space cudagraph_capture_sizes speculative_config
        distributed_executor_backend
    """: 'vllm_arguments: such as ["--enforce-eager"]',
    "max_running_requests": "max_num_seqs",
    """
        weight_sync_backend weight_update_mode vllm_sync_backend vllm.sync_backend
        weight_broadcast.type checkpoint_engine.backend
    """: "weight_transport",
    "rollout.scheduling_policy": "vllm_scheduling_policy",
    "prometheus.enable prometheus.port enable_ray_prometheus_stats": "prometheus_port",
    """
        update_weights_bucket_megabytes update_weight_buffer_size
        weight_transfer_threshold_cuda_ipc_GB
    """: "weight_broadcast_bucket_mb: in MiB",
    "enable_rollout_tracing": "enable_vllm_tracing",
    "trace.backend": "otlp_export_endpoint",
    "inference.gpus": "inference_num_workers: servers",
    "free_cache_engine": "colocate_sleep_level: with colocate",
    "layered_summon": "weight_broadcast_bucket_mb: 0 = each tensor by itself",
    "enable_auto_tool_choice": "tool_call_parser",
}
"""The servers and their weights."""

_RUNS = {
    "experiment_name trial_name run_name exp_name": "name: of the run and its folder",
    "wandb.name wandb.run_name wandb_name wandb_run_name": "name: of the run, here and at W&B",
    "wandb.project project_name wandb_project_name": "wandb_project",
    "wandb.tags wandb.group wandb_group trainer.tags": "wandb_tags",
    "report_to trainer.logger log_with wandb_enabled wandb.enabled wandb.mode use_tracking": (
        "use_wandb: or use_tensorboard, or trackers"
    ),
    "tensorboard_enabled tensorboard_dir tensorboard.path": "use_tensorboard",
    "trackio.project trackio.mode trackio_space_id swanlab.project swanlab.mode": "trackers",
    "gpu_monitoring.collection_interval monitor_gpus": "system_metrics_collection_interval_seconds",
    "log.level log_level logging_level": "debug: messages of that level",
    "fileroot default_local_dir log_dir save_path export_path log_path": "output_dir",
    """
        save_steps save_freq save_interval ckpt_interval save_period ckpt.interval saver.freq_steps
        hf_save_interval save_strategy checkpointing.enabled checkpoint_interval recover.freq_steps
    """: "checkpoint_every: in steps",
    "ckpt_path ckpt.path checkpoints_path save": "checkpoint_dir",
    """
        save_total_limit max_ckpts_to_keep max_actor_ckpt_to_keep max_ckpt_num keep_top_k
        ckpt.keep_last ckpt.max_num max_ckpt_to_keep
    """: "checkpoint_keep_last",
    "save_only_model weights_only checkpoint.save_contents load_contents": (
        "checkpoint_save_training_state"
    ),
    """
        load resume_mode resume_from_path load_checkpoint resume_path ckpt.resume_step recover.mode
        ckpt.load_enable resume_from
    """: "resume_from_checkpoint: a folder, or latest; --resume on the command line",
    """
        eval_strategy eval_steps test_freq eval_interval val_period eval.interval
        evaluator.freq_steps val.interval eval.steps steps_per_eval evals.interval
    """: "eval_every: in steps, of each evaluation",
    "val_before_train eval_before_train val_at_start eval_on_start": "eval_before_training",
    """
        num_eval_examples max_val_samples eval.num_examples val.num_examples limit
        evals.num_examples evals.max_samples
    """: "num_samples: of each evaluation",
    """
        n_samples_per_eval_prompt eval.rollouts_per_example num_eval_rollouts num_generations_eval
        eval.n_samples_per_prompt eval_n_samples_per_prompt evals.num_generations evals.group_size
        evals.rollouts_per_example evals.num_rollouts evals.n_samples evals.n evals.epochs
    """: "rollouts: of each evaluation",
    "env.id env_id environment_id env_name env_class": "environments: entries with a name",
    "environments.id environments.env_id evals.id evals.env_id": "name",
    "environments.ratio": "weight",
    "evals.pass_at_k evals.k": "pass_k",
    "reward_clip_range reward.clip_range": "reward_max: and reward_min, of each environment",
}
"""The run, its records, checkpoints and evaluations."""

_EARLIER = {
    "seq_is_mask_low seq_is_mask_high": "seq_is_mask_range: both bounds, [0.8, 1.2]",
    """
        megatron_use_precision_aware_optimizer megatron_main_grads_dtype megatron_main_params_dtype
        megatron_exp_avg_dtype megatron_exp_avg_sq_dtype
    """: "megatron_optimizer_dtypes: a table of main_grads, main_params, exp_avg and exp_avg_sq",
    "weight_broadcast_mode": "weight_broadcast_bucket_mb: 0 = each tensor by itself",
    "weight_broadcast_cpu_staging weight_broadcast_pin_memory": (
        "weight_broadcast_staging: none, pinned or pageable"
    ),
    "max_num_batched_tokens": 'vllm_arguments: ["--max-num-batched-tokens", "8192"]',
}
"""Settings of earlier versions that became parts of others; `earlier` converts recorded ones."""

FOREIGN_NAMES = _by_name(
    _SAMPLES | _AHEAD | _LOSSES | _OPTIMIZER | _MODELS | _PARALLEL | _SERVERS | _RUNS | _EARLIER
)
"""Name in other systems -> name here; a remark may follow after a colon."""

_TRUNCATED = (
    "it takes tokens out of the distribution that is sampled, and the trainer computes log-probs "
    "of the whole distribution, so every importance ratio would be wrong; shape rollouts with "
    "temperature, and set it in [[evals]], which may use any value"
)
_BY_THE_PAST = (
    "it changes the distribution that is sampled by what came before, and the trainer computes "
    "log-probs without it, so every importance ratio would be wrong"
)
REFUSED_NAMES = {
    **dict.fromkeys(("top_p", "top_k", "min_p"), _TRUNCATED),
    "repetition_penalty": f"{_BY_THE_PAST}; set it in [[evals]], which may use any value",
}
"""Setting of evals -> reason why training rollouts do not have it."""

_NO_EQUAL = {
    """
        micro_batch_size per_device_train_batch_size per_device_eval_batch_size ppo_micro_batch_size
        ppo_micro_batch_size_per_gpu train_micro_batch_size log_prob_micro_batch_size
        log_prob_micro_batch_size_per_gpu n_mbs micro_train_batch_size micro_rollout_batch_size
        logprob_batch_size micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu
        micro_batch_size_per_gpu forward_micro_batch_size use_dynamic_bsz
        forward_micro_batch_size_per_gpu log_prob_use_dynamic_bsz eval_batch_size
        use_dynamic_batch_size dynamic_batching.** log_prob_max_token_len_per_gpu
        forward_max_token_len_per_gpu logprob_mb_tokens val_batch_size dynamic_batch_enable
        ppo_infer_micro_batch_size_per_gpu auto_find_batch_size eval_accumulation_steps
    """: (
        "samples are packed into rows of seq_len tokens, so there is no micro batch; lower "
        "seq_len, or max_tokens, if memory is short"
    ),
    """
        use_remove_padding packing packing_samples use_sample_packing sequence_packing.**
        balance_batch balance_data padding_free mask_env_responses use_fused_kernels use_liger
        use_liger_kernel async_save batched sampling_params.logprobs calculate_log_probs
        disable_dropout use_vllm async_engine do_sample megatron_overlap_cpu_optimizer_d2h_h2d
        overlap_cpu_optimizer_d2h_h2d average_tokens_across_devices calculate_entropy
        packing_strategy use_sequence_packing remove_microbatch_padding use_prefix_grouper
    """: "there is no switch for it: it is always done",
    "gradient_accumulation_steps": (
        "a batch is as many packed rows as it needs, and their gradients are added up; "
        "number_of_minibatches says how many optimizer steps it makes"
    ),
    """
        max_prompt_len max_prompt_length prompt_max_len prompt_length max_input_length
        max_input_seq_length filter_overlong_prompts truncation rollout_max_prompt_len
    """: (
        "a prompt has no limit of its own, and none is cut: max_model_len bounds prompt and "
        "answer together; max_tokens bounds the answer"
    ),
    """
        critic.** gamma lam lambd gae_lambda value_clip critic_warmup critic_learning_rate
        critic_pretrain critic_num_nodes cliprange_value critic_num_gpus_per_node
        critic_mini_batch_size discount max_critic_ckpt_to_keep value_head_prefix vf_coef
        colocate_critic_reward
    """: "there is no value model: rollouts are compared with those of their group or batch",
    """
        data.* train_dataset.* valid_dataset.* dataset_name dataset_config prompt_data input_key
        label_key train_data val_data train_files val_files eval_prompt_data prompt_key
        dataset_train_split max_samples dataset_test_split shuffle_dataset rollout_shuffle shuffle
        remove_unused_columns eval_dataset prompt_file system_prompt_file agent_func_path
        dataset_text_field dataset_kwargs dataset_num_proc dataloader_num_workers
        dataloader_pin_memory dataloader_drop_last dataloader_prefetch_factor
        dataloader_persistent_workers ignore_data_skip
    """: "prompts, answers and rewards come from [[environments]]; write or install an environment",
    """
        reward_model.** custom_reward_function.** reward_funcs reward_weights rm_type custom_rm_path
        remote_rm_url reward_pretrain reward_scaling reward_bias reward_norm.** reward_model_path
        zero_truncated_completions reward_manager reward_fn_key reward.* reward.model_name_or_path
        reward.num_nodes reward.num_gpus_per_node llm_as_a_judge.** zero_reward_on_non_stop
    """: (
        "rewards come from the environment: a decorated method of it, which may ask a judge or "
        "run code in a sandbox"
    ),
    """
        total_epochs num_train_epochs total_train_epochs epochs num_epoch max_num_epochs num_epochs
        freq_epochs num_episodes
    """: "a run ends after number_of_steps; examples come around again as often as that takes",
    """
        use_deterministic_algorithms full_determinism full_determinism_enable deterministic_mode
        deterministic
    """: (
        "set seed_sampling = true, so that rollouts repeat and gradients are added in the order "
        "of the draws; on a CPU the trainer's arithmetic then repeats, on a GPU kernels may add in "
        "another order. For importance weights away from 1 with experts: routing_replay = true"
    ),
    """
        sglang.* vllm_mode generation.backend generator.backend rollout.name rollout.mode
        allocation_mode run_engines_locally use_sglang inference_engine_type rollout_backend
        served_model_name engine_kwargs.* inference_engine.backend
    """: "the engine is vLLM, and how it is started is in [inference]",
    "attn_implementation attn_impl flash_attn attn use_flash_attn attention_backend attn_type": (
        "attention for packed rows is chosen by the machine: flash-attn where it is installed"
    ),
    """
        deepspeed zero_stage ds.* deepspeed_config fsdp fsdp_config fsdp_config.* wrap_policy.*
        dtensor_cfg.*
    """: "train_backend chooses what shares the model: 'fsdp' (torch's FSDP2) or 'megatron'",
    """
        ddp_timeout nccl_timeout local_rank launcher.** scheduling_spec name_resolve.** cluster.*
        scheduler.endpoint scheduler.deploy_mode scheduler.functioncall_service_domain
        placement.* slurm.** deployment.* ray_kwargs.* ddp_backend ddp_find_unused_parameters
        ddp_bucket_cap_mb accelerator_config parallelism_config
    """: "where processes go is set in [ray], and torchrun and accelerate are not used",
    """
        decay_steps lr_decay_steps lr_decay_iters policy.scheduler.* megatron_cfg.scheduler.*
        lr_scheduler_kwargs num_cycles lr_wsd_decay_style lr_warmup_init
    """: (
        "the learning rate rises over warmup_steps, and with lr_scheduler = 'linear' or 'cosine' "
        "falls from there to min_lr_ratio of it after the last step of the run; cooldown_steps "
        "are the last ones over which alone it falls"
    ),
    "impl": "the trainer computes with the model's code in transformers, or train_backend's own",
    "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo save_hf ckpt.save_hf": (
        "`telescope export` writes the model, and uploads it with --push"
    ),
    """
        profiler.** torch_profiler_config.** global_profiler.** perf_tracer.** record_memory profile
    """: "the timeline of each step is recorded anyway, and `telescope ui` shows it",
    """
        logging_steps log_completions num_completions_to_print log_on_each_node disable_log_stats
        log_val_generations rollout_data_dir validation_data_dir dump_to_file
        num_val_samples_to_print dump_data_batch dump_eval_results logging_strategy
        logging_first_step log_unique_prompts log_multimodal log_completions_hub_repo
        num_rollouts_to_keep num_rollouts_per_group_for_logging data_path_to_save_groups
        data_dir_to_save_evals num_logger_eval_samples num_logger_train_samples
        print_example_interval log_example_interval disable_tqdm
    """: "a line of metrics is written for each step, and rollouts are recorded whole",
    """
        max_turns max_rollout_turns max_assistant_turns max_user_turns multi_turn.**
        max_tool_calling_iterations
    """: "how many turns a rollout has is the environment's own setting (env.max_turns)",
    "sft.** dpo.**": "`telescope sft` is for supervised training; its settings are its own",
    "rollout_top_p rollout_top_k": _TRUNCATED,
    "frequency_penalty presence_penalty logit_bias": _BY_THE_PAST,
    """
        val_kwargs.** eval.* eval.dataset eval_gconfig.** eval_sampling_params.**
        valid_dataset.** eval_max_response_len eval_top_p eval_sampling_params
    """: (
        "num_samples, rollouts, temperature, top_p, top_k and max_tokens of an evaluation stand "
        "in its [[evals]] entry"
    ),
    "env.* env.args.** environment.args.** skyrl_gym.**": (
        "settings of an environment itself stand in env of its [[environments]] entry"
    ),
    "tokenizer.* tokenizer_path tokenizer_name": (
        "the tokenizer is the one in the folder of the model"
    ),
    """
        override_config model_config_kwargs model_init_kwargs rope_scaling rope_theta hf_config_path
        use_shm init_from_scratch
    """: ("the model is what its config.json says; change that in a copy of its folder"),
    "kl_ctrl.type kl_ctrl.* horizon target_kl kl_target kl.target": (
        "kl_penalty_tau stays as it is set: nothing adapts it"
    ),
    """
        sapo_tau_pos sapo_tau_neg tau_pos tau_neg sapo_temperature_pos sapo_temperature_neg
    """: (
        "the gate of sapo is as steep as in its paper; another one is a variant of the algorithm, "
        "`replace(ALGORITHM, loss=partial(loss, tau_pos=2.0))` with both names from "
        "telescope_train.algorithms.sapo, given as algorithm = 'module:NAME'"
    ),
    """
        use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    """: "entropy_coef stays as it is set: nothing adapts it",
    """
        clip_cov.** clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov.** kl_cov_ratio ppo_kl_coef
        dro_beta vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg m2_threshold
        pf_ppo.**
    """: (
        "there is no algorithm that has it; one of your own may, given as algorithm = "
        "'module:NAME' (docs/how-to/add-an-algorithm.md)"
    ),
    """
        router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff moe_router_load_balancing_type
    """: "routers of experts are trained by the loss of the algorithm alone",
    """
        muon.* muon_nesterov muon_num_ns_steps muon_scale_mode muon_split_qkv
        muon_extra_scale_factor muon_tp_mode muon_fp32_matmul_prec
    """: (
        "with optimizer = 'muon', an update is five Newton-Schulz steps of Nesterov momentum, each "
        "projection apart, at the size of AdamW's: learning_rate and weight_decay carry over"
    ),
    """
        optim_args optim_target_modules adafactor_scale_parameter adafactor_relative_step
        override_optimizer_config
    """: (
        "optimizers are forms of AdamW, or Muon with AdamW, set by learning_rate, adam_betas, "
        "adam_eps, muon_momentum and weight_decay"
    ),
    "evals.stop": "an evaluation stops at the texts of stop in [rollout]",
    "enable_ema ema_beta": "no average of weights is kept; checkpoints have those of their step",
    """
        trigger_parameter_sync_step parameter_sync_step weight_sync_steps
    """: "the servers get new weights after each step",
    """
        use_rslora use_dora lora_modules_to_save lora_target_parameters lora.init_method
        lora_adapter_path adapter_path lora.adapter_path lora.type
    """: (
        "adapters begin at no change, stand beside matrices (lora_target_modules) and are scaled "
        "by lora_alpha over lora_rank"
    ),
    "model_revision": "the model is the newest state of its repository; of another, name a folder",
    "distillation.** teacher.** distill.** opd.**": (
        "a teacher is algorithm.reference_model, with algorithm = 'opd' to learn from it alone"
    ),
    "mtp.** mtp_num_layers": "heads that predict further tokens are not trained",
    "qat.** fake_int4_qat.**": "weights are not rounded in training; inference_quantization is",
    """
        rollout.pipeline_model_parallel_size inference_engine_pipeline_parallel_size
        inference_engine.pipeline_parallel_size disaggregation.** enable_pd num_prefill
    """: (
        "GPUs of a server share a model by inference_tensor_parallel_size, or have copies by "
        "inference_data_parallel_size"
    ),
    """
        vllm_server_base_url remote_inference_engine_urls external_server_urls external_proxy_url
        rollout_server_url vllm_group_port
    """: "a run starts its servers itself, as many as inference_num_workers",
    "virtual_pipeline_model_parallel_size expert_tensor_parallel_size": (
        "the model is divided by the megatron_ sizes in [megatron] alone"
    ),
    """
        wandb.key wandb.org wandb.entity wandb_entity wandb_api_key wandb_base_url
    """: "W&B reads it from the environment: WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL",
    "do_train do_eval do_predict": "`telescope train` trains, and `telescope eval` evaluates",
    "dr_grpo_loss_agg_mode loss_scale_factor": (
        "dr_grpo divides its loss by rollouts times max_tokens; to divide by the tokens of the "
        "step is a variant of the algorithm, `replace(ALGORITHM, weighting='token')` with "
        "ALGORITHM from telescope_train.algorithms.dr_grpo, given as algorithm = 'module:NAME'"
    ),
    "tis_logprob_clamp": "the log of a weight of use_tis is always cut to 20 nats",
    "off_policy_mask_threshold": (
        "no sample is left out for a negative advantage far from the policy that sampled it; "
        "seq_is_masking leaves out samples of any advantage whose ratio is out of bounds"
    ),
    "top_entropy_quantile": "the loss takes all tokens of an answer, whatever their entropy",
    "filter_groups.max_num_gen_batches": (
        "new draws replace the groups that should_accept_fn rejects until the batch is full"
    ),
    "sandbox_fusion.max_concurrent": (
        "code runs in the sandboxes of an environment, whose settings stand in env of its "
        "[[environments]] entry"
    ),
    "gibberish_logprob_offset": (
        "filter_gibberish always asks for 2 nats below the log-prob of a uniform draw"
    ),
    "fsdp_gradient_sync": (
        "ranks add up their gradients after each packed row, and whole copies of the model "
        "(fsdp_replicate_size) once in an optimizer step"
    ),
    "fsdp_prefetch_layers forward_prefetch": (
        "torch gathers the weights of the next layer while one computes"
    ),
    "eval_start_end_use_all_servers": (
        "evals before and after training use every server; those of eval_num_servers alone play "
        "the evals while the run trains"
    ),
    "ray_namespace": "Ray gives each run a namespace of its own",
    "freq_secs": "checkpoint_every and eval_every are in steps, not in seconds",
    "min_new_tokens ignore_eos stop_token_ids greedy": (
        "a turn ends with an end token of the model (eos_token_id in its generation_config.json), "
        "at a text of stop, or after max_tokens"
    ),
    "metric_name best_metric_key load_best_model_at_end metric_for_best_model greater_is_better": (
        "the newest checkpoints are kept (checkpoint_keep_last), not those with the best metric"
    ),
    "default_hdfs_dir del_local_ckpt_after_load": (
        "checkpoints stay in checkpoint_dir, which may be a mounted folder"
    ),
    "device use_cpu no_cuda": "GPUs are used where there are any, else the CPU",
    "val_only": "`telescope eval` plays an evaluation without training",
    "enable_activation_offload activation_offloading": (
        "activations are computed again (gradient_checkpointing), not moved to CPU memory"
    ),
    "load_in_4bit load_in_8bit use_bnb_nested_quant bnb_4bit_quant_type": (
        "weights are trained in model_dtype; quantized ones cannot be"
    ),
    "apply_chat_template": ("the model's chat template is always used; chat_template replaces it"),
    "ref.** ref_load ref_num_nodes ref_num_gpus_per_node ref_pretrain colocate_actor_ref": (
        "the reference is kept by the ranks if kl_penalty_tau is above 0: the initial model, or "
        "reference_model"
    ),
}
NO_EQUAL_NAMES = _by_name(_NO_EQUAL)
"""Name in other systems -> reason why there is no such setting, and what to do instead."""

SUPERVISED_NAMES = dict.fromkeys(
    ("make_tiny_model", "output", "dataset", "num_examples", "num_held_out", "stop_at_accuracy"),
    "it is a setting of `telescope sft`, and this is `telescope train`",
)
"""Setting that is often in files for `telescope sft` -> a remark that it belongs there."""
