"""Names of settings that people may expect and that do not exist here, with reasons.

They are names of other systems, of `telescope sft`, and of evaluations. `critic.**` is a whole
section, and `data.*` covers its names that have no answer of their own in `names` or here.
"""

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
"""Setting of evals -> reason why training rollouts do not have it."""

_PACKED = (
    "samples are packed into rows of seq_len tokens, so there is no micro batch; lower seq_len, or "
    "max_tokens, if memory is short"
)
_ACCUMULATED = (
    "a batch is as many packed rows as it needs, and their gradients are added up; "
    "number_of_minibatches says how many optimizer steps it makes"
)
_PROMPT_LENGTH = (
    "a prompt has no limit of its own, and none is cut: max_model_len bounds prompt and answer "
    "together; max_tokens bounds the answer"
)
_VALUES = "there is no value model: rollouts are compared with those of their group or batch"
_DATA = "prompts, answers and rewards come from [[environments]]; write or install an environment"
_REWARDS = (
    "rewards come from the environment: a decorated method of it, which may ask a judge or run "
    "code in a sandbox"
)
_EPOCHS = "a run ends after number_of_steps; examples come around again as often as that takes"
_DETERMINISTIC = (
    "set seed_sampling = true, so that rollouts repeat and gradients are added in the order of the "
    "draws; the trainer's arithmetic then repeats on the same machine"
)
_ENGINE = "the engine is vLLM, and how it is started is in [inference]"
_ATTENTION = "attention for packed rows is chosen by the machine: flash-attn where it is installed"
_SHARDING = "train_backend chooses what shares the model: 'fsdp' (torch's FSDP2) or 'megatron'"
_ALWAYS = "there is no switch for it: it is always done"
_SAPO_GATE = (
    "the gate of sapo is as steep as in its paper; another one is a variant of the algorithm, "
    "`replace(ALGORITHM, loss=partial(loss, tau_pos=2.0))` with both names from "
    "telescope_train.algorithms.sapo, given as algorithm = 'module:NAME'"
)
_DR_GRPO_TOKENS = (
    "dr_grpo divides its loss by rollouts times max_tokens; to divide by the tokens of the step is "
    "a variant of the algorithm, `replace(ALGORITHM, weighting='token')` with ALGORITHM from "
    "telescope_train.algorithms.dr_grpo, given as algorithm = 'module:NAME'"
)
_GRADIENT_SYNC = (
    "ranks add up their gradients after each packed row, and whole copies of the model "
    "(fsdp_replicate_size) once in an optimizer step"
)
_PROCESSES = "where processes go is set in [ray], and torchrun and accelerate are not used"
_HUB = "`telescope export` writes the model, and uploads it with --push"
_PROFILER = "the timeline of each step is recorded anyway, and `telescope ui` shows it"
_LOGS = "a line of metrics is written for each step, and rollouts are recorded whole"
_TURNS = "how many turns a rollout has is the environment's own setting (env.max_turns)"
_SFT_MODEL = "`telescope sft` is for supervised training; its settings are its own"
_QUANTIZED = "weights are trained in model_dtype; quantized ones cannot be"
_TEMPLATE = "the model's chat template is always used; chat_template replaces it"
_EVALS_OWN = (
    "num_samples, rollouts, temperature, top_p, top_k and max_tokens of an evaluation stand in its "
    "[[evals]] entry"
)
_ENVIRONMENT = "settings of an environment itself stand in env of its [[environments]] entry"
_TOKENIZER = "the tokenizer is the one in the folder of the model"
_CONFIG_JSON = "the model is what its config.json says; change that in a copy of its folder"
_CONSTANT = "kl_penalty_tau stays as it is set: nothing adapts it"
_IN_STEPS = "checkpoint_every and eval_every are in steps, not in seconds"
_ENDS = (
    "a turn ends with an end token of the model (eos_token_id in its generation_config.json), at a "
    "text of stop, or after max_tokens"
)
_NEWEST = "the newest checkpoints are kept (checkpoint_keep_last), not those with the best metric"
_FOLDERS = "checkpoints stay in checkpoint_dir, which may be a mounted folder"
_DEVICE = "GPUs are used where there are any, else the CPU"
_REFERENCE = "the reference is the initial model, kept by the ranks if kl_penalty_tau is above 0"

