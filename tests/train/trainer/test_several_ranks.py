"""The same steps on 1, 2 and 4 ranks: data and context parallel, HSDP, mixtures of experts, LoRA.

All layouts of as many ranks are run by the same ranks, one after the other.
"""

import json
import math
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from telescope_core.errors import ConfigError
from telescope_train.backends.fsdp.layout import fsdp_layout
from telescope_train.backends.fsdp.policy import check_context
from telescope_train.backends.protocol import BatchFacts
from telescope_train.batches.batch import StepPlan
from telescope_train.config.trainer_section import TrainerSection
from telescope_train.models.file_names import as_in_files
from telescope_train.models.load import load_model
from telescope_train.step.records import turn_facts

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import (  # noqa: E402
    backend_settings,
    grpo_batches,
    make_deep_model,
    make_mixture,
    make_special_head,
    relative_difference,
    require_facts,
    samples,
    slow_facts,
    slow_gradient,
    slow_muon_steps,
    slow_steps,
)
from rank_processes import run_jobs  # noqa: E402
from rank_script import FACTS  # noqa: E402
from routed_cases import slow_routed_gradient  # noqa: E402


def taken(folder, name) -> dict[str, np.ndarray]:
    return dict(np.load(folder / f"{name}.npz"))


def facts_of_ranks(folder, layout) -> list[list[BatchFacts]]:
    """Return what the ranks found, by [shard][batch]; those that share rows found the same."""
    found = []
    for rank in range(layout.num_ranks):
        files = sorted(folder.glob(f"facts-{rank}-*.npz"), key=lambda path: path.stem)
        found.append([BatchFacts(**dict(zip(FACTS, _arrays(path), strict=True))) for path in files])
    for rank, batches in enumerate(found):
        speaker = layout.speakers[layout.shard_of(rank)]
        for one, first in zip(batches, found[speaker], strict=True):
            assert np.array_equal(one.logprobs_M, first.logprobs_M)
    return [found[rank] for rank in layout.speakers]


def _arrays(path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


STEPS = 3
CLIP = {"grad_clip": 1e-3}
SELECTIVE = {"gradient_checkpointing": "selective"}
AUTO = {"gradient_checkpointing": "auto", "activation_memory_gib": 2e-4}
SHARING = {"share_prefixes": "auto"}
LAYOUTS = {
    "one": (1, {}),
    "data-4": (4, SHARING),
    "hsdp-2x2": (4, {"fsdp_replicate_size": 2}),
    "hsdp-2-context-2": (
        4,
        {
            "fsdp_context_parallel_size": 2,
            "fsdp_replicate_size": 2,
            "pad_to_multiple_of": 6,
            **AUTO,
        },
    ),
    "context-4-fewer-kv-heads": (4, {"fsdp_context_parallel_size": 4, **SELECTIVE, **SHARING}),
}
MIXTURES = {
    "qwen3_moe-hsdp-2x2": ("qwen3_moe", 4, {"fsdp_replicate_size": 2, **SELECTIVE}),
    "mixtral-2": ("mixtral", 2, {}),
}
ROUTED = {
    "mixtral-routed-context-2": ("mixtral", 2, {"fsdp_context_parallel_size": 2}),
    "qwen3_moe-routed-hsdp-2-context-2": (
        "qwen3_moe",
        4,
        {
            "fsdp_context_parallel_size": 2,
            "fsdp_replicate_size": 2,
            "pad_to_multiple_of": 6,
            **SELECTIVE,
        },
    ),
}
HEADS = {
    "gemma2-2": ("gemma2", 2, {}),
    "granite-context-2": ("granite", 2, {"fsdp_context_parallel_size": 2}),
    "phi-2": ("phi", 2, {}),
}
LORA = {"use_lora": True, "lora_rank": 3}
ROUNDED = {"fsdp_replicate_size": 2, "optimizer": "adamw_bf16"}
MUON = {"optimizer": "muon", "weight_decay": 0.1}
BY_MUON = {
    "muon-one": ("dense", 1, {}),
    "muon-4": ("dense", 4, {}),
    "muon-hsdp-2x2": ("dense", 4, {"fsdp_replicate_size": 2}),
    "muon-qwen3_moe-2": ("qwen3_moe", 2, {}),
}


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory) -> dict[str, Path]:
    """The folders of a dense model, two mixtures of experts, and heads with an arithmetic."""
    folder = tmp_path_factory.mktemp("mixtures")
    kinds = ("qwen3_moe", "mixtral")
    mixtures = {kind: make_mixture(folder / kind, kind) for kind in kinds}
    heads = {kind: make_special_head(folder / kind, kind) for kind, *_ in HEADS.values()}
    return {"dense": tiny} | mixtures | heads


