"""The schema of `telescope train`, its known names, and which settings fit together."""

import ast
from pathlib import Path

import pytest
from pydantic import BaseModel

import telescope_train
from telescope_core.errors import ConfigError
from telescope_core.settings.config import leaf_paths
from telescope_train.algorithms.record import known_algorithms
from telescope_train.backends.protocol import BackendSettings
from telescope_train.config.names import FOREIGN_NAMES, NO_EQUAL_NAMES, REFUSED_NAMES
from telescope_train.config.schema import EnvironmentEntry, EvalEntry, TrainConfig
from telescope_train.plan.checks.config import config_found
from telescope_train.plan.load import load_train_config

SOURCE = Path(telescope_train.__file__).parent
RUN = ["--name", "toy", "--number_of_steps", "10", "--model", "a/b"]
MATHS = ["--environments", '[{"name": "math-reasoning"}]']
GROUP_LANES = ["--enable_individual_sample_lanes", "false"]


def load(*flags: str) -> TrainConfig:
    return load_train_config([], [*RUN, *MATHS, *flags])


def sections() -> dict[str, type[BaseModel]]:
    found = {name: info.annotation for name, info in TrainConfig.model_fields.items()}
    models = {name: cls for name, cls in found.items() if isinstance(cls, type)}
    return {**models, "environments": EnvironmentEntry, "evals.evals": EvalEntry}


def test_defaults_pass_every_check():
    config = load()
    assert config.rollout.group_size == 8
    assert config.environments[0].weight == 1.0


def test_leaf_names_are_unique_and_apart_from_foreign_ones():
    leaves = leaf_paths(TrainConfig)
    assert not {*FOREIGN_NAMES, *NO_EQUAL_NAMES} & set(leaves)
    assert not set(FOREIGN_NAMES) & {*NO_EQUAL_NAMES, *REFUSED_NAMES}
    of_tables = {*EnvironmentEntry.model_fields, *EvalEntry.model_fields}
    targets = {answer.partition(": ")[0] for answer in FOREIGN_NAMES.values()}
    assert not targets - {*leaves, *of_tables}


