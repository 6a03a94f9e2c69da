"""Settings of `[megatron]`: what is refused before anything starts, and what each one reaches."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from megatron_cases import CONFIGS

from telescope_core.errors import ConfigError
from telescope_train.backends.megatron.layout import ModelSizes, model_problems
from telescope_train.backends.megatron.library import using
from telescope_train.backends.megatron.optimizer import (
    optimizer_config,
    precision_values,
)
from telescope_train.backends.protocol import BackendSettings
from telescope_train.config.megatron_section import MegatronSection
from telescope_train.config.schema import TrainConfig
from telescope_train.models.facts import facts_of
from telescope_train.plan.checks.config import check_config
from telescope_train.plan.checks.megatron import (
    megatron_device_problems,
    megatron_model_problems,
)


def config(*, trainer=None, model=None, **section) -> TrainConfig:
    named = {f"megatron_{name}": value for name, value in section.items()}
    return TrainConfig.model_validate(
        {
            "run": {"name": "toy", "number_of_steps": 2},
            "model": {"model": "some/model", **(model or {})},
            "environments": [{"name": "toy"}],
            "trainer": {"train_backend": "megatron", "seq_len": 512, **(trainer or {})},
            "megatron": named,
        }
    )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"tensor_parallel_size": 2}, "must be a multiple of 2"),
        (
            {"trainer": {"trainer_num_workers": 6}, "pipeline_parallel_size": 4},
            r"trainer_num_workers \(6\) must be a multiple of 4",
        ),
        (
            {"trainer": {"trainer_num_workers": 4}, "expert_parallel_size": 3},
            "must divide the 4 ranks of a pipeline stage",
        ),
        ({"trainer": {"use_lora": True}}, "megatron-core has no adapters"),
        ({"trainer": {"optimizer": "adamw_bf16"}}, "is one of backend fsdp"),
        ({"trainer": {"compile": True}}, "compile has no effect"),
        ({"trainer": {"gradient_checkpointing": False}}, "use megatron_gradient_checkpointing"),
        ({"model": {"model_dtype": "bfloat16"}}, "updates float32 weights"),
        ({"sequence_parallel": True}, "no effect without tensor-parallel ranks"),
        ({"fp8": True}, "no effect without megatron_use_transformer_engine"),
        ({"optimizer_offload_fraction": 0.5}, "without megatron_optimizer_cpu_offload"),
        ({"exp_avg_dtype": "bfloat16"}, "without megatron_use_precision_aware_optimizer"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(more, expected):
    with pytest.raises(ConfigError, match=expected):
        check_config(config(**more))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"tensor_parallel_size": 3}, "must divide the model's 4 attention heads"),
        ({"tensor_parallel_size": 4}, "must divide the model's 2 key-value heads"),
        ({"pipeline_parallel_size": 3}, "must divide the model's 2 layers"),
        ({"context_parallel_size": 8}, "must divide the 4 attention heads of a rank"),
        ({"expert_parallel_size": 2}, "the model has no experts"),
    ],
)
def test_the_model_must_be_divisible(section, expected):
    facts = facts_of(json.loads(CONFIGS["qwen3"]().to_json_string(use_diff=False)))
    found = "\n".join(megatron_model_problems(config(**section), facts))
    assert expected in found


def test_experts_must_be_divisible_and_need_sequence_parallel_ranks():
    sizes = ModelSizes(num_layers=2, num_heads=4, num_kv_heads=4, ffn_size=64, num_experts=6)
    section = MegatronSection(
        megatron_tensor_parallel_size=2,
        megatron_expert_parallel_size=4,
        megatron_sequence_parallel=False,
    )
    found = "\n".join(model_problems(section, sizes))
    assert "must divide the model's 6 experts" in found
    assert "ranks would route the same tokens" in found


@pytest.mark.parametrize(
    "name",
    [
        "use_transformer_engine",
        "fp8",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(name):
    asked = config(**{name: True})
    assert f"megatron.megatron_{name} needs a GPU" in "".join(
        megatron_device_problems(asked, "cpu")
    )
    assert not list(megatron_device_problems(asked, "cuda"))


def test_the_optimizer_settings_reach_the_library():
    asked = config(
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.25,
        overlap_cpu_optimizer_d2h_h2d=False,
        trainer={"learning_rate": 3e-4, "weight_decay": 0.2, "adam_betas": (0.8, 0.9)},
    )
    settings = BackendSettings.from_config(asked, device="cpu")
    with using(torch.device("cpu")):
        found = optimizer_config(settings)
    assert (found.optimizer_cpu_offload, found.optimizer_offload_fraction) == (True, 0.25)
    assert found.overlap_cpu_optimizer_d2h_h2d is False
    assert (found.lr, found.weight_decay) == (3e-4, 0.2)
    assert (found.adam_beta1, found.adam_beta2) == (0.8, 0.9)


def test_the_four_dtypes_reach_the_library():
    asked = config(
        main_grads_dtype="bfloat16",
        exp_avg_dtype="bfloat16",
        exp_avg_sq_dtype="fp8",
        main_params_dtype="float16",
    )
    assert precision_values(asked.megatron) == {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": torch.bfloat16,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.uint8,
    }
