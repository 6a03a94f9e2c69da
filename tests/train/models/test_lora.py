"""LoRA: what is trained, what leaves the trainer, and what an adapter is when merged."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from telescope_core.errors import ConfigError
from telescope_train.backends.distributed_checkpoint import saved_keys
from telescope_train.backends.fsdp import policy as fsdp_policy
from telescope_train.backends.fsdp.sharding import local_part, reshard
from telescope_train.batches.packing import pack
from telescope_train.config.schema import AlgorithmSection
from telescope_train.models.lora import adapters_off, merged_blocks, merged_weights, scaled_adapter

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import backend_settings, grpo_batches  # noqa: E402

pytestmark = pytest.mark.slow


def lora_settings(model, **trainer):
    given = {"use_lora": True, "lora_rank": 4, "learning_rate": 0.02, **trainer}
    return backend_settings(model, **given)


def largest_difference(some, others) -> float:
    return max(np.abs(a - b).max() for a, b in zip(some, others, strict=True))


def frozen_weights(worker) -> dict[str, torch.Tensor]:
    reshard(worker.backend._policy)
    return {
        name: local_part(parameter.detach()).clone()
        for name, parameter in worker.backend._policy.named_parameters()
        if not parameter.requires_grad
    }


def test_only_adapters_have_a_gradient_and_move(tiny, start):
    worker = start(lora_settings(tiny))
    batches = grpo_batches(seq_len=128)[0]
    frozen = frozen_weights(worker)
    worker.backend.accumulate_gradient(batches, version=0)
    names = [name for name, _ in worker.backend.export_gradient()]
    assert len(names) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    worker.backend.apply_gradient()
    held = {id(p) for g in worker.backend._optimizer.param_groups for p in g["params"]}
    assert len(held) == len(names)
    for name, value in frozen_weights(worker).items():
        assert torch.equal(value, frozen[name])


def test_the_gradient_is_that_of_the_merged_matrix(tiny, start):
    """W + s B A: the gradient of B is s G A', that of A is s B' G, with G that of W."""
    batches = grpo_batches(seq_len=128)[0]
    worker = start(lora_settings(tiny, dtype="float64"))
    worker.train_step(batches, version=0)
    merged = dict(worker.export_weights())
    worker.backend.accumulate_gradient(batches, version=1)
    found = dict(worker.backend.export_gradient())
    name = "model.layers.1.mlp.up_proj"
    module = worker.backend._policy.lm.get_submodule(name)
    parts = (module.lora_A["default"], module.lora_B["default"])
    down, up = (local_part(part.weight.detach()).clone() for part in parts)

    plain = start(backend_settings(tiny, dtype="float64"))
    with torch.no_grad():
        reshard(plain.backend._policy)
        for parameter_name, parameter in plain.backend._policy.lm.named_parameters():
            local_part(parameter).copy_(merged[parameter_name])
    plain.backend.accumulate_gradient(batches, version=1)
    whole = dict(plain.backend.export_gradient())[f"{name}.weight"]
    scale = 32 / 4
    for part, expected in (("B", scale * whole @ down.T), ("A", scale * up.T @ whole)):
        difference = found[f"{name}.lora_{part}.default.weight"] - expected
        assert difference.norm() < 1e-8 * expected.norm()


def test_merged_and_adapter_exports_give_the_same_logits(tiny, start, tmp_path):
    worker = start(lora_settings(tiny))
    batches = grpo_batches(seq_len=4096)[0]
    for version in range(2):
        worker.train_step(batches, version=version)
    worker.save_pretrained(tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    (batch,) = batches
    here = batch.sequence_ids_T == 0
    ids = torch.tensor(batch.token_ids_T[here], dtype=torch.long)
    with torch.no_grad():
        before = base(ids[None]).logits
        by_adapter = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")(ids[None]).logits
        logits = merged(ids[None]).logits
    assert (logits - by_adapter).abs().max() < 1e-5 * logits.abs().max()
    assert (logits - before).abs().max() > 1e-3
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
    alone = (logits[0] / batch.temperatures_T[0])[:-1].log_softmax(-1)
    alone = alone.gather(1, ids[1:, None])[:, 0].numpy()
    mask = batch.mask_T[here]
    (packed_T,) = worker.logprobs([batch])
    assert np.abs(packed_T[here][mask] - alone[mask[1:]]).max() < 1e-5


def test_servers_are_sent_whole_blocks_and_nothing_else(tiny, start):
    worker = start(lora_settings(tiny, lora_target_modules=("q_proj",)))
    worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    sent, whole = dict(worker.transfer_weights()), dict(worker.export_weights())
    matrices = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert set(sent) == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in range(2) for name in matrices
    }
    for name, value in sent.items():
        assert torch.equal(value, whole[name])
    start(backend_settings(tiny))
    initial = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
    changed = [name for name in whole if not torch.equal(whole[name], initial[name])]
    assert changed == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    assert set(whole) == set(initial)


def of_dtypes(settings, model_dtype, layers):
    section = settings.model.model_copy(
        update={"model_dtype": model_dtype, "mixed_precision_dtype": layers}
    )
    return replace(settings, model=section)


def adapter_shards(worker) -> dict[str, torch.Tensor]:
    """Return this rank's part of each adapter matrix, which writes go to."""
    reshard(worker.backend._policy)
    return {
        name: local_part(parameter.detach())
        for name, parameter in worker.backend._policy.lm.named_parameters()
        if ".lora_" in name
    }


