"""Every name of another system has an answer: what it is called here, or why there is none."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from peer_names import PEERS, document_of, paths_of

from telescope_cli.main import main
from telescope_core.errors import ConfigError
from telescope_core.settings.config import leaf_paths
from telescope_train.config.schema import TrainConfig
from telescope_train.plan.load import load_train_config

OURS = leaf_paths(TrainConfig)
ANSWERS = {
    "num_iterations": "algorithm.ppo_epochs",
    "num_batches_ahead": "scheduling.max_async_rollout",
    "bf16": "model.mixed_precision_dtype",
    "max_concurrent": "scheduling.max_concurrent_prompts_per_server",
    "eval_strategy": "'eval_every' (of each [[evals]] entry)",
    "eval_steps": "'eval_every' (of each [[evals]] entry)",
    "batch_size": "rollout.prompts_batch_size_for_trainer",
    "generation_timeout": "rollout.rollout_timeout_s",
    "num_generations": "rollout.group_size",
    "n": "rollout.group_size",
    "limit": "'num_samples' (of each [[evals]] entry)",
    "max_connections": "scheduling.max_concurrent_prompts_per_server",
    "rollouts_per_example": "rollout.group_size",
    "beta": "algorithm.kl_penalty_tau",
    "max_grad_norm": "trainer.grad_clip",
    "max_seq_len": "trainer.seq_len",
    "lr_scheduler_type": "trainer.lr_scheduler",
    "optim.lr_wsd_decay_steps": "trainer.cooldown_steps",
    "max_steps": "run.number_of_steps",
    "max_new_tokens": "rollout.max_tokens",
    "wandb.project": "observability.wandb_project",
    "wandb.name": "run.name",
    "actor.recompute_logprob": "[algorithm]",
    "rollout.max_head_offpolicyness": "scheduling.max_async_rollout",
    "actor.ppo_n_minibatches": "algorithm.number_of_minibatches",
    "model.name": "model.model",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "trainer.optim.lr": "trainer.learning_rate",
    "optimizer.lr": "trainer.learning_rate",
    "micro_batch_size": "packed into rows of seq_len",
    "per_device_train_batch_size": "packed into rows of seq_len",
    "gradient_accumulation_steps": "number_of_minibatches says",
    "max_prompt_len": "a prompt has no limit of its own",
    "use_deterministic_algorithms": "set seed_sampling = true",
    "actor.megatron.use_deterministic_algorithms": "set seed_sampling = true",
    "critic.optim.lr": "there is no value model",
    "data.train_batch_size": "rollout.prompts_batch_size_for_trainer",
    "data.image_key": "[[environments]]",
    "trainer.scheduler.warmup_steps": "set it in [trainer]",
    "trainer.scheduler.decay_steps": "warmup_steps",
    "trainer.scheduler.type": "trainer.lr_scheduler",
    "policy.scheduler.milestones": "warmup_steps",
    "policy.megatron_cfg.scheduler.lr_decay_iters": "min_lr_ratio",
    "policy.tokenizer.chat_template": "model.chat_template",
    "policy.tokenizer.name": "in the folder of the model",
    "policy.dtensor_cfg.tensor_parallel_size": "megatron.megatron_tensor_parallel_size",
    "trainer.model.impl": "transformers",
    "scheduler.deploy_mode": "[ray]",
    "vllm_importance_sampling_mode": "algorithm.tis_mode",
    "vllm_importance_sampling_clip_max": "algorithm.tis_cap",
    "vllm_importance_sampling_clip_min": "algorithm.tis_floor",
    "sapo_temperature_pos": "the gate of sapo",
    "sapo_temperature_neg": "the gate of sapo",
    "trainer.algorithm.dppo.delta_low": "algorithm.dppo_threshold",
    "trainer.algorithm.dppo.dppo_type": "algorithm.dppo_divergence",
    "divergence_type": "algorithm.dppo_divergence",
    "off_policy_mask_threshold": "seq_is_masking",
    "top_entropy_quantile": "all tokens of an answer",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.seq_is_mask_range",
    "algorithm.filter_groups.max_num_gen_batches": "should_accept_fn",
    "reward.sandbox_fusion.max_concurrent": "env of its [[environments]] entry",
    "actor_rollout_ref.rollout.nnodes": "inference.inference_num_workers",
    "actor_rollout_ref.rollout.n_gpus_per_node": "inference.inference_num_workers",
    "generator.inference_engine.num_engines": "inference.inference_num_workers",
    "generator.apply_overlong_filtering": "algorithm.filter_overlong",
    "generator.no_such_thing": "unknown section 'generator'",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "trainer_num_workers / fsdp_size",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "model.model_dtype",
    "actor_rollout_ref.rollout.data_parallel_size": "inference.inference_data_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": "inference_tensor_parallel_size",
    "data.apply_chat_template_kwargs.enable_thinking": "model.enable_thinking",
    "distillation.teacher_models.teacher_model.model_path": "a teacher is algorithm.reference",
    "trainer.policy.model.fake_int4_qat.group_size": "not rounded in training",
    "trainer.policy.torch_profiler_config.save_path": "the timeline of each step",
    "environment.skyrl_gym.llm_as_a_judge.model": "[[environments]] entry",
    "generator.eval_sampling_params.temperature": "[[evals]] entry",
    "generator.eval_n_samples_per_prompt": "'rollouts' (of each [[evals]] entry)",
    "eval.n_samples_per_prompt": "'rollouts' (of each [[evals]] entry)",
    "eval_gconfig.n_samples": "[[evals]] entry",
    "eval.dataset": "[[evals]] entry",
    "eval.steps": "'eval_every' (of each [[evals]] entry)",
    "reward.model_name_or_path": "rewards come from the environment",
    "reward.num_nodes": "rewards come from the environment",
    "ds.tensor_parallel_size": "megatron.megatron_tensor_parallel_size",
    "data.max_len": "inference.max_model_len",
    "train.num_episodes": "examples come around again",
    "teacher.train.optimizer.lr": "a teacher is algorithm.reference",
    "num_generations_eval": "'rollouts' (of each [[evals]] entry)",
    "packing_strategy": "it is always done",
    "optim.mu": "trainer.muon_momentum",
    "actor.muon.momentum": "trainer.muon_momentum",
    "actor.muon.lr": "trainer.learning_rate",
    "muon_num_ns_steps": "optimizer = 'muon'",
    "optim_args": "or Muon with AdamW",
    "logging_strategy": "a line of metrics",
    "do_predict": "`telescope eval` evaluates",
}
"""Name as it is written elsewhere -> what the answer to it, alone, must say."""


@pytest.mark.parametrize("name", ANSWERS)
def test_a_name_alone_is_answered(name):
    with pytest.raises(ConfigError) as caught:
        load_train_config([], [f"--{name}", "1"])
    assert ANSWERS[name] in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "answer"),
    [
        ({"num_generations": 4}, "'rollouts' (of each [[evals]] entry)"),
        ({"epochs": 4}, "'rollouts' (of each [[evals]] entry)"),
        ({"n": 4}, "'rollouts' (of each [[evals]] entry)"),
        ({"num_examples": 4}, "'num_samples' (of each [[evals]] entry)"),
        ({"max_new_tokens": 4}, "'max_tokens' (of each [[evals]] entry)"),
        ({"interval": 4}, "'eval_every' (of each [[evals]] entry)"),
        ({"id": "gsm8k"}, "'name' (of each [[evals]] entry)"),
        ({"args": {"size": 1}}, "'env' (of each [[evals]] entry)"),
        ({"max_concurrent": 4}, "scheduling.max_concurrent_prompts_per_server"),
        ({"stop": ["x"]}, "stop in [rollout]"),
    ],
)
def test_a_name_in_an_entry_is_answered_for_the_entry(entry, answer, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"evals": [{"name": "gsm8k", **entry}]}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_train_config([file])
    assert answer in str(caught.value)
    file.write_text(json.dumps({"environments": [{"name": "e", "n": 4}]}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_train_config([file])
    assert "'group_size' (of each [[environments]] entry)" in str(caught.value)


@pytest.mark.parametrize("peer", PEERS)
def test_a_whole_file_of_another_system_is_answered_in_one_message(peer, tmp_path):
    file = tmp_path / f"{peer}.yaml"
    file.write_text(json.dumps(document_of(PEERS[peer])), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_train_config([file])
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "not known:" not in message
    assert all(len(line) <= 80 for line in message.splitlines()[1:])
    # Each name that differs is in the message, by itself or with its section.
    plain = " ".join(message.split())
    for path in paths_of(PEERS[peer]):
        parts = tuple(path.split("."))
        if OURS.get(parts[-1]) in (parts, (parts[0], parts[-1])) or parts[0] in OURS:
            continue
        beginnings = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        named = (re.search(rf"(?<![\w.]){re.escape(one)}(?![\w.])", plain) for one in beginnings)
        assert any(named), path


def test_the_command_ends_with_exit_code_2(tmp_path, capsys):
    file = tmp_path / "verl.yaml"
    file.write_text(json.dumps(document_of(PEERS["verl"])), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(file), "--dry-run"])
    assert ended.value.code == 2
    assert "actor_rollout_ref.rollout.n -> rollout.group_size" in capsys.readouterr().err