@pytest.mark.slow
def test_every_setting_is_read_by_the_trainer():
    read: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE)
        reads = where.name in ("run_folder.py", "eval_folders.py")
        declares = where.parts[0] == "config" and not reads
        if not declares and where.parts[0] != "plan":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    unread = [
        f"{section}.{name}"
        for section, model in sections().items()
        for name in model.model_fields
        if name not in read
    ]
    assert not unread, "accepted and ignored: read it in the trainer, or remove it"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temperature", "0"], "rollout.temperature must be above 0 in training, got 0"),
        (["--group_size", "1"], "group_size must be at least 2 for grpo, got 1"),
        (["--max_tokens", "4096"], "rollout.max_tokens (4096) must be below trainer.seq_len"),
        (
            ["--max_tokens", "128", "--max_model_len", "128"],
            "rollout.max_tokens (128) must be below inference.max_model_len (128)",
        ),
        (["--max_model_len", "8192"], "must not exceed trainer.seq_len (4096)"),
        (["--use_tis", "--use_ppo_clip"], "would count the ratio to the sampler twice"),
        (
            ["--include_stop_str_in_output", "false"],
            "rollout.include_stop_str_in_output has no effect without stop",
        ),
        (["--clip_low", "0.1"], "algorithm.clip_low has no effect without use_ppo_clip"),
        (["--clip_high", "0.1"], "algorithm.clip_high has no effect without use_ppo_clip"),
        (
            [*("--clip_low", "0", "--clip_high", "0"), "--use_ppo_clip"],
            "algorithm.clip_low and clip_high are both 0",
        ),
        (["--env_isolation", "none", "--env_workers", "2"], "rollout.env_workers has no effect"),
        (
            [*("--env_isolation", "none"), *("--env_memory_limit_mb", "512")],
            "rollout.env_memory_limit_mb has no effect because no environment of this run starts",
        ),
        (
            [
                *("--environments", '[{"name": "a:B", "env_workers": 2}]'),
                *("--env_isolation", "none"),
            ],
            "environments[0] (a:B): env_workers has no effect",
        ),
        (
            ["--environments", '[{"name": "a", "env_addresses": ["here"]}]'],
            "must be host:port such as 10.0.0.5:7000, got 'here'",
        ),
        (
            [
                *("--environments", '[{"name": "a", "env_addresses": ["h:1"]}]'),
                *("--env_isolation", "none"),
            ],
            "env_addresses has no effect with env_isolation = 'none'",
        ),
        (
            ["--tis_cap", "3.0", "--max_async_rollout", "0"],
            "algorithm.tis_cap has no effect without use_tis",
        ),
        (["--adam_betas", "[0.9, 1.0]"], "adam_betas[1] must be at least 0 and below 1, got 1"),
        (["--min_lr_ratio", "0.1"], "min_lr_ratio has no effect"),
        (["--lr_scheduler", "none"], "expected constant (with warmup_steps = 0"),
        (["--lr_scheduler", "wsd"], "expected linear or cosine, with cooldown_steps"),
        (["--cooldown_steps", "2"], "trainer.cooldown_steps has no effect with lr_scheduler"),
        (
            ["--lr_scheduler", "linear", "--warmup_steps", "2", "--cooldown_steps", "99999"],
            "trainer.warmup_steps (2) and cooldown_steps (99999) must not exceed the",
        ),
        (["--output", "a"], "'output' is no setting here: it is a setting of `telescope sft`"),
        (["--lora_rank", "8"], "trainer.lora_rank has no effect without use_lora"),
        (["--lora_transfer", "adapter"], "weights.lora_transfer has no effect without use_lora"),
        (
            ["--use_lora", "--lora_transfer", "adapter", "--lora_rank", "600"],
            "vLLM computes adapters up to rank 512, and lora_rank is 600; lower it, or use",
        ),
        (
            ["--optimizer_cpu_offload", "--optimizer", "adamw_bf16"],
            "trainer.optimizer_cpu_offload works with optimizer = 'adamw'",
        ),
        (
            ["--optimizer_cpu_offload", "--optimizer", "muon"],
            "trainer.optimizer_cpu_offload works with optimizer = 'adamw', got 'muon'",
        ),
        (["--use_lora", "--optimizer", "muon"], "use 'adamw', or remove use_lora"),
        (["--muon_momentum", "0.9"], "trainer.muon_momentum has no effect without optimizer"),
        (["--muon_momentum", "1.0", "--optimizer", "muon"], "muon_momentum"),
        (
            ["--optimizer_cpu_offload", "--fsdp_cpu_offload"],
            "trainer.optimizer_cpu_offload has no effect with fsdp_cpu_offload",
        ),
        (
            ["--fsdp_context_parallel_size", "2"],
            "trainer_num_workers (1) must be a multiple of fsdp_context_parallel_size (2)",
        ),
        (["--compile", "--gradient_checkpointing", "selective"], "use 'full', or turn one off"),
        (["--compile", "--gradient_checkpointing", "auto"], "use true or false, or remove compile"),
        (["--activation_memory_gib", "2"], "no effect without gradient_checkpointing = 'auto'"),
        (["--lora_dropout", "1.0"], "lora_dropout"),
        (["--optimizer", "sgd"], "optimizer"),
        (["--warmup_steps", "11"], "must not exceed the 10 optimizer steps of the run"),
        (["--inference_base_port", "65535", "--inference_num_workers", "2"], "port 65536"),
        (["--gateway_host", "0.0.0.0"], "gateway_host is '0.0.0.0', which no program can connect"),
        (
            ["--gateway_port", "8101", "--inference_num_workers", "2"],
            "gateway_port (8101) is a port of the inference servers (8100 to 8101)",
        ),
        (["--max_off_policy_steps", "0"], "(0) must be at least max_async_rollout (1)"),
        (
            ["--max_off_policy_steps", "4", "--max_async_rollout", "0"],
            "max_off_policy_steps has no effect with max_async_rollout = 0",
        ),
        (
            ["--in_flight_update", "continue", "--max_async_rollout", "0"],
            "in_flight_update has no effect with max_async_rollout = 0",
        ),
        (
            ["--max_open_rollouts", "4096", "--free_lane_after_generation", "false"],
            "max_open_rollouts (4096) has no effect with free_lane_after_generation = false",
        ),
        (
            ["--max_open_rollouts", "7", *GROUP_LANES, "--group_size", "8"],
            "max_open_rollouts (7) must be at least the largest group_size (8)",
        ),
        (
            ["--batch_order", "finished", "--max_async_rollout", "0"],
            "scheduling.batch_order = 'finished' has no effect with max_async_rollout = 0",
        ),
        (
            ["--prompt_prefetch_buffer_size", "3", "--enable_prompt_prefetch", "false"],
            "prompt_prefetch_buffer_size has no effect without enable_prompt_prefetch",
        ),
        (["--algorithm", "grop"], "unknown algorithm 'grop'; did you mean 'grpo'"),
        (["--algorithm", "grpo_passk"], "it is rloo or dr_grpo with pass_at_k above 1"),
        (
            ["--pass_at_k", "2"],
            "pass_at_k = 2 changes nothing where rewards are right or wrong, if advantages are "
            "divided by the deviation of the group, as with grpo; set advantage_norm = 'batch'",
        ),
        (["--pass_at_k", "2", "--advantage_norm", "parts"], "compares rewards as a whole"),
        (["--pass_at_k", "2", "--algorithm", "maxrl"], "would count more twice"),
        (
            ["--pass_at_k", "8", "--algorithm", "rloo", "--group_size", "8"],
            "rollout: group_size must be above pass_at_k (8), got 8",
        ),
        (["--algorithm", "geo_mean"], "unknown algorithm 'geo_mean': it is called gmpo here"),
        (["--algorithm", "dppo_kl"], "it is dppo, with dppo_divergence"),
        (["--algorithm", "clip-cov"], "a wide clip_high, as in dapo, or entropy_coef"),
        (["--algorithm", "gdpo"], "unknown algorithm 'gdpo': it is grpo, or another that divides"),
        (["--algorithm", "Lite-PPO"], 'it is grpo with advantage_norm = "batch"'),
        (
            ["--advantage_norm", "parts", "--stream_gradients", "true"],
            'because advantage_norm is "parts"',
        ),
        (
            ["--advantage_norm", "parts", "--algorithm", "rloo"],
            "advantage_norm has no effect with rloo",
        ),
        (["--megatron_fp8", "true"], "has no effect with train_backend = 'fsdp'"),
        (["--weight_transport", "nickel"], "unknown weight_transport 'nickel'"),
        (["--eval_after_training"], "need at least one [[evals]]"),
        (["--evals", '[{"name": "a"}]'], "evals[0] (a): would never run"),
        (["--top_p", "0.9"], "'top_p' is no setting here: it takes tokens out of the distribution"),
        (
            ["--environments", '[{"name": "a", "top_k": 20}]'],
            "environments[0].top_k: 'top_k' is no setting here",
        ),
        (
            ["--rollout.repetition_penalty", "1.1"],
            "'repetition_penalty' is no setting here: it changes the distribution",
        ),
        (["--evals", '[{"name": "a", "eval_every": 2, "top_p": 0}]'], "top_p: expected greater"),
        (["--evals", '[{"name": "a", "eval_every": 2, "top_k": 0}]'], "top_k: expected"),
        (
            ["--evals", '[{"name": "a", "eval_every": 2, "temperature": 0, "top_p": 0.9}]'],
            "evals[0] (a): top_p has no effect with temperature 0",
        ),
        (["--eval_num_servers", "1"], "(1) must be below inference.inference_num_workers (1)"),
        (
            ["--opponent_num_servers", "1", "--inference_num_workers", "1"],
            "inference.opponent_num_servers (1) and evals.eval_num_servers (0)",
        ),
        (
            ["--opponent_update_every", "3"],
            "opponent_update_every has no effect without opponent_num_servers",
        ),
        (
            [
                "--environments",
                '[{"name": "nim", "env": {"opponents": {"others": {"older_version": true}}}}]',
            ],
            "environments[0] (nim): opponents.others is an older version",
        ),
        (
            ["--eval_num_servers", "1", "--inference_num_workers", "2"],
            "eval_num_servers has no effect without [[evals]]",
        ),
        (
            [
                *("--eval_num_servers", "1", "--inference_num_workers", "2"),
                *("--eval_after_training", "--evals", '[{"name": "a"}]'),
            ],
            "eval_num_servers has no effect without eval_every",
        ),
        (
            ["--evals", '[{"name": "a", "eval_every": 2, "pass_k": [1, 8]}]'],
            "pass_k 8 needs at least that many rollouts per example, got rollouts = 4",
        ),
        (
            ["--evals", '[{"name": "a", "eval_every": 2}, {"name": "a", "eval_every": 2}]'],
            "evals: 'a' is listed 2 times",
        ),
        (
            ["--evals", '[{"name": "a/b:C", "eval_every": 2}, {"name": "a-b:C", "eval_every": 2}]'],
            "would be recorded in the same folder",
        ),
        (
            ["--evals", '[{"name": "a", "eval_every": 2, "max_tokens": 9999}]'],
            "evals[0] (a): max_tokens (9999) must be below trainer.seq_len (4096)",
        ),
        (["--beta", "0.1"], "here it is called 'kl_penalty_tau' (algorithm.kl_penalty_tau)"),
        (["--max_new_tokens", "9"], "here it is called 'max_tokens' (rollout.max_tokens)"),
        (["--name", "a/b"], "expected letters, digits"),
        (["--environments", "[]"], "environments"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(flags, expected):
    with pytest.raises(ConfigError) as caught:
        load(*flags)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ('[{"name": "a", "weight": 0}]', "environments[0] (a): weight must be above 0, got 0"),
        ('[{"name": "a", "weight": -1}]', "weight must be above 0, got -1"),
        ('[{"name": "a"}, {"name": "a"}]', "'a' is listed 2 times"),
        ('[{"name": "a", "temperature": 0}]', "environments[0] (a): temperature must be above 0"),
        ('[{"name": "a", "group_size": 1}]', "environments[0] (a): group_size must be at least 2"),
        ('[{"name": "a", "reward_min": 0}]', "reward_min needs reward_max as well"),
        ('[{"name": "a", "reward_max": 0}]', "reward_max needs reward_min as well"),
        ('[{"name": "a", "reward_min": 1, "reward_max": 1}]', "must be below reward_max"),
        ('[{"name": "a", "max_tokens": 5000}]', "environments[0] (a): max_tokens (5000)"),
    ],
)
def test_environments_that_do_not_fit(entries, expected):
    with pytest.raises(ConfigError) as caught:
        load_train_config([], [*RUN, "--environments", entries])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--use_ppo_clip", "--clip_low", "0.1", "--clip_high", "0.3"],
        ["--use_tis", "--tis_cap", "4"],
        ["--stop", '["</search>"]', "--include_stop_str_in_output", "false"],
        ["--clip_low", "null"],
        ["--lr_scheduler", "cosine", "--min_lr_ratio", "0.1", "--warmup_steps", "3"],
        ["--lr_scheduler", "linear", "--cooldown_steps", "2"],
        ["--max_async_rollout", "4"],
        ["--max_async_rollout", "0"],
        ["--max_open_rollouts", "7", "--group_size", "8"],
        ["--max_open_rollouts", "8", *GROUP_LANES, "--group_size", "8"],
        ["--eval_before_training", "--evals", '[{"name": "a", "temperature": 0}]'],
        ["--weight_transport", "gloo"],
        ["--use_lora", "--lora_rank", "8", "--lora_target_modules", '["q_proj"]'],
        ["--use_lora", "--lora_transfer", "adapter", "--lora_rank", "512"],
        ["--use_lora", "--lora_rank", "600"],
        ["--gradient_checkpointing", "selective", "--optimizer", "adamw_bf16"],
    ],
)
def test_what_fits_is_accepted(flags):
    load(*flags)


