"""What every backend owes the trainer, on one rank: the same tests over all that are installed."""

import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from telescope_core.base.file_proofs import proofs_of
from telescope_core.errors import ConfigError, TelescopeError
from telescope_train.backends import known_backends
from telescope_train.backends.protocol import DamagedStateError
from telescope_train.batches.packing import padding_batch
from telescope_train.models.head import HeadRule
from telescope_train.models.head_check import HEAD_LIMIT

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

# Megatron's library warns of its own defaults and of names that torch has replaced.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(
    params=[
        # Its library takes half a minute of the processor over this file.
        pytest.param(name, marks=[pytest.mark.slow] if name == "megatron" else [])
        for name in known_backends()
    ]
)
def settings(request, tiny):
    """Return a function that makes the settings of a rank of one backend."""
    return partial(backend_settings, tiny, train_backend=request.param)


@pytest.fixture(scope="module")
def expected(tiny):
    """The gradient of all samples in float64, one at a time through transformers' own forward."""
    return slow_gradient(tiny)


@pytest.mark.slow
def test_packed_forward_equals_one_by_one_forwards(settings, tiny, start):
    worker = start(settings())
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


@pytest.mark.slow
def test_gradient_does_not_depend_on_packing(settings, expected, start):
    worker = start(settings(dtype="float64"))
    for seq_len, order, numbers in ((4096, None, {1}), (128, 1, {2}), (40, 2, {5, 6, 7, 8})):
        batches = grpo_batches(seq_len=seq_len, order=order)[0]
        assert len(batches) in numbers
        assert relative_difference(gradient_of(worker, batches), expected) < 1e-13
    of_eight_ranks = grpo_batches(seq_len=4096, num_ranks=8)
    one_per_sample = [batch for rank in of_eight_ranks for batch in rank]
    assert len(one_per_sample) == 8
    alone = gradient_of(worker, one_per_sample)
    assert relative_difference(alone, expected) < 1e-13
    padded = gradient_of(worker, [*one_per_sample, padding_batch()])
    assert relative_difference(padded, alone) < 1e-12


@pytest.mark.slow
def test_gradient_in_float32_is_the_same_to_rounding(settings, tiny, start):
    """Float32 sums of some hundred terms in another order: 1e-5 is 100 ulp."""
    worker = start(settings())
    whole = gradient_of(worker, grpo_batches(seq_len=4096)[0])
    parts = gradient_of(worker, grpo_batches(seq_len=40)[0])
    assert relative_difference(parts, whole) < 1e-5


@pytest.mark.slow
def test_a_head_is_what_its_rule_says_and_is_compared_with_transformers(settings, start):
    """Every logit is halved: as at twice the temperature, and unlike in transformers."""
    worker, rule = start(settings()), HeadRule(scale=0.5)
    assert worker.backend.head_difference() < HEAD_LIMIT / 10
    (batch,) = grpo_batches(seq_len=4096)[0]
    (expected_T,) = worker.logprobs([replace(batch, temperatures_T=2 * batch.temperatures_T)])
    if worker.backend.__class__.__name__ == "FsdpBackend":
        worker.backend._policy._head_rule = rule
    else:
        object.__setattr__(worker.backend._loaded.architecture, "head_rule", rule)
    (found_T,) = worker.logprobs([batch])
    np.testing.assert_allclose(found_T, expected_T, atol=1e-5)
    assert worker.backend.head_difference() > 1.0


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_step(settings, tiny, start):
    worker = start(settings())
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


@pytest.mark.slow
def test_metrics_of_a_step(settings, tiny, start):
    worker = start(settings(lr_scheduler="linear", warmup_steps=2))
    row = worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    assert row["learning_rate"] == pytest.approx(0.5e-3)
    assert 0 < row["entropy"] < math.log(VOCAB)
    assert row["mismatch/max"] > 0
    assert {"loss/total", "grad_norm", "time/gradient_s", "time/optimizer_s"} <= set(row)
    later = worker.train_step(grpo_batches(seq_len=128)[0], version=1)
    assert "mismatch/max" not in later
    with pytest.raises(ValueError, match="at least one optimizer step"):
        worker.train_minibatches([], [], version=2)


@pytest.mark.slow
def test_export_loads_in_transformers_with_identical_logits(settings, tiny, start, tmp_path):
    worker = start(settings())
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


@pytest.mark.slow
def test_checkpoint_continues_bit_for_bit(settings, tiny, start, tmp_path):
    batches = grpo_batches(seq_len=128)[0]
    settings = settings(lr_scheduler="cosine", weight_decay=0.1)
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


@pytest.mark.slow
def test_a_changed_optimizer_setting_holds_after_a_checkpoint(settings, start, tmp_path):
    """The checkpoint holds those of its own run, and a resume or a fork may have others."""
    batches = grpo_batches(seq_len=128)[0]
    worker = start(settings(weight_decay=0.1))
    worker.train_step(batches, version=0)
    worker.save_checkpoint(tmp_path / "checkpoint")

    def weights_after_a_step(**changed):
        worker = start(settings(**{"weight_decay": 0.1, **changed}))
        worker.load_checkpoint(tmp_path / "checkpoint")
        worker.train_step(batches, version=1)
        return [value.clone() for _, value in worker.export_weights()]

    unchanged = weights_after_a_step()
    for changes in ({"weight_decay": 0.5}, {"adam_betas": (0.5, 0.9), "adam_eps": 1e-2}):
        changed = weights_after_a_step(**changes)
        same = [torch.equal(*pair) for pair in zip(unchanged, changed, strict=True)]
        assert not all(same), changes


@pytest.mark.slow
def test_every_file_of_a_checkpoint_is_proved_before_it_is_loaded(settings, start, tmp_path):
    worker = start(settings())
    worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    folder = tmp_path / "state"
    worker.start_checkpoint(folder, with_training_state=True)
    told = worker.finish_checkpoint()
    proofs = proofs_of(folder, {})
    # Told while they were written: the large ones, and what says where their parts are.
    assert {"__0_0.distcp", ".metadata"} <= told.keys()
    assert {name: proofs[name] for name in told} == told
    for name in proofs:
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(DamagedStateError, match=re.escape(name)):
            worker.load_checkpoint(folder, proofs)
        (folder / name).write_bytes(kept)
    worker.load_checkpoint(folder, proofs)
    # What torch cannot read names the folder, also where nothing proves it.
    (folder / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(DamagedStateError, match="state"):
        worker.load_checkpoint(folder)


@pytest.mark.slow
def test_a_folder_that_is_no_model_is_never_replaced(settings, start, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    worker = start(settings())
    with pytest.raises(ConfigError, match="no model or checkpoint"):
        worker.save_pretrained(tmp_path / "mine")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        worker.load_checkpoint(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
