"""Names in the settings files that other systems bring, as paths: facts, one system after another.

Of a part that has nothing to do with training here (profilers, data sets), a few stand for all.
"""

VERL = """
actor_rollout_ref.actor: strategy ppo_mini_batch_size ppo_micro_batch_size
    ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio
    clip_ratio_low clip_ratio_high clip_ratio_c policy_loss.loss_mode loss_agg_mode entropy_coeff
    use_kl_loss use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle grad_clip
    checkpoint.save_contents checkpoint.async_save optim.lr optim.lr_warmup_steps_ratio
    optim.total_training_steps optim.weight_decay optim.lr_warmup_steps optim.min_lr_ratio
    optim.warmup_style use_fused_kernels profiler.enable ulysses_sequence_parallel_size
    entropy_from_logits_with_chunking entropy_checkpointing fsdp_config.param_offload
    fsdp_config.optimizer_offload fsdp_config.fsdp_size fsdp_config.forward_prefetch
    use_remove_padding
actor_rollout_ref.ref: strategy log_prob_micro_batch_size_per_gpu fsdp_config.param_offload
actor_rollout_ref.rollout: name mode temperature top_k top_p prompt_length response_length dtype
    gpu_memory_utilization ignore_eos enforce_eager free_cache_engine tensor_model_parallel_size
    max_num_batched_tokens max_model_len max_num_seqs log_prob_micro_batch_size
    log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu
    disable_log_stats do_sample n over_sample_rate engine_kwargs.vllm val_kwargs.temperature
    val_kwargs.n multi_turn.enable multi_turn.max_assistant_turns multi_turn.tool_config_path
    calculate_log_probs agent.num_workers update_weights_bucket_megabytes trace.backend
    enable_chunked_prefill load_format layered_summon
actor_rollout_ref: hybrid_engine nccl_timeout
actor_rollout_ref.model: path custom_chat_template use_shm external_lib override_config
    enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank lora_alpha
    target_modules exclude_modules use_liger trust_remote_code
data: tokenizer train_files val_files prompt_key reward_fn_key max_prompt_length max_response_length
    train_batch_size val_batch_size shuffle filter_overlong_prompts truncation image_key
critic: strategy optim.lr ppo_micro_batch_size_per_gpu cliprange_value
reward_model: enable model.path micro_batch_size_per_gpu reward_manager
custom_reward_function: path name
algorithm: gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty
    kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon use_pf_ppo
trainer: balance_batch total_epochs total_training_steps project_name experiment_name logger
    log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq
    resume_mode resume_from_path val_before_train val_only test_freq critic_warmup
    default_hdfs_dir del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep
    max_critic_ckpt_to_keep ray_wait_register_center_timeout device
    v1.separate_async.parameter_sync_step v1.sampler.max_off_policy_threshold
distillation: enabled teacher_key teacher_models.teacher_model.model_path
async_training: trigger_parameter_sync_step concurrent_samples_per_replica staleness_threshold
    partial_rollout
global_profiler: tool steps save_path
ray_kwargs: ray_init.num_cpus timeline_json_file
"""

AREAL = """
: experiment_name trial_name seed enable_offload total_train_epochs tokenizer_path allocation_mode
cluster: n_nodes n_gpus_per_node fileroot name_resolve.type
scheduler: type endpoint deploy_mode
rollout: experiment_name max_concurrent_rollouts queue_size consumer_batch_size
    max_head_offpolicyness enable_rollout_tracing scheduling_spec fileroot dump_to_file
gconfig: n_samples min_new_tokens max_new_tokens greedy temperature frequency_penalty
eval_gconfig: n_samples max_new_tokens temperature top_p
teacher: train.path train.optimizer.lr
actor: experiment_name path init_from_scratch disable_dropout gradient_checkpointing dtype
    mb_spec.max_tokens_per_mb optimizer.type optimizer.lr optimizer.weight_decay optimizer.beta1
    optimizer.beta2 optimizer.eps optimizer.lr_scheduler_type optimizer.gradient_clipping
    optimizer.warmup_steps_proportion eps_clip reward_scaling reward_bias kl_ctl ppo_n_minibatches
    recompute_logprob use_decoupled_loss behav_imp_weight_cap reward_norm.mean_level
    adv_norm.mean_level adv_norm.std_level weight_update_mode max_new_tokens
    megatron.use_deterministic_algorithms
ref: path dtype mb_spec.max_tokens_per_mb
sglang: model_path mem_fraction_static
vllm: model max_model_len gpu_memory_utilization
train_dataset: batch_size shuffle num_workers path type max_length
valid_dataset: batch_size path
saver: freq_epochs freq_steps freq_secs
recover: mode freq_secs
evaluator: freq_epochs freq_steps
stats_logger: wandb.mode
perf_tracer: enabled
"""

