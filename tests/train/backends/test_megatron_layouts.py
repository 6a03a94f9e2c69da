"""Backend megatron: every layout takes the steps of one process in float64, and resumes on others.

Gradients and weights are compared, never losses: a missing reduction leaves a loss as it was. The
limit of dense models is that of the float32 columns of a batch, and of mixtures that of
transformers' router, which computes in float32 whatever the dtype.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import relative_difference  # noqa: E402
from megatron_cases import (  # noqa: E402
    make_model,
    reference,
    supervised_gradient,
    worst_difference,
)
from rank_processes import run_ranks  # noqa: E402

from telescope_train.backends.megatron.architecture import architecture_of  # noqa: E402
from telescope_train.backends.megatron.pretrained import read_weights  # noqa: E402

pytestmark = pytest.mark.engine
DENSE, MIXTURE = 1e-8, 1e-6
"""Largest difference of a gradient, relative to the largest number in its tensor."""
TWO_RANKS = {
    "tensor": ("qwen3", {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "sequence": ("qwen2", {"tensor_parallel_size": 2}),
    "pipeline-tied": ("qwen3", {"pipeline_parallel_size": 2}),
    "pipeline": ("llama", {"pipeline_parallel_size": 2, "gradient_checkpointing": False}),
    "context": ("qwen3", {"context_parallel_size": 2}),
    "data": ("mistral", {"use_distributed_optimizer": False}),
    "data-distributed": ("qwen3", {}),
    "data-overlap": ("qwen3", {"overlap_grad_reduce": True}),
    "experts": ("qwen3_moe", {"expert_parallel_size": 2}),
    "experts-tensor": ("qwen3_moe", {"tensor_parallel_size": 2}),
    "experts-both": ("mixtral", {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
    "experts-pipeline": (
        "mixtral",
        {"pipeline_parallel_size": 2, "use_distributed_optimizer": False},
    ),
}
TEACHERS = {
    "teacher-tensor": ("pipeline", {"tensor_parallel_size": 2}),
    "teacher-pipeline": ("experts-tensor", {"pipeline_parallel_size": 2}),
}
"""Beside qwen3: the layout in which the teacher's family is trained, and that of the student."""
SUPERVISED = {
    "supervised-tensor": ("qwen3", {"tensor_parallel_size": 2}),
    "supervised-pipeline": ("llama", {"pipeline_parallel_size": 2}),
    "supervised-context": ("qwen3", {"context_parallel_size": 2}),
    "supervised-data": ("mistral", {}),
    "supervised-experts": ("mixtral", {"expert_parallel_size": 2}),
}
"""Those of `telescope sft`, whose loss is another one."""
SHARING = {
    "sharing-sequence": ("qwen3", {"tensor_parallel_size": 2}),
    "sharing-pipeline": ("llama", {"pipeline_parallel_size": 2, "gradient_checkpointing": False}),
    "sharing-data": ("qwen2", {}),
}
NOT_SHARING = {
    "sharing-context": ("qwen3", {"context_parallel_size": 2}),
    "sharing-experts": ("mixtral", {}),
}
STREAMED = ("data-distributed", "data-overlap", "pipeline")
"""Those that get their gradient in two parts."""
FOUR_RANKS = {
    "tensor-pipeline": ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tensor-context": ("llama", {"tensor_parallel_size": 2, "context_parallel_size": 2}),
    "experts-pipeline": (
        "qwen3_moe",
        {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron-models")
    families = {family for family, _ in (TWO_RANKS | FOUR_RANKS).values()}
    return {family: make_model(family, folder / family) for family in sorted(families)}


@pytest.fixture(scope="module")
def expected(models):
    return {family: reference(folder) for family, folder in models.items()}


def cases_of(layouts, models, **more):
    return [
        {
            "name": name,
            "model": str(models[family]),
            "section": section,
            "streamed": name in STREAMED,
            **more,
        }
        for name, (family, section) in layouts.items()
    ]


def require_the_same(folder, layouts, expected, world_size):
    for name, (family, _) in layouts.items():
        limit = MIXTURE if "experts" in name else DENSE
        for rank in range(world_size):
            found = dict(np.load(folder / f"{name}-{rank}.npz"))
            assert worst_difference(found, expected[family], "gradient.") < limit, name
            # A step of Adam divides by the gradient's size, where small ones count as much.
            assert worst_difference(found, expected[family], "weight.") < 20 * limit, name
            np.testing.assert_allclose(found["norms"], expected[family]["norms"], rtol=1e-6)


@pytest.fixture(scope="module")
def on_two(models, tmp_path_factory):
    """Run every layout of two ranks in the same two processes; checkpoints move between them."""
    folder = tmp_path_factory.mktemp("megatron-two")
    cases = cases_of(TWO_RANKS, models)
    by_name = {case["name"]: case for case in cases}
    by_name["tensor"]["save"] = str(folder / "saved")
    by_name["tensor"]["export"] = str(folder / "exported")
    by_name["experts"]["save"] = str(folder / "saved-experts")
    by_name["experts"]["export"] = str(folder / "exported-experts")
    moved = [
        ("moved", "qwen3", "saved", {"pipeline_parallel_size": 2}),
        ("moved-data", "qwen3", "saved", {}),
        ("moved-experts", "qwen3_moe", "saved-experts", {"tensor_parallel_size": 2}),
    ]
    for name, family, load, section in moved:
        case = {"name": name, "model": str(models[family]), "section": section, "steps": 1}
        cases.append({**case, "load": str(folder / load)})
    both = {"model": str(models["qwen3"]), "reference": True}
    tensor, pipeline = TWO_RANKS["tensor"][1], TWO_RANKS["pipeline-tied"][1]
    path = str(folder / "saved-reference")
    cases.append({**both, "name": "reference", "section": tensor, "save": path})
    cases.append({**both, "name": "reference-again", "section": tensor, "load": path})
    cases.append({**both, "name": "reference-moved", "section": pipeline, "load": path})
    for name, (like, section) in TEACHERS.items():
        student = {"name": name, "model": str(models["qwen3"]), "section": section}
        cases.append({**student, "teacher": str(models[TWO_RANKS[like][0]])})
    stayed = {**by_name["tensor"], "name": "stayed", "steps": 1, "load": str(folder / "saved")}
    cases += cases_of(SUPERVISED, models, supervised=True, steps=1)
    cases += cases_of(SHARING | NOT_SHARING, models, shares=True)
    narrow = cases_of({"sharing-float32": SHARING["sharing-sequence"]}, models, shares=True)
    cases += [{**one, "dtype": "float32"} for one in narrow]
    cases.append({key: stayed[key] for key in ("name", "model", "section", "steps", "load")})
    run_ranks(2, {"cases": cases}, folder, script=HERE / "megatron_script.py", wait_s=400)
    return folder


def test_every_layout_of_two_ranks_takes_the_steps_of_one(on_two, expected):
    require_the_same(on_two, TWO_RANKS, expected, 2)


def test_supervised_training_has_the_gradient_of_one_process(on_two, models):
    expected = {}
    for name, (family, _) in SUPERVISED.items():
        if family not in expected:
            expected[family] = supervised_gradient(models[family])
        limit = MIXTURE if "experts" in name else DENSE
        for rank in range(2):
            found = dict(np.load(on_two / f"{name}-{rank}.npz"))
            assert worst_difference(found, expected[family], "gradient.") < limit, name


@pytest.mark.parametrize("name", [*SHARING, "sharing-float32"])
def test_what_samples_share_is_computed_once_with_the_same_gradient(on_two, name):
    # float32 alone is as far from float64 here, with and without anything shared.
    limit = 4e-6 if "float32" in name else 1e-12
    for rank in range(2):
        found = dict(np.load(on_two / f"{name}-{rank}.npz"))
        assert found["saved"] > 50
        apart, together = (
            {n.removeprefix(f"{one}."): v for n, v in found.items() if n.startswith(f"{one}.")}
            for one in ("apart", "together")
        )
        assert relative_difference(together, apart) < limit
        both = [
            [v for n, v in found.items() if n.startswith(f"logprobs of {one}")]
            for one in ("apart", "together")
        ]
        for one, other in zip(*both, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)


def test_what_cannot_share_prefixes_says_why(on_two):
    reasons = {name: str(np.load(on_two / f"{name}-0.npz")["reason"]) for name in NOT_SHARING}
    facts = {"sharing-context": "context-parallel", "sharing-experts": "experts"}
    for name, reason in reasons.items():
        assert facts[name] in reason


def test_the_optimizer_keeps_a_share_of_its_state(on_two):
    def kept(name):
        states = [np.load(on_two / f"{name}-{rank}.npz")["state"] for rank in range(2)]
        return [int(one) for one, _ in states], int(states[0][1])

    whole, numbers = kept("data")
    assert min(whole) >= 2 * numbers, "two moments of every weight on each rank"
    shared, numbers = kept("data-distributed")
    # Rows of padding in the vocabulary count on top, and buckets are padded.
    assert max(shared) < 1.25 * numbers
    assert sum(shared) >= 2 * numbers


def test_a_checkpoint_is_resumed_on_other_layouts(on_two):
    saved = {n[7:]: v for n, v in np.load(on_two / "tensor-0.npz").items() if "weight." in n[:7]}
    after = dict(np.load(on_two / "stayed-0.npz"))
    for name in ("moved", "moved-data"):
        found = dict(np.load(on_two / f"{name}-1.npz"))
        loaded = {n[7:]: v for n, v in found.items() if n.startswith("loaded.")}
        # The distributed optimizer's files are in float32.
        assert all(np.abs(loaded[n] - saved[n]).max() < 1e-6 for n in saved)
        assert worst_difference(found, after, "weight.") < 1e-6
        assert found["norms"] == pytest.approx(after["norms"], rel=1e-5)
    experts = dict(np.load(on_two / "experts-0.npz"))
    moved = dict(np.load(on_two / "moved-experts-1.npz"))
    names = [n[7:] for n in experts if n.startswith("weight.")]
    difference = [np.abs(moved[f"loaded.{n}"] - experts[f"weight.{n}"]).max() for n in names]
    assert max(difference) < 1e-6


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_of_another_family_has_the_log_probs_that_it_has_in_training(on_two, name):
    like, _ = TEACHERS[name]
    trained = np.load(on_two / f"{like}-0.npz")
    found = np.load(on_two / f"{name}-0.npz")
    numbers = [key.split(".")[1] for key in found if key.startswith("logprobs.")]
    assert numbers
    for number in numbers:
        expected = trained[f"logprobs.{number}"]
        np.testing.assert_allclose(found[f"logprobs.{number}"], expected, atol=1e-6)
        np.testing.assert_allclose(found[f"transformers.{number}"], expected, atol=1e-5)
        assert np.abs(expected).max() > 1


def test_an_updated_reference_comes_back_on_any_layout(on_two):
    saved = np.load(on_two / "reference-0.npz")
    assert np.abs(saved["moved"] - saved["first"]).max() > 0.01
    for name in ("reference-again", "reference-moved"):
        found = np.load(on_two / f"{name}-0.npz")
        np.testing.assert_allclose(found["first"], saved["first"], atol=1e-6)
        np.testing.assert_allclose(found["moved"], saved["moved"], atol=1e-6)


@pytest.mark.parametrize(("name", "suffix"), [("tensor", ""), ("experts", "-experts")])
def test_checkpoints_and_exports_hold_the_weights(on_two, name, suffix):
    weights = {
        n.removeprefix("weight."): v
        for n, v in np.load(on_two / f"{name}-0.npz").items()
        if n.startswith("weight.")
    }
    model = AutoModelForCausalLM.from_pretrained(on_two / f"exported{suffix}")
    assert model.dtype == torch.float64
    architecture = architecture_of(model.config)
    read = dict(read_weights(on_two / f"saved{suffix}", architecture))
    assert sorted(read) == sorted(weights)
    assert all(np.array_equal(read[n].numpy(), value) for n, value in weights.items())
    total = sum(value.size for value in weights.values())
    assert sum(math.prod(p.shape) for p in model.parameters()) == total


@pytest.mark.nightly
def test_layouts_of_four_ranks_take_the_steps_of_one(models, expected, tmp_path):
    cases = cases_of(FOUR_RANKS, models)
    run_ranks(4, {"cases": cases}, tmp_path, script=HERE / "megatron_script.py", wait_s=400)
    require_the_same(tmp_path, FOUR_RANKS, expected, 4)
