"""Settings of `[megatron]`: what is refused before anything starts, and what each one reaches."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.version import Version
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).parents[1]))
from megatron_cases import CONFIGS

from telescope_core.errors import ConfigError
from telescope_train.backends.megatron import library
from telescope_train.backends.megatron.architecture import architecture_of
from telescope_train.backends.megatron.backend import MegatronBackend
from telescope_train.backends.megatron.layout import ModelSizes, model_problems
from telescope_train.backends.megatron.library import using
from telescope_train.backends.megatron.model import Building, transformer_config
from telescope_train.backends.megatron.optimizer import (
    buffers_config,
    optimizer_config,
    precision_values,
)
from telescope_train.backends.protocol import BackendSettings
from telescope_train.config.schema import TrainConfig
from telescope_train.config.trainer_section import MegatronSection
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


TWO, FOUR = {"trainer": {"trainer_num_workers": 2}}, {"trainer": {"trainer_num_workers": 4}}


@pytest.mark.parametrize(
    ("more", "facts", "fixed"),
    [
        ({"tensor_parallel_size": 2}, r"trainer_num_workers \(1\).*\b2\b", TWO),
        (
            {"trainer": {"trainer_num_workers": 6}, "pipeline_parallel_size": 4},
            r"trainer_num_workers \(6\).*\b4\b",
            FOUR,
        ),
        (
            {**FOUR, "expert_parallel_size": 3},
            r"expert_parallel_size.*\b4 ranks",
            {"expert_parallel_size": 2},
        ),
        ({"trainer": {"use_lora": True}}, "use_lora.*fsdp", {"trainer": {}}),
        ({"trainer": {"optimizer": "adamw_bf16"}}, "adamw_bf16.*fsdp", {"trainer": {}}),
        ({"trainer": {"optimizer": "muon"}}, "'muon'.*fsdp.*use 'adamw'", {"trainer": {}}),
        ({"trainer": {"compile": True}}, "compile", {"trainer": {}}),
        (
            {"trainer": {"gradient_checkpointing": False}},
            "megatron_gradient_checkpointing",
            {"trainer": {}, "gradient_checkpointing": False},
        ),
        ({"trainer": {"gradient_checkpointing": "auto"}}, "'auto'", {"trainer": {}}),
        ({"model": {"model_dtype": "bfloat16"}}, "model_dtype.*float32", {"model": {}}),
        ({"fp8": True}, "megatron_use_transformer_engine", {"use_transformer_engine": True}),
        (
            {"optimizer_offload_fraction": 0.5},
            "megatron_optimizer_cpu_offload",
            {"optimizer_cpu_offload": True},
        ),
        (
            {"optimizer_dtypes": {"exp_avg": "bfloat16"}, "use_distributed_optimizer": False},
            "megatron_use_distributed_optimizer",
            {"use_distributed_optimizer": True},
        ),
        (
            {"optimizer_dtypes": {"exp_avg": "bfloat16"}, "optimizer_cpu_offload": True},
            "exp_avg would have no effect with megatron_optimizer_cpu_offload",
            {"optimizer_dtypes": {"main_grads": "bfloat16"}},
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(more, facts, fixed):
    with pytest.raises(ConfigError, match=facts):
        check_config(config(**more))
    assert check_config(config(**(more | fixed))) is None


def test_a_mistyped_backend_is_only_called_unknown():
    asked = config(tensor_parallel_size=2, trainer={"train_backend": "megatorn"})
    with pytest.raises(ConfigError) as said:
        check_config(asked)
    assert "'megatorn'" in str(said.value)
    assert "'megatron'" in str(said.value)
    assert len(str(said.value).splitlines()) == 1, "nothing is said of settings of its section"


def of_model(chosen, facts):
    return list(megatron_model_problems(chosen.trainer, chosen.megatron, facts))


def test_a_model_of_another_family_is_refused_before_anything_starts():
    known = json.loads(CONFIGS["qwen3"]().to_json_string(use_diff=False))
    (said,) = of_model(config(), facts_of({**known, "model_type": "gemma3"}))
    assert "'gemma3'" in said
    assert "'fsdp'" in said
    assert of_model(config(), facts_of(known)) == []


def test_gradients_of_float32_layers_are_in_float32_whatever_is_asked():
    asked = config(grad_reduce_in_fp32=False)
    (said,) = megatron_device_problems(asked, "cpu")
    assert "no effect where layers compute in float32" in said
    assert not list(megatron_device_problems(asked, "cuda"))


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
    found = "\n".join(of_model(config(**section), facts))
    assert expected in found


def test_experts_must_be_divisible_and_need_sequence_parallel_ranks():
    sizes = ModelSizes(num_layers=2, num_heads=4, num_kv_heads=4, ffn_size=64, num_experts=6)
    section = MegatronSection(
        megatron_tensor_parallel_size=2,
        megatron_expert_parallel_size=4,
        megatron_sequence_parallel=False,
    )
    divisible, sequential = model_problems(section, sizes)
    assert "6 experts" in divisible
    assert "sequence_parallel" in sequential
    fitting = section.model_copy(
        update={"megatron_expert_parallel_size": 3, "megatron_sequence_parallel": True}
    )
    assert list(model_problems(fitting, sizes)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_transformer_engine", True),
        ("fp8", True),
        ("optimizer_dtypes", {}),
        ("optimizer_cpu_offload", True),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(name, value):
    asked = config(**{name: value})
    assert f"megatron.megatron_{name} needs a GPU" in "".join(
        megatron_device_problems(asked, "cpu")
    )
    assert not list(megatron_device_problems(asked, "cuda"))


def test_an_offloaded_optimizer_needs_narrow_layers():
    for dtype, is_refused in (("float32", True), ("bfloat16", False)):
        asked = config(optimizer_cpu_offload=True, model={"mixed_precision_dtype": dtype})
        said = list(megatron_device_problems(asked, "cuda"))
        assert bool(said) is is_refused
        assert all("mixed_precision_dtype = 'bfloat16'" in one for one in said)


def library_configs(trainer, more) -> dict[str, Any]:
    """Return what of the library a rank with these settings would be built from, by field."""
    asked = config(trainer=trainer, model={"mixed_precision_dtype": "bfloat16"}, **more)
    settings = BackendSettings.from_config(asked, device="cpu")
    layout = MegatronBackend.rank_layout(settings, asked.trainer.trainer_num_workers)
    building = Building(
        settings=settings,
        architecture=architecture_of(CONFIGS["qwen3_moe"]()),
        layout=layout,
        frequencies=torch.ones(1),
        attention=None,
        device=torch.device("cpu"),
    )
    with using(torch.device("cpu")):
        found = (
            transformer_config(building),
            optimizer_config(settings),
            buffers_config(settings),
        )
    model, optimizer, buffers = (vars(one) for one in found)
    return {
        "layout": layout,
        **{f"model.{name}": value for name, value in model.items()},
        **{f"optimizer.{name}": value for name, value in optimizer.items()},
        **{f"buffers.{name}": value for name, value in buffers.items()},
    }


OFFLOADED = {"optimizer_cpu_offload": True}
REACHED = {
    "tensor_parallel_size": (2, {}, "model.tensor_model_parallel_size", 2),
    "pipeline_parallel_size": (2, {}, "model.pipeline_model_parallel_size", 2),
    "context_parallel_size": (2, {}, "model.context_parallel_size", 2),
    "expert_parallel_size": (2, {}, "model.expert_model_parallel_size", 2),
    "sequence_parallel": (True, {"tensor_parallel_size": 2}, "model.sequence_parallel", True),
    "use_distributed_optimizer": (False, {}, "optimizer.use_distributed_optimizer", False),
    "overlap_grad_reduce": (True, {}, "buffers.overlap_grad_reduce", True),
    "gradient_checkpointing": (False, {}, "model.recompute_granularity", None),
    "grad_reduce_in_fp32": (True, {}, "buffers.grad_reduce_in_fp32", True),
    "optimizer_cpu_offload": (True, {}, "optimizer.optimizer_cpu_offload", True),
    "optimizer_offload_fraction": (0.25, OFFLOADED, "optimizer.optimizer_offload_fraction", 0.25),
    "optimizer_dtypes": (
        {"exp_avg_sq": "fp8"},
        {},
        "optimizer.exp_avg_sq_dtype",
        torch.uint8,
    ),
    "use_transformer_engine": (True, {}, "model.moe_grouped_gemm", True),
    "fp8": (True, {"use_transformer_engine": True}, "model.fp8", "hybrid"),
}
"""Setting -> a value, settings that it needs, and which field of the library is set to what."""


def test_every_setting_is_in_the_table():
    names = {name.removeprefix("megatron_") for name in MegatronSection.model_fields}
    assert set(REACHED) == names


def test_each_number_of_the_optimizer_gets_its_own_type():
    given = {"main_grads": "bfloat16", "main_params": "float16", "exp_avg": "fp8"}
    asked = config(optimizer_dtypes=given).megatron.megatron_optimizer_dtypes
    assert precision_values(asked) == {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": torch.bfloat16,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.float32,
    }


@pytest.mark.parametrize(
    ("given", "facts"),
    [({"exp_avgs": "fp8"}, "exp_avg.*exp_avgs"), ({"main_params": "fp8"}, "float16.*'fp8'")],
)
def test_a_type_that_the_optimizer_cannot_have_is_refused(given, facts):
    with pytest.raises(ValidationError, match=facts):
        config(optimizer_dtypes=given)


class FusedAdamOfAnEngine:
    """The parameters by which the library sees that this optimizer keeps narrow numbers."""

    def __init__(
        self, *, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad
    ) -> None: ...


def test_a_transformer_engine_without_its_part_for_torch_is_named(monkeypatch):
    """Importing megatron-core then ends in a FileNotFoundError of that package."""

    def imported(name):
        raise FileNotFoundError("transformer_engine_torch.so")

    monkeypatch.setattr(library, "_is_prepared", False)
    monkeypatch.setattr(library.importlib, "import_module", imported)
    with pytest.raises(ConfigError, match=r"transformer_engine_torch\.so.*install its part"):
        library._prepare()


@pytest.mark.slow
@pytest.mark.parametrize("setting", REACHED)
def test_each_setting_changes_what_the_library_is_told(setting, monkeypatch):
    """Transformer Engine is for GPUs: here the library is only told that it is there."""
    with using(torch.device("cpu")):
        utils = importlib.import_module("megatron.core.utils")
    monkeypatch.setattr(utils, "get_te_version", lambda: Version("2.20.2"))
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = FusedAdamOfAnEngine
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    value, needed, field, expected = REACHED[setting]
    trainer = {"trainer_num_workers": 4}
    with_it = library_configs(trainer, {**needed, setting: value})
    other = not value if isinstance(value, bool) else None
    without = library_configs(trainer, needed if other is None else {**needed, setting: other})
    assert with_it[field] == expected
    assert without[field] != expected


@pytest.mark.slow
def test_the_trainer_settings_reach_the_library():
    trainer = {"learning_rate": 3e-4, "weight_decay": 0.2, "adam_betas": (0.8, 0.9)}
    found = library_configs(trainer, {})
    optimizer = {name: found[f"optimizer.{name}"] for name in ("lr", "weight_decay")}
    assert optimizer == {"lr": 3e-4, "weight_decay": 0.2}
    betas = [found[f"optimizer.adam_beta{number}"] for number in (1, 2)]
    assert betas == [0.8, 0.9]
    assert found["model.recompute_granularity"] == "full"