SKYRL = """
data: train_data val_data
trainer: strategy sequence_parallel_backend gradient_checkpointing seed resume_mode resume_path
    log_path ckpt_path max_ckpts_to_keep ckpt_interval hf_save_interval export_path bf16 epochs
    update_epochs_per_batch train_batch_size policy_mini_batch_size critic_mini_batch_size
    micro_train_batch_size_per_gpu micro_forward_batch_size_per_gpu update_ref_every_epoch
    use_sample_packing eval_batch_size eval_before_train eval_interval max_prompt_length flash_attn
    project_name run_name logger dump_data_batch dump_eval_results
trainer.placement: colocate_all policy_num_nodes policy_num_gpus_per_node
trainer.policy: model.path model.lora.rank model.lora.alpha model.lora.dropout
    model.lora.target_modules optimizer_config.lr optimizer_config.adam_betas
    optimizer_config.weight_decay optimizer_config.max_grad_norm optimizer_config.offload_after_step
    optimizer_config.num_warmup_steps optimizer_config.scheduler fsdp_config.cpu_offload
    sequence_parallel_size use_torch_compile record_memory
trainer.ref: model.path fsdp_config.cpu_offload
trainer.critic: model.path optimizer_config.lr
trainer.algorithm: advantage_estimator kl_ctrl.type kl_estimator_type use_kl_in_reward use_kl_loss
    kl_loss_coef use_entropy_loss entropy_loss_coef advantage_batch_normalize policy_loss_type
    loss_reduction grpo_norm_by_std zero_variance_filter lambd gamma eps_clip_low eps_clip_high
    clip_ratio_c tis_imp_ratio_cap use_tis max_seq_len off_policy_correction.tis_ratio_type
    off_policy_correction.token_tis_ratio_clip_high off_policy_correction.geo_mask_high
    sapo.tau_pos sapo.tau_neg value_clip dynamic_sampling.type cispo.cispo_eps_clip_low
    clip_cov.clip_ratio clip_cov.clip_cov_lb kl_cov.kl_cov_frac dppo.delta_low
    dppo.delta_high dppo.dppo_type
    off_policy_correction.token_mask_is_threshold_high
trainer.fully_async: max_staleness_steps num_parallel_generation_workers
generator: model_name model_dtype run_engines_locally num_inference_engines backend
    weight_sync_backend inference_engine_tensor_parallel_size inference_engine_data_parallel_size
    n_samples_per_prompt async_engine batched max_input_length enable_prefix_caching
    enable_chunked_prefill max_num_batched_tokens enforce_eager gpu_memory_utilization max_num_seqs
    http_endpoint_host http_endpoint_port served_model_name max_turns chat_template.name_or_path
    engine_init_kwargs sampling_params.max_generate_length sampling_params.repetition_penalty
    sampling_params.temperature sampling_params.top_p sampling_params.min_p sampling_params.top_k
    sampling_params.logprobs sampling_params.stop
    eval_n_samples_per_prompt eval_sampling_params.temperature eval_sampling_params.top_p
    inference_engine.data_parallel_size inference_engine.pipeline_parallel_size
    inference_engine.external_server_urls
environment: env_class skyrl_gym.max_env_workers skyrl_gym.llm_as_a_judge.model
"""