# Each is compared with the results of many jobs.
gradient_of_one = cache(slow_gradient)
steps_of_one = cache(slow_steps)
muon_steps_of_one = cache(slow_muon_steps)


@pytest.fixture(scope="module")
def facts(tiny) -> dict[tuple[str, int, int], list[np.ndarray]]:
    """What one process finds of every turn."""
    return slow_facts(tiny, samples())


@pytest.fixture(scope="module")
def ran(models, tmp_path_factory) -> Path:
    """A folder with a folder for each job, in which the ranks of all jobs have ended."""
    folder, dense = tmp_path_factory.mktemp("ranks"), models["dense"]
    jobs = {name: job(dense, *of) for name, of in LAYOUTS.items()}
    jobs |= {name: job(models[kind], *of) for name, (kind, *of) in MIXTURES.items()}
    jobs |= {name: job(models[kind], *of, steps=1) for name, (kind, *of) in HEADS.items()}
    for name, (kind, *of) in ROUTED.items():
        jobs[name] = job(models[kind], *of, steps=1, routed=True)
    for name, (kind, world_size, more) in BY_MUON.items():
        jobs[name] = job(models[kind], world_size, MUON | more, saves=name == "muon-4")
    state = str(folder / "muon-4" / "checkpoint")
    jobs["muon-resumed"] = job(dense, 2, MUON, steps=2, load=state)
    jobs["float32"] = job(dense, 2, {}, dtype="float32")
    state = str(folder / "data-4" / "checkpoint")
    jobs["resumed"] = job(dense, 2, {}, steps=2, load=state)
    jobs["rounded"] = job(dense, 2, ROUNDED, dtype="float32", saves=True)
    state = str(folder / "rounded" / "checkpoint")
    jobs["rounded-resumed"] = job(dense, 2, ROUNDED, dtype="float32", steps=2, load=state)
    jobs["lora-1"] = job(dense, 1, LORA, steps=1)
    jobs["lora-2"] = job(dense, 2, LORA, steps=1)
    jobs["data-4"]["broken_rank"] = 1
    for name in ("data-4", *MIXTURES, "lora-2"):
        jobs[name]["saves"] = True
    deep = make_deep_model(folder / "deep-model")
    jobs["deep"] = job(deep, 2, {}, only_loads=True)
    for name, one in jobs.items():
        one["output"] = str(folder / name)
    run_jobs(list(jobs.values()), folder)
    return folder


def job(model, world_size, trainer, **more) -> dict:
    # Its self-tests take long, and two layouts have them.
    settings = {**CLIP, "share_prefixes": False, **trainer}
    whole = {"model": str(model), "world_size": world_size, "trainer": settings, "steps": STEPS}
    return whole | more


def numbers_of(folder) -> dict[str, float]:
    return json.loads((folder / "numbers.json").read_text())


