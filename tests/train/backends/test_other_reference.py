"""`reference_model`: a teacher of another size, and on-policy distillation from it (`opd`)."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from telescope_core.errors import ConfigError
from telescope_train.backends.fsdp import policy
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection
from telescope_train.models.attention.kinds import EAGER

HERE = Path(__file__).parents[1]
sys.path[:0] = [str(HERE), str(HERE / "algorithms")]
from backend_cases import (  # noqa: E402
    backend_settings,
    exported_gradient,
    grpo_batches,
    make_mixture,
    make_special_head,
    relative_difference,
    samples,
    slow_model,
)
from prefix_trees import all_shared, plain_batches, random_tree  # noqa: E402
from rank_objectives import batches_of  # noqa: E402
from rank_processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def teacher(tiny_of_quickstart):
    """Four times as wide as the student, with a layer more; its tokens are the same."""
    return tiny_of_quickstart


def taught(student, teacher, *, kl=0.0, **trainer):
    form = {"kl_penalty_tau": kl} if kl else {"algorithm": "opd"}
    section = AlgorithmSection(**form, reference_model=str(teacher))
    settings = backend_settings(student, **{"dtype": "float64", **trainer})
    return replace(settings, algorithm=section)


def slow_logprobs(model, sample) -> torch.Tensor:
    """[T - 1] of each token of a sample given those before it, by transformers."""
    ids = torch.tensor(sample.token_ids, dtype=torch.long)
    logits = model(ids[None], use_cache=False).logits[0] / np.float32(sample.temperature)
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def one_batch(chosen):
    return pack(chosen, token_weights(chosen, "token", max_tokens=64), seq_len=4096, num_ranks=1)


def test_its_log_probs_are_those_of_transformers(tiny, teacher, start):
    worker = start(taught(tiny, teacher))
    (batch,) = one_batch(samples())[0]
    (found_T,) = worker.reference_logprobs([batch])
    model = slow_model(teacher)
    with torch.no_grad():
        expected = [slow_logprobs(model, one)[one.mask[1:]] for one in samples()]
    found_M, expected_M = np.sort(found_T[batch.mask_T]), torch.cat(expected).sort().values
    np.testing.assert_allclose(found_M, expected_M, atol=1e-6)
    names = [one.name for one in worker.self_tests]
    assert "packing does not leak in the reference model" in names
    assert "shared prefixes change nothing in the reference model" in names
    assert "reference is the policy at its start" not in names


def test_the_gradient_is_that_of_the_divergence(tiny, teacher, start):
    """Of KL(policy, teacher) at each token, estimated from the one that was sampled."""
    worker = start(taught(tiny, teacher))
    chosen = [replace(one, advantage=1.0) for one in samples()]
    worker.accumulate_gradient(one_batch(chosen)[0], 0)
    found = exported_gradient(worker)
    student, other = slow_model(tiny), slow_model(teacher)
    num_tokens = sum(int(one.mask.sum()) for one in chosen)
    for one in chosen:
        mask, own = torch.tensor(one.mask[1:]), slow_logprobs(student, one)
        with torch.no_grad():
            gap = slow_logprobs(other, one) - own
        (-(gap * own)[mask].sum() / num_tokens).backward()
    expected = {name: value.grad.numpy() for name, value in student.named_parameters()}
    assert relative_difference(found, expected) < 1e-6


def test_rows_with_shared_prefixes_and_without_have_the_same(tiny, teacher, start):
    worker = start(taught(tiny, teacher))
    plain = plain_batches(random_tree(np.random.default_rng(3), num=10, vocab=90))
    shared = all_shared(plain)
    apart, together = (
        np.concatenate(
            [
                found[batch.mask_T]
                for found, batch in zip(worker.reference_logprobs(batches), batches, strict=True)
            ]
        )
        for batches in (plain[0], shared[0])
    )
    assert shared[0][0].num_shared_tokens > 20
    np.testing.assert_allclose(np.sort(apart), np.sort(together), atol=1e-6)


def test_with_adapters_it_is_still_the_other_model(tiny, teacher, start):
    lora = {"use_lora": True, "lora_rank": 2, "lora_alpha": 4}
    worker = start(taught(tiny, teacher, kl=0.5, **lora))
    alone = start(taught(tiny, teacher))
    batches = grpo_batches(seq_len=64)[0]
    for found_T, expected_T in zip(
        worker.reference_logprobs(batches), alone.reference_logprobs(batches), strict=True
    ):
        np.testing.assert_allclose(found_T, expected_T, atol=1e-6)


def test_two_ranks_have_what_one_has(tiny, teacher, start, tmp_path):
    job = {"model": str(tiny), "teacher": str(teacher)}
    run_ranks(2, job, tmp_path, script=HERE / "algorithms" / "rank_objectives.py")
    worker = start(taught(tiny, teacher))
    section = AlgorithmSection(algorithm="opd", reference_model=str(teacher))
    for rank, batches in enumerate(batches_of(section, 40, 2)):
        together = np.load(tmp_path / f"reference{rank}.npz")
        for number, expected_T in enumerate(worker.reference_logprobs(batches)):
            np.testing.assert_allclose(together[f"arr_{number}"], expected_T, atol=1e-6)


def test_a_teacher_whose_samples_are_not_kept_apart_is_refused(tiny, teacher, start, monkeypatch):
    beside = policy._beside

    def leaking(*arguments):
        sharing, other = beside(*arguments)
        return sharing, replace(other, attention=EAGER)

    monkeypatch.setattr(policy, "_beside", leaking)
    with pytest.raises(ConfigError, match=r"\Areference_model: self-test 'shared prefixes"):
        start(taught(tiny, teacher))


def test_what_is_wrong_with_a_teacher_is_told_of_it(tiny, start, tmp_path):
    with pytest.raises(ConfigError, match=r"\Areference_model: .*nothing"):
        start(taught(tiny, tmp_path / "nothing"))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma2", "phi"])
def test_a_teacher_may_be_of_another_family(tiny, start, tmp_path, kind):
    """With a cap or a bias at its head. A mixture of experts needs each sample by itself."""
    make = make_mixture if kind == "qwen3_moe" else make_special_head
    other = make(tmp_path / "teacher", kind)
    worker = start(taught(tiny, other))
    if kind == "qwen3_moe":
        assert worker.sharing.reason.startswith("reference_model cannot: the model is a mixture of")
    (batch,) = one_batch(samples())[0]
    (found_T,) = worker.reference_logprobs([batch])
    with torch.no_grad():
        model = slow_model(other)
        expected = [slow_logprobs(model, one)[one.mask[1:]] for one in samples()]
    found_M, expected_M = np.sort(found_T[batch.mask_T]), torch.cat(expected).sort().values
    np.testing.assert_allclose(found_M, expected_M, atol=1e-6)