NEMO_RL = """
grpo: num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_epochs max_num_steps
    normalize_rewards use_leave_one_out_baseline val_period val_at_start overlong_filtering
    max_val_samples val_batch_size seed async_grpo.enabled async_grpo.max_trajectory_age_steps
loss_fn: reference_policy_kl_penalty ratio_clip_min ratio_clip_max ratio_clip_c
    use_on_policy_kl_approximation use_importance_sampling_correction
    sequence_level_importance_ratios token_level_loss
checkpointing: enabled checkpoint_dir metric_name keep_top_k save_period
policy: model_name tokenizer.name tokenizer.chat_template scheduler.milestones
    train_global_batch_size train_micro_batch_size
    generation_batch_size logprob_batch_size max_total_sequence_length precision logprob_chunk_size
    dtensor_cfg.enabled dtensor_cfg.tensor_parallel_size megatron_cfg.enabled
    megatron_cfg.activation_checkpointing megatron_cfg.tensor_model_parallel_size
    megatron_cfg.pipeline_model_parallel_size megatron_cfg.context_parallel_size
    megatron_cfg.expert_model_parallel_size megatron_cfg.sequence_parallel
    megatron_cfg.optimizer.lr dynamic_batching.enabled sequence_packing.enabled max_grad_norm
    make_sequence_length_divisible_by optimizer.name optimizer.kwargs.lr
    optimizer.kwargs.weight_decay optimizer.kwargs.betas optimizer.kwargs.eps
policy.generation: backend max_new_tokens temperature top_p top_k stop_token_ids stop_strings
    vllm_cfg.async_engine vllm_cfg.precision vllm_cfg.tensor_parallel_size
    vllm_cfg.gpu_memory_utilization vllm_cfg.max_model_len vllm_cfg.enforce_eager vllm_kwargs
    colocated.enabled
data: max_input_seq_length prompt_file shuffle dataset_name
env: math.num_workers
logger: log_dir wandb_enabled tensorboard_enabled monitor_gpus wandb.project wandb.name
    gpu_monitoring.collection_interval
cluster: gpus_per_node num_nodes
"""

PRIME_RL = """
: inference_gpu_ids trainer_gpu_ids max_steps output_dir max_async_level seq_len
model: name
wandb: project name
trainer.optim: lr weight_decay betas1 betas2 type
trainer.scheduler: type warmup_steps decay_steps min_lr
trainer.model: seq_len attn impl optim_cpu_offload lora.rank lora.alpha lora.dropout
    lora.target_modules
trainer.loss: type kl_tau
trainer.ckpt: interval
orchestrator: batch_size rollouts_per_example seq_len max_off_policy_steps max_inflight_rollouts
    oversampling_factor mask_truncated_completions zero_truncated_completions trajectory_strategy
orchestrator.sampling: max_tokens temperature
orchestrator.buffer: online_difficulty_filtering
orchestrator.env: id args
orchestrator.eval: interval num_examples rollouts_per_example
inference.model: enable_auto_tool_choice tool_call_parser max_model_len enforce_eager
inference.parallel: tp dp
inference.server: host port
log: level
weight_broadcast: type
deployment: type num_train_nodes
slurm: job_name
"""

VERIFIERS = """
: model
env: id
env.args: dataset
inference: gpus
inference.args: enforce_eager
trainer: gpus
trainer.args: run_name rollouts_per_example micro_batch_size batch_size max_steps max_tokens
    max_seq_len max_prompt_len max_concurrent learning_rate epsilon importance_sampling_level
    scale_rewards loss_type mask_env_responses mask_truncated_completions zero_truncated_completions
    vllm_importance_sampling_cap temperature top_p top_k min_p repetition_penalty num_batches_ahead
    async_max_queue_size async_generation_timeout generation_timeout vllm_server_host
    vllm_server_port vllm_server_timeout output_dir lr_scheduler_type warmup_steps bf16
    max_grad_norm gradient_checkpointing save_strategy save_steps eval_strategy eval_steps
    save_only_model logging_steps report_to shuffle_dataset use_lora lora_rank lora_alpha
    lora_dropout lora_target_modules beta num_iterations num_generations
    per_device_train_batch_size gradient_accumulation_steps
"""