@pytest.mark.engine
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_ranks_give_the_gradient_and_norm_of_one(tiny, ran, facts, name):
    """AdamW would hide a wrong scale of the gradient; its norm does not."""
    folder, (world_size, options) = ran / name, LAYOUTS[name]
    one, many = numbers_of(ran / "one"), numbers_of(folder)
    expected = gradient_of_one(tiny)
    assert relative_difference(taken(folder, "gradient"), expected) < 1e-12
    norm = math.sqrt(sum((value**2).sum() for value in expected.values()))
    assert many["norm"] == pytest.approx(norm, rel=1e-6)
    assert many["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert many["norm"] > 10 * CLIP["grad_clip"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert many["count"] == one["count"]
    assert many["entropy"] == pytest.approx(one["entropy"], rel=1e-6)
    assert many["packing_difference"] < 1e-6
    layout = fsdp_layout(TrainerSection(**options), world_size)
    shards = grpo_batches(seq_len=64, num_ranks=layout.num_shards)
    plan = StepPlan(minibatches=[shards], order=[0])
    found = facts_of_ranks(folder, layout)
    require_facts(list(turn_facts(plan, found, samples())), facts)
    if world_size == options.get("fsdp_context_parallel_size"):
        alone, shared = taken(ran / "one", "logprobs"), taken(folder, "logprobs")
        assert alone.keys() == shared.keys()
        assert max(np.abs(alone[name] - shared[name]).max() for name in alone) < 1e-6


@pytest.mark.engine
@pytest.mark.parametrize("name", [*LAYOUTS, "resumed"])
def test_weights_after_three_steps_are_those_of_one_process(tiny, ran, name):
    """Those of torch's own AdamW; one job resumes on another layout after a step."""
    expected = steps_of_one(tiny, STEPS, **CLIP)
    assert relative_difference(taken(ran / name, "last"), expected) < 1e-6
    begun = taken(ran / "one", "weights")
    moved = relative_difference(expected, begun)
    assert moved > 1e-3, "three steps are far more than the tolerance"


@pytest.mark.engine
@pytest.mark.parametrize("name", [*BY_MUON, "muon-resumed"])
def test_muon_takes_the_steps_of_one_process_on_any_ranks(models, ran, name):
    """Rows of a matrix on several ranks, experts on one; one job resumes on fewer ranks."""
    kind, *_ = BY_MUON.get(name, ("dense",))
    after = muon_steps_of_one(models[kind], STEPS, **CLIP, decay=MUON["weight_decay"])
    expected = {
        part: one.numpy()
        for parameter, value in after.items()
        for part, one in as_in_files(parameter, torch.tensor(value), kind)
    }
    last, adam = taken(ran / name, "last"), steps_of_one(models[kind], STEPS, **CLIP)
    assert relative_difference(last, expected) < 1e-8
    if kind == "dense":
        assert relative_difference(adam, expected) > 1e-3, "other steps are far outside"


@pytest.mark.engine
def test_muon_keeps_one_moment_of_a_matrix_and_ranks_divide_it(models, ran):
    sizes = {name: value.size for name, value in gradient_of_one(models["dense"]).items()}
    others = sum(size for name, size in sizes.items() if ".layers." not in name or "norm" in name)
    for name, num_copies in (("muon-4", 1), ("muon-hsdp-2x2", 2)):
        kept = [json.loads((ran / name / f"kept-{rank}.json").read_text()) for rank in range(4)]
        moments = sum(one["moments"] for one in kept)
        assert moments == num_copies * (sum(sizes.values()) + others)
        if num_copies == 2:
            assert [one["bits"] for one in kept[:2]] == [one["bits"] for one in kept[2:]]
        assert max(one["moments"] for one in kept) < 1.02 * moments / 4


@pytest.mark.engine
def test_float32_differs_by_rounding_alone(tiny, ran):
    folder = ran / "float32"
    assert relative_difference(taken(folder, "gradient"), gradient_of_one(tiny)) < 5e-6
    assert relative_difference(taken(folder, "last"), steps_of_one(tiny, STEPS, **CLIP)) < 1e-4


@pytest.mark.engine
def test_copies_of_the_model_round_their_moments_alike_and_a_resumed_run_does_too(ran):
    """Every step rounds at random; a checkpoint holds the moments of one copy."""
    names = ("rounded", "rounded-resumed")
    kept = [
        json.loads((ran / name / f"kept-{rank}.json").read_text())["bits"]
        for name in names
        for rank in range(2)
    ]
    assert kept[0] == kept[1] == kept[2] == kept[3]
    last, resumed = (taken(ran / name, "last") for name in names)
    assert all(np.array_equal(resumed[parameter], last[parameter]) for parameter in last)


@pytest.mark.engine
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_train_their_routers_and_experts(models, ran, name):
    kind, world_size, _ = MIXTURES[name]
    expected, found = gradient_of_one(models[kind]), taken(ran / name, "gradient")
    for parameter, value in expected.items():
        assert np.abs(found[parameter] - value).max() <= 1e-12 * np.abs(value).max()
    assert {"gate.weight", "experts.gate_up_proj"} <= {n.partition(".mlp.")[2] for n in found}
    after = steps_of_one(models[kind], STEPS, **CLIP)
    last = taken(ran / name, "last")
    files = {
        part: one.numpy()
        for parameter, value in after.items()
        for part, one in as_in_files(parameter, torch.tensor(value), kind)
    }
    assert relative_difference(last, files) < 1e-6
    with safe_open(ran / name / "exported" / "model.safetensors", framework="np") as file:
        assert set(file.keys()) == set(last) == set(files)
        stepped = taken(ran / name, "weights")
        assert all(np.array_equal(file.get_tensor(part), stepped[part]) for part in last)
    kept = [
        json.loads((ran / name / f"kept-{rank}.json").read_text()) for rank in range(world_size)
    ]
    assert sum(one["weights"] for one in kept) == sum(value.size for value in expected.values()) * (
        2 if "hsdp" in name else 1
    )


@pytest.mark.engine
@pytest.mark.parametrize("name", HEADS)
def test_a_head_with_a_cap_a_scale_or_a_bias_trains_alike_on_several_ranks(models, ran, name):
    """And before it does, the head was compared with transformers' on every rank."""
    kind, *_ = HEADS[name]
    expected, found = gradient_of_one(models[kind]), taken(ran / name, "gradient")
    assert relative_difference(found, expected) < (1e-10 if name == "phi-2" else 1e-12)
    assert found.keys() == expected.keys()


@pytest.mark.engine
@pytest.mark.parametrize("name", ROUTED)
def test_routes_are_dealt_and_cut_as_tokens_are(models, ran, name):
    folder = models[ROUTED[name][0]]
    expected, found = slow_routed_gradient(folder), taken(ran / name, "gradient")
    assert relative_difference(found, expected) < 1e-12
    assert relative_difference(gradient_of_one(folder), expected) > 0.05


@pytest.mark.engine
def test_weights_and_moments_are_divided_among_the_ranks_of_a_copy(tiny, ran):
    whole = sum(value.size for value in gradient_of_one(tiny).values())
    for name, num_copies in (("data-4", 1), ("hsdp-2x2", 2), ("hsdp-2-context-2", 2)):
        kept = [json.loads((ran / name / f"kept-{rank}.json").read_text()) for rank in range(4)]
        assert sum(one["weights"] for one in kept) == num_copies * whole
        assert sum(one["moments"] for one in kept) == 2 * num_copies * whole
        assert max(one["moments"] for one in kept) < 1.02 * 2 * num_copies * whole / 4


@pytest.mark.engine
def test_no_rank_holds_more_of_a_model_in_memory_than_its_shards(ran):
    """At most 1.25 times its shards and one tensor, at any time; the reference model likewise.

    A fifth more was measured: pages of the process count whole, and some are of libraries.
    """
    for rank in range(2):
        found = json.loads((ran / "deep" / f"loaded-{rank}.json").read_text())
        assert found["layers"] == 48
        for model in ("policy", "reference"):
            assert found["shard"] * 0.9 < found[model] < 1.25 * found["shard"] + found["largest"]


@pytest.mark.engine
def test_adapters_are_sharded_like_everything_else(ran):
    name = "lora-2"
    one, two = numbers_of(ran / "lora-1"), numbers_of(ran / name)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert len(taken(ran / name, "gradient")) == 2 * 7 * 2
    assert (ran / name / "exported" / "adapter" / "adapter_config.json").is_file()
    weights = taken(ran / "lora-1", "weights")
    assert relative_difference(taken(ran / name, "weights"), weights) < 1e-6


@pytest.mark.engine
def test_one_rank_s_broken_gradient_skips_the_step_everywhere(ran):
    is_skipped, norm = numbers_of(ran / "data-4")["broken"]
    assert is_skipped
    assert math.isnan(norm)


@pytest.mark.engine
def test_what_ranks_saved_loads_on_one_and_in_transformers(tiny, ran, start):
    name = "data-4"
    worker = start(backend_settings(tiny, dtype="float64"))
    worker.load_checkpoint(ran / name / "checkpoint")
    saved = taken(ran / name, "weights")
    for parameter, value in worker.export_weights():
        assert np.array_equal(value.numpy(), saved[parameter])
    model = AutoModelForCausalLM.from_pretrained(ran / name / "exported", dtype=torch.float64)
    for parameter, value in model.named_parameters():
        assert np.array_equal(value.detach().numpy(), saved[parameter])


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_cannot_be_dealt_are_refused(tiny, size):
    model = load_model(str(tiny)).model
    with pytest.raises(ConfigError, match=rf"\({size}\).*\b4 attention"):
        check_context(model, size)
    assert check_context(model, 4) is None


def test_the_batches_have_sequences_across_the_borders_of_slices():
    for batch in grpo_batches(seq_len=64)[0]:
        for border in (batch.num_tokens * part // 4 for part in (1, 2, 3)):
            assert batch.sequence_ids_T[border - 1] == batch.sequence_ids_T[border]
