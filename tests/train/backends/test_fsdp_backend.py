import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM

from telescope_core.errors import ConfigError, TelescopeError
from telescope_train.backends.schedule import learning_rate_factor
from telescope_train.batches.packing import padding_batch
from telescope_train.diagnostics.rank_checks import Tolerance, check_packing
from telescope_train.trainer.worker import TrainerWorker

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import (  # noqa: E402
    VOCAB,
    backend_settings,
    grpo_batches,
    relative_difference,
    slow_gradient,
)


def gradient_of(worker, batches) -> dict[str, np.ndarray]:
    for parameter in worker.backend._policy.parameters():
        parameter.grad = None
    worker.backend.accumulate_gradient(batches, version=0)
    return {name: value.numpy().copy() for name, value in worker.backend.export_gradient()}


def test_packed_forward_equals_one_by_one_forwards(tiny, start):
    worker = start(backend_settings(tiny))
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    (batch,) = grpo_batches(seq_len=4096)[0]
    (packed_T,) = worker.logprobs([batch])
    for number in range(batch.sequence_ids_T.max() + 1):
        here = batch.sequence_ids_T == number
        ids = torch.tensor(batch.token_ids_T[here], dtype=torch.long)
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0] / batch.temperatures_T[here][0]
        alone = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        mask = batch.mask_T[here]
        assert np.abs(packed_T[here][mask] - alone[mask[1:]]).max() < 1e-5
    assert (packed_T[~batch.mask_T] == 0).all()


@pytest.mark.parametrize("seq_len", [4096, 128, 40])
@pytest.mark.parametrize("order", [None, 1])
def test_gradient_does_not_depend_on_packing(tiny, start, seq_len, order):
    worker = start(backend_settings(tiny, dtype="float64"))
    batches = grpo_batches(seq_len=seq_len, order=order)[0]
    assert len(batches) in {4096: {1}, 128: {2}, 40: {5, 6, 7, 8}}[seq_len]
    assert relative_difference(gradient_of(worker, batches), slow_gradient(tiny)) < 1e-6


def test_gradient_in_float32_is_the_same_to_rounding(tiny, start):
    """Float32 sums of some hundred terms in another order: 1e-5 is 100 ulp."""
    worker = start(backend_settings(tiny))
    whole = gradient_of(worker, grpo_batches(seq_len=4096)[0])
    parts = gradient_of(worker, grpo_batches(seq_len=40)[0])
    assert relative_difference(parts, whole) < 1e-5


def test_eight_batches_one_per_sample(tiny, start):
    worker = start(backend_settings(tiny, dtype="float64"))
    ranks = grpo_batches(seq_len=4096, num_ranks=8)
    batches = [batch for rank in ranks for batch in rank]
    assert len(batches) == 8
    assert relative_difference(gradient_of(worker, batches), slow_gradient(tiny)) < 1e-6


def test_weighting_each_batch_by_itself_is_caught(tiny, start):
    worker = start(backend_settings(tiny, dtype="float64"))
    batches = grpo_batches(seq_len=40)[0]
    broken = [
        replace(batch, weights_T=batch.mask_T.astype("f4") / batch.mask_T.sum() / len(batches))
        for batch in batches
    ]
    assert relative_difference(gradient_of(worker, broken), slow_gradient(tiny)) > 1e-2


def test_padding_batches_change_nothing(tiny, start):
    worker = start(backend_settings(tiny, dtype="float64"))
    batches = grpo_batches(seq_len=4096)[0]
    padded = gradient_of(worker, [*batches, padding_batch()])
    assert relative_difference(padded, gradient_of(worker, batches)) < 1e-12


def test_a_gradient_that_is_not_finite_skips_the_step(tiny, start):
    worker = start(backend_settings(tiny))
    batches = grpo_batches(seq_len=4096)[0]
    broken = [replace(batches[0], advantages_T=batches[0].advantages_T * np.nan)]
    before = {name: value.clone() for name, value in worker.export_weights()}
    row = worker.train_step(broken, version=0)
    assert row["optimizer/skipped"] == 1
    assert all(torch.equal(value, before[name]) for name, value in worker.export_weights())
    assert worker.train_step(batches, version=0)["optimizer/skipped"] == 0
    assert not torch.equal(
        dict(worker.export_weights())["model.norm.weight"], before["model.norm.weight"]
    )
    for _ in range(4):
        worker.train_step(broken, version=0)
    with pytest.raises(TelescopeError, match="5 steps in a row"):
        worker.train_step(broken, version=0)


def test_clipping_bounds_the_norm_and_zero_turns_it_off(tiny, start):
    batches = grpo_batches(seq_len=4096)[0]
    worker = start(backend_settings(tiny, grad_clip=1e-3))
    gradient = gradient_of(worker, batches)
    norm = math.sqrt(sum((value.astype("f8") ** 2).sum() for value in gradient.values()))
    assert worker.backend._clip(1e-3) == pytest.approx(norm, rel=1e-5)
    clipped = {name: value.numpy() for name, value in worker.backend.export_gradient()}
    assert math.sqrt(sum((v**2).sum() for v in clipped.values())) == pytest.approx(1e-3, rel=1e-4)
    assert worker.backend._clip(0.0) == pytest.approx(1e-3, rel=1e-4)


