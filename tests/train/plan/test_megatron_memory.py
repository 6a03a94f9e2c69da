"""Memory of a Megatron rank in the plan: what each setting divides. Arithmetic alone."""

import pytest
from tests.train.plan.models import QWEN3

from telescope_train.models.facts import facts_of
from telescope_train.plan.gpus import memory_problems
from telescope_train.plan.load import load_train_config
from telescope_train.plan.memory import rank_memory
from telescope_train.plan.plan import _prompts

FLAGS = ["--name", "x", "--number_of_steps", "2", "--model", "m", "--train_backend", "megatron"]
FLAGS += ["--environments", '[{"name": "a"}]']
FACTS = facts_of(QWEN3["8B"])
DENSE = FACTS.num_parameters
MIXTURE = facts_of(
    {
        **QWEN3["0.6B"],
        "model_type": "qwen3_moe",
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
)


def config(ranks: int, **section):
    more = [text for name, value in section.items() for text in (f"--megatron_{name}", str(value))]
    return load_train_config([], [*FLAGS, "--trainer_num_workers", str(ranks), *more])


def parts(ranks: int, *, facts=FACTS, **section) -> dict[str, int]:
    return dict(rank_memory(config(ranks, **section), facts, device="cuda").parts)


def test_bfloat16_weights_float32_gradients_masters_and_two_moments():
    found = parts(1)
    assert found["weights"] == 2 * DENSE
    assert found["gradient buffers"] == 4 * DENSE
    assert found["Adam"] == 12 * DENSE
    narrow = parts(1, grad_reduce_in_fp32="false")
    assert narrow["gradient buffers"] == 2 * DENSE


def test_gradients_that_are_summed_during_a_pass_are_kept_apart_from_those_of_earlier_passes():
    name = "gradients of earlier passes"
    assert name not in parts(2)
    assert parts(2, overlap_grad_reduce="true")[name] == 4 * DENSE
    whole = ["--trainer_num_workers", "2", "--megatron_overlap_grad_reduce", "true"]
    whole += ["--stream_gradients", "false"]
    found = rank_memory(load_train_config([], [*FLAGS, *whole]), FACTS, device="cuda")
    assert name not in dict(found.parts)


def test_tensor_parallel_ranks_divide_everything_and_data_parallel_ones_the_optimizer():
    one, tensor, data = parts(1), parts(2, tensor_parallel_size=2), parts(2)
    for name in ("weights", "gradient buffers", "Adam"):
        assert tensor[name] == pytest.approx(one[name] / 2)
    assert data["weights"] == one["weights"]
    assert data["Adam"] == pytest.approx(one["Adam"] / 2)
    whole = parts(2, use_distributed_optimizer="false")
    assert whole["Adam"] == one["Adam"]
    assert tensor["activations"] < data["activations"]


def test_a_stage_has_its_layers_and_the_embedding():
    one, staged = parts(1), parts(2, pipeline_parallel_size=2)
    outside = DENSE - FACTS.num_body_parameters
    assert staged["weights"] == pytest.approx(
        2 * (FACTS.num_body_parameters / 2 + outside / 2), rel=1e-6
    )
    # The first stage has a half of the layers, and two rows in them.
    assert staged["activations"] == one["activations"]


def test_experts_are_divided_over_ranks_that_share_nothing_else():
    one, four = parts(1, facts=MIXTURE), parts(4, facts=MIXTURE, expert_parallel_size=4)
    assert one["weights"] == 2 * MIXTURE.num_parameters
    assert one["weights"] / 4 < four["weights"] < one["weights"] / 2


def test_a_part_of_the_optimizer_may_be_in_cpu_memory():
    kept = parts(1, optimizer_cpu_offload="true", optimizer_offload_fraction=0.75)["Adam"]
    assert kept == pytest.approx(parts(1)["Adam"] / 4)
    tiny = '{"exp_avg": "fp8", "exp_avg_sq": "fp8", "main_params": "float16"}'
    assert parts(1, optimizer_dtypes=tiny)["Adam"] == 4 * DENSE


def test_the_advice_for_a_rank_that_is_too_large_names_settings_of_this_backend():
    (said,) = memory_problems(config(1), FACTS, 4096, 80 * 10**9)
    assert "megatron_optimizer_cpu_offload = true" in said
    assert "megatron_tensor_parallel_size" in said
    assert "fsdp" not in said
    (said,) = memory_problems(config(1, gradient_checkpointing="false"), FACTS, 4096, 80 * 10**9)
    assert "megatron_gradient_checkpointing = true" in said


def test_the_plan_says_for_which_rollouts_prompts_are_computed():
    once = "computed once for rollouts that begin alike, if a test of the model passes"
    assert _prompts(config(2, tensor_parallel_size=2), FACTS) == once
    assert _prompts(config(2, context_parallel_size=2), FACTS) == (
        "computed for each rollout: context-parallel ranks of Megatron each hold pieces of every "
        "sample"
    )
    assert "Transformer Engine" in _prompts(config(1, use_transformer_engine="true"), FACTS)
    assert "mixture of experts" in _prompts(config(1), MIXTURE)