def test_a_switch_with_more_than_two_positions():
    name = "--gradient_checkpointing"
    assert load().trainer.gradient_checkpointing is True
    assert load(name, "--debug").trainer.gradient_checkpointing is True
    assert load(name, "false").trainer.gradient_checkpointing is False
    assert load(name, "selective").trainer.gradient_checkpointing == "selective"


EVALS = ["--evals", '[{"name": "a", "eval_every": 2, "temperature": 0, "top_k": 1}]']
SITUATIONS = {
    "plain": [],
    "synchronous": ["--max_async_rollout", "0"],
    "off": [
        *("--enable_prompt_prefetch", "false", "--weight_broadcast_bucket_mb", "0"),
        *("--env_isolation", "none"),
    ],
    "on": [
        *("--use_wandb", "--debug", "--use_lora", "--checkpoint_every", "2"),
        *("--checkpoint_keep_last", "1", "--enable_vllm_tracing"),
        *("--weight_broadcast_staging", "pageable"),
    ],
    "evals": [*EVALS, "--inference_num_workers", "2", "--eval_num_servers", "1"],
    "cluster": ["--ray_address", "auto", "--ray_environment_placement", "SPREAD"],
    "clipped": ["--use_ppo_clip", "--use_decoupled_loss"],
    "divided": ["--megatron_tensor_parallel_size", "2", "--trainer_num_workers", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "situation"),
    [
        (backend, situation)
        for backend, missing in (("fsdp", "divided"), ("megatron", "on"))
        for situation in SITUATIONS
        if situation != missing
    ],
)
def test_a_value_that_holds_by_itself_may_be_written(backend, situation):
    walked: list[str] = []
    for algorithm in known_algorithms():
        flags = ["--algorithm", algorithm, "--train_backend", backend, *SITUATIONS[situation]]
        try:
            config = load(*flags)
        except ConfigError:  # what the situation needs is not there, such as a loss that clips
            continue
        walked.append(algorithm)
        written = TrainConfig.model_validate_json(config.model_dump_json(), strict=True)
        assert not config_found(written).problems, algorithm
    assert "grpo" in walked