TRL = """
: model_name_or_path dtype torch_dtype attn_implementation use_peft lora_r lora_alpha lora_dropout
    lora_target_modules load_in_4bit dataset_name dataset_config dataset_train_split reward_funcs
    output_dir run_name per_device_train_batch_size gradient_accumulation_steps num_train_epochs
    max_steps learning_rate lr_scheduler_type warmup_ratio warmup_steps weight_decay adam_beta1
    adam_beta2 adam_epsilon max_grad_norm optim bf16 fp16 gradient_checkpointing torch_compile
    deepspeed fsdp ddp_timeout logging_steps save_steps save_strategy save_total_limit
    save_only_model eval_strategy eval_steps report_to push_to_hub hub_model_id seed
    resume_from_checkpoint num_generations max_completion_length max_prompt_length temperature top_p
    top_k min_p repetition_penalty use_vllm vllm_mode vllm_server_host vllm_server_port
    vllm_server_timeout vllm_gpu_memory_utilization vllm_tensor_parallel_size
    vllm_max_model_length vllm_enable_sleep_mode beta num_iterations epsilon epsilon_high delta
    importance_sampling_level reward_weights scale_rewards loss_type mask_truncated_completions
    sync_ref_model ref_model_sync_steps ref_model_mixup_alpha use_liger_kernel
    vllm_importance_sampling_correction vllm_importance_sampling_cap steps_per_generation
    generation_batch_size shuffle_dataset log_completions remove_unused_columns
    cast_lm_head_to_fp32 max_tool_calling_iterations lr_scheduler_kwargs model_init_kwargs
    router_aux_loss_coef num_generations_eval chat_template_kwargs vllm_server_base_url
    vespo_k_pos multi_objective_aggregation use_adaptive_entropy entropy_target
    use_bias_correction_kl log_unique_prompts normalize_advantages dataset_text_field
    activation_offloading max_inflight_tasks queue_maxsize weight_sync_steps token_budget
    model_revision use_dora use_rslora lora_modules_to_save load_best_model_at_end
    metric_for_best_model dataloader_num_workers ddp_find_unused_parameters logging_strategy
    data_seed use_cpu auto_find_batch_size optim_args gradient_checkpointing_kwargs
"""

OPENRLHF = """
: pretrain remote_rm_url reward_pretrain prompt_data input_key label_key apply_chat_template
    n_samples_per_prompt rollout_batch_size train_batch_size micro_train_batch_size
    micro_rollout_batch_size prompt_max_len generate_max_len max_samples max_epochs num_episodes
    actor_learning_rate critic_learning_rate lr_warmup_ratio l2 max_norm init_kl_coef kl_estimator
    use_kl_loss advantage_estimator eps_clip eps_clip_low_high entropy_loss_coef gamma lambd
    zero_stage bf16 flash_attn gradient_checkpointing packing_samples adam_offload ring_attn_size
    actor_num_nodes actor_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node
    critic_num_nodes critic_num_gpus_per_node vllm_num_engines vllm_tensor_parallel_size
    vllm_gpu_memory_utilization vllm_sync_backend vllm_enable_sleep colocate_all_models
    enable_prefix_caching enforce_eager save_steps save_path ckpt_path max_ckpt_num load_checkpoint
    logging_steps eval_steps temperature top_p seed normalize_reward dynamic_filtering
    dynamic_filtering_reward_range async_train async_queue_size partial_rollout
    enable_vllm_is_correction vllm_is_truncated_threshold lora_rank lora_alpha lora_dropout
    target_modules load_in_4bit use_tensorboard wandb_run_name wandb_project
"""

SLIME = """
: hf_checkpoint ref_load load save save_interval prompt_data input_key label_key apply_chat_template
    rollout_shuffle rm_type custom_rm_path num_rollout rollout_batch_size n_samples_per_prompt
    rollout_max_response_len rollout_max_context_len rollout_max_prompt_len rollout_temperature
    rollout_top_p rollout_stop rollout_seed global_batch_size num_steps_per_rollout balance_data
    eval_interval eval_prompt_data n_samples_per_eval_prompt eval_max_response_len
    tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size recompute_granularity recompute_method recompute_num_layers
    use_dynamic_batch_size max_tokens_per_gpu log_probs_chunk_size advantage_estimator use_kl_loss
    kl_loss_coef kl_loss_type kl_coef entropy_coef eps_clip eps_clip_high eps_clip_c use_tis
    tis_clip tis_clip_low optimizer lr lr_decay_style lr_warmup_iters weight_decay adam_beta1
    adam_beta2 clip_grad optimizer_cpu_offload rollout_num_gpus rollout_num_gpus_per_engine
    actor_num_nodes actor_num_gpus_per_node colocate sglang_mem_fraction_static
    sglang_server_concurrency over_sampling_batch_size dynamic_sampling_filter_path partial_rollout
    use_wandb wandb_project wandb_group update_weight_buffer_size use_rollout_routing_replay
    ref_update_interval num_epoch train_backend attention_backend
"""

