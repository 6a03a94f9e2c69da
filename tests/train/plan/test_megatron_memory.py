"""Memory of a rank of backend megatron, against a count of every tensor on every rank."""

from typing import Any

import pytest
from tests.train.plan.models import QWEN3

from telescope_core.errors import ConfigError
from telescope_train.models.facts import facts_of
from telescope_train.plan.gpus import gpu_problems
from telescope_train.plan.load import load_train_config
from telescope_train.plan.megatron_memory import megatron_share
from telescope_train.plan.memory import rank_memory

FLAGS = ["--name", "x", "--number_of_steps", "2", "--model", "m", "--train_backend", "megatron"]
FLAGS += ["--environments", '[{"name": "a"}]']
MIXTURE = {
    **QWEN3["4B"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def config(ranks: int, **sizes: Any) -> Any:
    flags = [text for name, value in sizes.items() for text in (f"--megatron_{name}", str(value))]
    return load_train_config([], [*FLAGS, "--trainer_num_workers", str(ranks), *flags])


def counted(model: dict[str, Any], *, tp: int, pp: int, cp: int, ep: int, ranks: int):
    """Return (parameters, parameters with optimizer state) of the fullest rank, tensor by tensor.

    `copies` of a tensor are the ranks of its stage that hold the same part of it.
    """
    hidden, width, dim = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    of_stage, most = ranks // pp, (0.0, 0.0)
    for stage in range(pp):
        shards = list[tuple[float, int]]()  # numbers in the part of one rank, parts
        if stage == 0 or (stage == pp - 1):
            shards.append((model["vocab_size"] * hidden / tp, tp))
        if pp == 1 and not model["tie_word_embeddings"]:
            shards.append((model["vocab_size"] * hidden / tp, tp))
        for _ in range(model["num_hidden_layers"] // pp):
            attention = (heads * 2 + kv_heads * 2) * dim * hidden
            shards.append((attention / tp, tp))
            if "num_experts" not in model:
                shards.append((3 * hidden * width / tp, tp))
                continue
            shards.append((model["num_experts"] * hidden / tp, tp))
            for _ in range(model["num_experts"] // ep):
                shards.append((3 * hidden * model["moe_intermediate_size"], ep))
        whole = sum(size for size, _ in shards)
        state = sum(size * parts / of_stage for size, parts in shards)
        most = max(most, (whole, state))
    return most


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (QWEN3["8B"], {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "ranks": 4}),
        (QWEN3["8B"], {"tp": 4, "pp": 2, "cp": 1, "ep": 1, "ranks": 16}),
        (QWEN3["4B"], {"tp": 2, "pp": 2, "cp": 2, "ep": 1, "ranks": 16}),
        (QWEN3["4B"], {"tp": 8, "pp": 1, "cp": 1, "ep": 1, "ranks": 8}),
        (MIXTURE, {"tp": 1, "pp": 1, "cp": 1, "ep": 8, "ranks": 8}),
        (MIXTURE, {"tp": 2, "pp": 2, "cp": 1, "ep": 4, "ranks": 16}),
    ],
)
def test_a_rank_holds_what_a_count_of_its_tensors_gives(model, sizes):
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    settings = {
        f"{name}_parallel_size": sizes[short] for short, name in names.items() if sizes[short] > 1
    }
    share = megatron_share(config(sizes["ranks"], **settings), facts_of(model))
    whole, state = counted(model, **sizes)
    # Norms are divided by nobody and counted nowhere: a few in ten thousand.
    assert share.num_parameters == pytest.approx(whole, rel=1e-3)
    assert share.optimized == pytest.approx(state, rel=1e-3)


def parts(ranks: int = 8, size: str = "8B", **sizes: Any) -> dict[str, int]:
    plan = rank_memory(config(ranks, **sizes), facts_of(QWEN3[size]), device="cuda")
    assert plan is not None
    return dict(plan.parts)


def test_settings_change_the_part_that_they_are_about():
    plain = parts(tensor_parallel_size=2)
    number = plain["weights"] / 2  # bfloat16
    assert plain["gradients"] == pytest.approx(4 * number)
    assert plain["Adam"] == pytest.approx(12 * number / 4)  # float32 copy and moments, 4 ranks
    whole = parts(tensor_parallel_size=2, use_distributed_optimizer=False)
    assert whole["Adam"] == pytest.approx(12 * number)
    narrow = parts(tensor_parallel_size=2, grad_reduce_in_fp32=False)
    assert narrow["gradients"] == pytest.approx(2 * number)
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    assert parts(tensor_parallel_size=2, **half)["Adam"] == pytest.approx(plain["Adam"] / 2, abs=1)
    kept = parts(tensor_parallel_size=2, gradient_checkpointing=False)
    assert kept["activations"] > 4 * plain["activations"]
    longer = parts(tensor_parallel_size=2, context_parallel_size=2)
    assert longer["activations"] == pytest.approx(plain["activations"] / 2, abs=2)
    assert longer["Adam"] == plain["Adam"]


def test_what_does_not_fit_is_told_with_a_setting_of_this_backend():
    facts = facts_of(QWEN3["32B"])
    (said,) = gpu_problems(config(8), facts, 4096, [80 * 10**9] * 9)
    assert "trainer rank needs about" in said
    assert "megatron_tensor_parallel_size" in said
    assert (
        list(gpu_problems(config(32, tensor_parallel_size=8), facts, 4096, [80 * 10**9] * 33)) == []
    )


def test_ranks_that_do_not_divide_are_an_error_and_not_a_number():
    with pytest.raises(ConfigError, match="must be a multiple of"):
        megatron_share(
            config(4).model_copy(update={"megatron": config(8, tensor_parallel_size=8).megatron}),
            facts_of(QWEN3["8B"]),
        )
