"""The same step on 1, 2 and 4 ranks: data parallel, context parallel, LoRA; and its clipping."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from telescope_core.errors import ConfigError
from telescope_train.backends.protocol import BatchFacts
from telescope_train.batches.batch import StepPlan
from telescope_train.step.token_facts import turn_facts
from telescope_train.trainer.worker import TrainerWorker

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import (  # noqa: E402
    backend_settings,
    grpo_batches,
    relative_difference,
    require_facts,
    run_ranks,
    samples,
    slow_facts,
    slow_gradient,
)
from rank_script import FACTS  # noqa: E402


def taken(folder, name) -> dict[str, np.ndarray]:
    return dict(np.load(folder / f"{name}.npz"))


def step_on(world_size, tiny, folder, **job) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    run_ranks(world_size, {"model": str(tiny), "seq_len": 64, **job}, folder)
    return json.loads((folder / "numbers.json").read_text())


def facts_of_ranks(folder, num_shards, sharing) -> list[list[BatchFacts]]:
    """Return what the ranks found, by [shard][batch]; those that share rows found the same."""
    found = []
    for rank in range(num_shards * sharing):
        files = sorted(folder.glob(f"facts-{rank}-*.npz"), key=lambda path: path.stem)
        found.append([BatchFacts(**dict(zip(FACTS, _arrays(path), strict=True))) for path in files])
    for rank, batches in enumerate(found):
        for one, first in zip(batches, found[rank - rank % sharing], strict=True):
            assert np.array_equal(one.logprobs_M, first.logprobs_M)
    return found[::sharing]


def _arrays(path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


CLIP = {"grad_clip": 1e-3}


@pytest.fixture(scope="module")
def one_rank(tiny, tmp_path_factory):
    """The folder and the numbers of one rank's step."""
    folder = tmp_path_factory.mktemp("ranks") / "one"
    return folder, step_on(1, tiny, folder, trainer=CLIP)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {}),
        (2, {"fsdp_context_parallel_size": 2}),
        (4, {"fsdp_context_parallel_size": 2, "pad_to_multiple_of": 6}),
        (4, {"fsdp_context_parallel_size": 4, "gradient_checkpointing": "selective"}),
        (4, {"fsdp_replicate_size": 2}),
    ],
    ids=["data-4", "context-2", "data-2-context-2", "context-4-fewer-kv-heads", "hsdp-2x2"],
)
def test_any_ranks_give_the_gradient_and_norm_of_one(tiny, tmp_path, one_rank, world_size, options):
    """AdamW would hide a wrong scale of the gradient; its norm does not."""
    folder, one = one_rank
    many = step_on(world_size, tiny, tmp_path / "many", trainer={**CLIP, **options})
    expected = slow_gradient(tiny)
    assert relative_difference(taken(tmp_path / "many", "gradient"), expected) < 1e-6
    norm = math.sqrt(sum((value**2).sum() for value in expected.values()))
    assert many["norm"] == pytest.approx(norm, rel=1e-6)
    assert many["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert many["norm"] > 10 * CLIP["grad_clip"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert many["count"] == one["count"]
    assert many["entropy"] == pytest.approx(one["entropy"], rel=1e-6)
    assert many["packing_difference"] < 1e-6
    sharing = options.get("fsdp_context_parallel_size", 1)
    num_shards = world_size // sharing
    plan = StepPlan(minibatches=[grpo_batches(seq_len=64, num_ranks=num_shards)], order=[0])
    facts = facts_of_ranks(tmp_path / "many", num_shards, sharing)
    require_facts(list(turn_facts(plan, facts, samples())), slow_facts(tiny, samples()))
    weights = taken(folder, "weights")
    assert relative_difference(taken(tmp_path / "many", "weights"), weights) < 1e-6
    if world_size == options.get("fsdp_context_parallel_size"):
        alone, shared = taken(folder, "logprobs"), taken(tmp_path / "many", "logprobs")
        assert alone.keys() == shared.keys()
        assert max(np.abs(alone[name] - shared[name]).max() for name in alone) < 1e-6


@pytest.mark.engine
def test_adapters_are_sharded_like_everything_else(tiny, tmp_path):
    options = {"use_lora": True, "lora_rank": 3}
    one = step_on(1, tiny, tmp_path / "one", trainer=options)
    two = step_on(2, tiny, tmp_path / "two", trainer=options)
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert len(taken(tmp_path / "two", "gradient")) == 3 * 7 * 2
    assert (tmp_path / "two" / "exported" / "adapter" / "adapter_config.json").is_file()
    weights = taken(tmp_path / "one", "weights")
    assert relative_difference(taken(tmp_path / "two", "weights"), weights) < 1e-6


@pytest.mark.engine
def test_one_rank_s_broken_gradient_skips_the_step_everywhere(tiny, tmp_path):
    numbers = step_on(2, tiny, tmp_path, broken_rank=1)
    assert numbers["is_skipped"]
    assert math.isnan(numbers["norm"])


@pytest.mark.parametrize(
    ("size", "expected"),
    [(3, "must divide the model's 4 attention heads"), (8, "must divide the model's 4")],
)
def test_heads_that_cannot_be_dealt_are_refused(tiny, size, expected):
    with pytest.raises(ConfigError, match=expected):
        TrainerWorker(backend_settings(tiny, fsdp_context_parallel_size=size))


def test_the_batches_have_sequences_across_the_borders_of_slices():
    for batch in grpo_batches(seq_len=64)[0]:
        for border in (batch.num_tokens * part // 4 for part in (1, 2, 3)):
            assert batch.sequence_ids_T[border - 1] == batch.sequence_ids_T[border]