def test_the_settings_of_a_run_are_a_settings_file(tmp_path):
    file = tmp_path / "resolved.yaml"
    for algorithm in ("grpo", "reinforce_pp"):
        config = load("--algorithm", algorithm)
        file.write_text(config.model_dump_json(), encoding="utf-8")
        assert load_train_config([file]) == config


SEEDS = {
    "synchronous": [
        *("--max_async_rollout", "0", "--recompute_logprob", "false"),
        *("--use_decoupled_loss", "false"),
    ],
    "reinforce_pp": ["--algorithm", "reinforce_pp", "--advantage_norm", "batch"],
    "stable": ["--learning_rate", "1e-6", "--warmup_steps", "10", "--use_ppo_clip"],
    "rloo": ["--algorithm", "rloo", "--group_size", "16"],
    "async": [
        *("--max_async_rollout", "2", "--use_tis", "--tis_cap", "2", "--max_off_policy_steps", "4"),
    ],
    "decoupled": [
        *("--use_ppo_clip", "--use_decoupled_loss", "--behave_imp_weight_cap", "5"),
        *("--number_of_minibatches", "1"),
    ],
    "aggressive": [
        *("--kl_penalty_tau", "0", "--learning_rate", "5e-6", "--use_ppo_clip"),
        *("--ppo_epochs", "4"),
    ],
    "careful": [
        *("--group_size", "32", "--grad_clip", "0.001", "--ppo_epochs", "1"),
        *("--warmup_steps", "10", "--max_async_rollout", "1"),
        *("--kl_penalty_tau", "0.1", "--reference_update_every", "5"),
    ],
    "overlong": ["--filter_overlong", "--max_tokens", "1024"],
    "logs": [
        *("--debug", "--use_wandb", "--wandb_upload_logs", "--wandb_upload_logs_detailed"),
        "--wandb_upload_logs_stdout",
    ],
}
"""What the four guides that this project began with say to set, in the names of this project."""


