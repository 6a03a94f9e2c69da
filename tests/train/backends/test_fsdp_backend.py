import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, get_wsd_schedule

from telescope_core.errors import ConfigError
from telescope_train.backends import progress
from telescope_train.backends.progress import learning_rate_factor
from telescope_train.diagnostics.rank_checks import Tolerance, check_packing, check_rank
from telescope_train.models.head_check import HEAD_LIMIT
from telescope_train.models.tiny import make_tiny_model

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import (  # noqa: E402
    VOCAB,
    backend_settings,
    gradient_of,
    grpo_batches,
    relative_difference,
    slow_gradient,
)


@pytest.mark.slow
def test_weighting_each_batch_by_itself_is_caught(tiny, start):
    worker = start(backend_settings(tiny, dtype="float64"))
    batches = grpo_batches(seq_len=40)[0]
    broken = [
        replace(batch, weights_T=batch.mask_T.astype("f4") / batch.mask_T.sum() / len(batches))
        for batch in batches
    ]
    assert relative_difference(gradient_of(worker, broken), slow_gradient(tiny)) > 1e-2


@pytest.mark.slow
def test_clipping_bounds_the_norm_and_zero_turns_it_off(tiny, start):
    batches = grpo_batches(seq_len=4096)[0]
    worker = start(backend_settings(tiny, grad_clip=1e-3))
    gradient = gradient_of(worker, batches)
    norm = math.sqrt(sum((value.astype("f8") ** 2).sum() for value in gradient.values()))
    assert worker.backend._clip(1e-3) == pytest.approx(norm, rel=1e-5)
    clipped = {name: value.numpy() for name, value in worker.backend.export_gradient()}
    assert math.sqrt(sum((v**2).sum() for v in clipped.values())) == pytest.approx(1e-3, rel=1e-4)
    assert worker.backend._clip(0.0) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.slow
def test_the_norm_of_a_gradient_in_bfloat16_is_not_rounded(tiny, start):
    worker = start(backend_settings(tiny, dtype="bfloat16"))
    worker.backend.accumulate_gradient(grpo_batches(seq_len=4096)[0], version=0)
    exact = sum(value.double().square().sum() for _, value in worker.backend.export_gradient())
    norm = worker.backend.apply_gradient().gradient_norm
    assert norm == pytest.approx(math.sqrt(exact), rel=1e-6)


@pytest.mark.slow
def test_it_is_counted_how_many_bfloat16_weights_a_step_changes(tiny, start, monkeypatch):
    """With a low learning rate nearly all changes are smaller than the numbers are apart."""
    batches = grpo_batches(seq_len=4096)[0]
    shares: list[float] = []
    monkeypatch.setattr(progress, "MAX_SAMPLED_WEIGHTS", 10**6)  # all
    for rate in (1e-2, 1e-4, 1e-6):
        worker = start(backend_settings(tiny, dtype="bfloat16", learning_rate=rate))
        worker.backend.accumulate_gradient(batches, version=0)
        learns = {name: value != 0 for name, value in worker.backend.export_gradient()}
        before = {name: value.clone() for name, value in worker.export_weights()}
        changed = worker.backend.apply_gradient().changed
        moved = [(new != before[name])[learns[name]] for name, new in worker.export_weights()]
        assert changed == pytest.approx(torch.cat(moved).double().mean().item())
        shares.append(changed)
    assert shares[0] > 0.99 > 0.5 > shares[1] > 0.1 > 0.01 > shares[2]
    monkeypatch.setattr(progress, "MAX_SAMPLED_WEIGHTS", 1000)
    worker = start(backend_settings(tiny, dtype="bfloat16", learning_rate=1e-4))
    found = worker.train_step(batches, version=0)["optimizer/changed_weights"]
    assert found == pytest.approx(shares[1], abs=0.1)
    worker = start(backend_settings(tiny))
    assert "optimizer/changed_weights" not in worker.train_step(batches, version=0)


@pytest.mark.slow
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


def _leaky_attention(module, query, key, value, attention_mask, *, scaling, **_):
    """Attend to everything before in the row, whatever sample it is of."""
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