def adapted(sent, initial):
    """Return what was added to the matrices, all numbers in one row."""
    return torch.cat([(sent[name].float() - initial[name].float()).flatten() for name in sent])


@pytest.mark.parametrize(("layers", "least"), [("float32", 0.9999), ("bfloat16", 0.95)])
def test_servers_get_a_small_update_of_bfloat16_weights_whole(
    tiny_of_quickstart, start, layers, least
):
    """At this rate rounding to nearest would leave a twentieth of the first step."""
    settings = of_dtypes(lora_settings(tiny_of_quickstart, learning_rate=1e-5), "bfloat16", layers)
    worker = start(settings)
    initial = {name: value.clone() for name, value in worker.transfer_weights()}
    for name, value in initial.items():
        assert torch.equal(value, value.to(torch.bfloat16).to(value.dtype)), name
    worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    sent = dict(worker.transfer_weights())
    assert {value.dtype for value in sent.values()} == {getattr(torch, layers)}
    given = adapted(sent, initial)
    parts = dict(scaled_adapter(worker.backend._policy.lm, worker.backend._whole))
    change = torch.cat(
        [
            (
                parts[f"base_model.model.{name[:-7]}.lora_B.weight"]
                @ parts[f"base_model.model.{name[:-7]}.lora_A.weight"]
            ).flatten()
            for name in sent
        ]
    )
    assert change.abs().mean() < 1e-5
    assert least < float(given @ change / (change @ change)) < 2 - least
    nearest = (torch.cat([v.float().flatten() for v in initial.values()]) + change).bfloat16()
    before = torch.cat([value.float().flatten() for value in initial.values()])
    assert float((nearest.float() - before) @ change / (change @ change)) < 0.1
    # The same weights are sent the same way again, for instance after a resume.
    again = dict(worker.transfer_weights())
    assert all(torch.equal(value, again[name]) for name, value in sent.items())


def test_layers_in_bfloat16_compute_a_small_update_whole(tiny, start, tmp_path, make_sample):
    """The noise of bfloat16 is there with every weight; the part of the update is what counts."""
    samples = [make_sample(1, 199, rollout=index, vocab_size=100) for index in range(16)]
    (batches,) = pack(samples, np.ones(16), seq_len=1024, num_ranks=1)
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for path in tiny.glob("*token*"):
        shutil.copy(path, tmp_path)
    narrow = of_dtypes(lora_settings(tmp_path, learning_rate=1e-5), "float32", "bfloat16")
    worker = start(narrow)
    before = np.concatenate(worker.logprobs(batches))
    for version in range(10):
        worker.train_step(batches, version=version)
    shown = np.concatenate(worker.logprobs(batches)) - before
    trained = adapter_shards(worker)

    worker = start(of_dtypes(narrow, "float32", "float32"))
    before = np.concatenate(worker.logprobs(batches))
    for name, shard in adapter_shards(worker).items():
        shard.copy_(trained[name])
    moved = np.concatenate(worker.logprobs(batches)) - before
    # With peft's own forward it is a half; the standard error is 0.03.
    assert 0.85 < float(shown @ moved / (moved @ moved)) < 1.15


def test_the_gradient_in_bfloat16_is_that_of_peft(tiny, start, monkeypatch):
    batches = grpo_batches(seq_len=128)[0]
    settings = of_dtypes(lora_settings(tiny), "float32", "bfloat16")
    gradients = []
    for replaced in (True, False):
        if not replaced:
            monkeypatch.setattr(fsdp_policy, "round_sums_once", lambda lm: None)
        worker = start(settings)
        worker.train_step(batches, version=0)
        worker.backend.accumulate_gradient(batches, version=1)
        gradients.append(
            torch.cat([value.flatten() for _, value in worker.backend.export_gradient()])
        )
    ours, of_peft = gradients
    assert (ours - of_peft).norm() < 0.1 * of_peft.norm()
    assert ours @ of_peft > 0.995 * ours.norm() * of_peft.norm()


def test_an_adapter_that_is_sent_has_its_scale_in_it(tiny, start):
    worker = start(replace(lora_settings(tiny, lora_alpha=7), sends_adapter=True))
    worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    sent, whole = dict(worker.transfer_weights()), dict(worker.export_weights())
    assert len(sent) == 2 * 7 * 2
    initial = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
    for name in (name for name in whole if name.endswith("_proj.weight")):
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        change = sent[f"{prefix}.lora_B.weight"] @ sent[f"{prefix}.lora_A.weight"]
        assert torch.allclose(initial[name] + change, whole[name], atol=1e-7)