NO_EQUAL_NAMES = {
    **dict.fromkeys(
        (
            *("micro_batch_size", "per_device_train_batch_size", "per_device_eval_batch_size"),
            *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "train_micro_batch_size"),
            *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "n_mbs"),
            *("micro_train_batch_size", "micro_rollout_batch_size", "logprob_batch_size"),
            *("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"),
            *("micro_batch_size_per_gpu", "forward_micro_batch_size", "use_dynamic_bsz"),
            *("forward_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "eval_batch_size"),
            *("use_dynamic_batch_size", "dynamic_batching.**", "log_prob_max_token_len_per_gpu"),
            *("forward_max_token_len_per_gpu", "logprob_mb_tokens", "val_batch_size"),
        ),
        _PACKED,
    ),
    **dict.fromkeys(
        (
            *("use_remove_padding", "packing", "packing_samples", "use_sample_packing"),
            *("sequence_packing.**", "balance_batch", "balance_data", "padding_free"),
            *("mask_env_responses", "use_fused_kernels", "use_liger", "use_liger_kernel"),
            *(
                "async_save",
                "batched",
                "sampling_params.logprobs",
                "calculate_log_probs",
                "disable_dropout",
                "use_vllm",
                "async_engine",
                "do_sample",
            ),
        ),
        _ALWAYS,
    ),
    "gradient_accumulation_steps": _ACCUMULATED,
    **dict.fromkeys(
        (
            *("max_prompt_len", "max_prompt_length", "prompt_max_len", "prompt_length"),
            *("max_input_length", "max_input_seq_length", "filter_overlong_prompts", "truncation"),
            "rollout_max_prompt_len",
        ),
        _PROMPT_LENGTH,
    ),
    **dict.fromkeys(
        (
            *("critic.**", "gamma", "lam", "lambd", "gae_lambda", "value_clip", "critic_warmup"),
            *("critic_learning_rate", "critic_pretrain", "critic_num_nodes", "cliprange_value"),
            *("critic_num_gpus_per_node", "critic_mini_batch_size", "discount"),
            *("max_critic_ckpt_to_keep", "value_head_prefix", "vf_coef"),
        ),
        _VALUES,
    ),
    **dict.fromkeys(
        (
            *("data.*", "train_dataset.*", "valid_dataset.*", "dataset_name", "dataset_config"),
            *("prompt_data", "input_key", "label_key", "train_data", "val_data", "train_files"),
            *("val_files", "eval_prompt_data", "prompt_key", "dataset_train_split", "max_samples"),
            *("dataset_test_split", "shuffle_dataset", "rollout_shuffle", "shuffle"),
            *("remove_unused_columns", "eval_dataset", "prompt_file", "system_prompt_file"),
        ),
        _DATA,
    ),
    **dict.fromkeys(
        (
            *("reward_model.**", "custom_reward_function.**", "reward_funcs", "reward_weights"),
            *("rm_type", "custom_rm_path", "remote_rm_url", "reward_pretrain", "reward_scaling"),
            *("reward_bias", "reward_norm.**", "reward_model_path", "zero_truncated_completions"),
            *("reward_manager", "reward_fn_key"),
        ),
        _REWARDS,
    ),
    **dict.fromkeys(
        (
            *("total_epochs", "num_train_epochs", "total_train_epochs", "epochs", "num_epoch"),
            *("max_num_epochs", "num_epochs", "freq_epochs"),
        ),
        _EPOCHS,
    ),
    **dict.fromkeys(
        ("use_deterministic_algorithms", "full_determinism", "deterministic_mode", "deterministic"),
        _DETERMINISTIC,
    ),
    **dict.fromkeys(
        (
            *("sglang.*", "vllm_mode", "generation.backend", "generator.backend"),
            *("rollout.name", "rollout.mode", "allocation_mode", "run_engines_locally"),
            *("use_sglang", "inference_engine_type", "rollout_backend", "served_model_name"),
        ),
        _ENGINE,
    ),
    **dict.fromkeys(
        ("attn_implementation", "flash_attn", "attn", "use_flash_attn", "attention_backend"),
        _ATTENTION,
    ),
    **dict.fromkeys(
        ("deepspeed", "zero_stage", "fsdp", "fsdp_config.*", "wrap_policy.*", "dtensor_cfg.*"),
        _SHARDING,
    ),
    **dict.fromkeys(
        (
            *("ddp_timeout", "nccl_timeout", "local_rank", "launcher.**", "scheduler.*"),
            *("scheduling_spec", "name_resolve.**", "cluster.*", "placement.*", "slurm.**"),
            *("deployment.*", "ray_kwargs.*"),
        ),
        _PROCESSES,
    ),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token"), _HUB),
    **dict.fromkeys(
        ("profiler.**", "global_profiler.**", "perf_tracer.**", "record_memory", "profile"),
        _PROFILER,
    ),
    **dict.fromkeys(
        (
            *("logging_steps", "log_completions", "num_completions_to_print", "log_on_each_node"),
            *(
                "disable_log_stats",
                "log_val_generations",
                "rollout_data_dir",
                "validation_data_dir",
                "dump_to_file",
            ),
            *("num_val_samples_to_print", "dump_data_batch", "dump_eval_results"),
        ),
        _LOGS,
    ),
    **dict.fromkeys(
        (
            *("max_turns", "max_rollout_turns", "max_assistant_turns", "max_user_turns"),
            *("multi_turn.**", "max_tool_calling_iterations"),
        ),
        _TURNS,
    ),
    **dict.fromkeys(("sft.**", "dpo.**"), _SFT_MODEL),
    **dict.fromkeys(("rollout_top_p", "rollout_top_k"), _TRUNCATED),
    **dict.fromkeys(
        ("val_kwargs.**", "eval.*", "valid_dataset.**", "eval_max_response_len", "eval_top_p"),
        _EVALS_OWN,
    ),
    **dict.fromkeys(("env.*", "env.args.**", "environment.args.**"), _ENVIRONMENT),
    **dict.fromkeys(("tokenizer.**", "tokenizer_path", "tokenizer_name"), _TOKENIZER),
    **dict.fromkeys(
        ("override_config", "model_config_kwargs", "use_shm", "init_from_scratch"), _CONFIG_JSON
    ),
    **dict.fromkeys(("kl_ctrl.type", "kl_ctrl.*", "horizon", "target_kl", "kl_target"), _CONSTANT),
    **dict.fromkeys(("sapo_tau_pos", "sapo_tau_neg", "tau_pos", "tau_neg"), _SAPO_GATE),
    "dr_grpo_loss_agg_mode": _DR_GRPO_TOKENS,
    "tis_logprob_clamp": "the log of a weight of use_tis is always cut to 20 nats",
    "gibberish_logprob_offset": (
        "filter_gibberish always asks for 2 nats below the log-prob of a uniform draw"
    ),
    "fsdp_gradient_sync": _GRADIENT_SYNC,
    **dict.fromkeys(
        ("fsdp_prefetch_layers", "forward_prefetch"),
        "torch gathers the weights of the next layer while one computes",
    ),
    "eval_start_end_use_all_servers": (
        "evals before and after training use every server; those of eval_num_servers alone play "
        "the evals while the run trains"
    ),
    **dict.fromkeys(
        ("megatron_overlap_cpu_optimizer_d2h_h2d", "overlap_cpu_optimizer_d2h_h2d"), _ALWAYS
    ),
    "ray_namespace": "Ray gives each run a namespace of its own",
    "freq_secs": _IN_STEPS,
    **dict.fromkeys(("min_new_tokens", "ignore_eos", "stop_token_ids", "greedy"), _ENDS),
    "metric_name": _NEWEST,
    **dict.fromkeys(("default_hdfs_dir", "del_local_ckpt_after_load"), _FOLDERS),
    "device": _DEVICE,
    "val_only": "`telescope eval` plays an evaluation without training",
    "enable_activation_offload": (
        "activations are computed again (gradient_checkpointing), not moved to CPU memory"
    ),
    **dict.fromkeys(("engine_kwargs.*", "impl"), _ENGINE),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"), _QUANTIZED),
    **dict.fromkeys(("apply_chat_template", "apply_chat_template_kwargs"), _TEMPLATE),
    **dict.fromkeys(
        ("ref.**", "ref_load", "ref_num_nodes", "ref_num_gpus_per_node", "ref_pretrain"), _REFERENCE
    ),
}
"""Name in other systems -> reason why there is no such setting, and what to do instead."""

_SUPERVISED = "it is a setting of `telescope sft`, and this is `telescope train`"
SUPERVISED_NAMES = dict.fromkeys(
    ("make_tiny_model", "output", "dataset", "num_examples", "num_held_out", "stop_at_accuracy"),
    _SUPERVISED,
)
"""Setting that is often in files for `telescope sft` -> a remark that it belongs there."""