def test_metrics_of_a_step(tiny, start):
    worker = start(backend_settings(tiny, lr_scheduler="linear", warmup_steps=2))
    row = worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    assert row["learning_rate"] == pytest.approx(0.5e-3)
    assert 0 < row["entropy"] < math.log(VOCAB)
    assert row["mismatch/max"] > 0
    assert {"loss/total", "grad_norm", "time/gradient_s", "time/optimizer_s"} <= set(row)
    later = worker.train_step(grpo_batches(seq_len=128)[0], version=1)
    assert "mismatch/max" not in later
    with pytest.raises(ValueError, match="at least one optimizer step"):
        worker.train_minibatches([], [], version=2)


def test_export_loads_in_transformers_with_identical_logits(tiny, start, tmp_path):
    worker = start(backend_settings(tiny))
    worker.train_step(grpo_batches(seq_len=4096)[0], version=0)
    worker.save_pretrained(tmp_path / "exported")
    names = [name for name, _ in worker.export_weights()]
    assert "lm_head.weight" not in names
    assert "model.layers.0.self_attn.q_proj.weight" in names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    exported = dict(worker.export_weights())
    for name, value in model.named_parameters():
        assert torch.equal(value, exported[name])
    (batch,) = grpo_batches(seq_len=4096)[0]
    here = batch.sequence_ids_T == 0
    ids = torch.tensor(batch.token_ids_T[here], dtype=torch.long)
    with torch.no_grad():
        logits = model(ids[None]).logits[0] / batch.temperatures_T[0]
    alone = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    mask = batch.mask_T[here]
    (packed_T,) = worker.logprobs([batch])
    assert np.abs(packed_T[here][mask] - alone[mask[1:]]).max() < 1e-5
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "exported" / name).read_text() == (tiny / name).read_text()


def test_checkpoint_continues_bit_for_bit(tiny, start, tmp_path):
    batches = grpo_batches(seq_len=128)[0]
    settings = backend_settings(tiny, lr_scheduler="cosine", weight_decay=0.1)
    worker = start(settings)
    for version in range(2):
        worker.train_step(batches, version=version)
    worker.save_checkpoint(tmp_path / "checkpoint")
    drawn = torch.rand(3)
    straight = [worker.train_step(batches, version=version) for version in (2, 3)]
    expected = {name: value.clone() for name, value in worker.export_weights()}

    worker = start(settings)
    worker.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(torch.rand(3), drawn)
    resumed = [worker.train_step(batches, version=version) for version in (2, 3)]
    for before, after in zip(straight, resumed, strict=True):
        for name in ("loss/total", "grad_norm", "learning_rate"):
            assert before[name] == after[name]
    for name, value in worker.export_weights():
        assert torch.equal(value, expected[name])


def test_a_checkpoint_of_a_cpu_continues_on_a_gpu_and_back(tiny, start, tmp_path, monkeypatch):
    """A GPU has a random state that a checkpoint of a CPU does not hold."""
    batches = grpo_batches(seq_len=128)[0]
    worker = start(backend_settings(tiny))
    worker.train_step(batches, version=0)
    worker.save_checkpoint(tmp_path / "of-cpu")
    expected = {name: value.clone() for name, value in worker.export_weights()}
    of_gpu, restored = torch.arange(16, dtype=torch.uint8), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
        patch.setattr(torch.cuda, "set_rng_state", restored.append)
        worker.load_checkpoint(tmp_path / "of-cpu")
        assert not restored, "there was none to restore"
        patch.setattr(torch.cuda, "get_rng_state", lambda: of_gpu)
        worker.save_checkpoint(tmp_path / "of-gpu")
        patch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
        worker.load_checkpoint(tmp_path / "of-gpu")
        assert torch.equal(restored[0], of_gpu)
    worker = start(backend_settings(tiny))
    worker.load_checkpoint(tmp_path / "of-gpu")
    assert all(torch.equal(value, expected[name]) for name, value in worker.export_weights())


def test_a_folder_that_is_no_model_is_never_replaced(tiny, start, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    worker = start(backend_settings(tiny))
    with pytest.raises(ConfigError, match="no model or checkpoint"):
        worker.save_pretrained(tmp_path / "mine")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        worker.load_checkpoint(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def _leaky_attention(module, query, key, value, attention_mask, *, scaling, **_):
    """Attend to everything before in the row, whatever sample it is of."""
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


def test_self_check_refuses_attention_that_ignores_boundaries(tiny, start):
    worker = start(backend_settings(tiny))
    assert max(test.value for test in worker.self_tests) < 1e-5
    AttentionInterface.register("leaky_test", _leaky_attention)
    worker.backend._policy.lm.set_attn_implementation("leaky_test")
    with pytest.raises(ConfigError, match="packed samples differ"):
        check_packing(worker.backend, vocab_size=VOCAB, tolerance=Tolerance.of("float32"))


def test_self_check_refuses_a_head_that_scales_its_logits(tiny, start):
    worker = start(backend_settings(tiny))
    head = worker.backend._policy.lm.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: 1.5 * logits)
    with pytest.raises(ConfigError, match="single samples differ by"):
        check_packing(worker.backend, vocab_size=VOCAB, tolerance=Tolerance.of("float32"))


def test_a_second_rank_in_one_process_is_refused(tiny, start):
    start(backend_settings(tiny))
    with pytest.raises(ConfigError, match="already has a trainer rank"):
        TrainerWorker(backend_settings(tiny))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("none", [1, 1, 1, 1, 1, 1]),
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1, 1, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, 0.55]),
    ],
)
def test_learning_rate_schedules(schedule, expected):
    found = [
        learning_rate_factor(step, schedule, warmup_steps=2, number_of_steps=6, min_lr_ratio=0.1)
        for step in range(len(expected))
    ]
    assert found == pytest.approx(expected)