OPENRLHF_SECTIONS = """
ref: num_nodes num_gpus_per_node offload
reward: num_nodes num_gpus_per_node model_name_or_path remote_url normalize_enable clip_range
    overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef
actor: num_nodes num_gpus_per_node model_name_or_path gradient_checkpointing_enable
    gradient_checkpointing_reentrant optim muon.lr muon.momentum adam.lr adam.betas adam.eps
    adam.weight_decay lr_scheduler lr_warmup_ratio min_lr_ratio max_norm eps_clip
    eps_clip_low_high dual_clip policy_loss_type loss_agg_mode entropy_coef aux_loss_coef
critic: num_nodes num_gpus_per_node adam.lr value_clip freezing_steps
vllm: num_engines tensor_parallel_size sync_backend enable_prefix_caching enforce_eager enable_sleep
    gpu_memory_utilization
algo: advantage.estimator advantage.gamma advantage.lambd advantage.no_std_norm
    advantage.is_correction_level advantage.is_correction_mode advantage.is_correction_gating
    advantage.is_correction_threshold kl.init_coef kl.estimator kl.use_loss kl.target kl.horizon
    kl.unbiased_gradient dynamic_filtering_enable dynamic_filtering_range
train: async_enable async_queue_size partial_rollout_enable colocate_all colocate_actor_ref
    colocate_critic_reward num_episodes max_epochs batch_size micro_batch_size max_tokens_per_gpu
    dynamic_batch_enable full_determinism_enable enable_ema ema_beta seed agent_func_path
rollout: batch_size micro_batch_size n_samples_per_prompt max_new_tokens top_p temperature
    vllm_generate_batch_size max_tokens_per_gpu
ds: zero_stage param_dtype adam_offload attn_implementation use_liger_kernel tensor_parallel_size
    packing_samples load_in_4bit lora.rank lora.alpha lora.dropout lora.target_modules zpg
    overlap_comm ring_attn_size
ckpt: path save_steps save_hf max_num load_enable output_dir best_metric_key
eval: steps dataset split temperature n_samples_per_prompt
data: max_len prompt_dataset input_key label_key apply_chat_template
logger: logging_steps tensorboard_dir wandb.key wandb.org wandb.group wandb.project wandb.run_name
"""

ATROPOS = """
: model_name lr training_steps batch_size seq_len gradient_accumulation_steps warmup_steps optimizer
    adafactor_relative_step device save_path clip_eps checkpoint_interval vllm_port
    vllm_gpu_memory_utilization max_model_len dtype lora_r use_wandb wandb_group group_size
    steps_per_eval max_token_length max_batches_offpolicy tokenizer_name total_steps wandb_name
    num_rollouts_to_keep ensure_scores_are_not_same data_path_to_save_groups thinking_mode
    rollout_server_url num_inference_nodes
"""

PEERS = {
    "openrlhf_sections": OPENRLHF_SECTIONS,
    "atropos": ATROPOS,
    "verl": VERL,
    "areal": AREAL,
    "skyrl": SKYRL,
    "nemo_rl": NEMO_RL,
    "prime_rl": PRIME_RL,
    "verifiers": VERIFIERS,
    "trl": TRL,
    "openrlhf": OPENRLHF,
    "slime": SLIME,
}


def paths_of(text: str) -> list[str]:
    """Return the dotted names in one of the texts above."""
    found: list[str] = []
    section = ""
    for word in text.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            found.append(f"{section}.{word}" if section else word)
    return found


def document_of(text: str) -> dict[str, object]:
    """Return the same as the tables of a settings file."""
    document: dict[str, object] = {}
    for path in paths_of(text):
        *sections, leaf = path.split(".")
        table = document
        for part in sections:
            inner = table.setdefault(part, {})
            assert isinstance(inner, dict), path
            table = inner
        table[leaf] = 1
    return document