@pytest.mark.parametrize("recipe", SEEDS)
def test_recipes_are_accepted_as_they_are_written(recipe):
    load(*SEEDS[recipe])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (SEEDS["reinforce_pp"], ['algorithm.advantage_norm = "batch"']),
        (SEEDS["synchronous"], ["algorithm.recompute_logprob = false"]),
        (["--algorithm", "rloo", "--advantage_norm", "group"], ["algorithm.advantage_norm"]),
        (["--algorithm", "gspo", "--use_ppo_clip", "false"], ["algorithm.use_ppo_clip = false"]),
        (["--megatron_tensor_parallel_size", "1"], ["megatron.megatron_tensor_parallel_size = 1"]),
        ([], []),
    ],
)
def test_redundant_settings_are_told(flags, told):
    found = config_found(load(*flags))
    assert not found.problems
    assert len(found.redundant) == len(told)
    for name in told:
        assert name in found.note


@pytest.mark.parametrize(
    "flags",
    [
        ["--algorithm", "reinforce_pp", "--advantage_norm", "group"],
        ["--algorithm", "rloo", "--advantage_norm", "batch"],
        ["--algorithm", "dr_grpo", "--advantage_norm", "batch"],
        ["--algorithm", "cispo", "--use_ppo_clip"],
        ["--use_ppo_clip", "--use_decoupled_loss", "--ppo_clip_ref_logprobs", "rollout"],
        ["--train_backend", "megatron", "--gradient_checkpointing", "false"],
    ],
)
def test_what_contradicts_what_holds_is_refused(flags):
    with pytest.raises(ConfigError, match="has no effect"):
        load(*flags)