@pytest.mark.slow
def test_self_check_refuses_attention_that_ignores_boundaries(tiny, start):
    worker = start(backend_settings(tiny))
    assert max(test.value for test in worker.self_tests) < 1e-4
    AttentionInterface.register("leaky_test", _leaky_attention)
    worker.backend._policy.lm.set_attn_implementation("leaky_test")
    with pytest.raises(ConfigError, match=r"packed samples.* \d.*attention"):
        check_packing(worker.backend, vocab_size=VOCAB, tolerance=Tolerance.from_dtype("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_self_check_refuses_a_head_that_scales_its_logits(tiny, start, dtype):
    """As a model does whose config does not say so; a hundredth is seen in 16 bits as well."""
    worker = start(backend_settings(tiny, dtype=dtype))
    assert worker.backend.head_difference() < HEAD_LIMIT / 10
    head = worker.backend._policy.lm.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: 1.01 * logits)
    with pytest.raises(ConfigError, match=r"output head is that of transformers.* nats"):
        check_rank(
            worker.backend, vocab_size=VOCAB, tolerance=Tolerance.from_dtype(dtype), exactness=None
        )


@pytest.mark.slow
def test_each_tensor_that_is_loaded_and_each_self_test_is_progress(tiny, start):
    """Who watches a rank would take a large model on a slow disk for one that hangs."""
    worker = start(backend_settings(tiny))
    num_tensors = sum(1 for _ in worker.backend._policy.lm.parameters())
    assert worker._progress.count > num_tensors
    before = worker._progress.count
    with worker.spans.span("forward"):
        pass
    assert worker._progress.count == before + 1


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named(tiny, start, monkeypatch):
    """The variable is often set for all machines of a cluster, whose interfaces differ."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=eth9: .*\blo\b.*unset it"):
        start(backend_settings(tiny))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    start(backend_settings(tiny))


@pytest.mark.slow
def test_a_second_rank_in_one_process_is_refused(tiny, start):
    from telescope_train.trainer.worker import TrainerWorker

    worker = start(backend_settings(tiny))
    with pytest.raises(ConfigError, match="trainer rank"):
        TrainerWorker(backend_settings(tiny))
    # The first one lives on, with the process group that both would have shared.
    assert worker.train_step(grpo_batches(seq_len=4096)[0], version=0)["grad_norm"] > 0


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


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 1), (3, 5), (3, 17), (0, 20), (19, 1)])
def test_a_cooldown_is_the_decay_of_the_peer_after_a_constant_rate(schedule, warmup, cooldown):
    """Their warm-up begins at 0 instead of at 1 / `warmup_steps`; all later steps are the same."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = get_wsd_schedule(
        optimizer,
        num_warmup_steps=warmup,
        num_decay_steps=cooldown,
        num_training_steps=20,
        decay_type=schedule,
        min_lr_ratio=0.1,
    )
    for step in range(20):
        ours = learning_rate_factor(
            step,
            schedule,
            warmup_steps=warmup,
            number_of_steps=20,
            cooldown_steps=cooldown,
            min_lr_ratio=0.1,
        )
        if step >= warmup:
            assert ours == pytest.approx(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    plain, whole = (
        [
            learning_rate_factor(
                step,
                schedule,
                warmup_steps=warmup,
                number_of_steps=20,
                cooldown_steps=given,
                min_lr_ratio=0.1,
            )
            for step in range(20)
        ]
        for given in (None, 20 - warmup)
    )
    assert plain == whole


@pytest.mark.slow
def test_what_float32_rounds_of_a_large_log_prob_is_no_fault(start, tmp_path):
    """Log-probs travel in float32; a model in float64 that is sure of itself has large ones."""
    folder = make_tiny_model(tmp_path / "tiny", seed=0)
    weights = load_file(folder / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    save_file(
        {**weights, head: 400 * weights[head]}, folder / "model.safetensors", {"format": "pt"}
    )
    worker = start(backend_settings(folder, dtype="float64"))
    one = next(test for test in worker.self_tests if test.name == "importance weight is 1")
    assert 1e-6 < one.value <= one.limit < 1e-3
