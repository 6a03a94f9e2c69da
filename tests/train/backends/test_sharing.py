"""The gradient of a step is the same whether samples share prefixes or not, whatever is trained."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ports import free_port

from telescope_train.algorithms import known_algorithms, loss_function
from telescope_train.batches.batch import StepPlan
from telescope_train.batches.packing import pack
from telescope_train.config.schema import AlgorithmSection
from telescope_train.step.records import turn_facts

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import (  # noqa: E402
    VOCAB,
    backend_settings,
    relative_difference,
)
from prefix_trees import all_shared, plain_batches, random_tree, tree_sample  # noqa: E402
from rank_processes import run_ranks  # noqa: E402

RESTS = {"use_decoupled_loss": True, "kl_penalty_tau": 0.1, "kl_estimator": "k3"}
FORMS = {
    **{name: {"algorithm": name} for name in known_algorithms()},
    "dapo with all": {"algorithm": "dapo", "entropy_coef": 0.05, **RESTS},
    "gspo with all": {"algorithm": "gspo", "entropy_coef": 0.05, **RESTS},
}


def tree(num=14, seed=3):
    return random_tree(np.random.default_rng(seed), num=num, vocab=VOCAB)


def with_old(batch):
    """Add old log-probs that depend on the token alone."""
    wave_T = np.sin(batch.token_ids_T + 2.0 * batch.positions_T).astype(np.float32)
    return replace(
        batch,
        proximal_logprobs_T=np.where(batch.mask_T, batch.behavior_logprobs_T + 0.3 * wave_T, 0),
        reference_logprobs_T=np.where(batch.mask_T, batch.behavior_logprobs_T - 0.5 * wave_T, 0),
    )


def gradient_of(worker, batches):
    """Return the gradient of `batches` as one array, and what else was found."""
    for parameter in worker.backend._policy.parameters():
        parameter.grad = None
    result = worker.backend.accumulate_gradient(batches, version=0)
    parts = [value.flatten() for _, value in worker.backend.export_gradient()]
    return torch.cat(parts).double(), result


def difference(one, other) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def both():
    """The same step with and without what samples share."""
    plain = plain_batches(tree())
    shared = all_shared(plain)
    assert shared[0][0].num_shared_tokens > 50
    return [with_old(batch) for batch in plain[0]], [with_old(batch) for batch in shared[0]]


@pytest.mark.slow
def test_every_algorithm_has_the_same_gradient_and_metrics(tiny, start, both):
    section = AlgorithmSection(**FORMS["dapo with all"])
    worker = start(replace(backend_settings(tiny, dtype="float64"), algorithm=section))
    assert worker.sharing.reason == ""
    for name, form in FORMS.items():
        worker.backend._loss = loss_function(AlgorithmSection(**form))
        (expected, apart), (found, together) = (gradient_of(worker, one) for one in both)
        assert difference(found, expected) < 1e-13, name
        assert together.loss == pytest.approx(apart.loss, rel=1e-13)
        for metric, value in apart.metrics.items():
            assert together.metrics[metric].count == value.count
            assert together.metrics[metric].total == pytest.approx(value.total, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float64", {}),
        pytest.param("float32", {}, marks=pytest.mark.slow),
        pytest.param("float64", {"gradient_checkpointing": False}, marks=pytest.mark.slow),
        pytest.param("float32", {"gradient_checkpointing": "selective"}, marks=pytest.mark.slow),
        pytest.param("float64", {"use_lora": True, "lora_rank": 4}, marks=pytest.mark.slow),
        pytest.param("float32", {"pad_to_multiple_of": 64}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "plain",
)
def test_however_the_model_is_trained(tiny, start, both, options, dtype):
    worker = start(backend_settings(tiny, dtype=dtype, **options))
    assert worker.sharing.reason == ""
    (expected, _), (found, _) = (gradient_of(worker, one) for one in both)
    assert expected.norm() > 1e-3
    # float32 alone is 1.7e-6 away from float64 here, with and without anything shared.
    assert difference(found, expected) < (4e-6 if dtype == "float32" else 1e-13)
    (alone,), (shared,) = (worker.logprobs(one) for one in both)
    assert np.abs(alone - shared).max() < 1e-5


@pytest.mark.slow
def test_facts_of_tokens_are_those_of_their_own_sample(tiny, start):
    samples = tree()
    worker = start(backend_settings(tiny, records=True))
    rows = []
    for shards in (plain_batches(samples), all_shared(plain_batches(samples))):
        worker.train_minibatches([shards[0]], [0], 0)
        plan = StepPlan(minibatches=[shards], order=[0])
        rows.append(list(turn_facts(plan, [worker.take_token_facts()], samples)))
        worker = start(backend_settings(tiny, records=True))
    for alone, shared in zip(*rows, strict=True):
        assert (alone.group_id, alone.index, alone.weight) == (
            shared.group_id,
            shared.index,
            shared.weight,
        )
        assert np.allclose(alone.logprobs, shared.logprobs, atol=1e-5)
        assert np.allclose(alone.entropy, shared.entropy, atol=1e-2)


@pytest.mark.slow
def test_what_cannot_share_says_why(tiny, start):
    off = start(backend_settings(tiny, share_prefixes=False))
    assert "share_prefixes is off" in off.sharing.reason
    dropped = start(backend_settings(tiny, use_lora=True, lora_dropout=0.1))
    assert "dropout" in dropped.sharing.reason


@pytest.mark.engine
def test_two_ranks_give_the_same_gradient(tiny, tmp_path):
    """One after the other: each with rows of its own, and both with the same rows."""
    contexts = {1: free_port(), 2: free_port()}
    job = {"model": str(tiny), "port_of_context": contexts}
    run_ranks(2, job, tmp_path, script=Path(__file__).parent / "rank_sharing.py")
    for context in contexts:
        found, expected = (
            dict(np.load(tmp_path / f"{name}-{context}.npz")) for name in ("together", "apart")
        )
        assert json.loads((tmp_path / f"saved-{context}.json").read_text()) > 50
        assert relative_difference(found, expected) < 1e-13


@pytest.mark.slow
def test_minibatches_share_inside_of_each_only(tiny, start):
    samples = tree()
    halves = [samples[:7], samples[7:]]
    weights = []
    for share in (False, True):
        worker = start(backend_settings(tiny, dtype="float64"))
        packed = [plain_batches(half)[0] for half in halves]
        if share:
            packed = [all_shared([half])[0] for half in packed]
        worker.train_minibatches(packed, [1, 0, 0, 1], 0)
        weights.append({name: value.numpy() for name, value in worker.export_weights()})
    # AdamW divides each gradient by its size, and with it what the small ones are rounded by.
    assert relative_difference(weights[1], weights[0]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_step_needs_no_more_memory(tiny_of_quickstart, start, checkpointing):
    generator = np.random.default_rng(0)
    samples = []
    for number in range(16):
        if number % 8 == 0:
            prompt = generator.integers(VOCAB, size=64, dtype=np.int32)
        ids = np.append(prompt, generator.integers(VOCAB, size=32, dtype=np.int32))
        mask = np.arange(96) >= 64
        behavior = np.where(mask, -1.0, np.nan).astype(np.float32)
        sample = tree_sample(generator, ids, number)
        samples.append(replace(sample, mask=mask, behavior_logprobs=behavior))
    peaks = []
    for share in (False, True):
        worker = start(
            backend_settings(
                tiny_of_quickstart,
                gradient_checkpointing=checkpointing,
                share_prefixes="auto" if share else False,
            )
        )
        options = {"seq_len": 512, "num_ranks": 1, "hidden_size": 64, "share_prefixes": share}
        peaks.append(peak_bytes(worker, pack(samples, np.ones(16), **options)[0]))
    assert 0 < peaks[1] < peaks[0]


def peak_bytes(worker, batches) -> int:
    """Return the most that torch had allocated during a step, beyond what it had before."""
    from torch.profiler import ProfilerActivity, profile

    worker.backend.accumulate_gradient(batches, version=0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        worker.backend.accumulate_gradient(batches, version=0)
    events = [one for one in found.profiler.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda one: one.start_ns())
    return int(np.cumsum([one.nbytes() for one in events]).max())