def test_an_algorithm_with_one_norm_says_so_in_the_record():
    assert load("--algorithm", "reinforce_pp").algorithm.advantage_norm == "batch"
    assert load("--algorithm", "grpo").algorithm.advantage_norm == "group"


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load("--temperature", "0", "--clip_low", "0.1", "--group_size", "1")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "is_weighted"),
    [
        ([], True),
        (["--max_async_rollout", "0"], False),
        (["--max_async_rollout", "0", "--number_of_minibatches", "2"], True),
        (["--use_tis", "false"], False),
        (["--max_async_rollout", "0", "--use_tis"], True),
        (["--max_async_rollout", "0", "--ppo_epochs", "2"], True),
        (["--max_async_rollout", "0", "--ppo_epochs", "2", "--use_ppo_clip"], False),
        (["--use_ppo_clip"], False),
        (["--use_ppo_clip", "--use_decoupled_loss"], False),
        (["--algorithm", "dapo"], False),
        (["--algorithm", "cispo"], False),
        (["--algorithm", "dapo", "--use_ppo_clip", "false"], True),
        (["--algorithm", "rloo"], True),
    ],
)
def test_late_rollouts_are_weighted_unless_the_loss_does_or_the_user_says_no(flags, is_weighted):
    config = load_train_config([], [*RUN, *MATHS, *flags])
    assert config.algorithm.use_tis is is_weighted
    section = BackendSettings.from_config(config, device="cpu").algorithm
    assert section is not None
    assert section.use_tis is is_weighted