def test_the_reference_is_the_model_without_adapters(tiny, start):
    section = AlgorithmSection(use_tis=True, kl_penalty_tau=0.1)
    worker = start(replace(lora_settings(tiny), algorithm=section))
    backend, batches = worker.backend, grpo_batches(seq_len=128)[0]
    first = worker.logprobs(batches)
    assert largest_difference(backend.reference_logprobs(batches), first) == 0
    for version in range(2):
        worker.train_step(batches, version=version)
    moved = worker.logprobs(batches)
    assert largest_difference(moved, first) > 0.01
    assert largest_difference(backend.reference_logprobs(batches), first) == 0
    backend.update_reference()
    worker.train_step(batches, version=2)
    assert largest_difference(backend.reference_logprobs(batches), moved) == 0
    assert largest_difference(worker.logprobs(batches), moved) > 0.001


def test_checkpoints_hold_adapters_alone_and_continue_bit_for_bit(tiny, start, tmp_path):
    batches = grpo_batches(seq_len=128)[0]
    settings = lora_settings(tiny, lr_scheduler="cosine", lora_dropout=0.1)
    worker = start(settings)
    for version in range(2):
        worker.train_step(batches, version=version)
    worker.save_checkpoint(tmp_path / "state")
    worker.train_step(batches, version=2)
    expected = {name: value.clone() for name, value in worker.export_weights()}
    keys = [key for key in saved_keys(tmp_path / "state") if key.startswith("model.")]
    assert len(keys) == 2 * 7 * 2
    assert all("lora_" in key for key in keys)
    worker = start(settings)
    worker.load_checkpoint(tmp_path / "state")
    worker.train_step(batches, version=2)
    assert all(torch.equal(value, expected[name]) for name, value in worker.export_weights())


def test_dropout_acts_in_training_only(tiny, start):
    batches = grpo_batches(seq_len=128)[0]
    worker = start(lora_settings(tiny, lora_dropout=0.5))
    worker.train_step(batches, version=0)
    assert largest_difference(worker.logprobs(batches), worker.logprobs(batches)) == 0
    gradients = []
    for _ in range(2):
        worker.backend.accumulate_gradient(batches, version=1)
        gradients.append(dict(worker.backend.export_gradient()))
        worker.backend._optimizer.zero_grad()
    assert any(not torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


def test_a_bfloat16_base_has_float32_adapters(tiny, start):
    settings = lora_settings(tiny)
    model = settings.model.model_copy(
        update={"model_dtype": "bfloat16", "mixed_precision_dtype": "bfloat16"}
    )
    worker = start(replace(settings, model=model))
    reshard(worker.backend._policy)
    dtypes = {
        "lora" in name: parameter.dtype
        for name, parameter in worker.backend._policy.named_parameters()
    }
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert worker.train_step(grpo_batches(seq_len=128)[0], version=0)["grad_norm"] > 0
    with adapters_off(worker.backend._policy.lm):
        worker.logprobs(grpo_batches(seq_len=128)[0])
    # What is asked for in float32, as `telescope export --dtype` does, is not rounded before.
    reshard(worker.backend._policy)
    lm = worker.backend._policy.lm
    for dtype in (torch.float32, torch.bfloat16):
        whole = dict(merged_weights(lm, local_part, dtype))
        value = next(value for name, value in whole.items() if "q_proj" in name)
        assert torch.equal(value, value.to(torch.bfloat16).to(dtype)) == (dtype is torch.bfloat16)


def test_an_adapter_far_below_the_spacing_of_bfloat16_is_merged_on_average(tiny, start):
    """Rounded to nearest, next to nothing of it would be left."""
    settings = lora_settings(tiny)
    model = settings.model.model_copy(
        update={"model_dtype": "bfloat16", "mixed_precision_dtype": "bfloat16"}
    )
    lm = start(replace(settings, model=model)).backend._policy.lm
    base = dict(merged_blocks(lm, local_part, torch.float32))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=3e-5)
    exact, sent = (
        dict(merged_blocks(lm, local_part, dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(value.dtype == torch.bfloat16 for value in sent.values())
    moved, arrived, nearest = (
        torch.cat([(found[name].float() - base[name]).flatten() for name in base])
        for found in (exact, sent, {name: one.bfloat16() for name, one in exact.items()})
    )
    assert float(arrived @ moved / (moved @ moved)) == pytest.approx(1, abs=0.1)
    assert float(nearest @ moved / (moved @ moved)) < 0.6


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj"])
def test_targets_outside_the_layers_are_refused(tiny, start, target):
    with pytest.raises(ConfigError, match=f"lora_target_modules.*{target}"):
        start(lora_settings(tiny, lora_target_modules=("q_proj", target)))
    assert not torch.distributed.is_initialized(), "no rank was started"
