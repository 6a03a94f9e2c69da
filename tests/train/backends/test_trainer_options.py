"""Optimisers, activation checkpointing, padding and the reference model of the FSDP backend."""

import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from telescope_core.errors import ConfigError
from telescope_train.backends.fsdp import backend as fsdp_backend
from telescope_train.backends.fsdp import optimizer
from telescope_train.backends.fsdp.backend import ActivationRoom, limit_activations
from telescope_train.backends.fsdp.optimizer import (
    LowPrecisionAdamW,
    OffloadedAdamW,
    make_optimizer,
)
from telescope_train.backends.fsdp.sharding import ShardPlace
from telescope_train.chat.template import template_problems
from telescope_train.chat.tokenizer import load_tokenizer
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.models import packed
from telescope_train.models.adaptive_checkpointing import AdaptiveCheckpointing
from telescope_train.models.logprobs import chunked_logprobs
from telescope_train.models.rounding import round_at_random

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
from backend_cases import backend_settings, grpo_batches  # noqa: E402

CPU = torch.device("cpu")


def with_reference(settings):
    return replace(settings, algorithm=AlgorithmSection(use_tis=True, kl_penalty_tau=0.1))


def gradient_of(worker, batches) -> torch.Tensor:
    worker.backend.accumulate_gradient(batches, version=0)
    return torch.cat([value.flatten() for _, value in worker.backend.export_gradient()])


class OperatorCounts(TorchDispatchMode):
    """Counts each operator that runs."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_reference_stays_until_it_is_updated(tiny, start):
    worker = start(with_reference(backend_settings(tiny, learning_rate=0.05)))
    backend, batches = worker.backend, grpo_batches(seq_len=128)[0]
    first = worker.logprobs(batches)
    for found, expected in zip(backend.reference_logprobs(batches), first, strict=True):
        assert np.array_equal(found, expected)
    worker.train_step(batches, version=0)
    moved = worker.logprobs(batches)
    assert np.abs(moved[0] - first[0]).max() > 0.01
    for found, expected in zip(backend.reference_logprobs(batches), first, strict=True):
        assert np.array_equal(found, expected)
    backend.update_reference()
    for found, expected in zip(backend.reference_logprobs(batches), moved, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_reference_is_the_policy_in_the_dtype_of_the_layers(tiny, start, dtype):
    settings = with_reference(backend_settings(tiny))
    model = settings.model.model_copy(update={"mixed_precision_dtype": dtype})
    worker = start(replace(settings, model=model))
    (rotation,) = (
        module
        for name, module in worker.backend._reference._copy.lm.named_modules()
        if name.endswith("rotary_emb")
    )
    assert rotation.inv_freq.dtype == torch.float32, "rounded frequencies are other positions"
    batches = grpo_batches(seq_len=128)[0]
    with OperatorCounts() as counter:
        reference = worker.backend.reference_logprobs(batches)
    assert "aten._foreach_copy_.default" not in counter.counts, "the policy is not asked, so stays"
    pairs = zip(reference, worker.logprobs(batches), strict=True)
    assert all(np.array_equal(found, expected) for found, expected in pairs)


def kept_and_run_again(worker, batch) -> tuple[int, Counter]:
    """Return (bytes that autograd itself keeps, weights not counted; operators of backward)."""
    worker.logprobs([batch])  # weights are whole from the first forward pass on
    weights = {p.untyped_storage().data_ptr() for p in worker.backend._policy.lm.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    row = worker.backend._row(batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = worker.backend._policy(row)
    with OperatorCounts() as counter:
        output.logprobs_M.sum().backward()
    worker.backend._optimizer.zero_grad()
    return sum(kept.values()), counter.counts


@pytest.mark.slow
def test_checkpointing_keeps_less_and_gives_the_same_gradient(tiny, start):
    batches = grpo_batches(seq_len=4096)[0]
    found, kept, again = {}, {}, {}
    for kind in (False, "selective", "full", True):
        worker = start(backend_settings(tiny, gradient_checkpointing=kind))
        kept[kind], again[kind] = kept_and_run_again(worker, batches[0])
        found[kind] = gradient_of(worker, batches)
        assert torch.equal(found[kind], found[False])
    assert again[True] == again["full"]
    assert kept["full"] < 0.3 * kept[False]
    cheap, layers = "aten.silu.default", 2
    products = ("aten.mm.default", "mkldnn._linear_pointwise.default")
    dear = {kind: sum(counts[one] for one in products) for kind, counts in again.items()}
    assert again[False][cheap] == 0
    assert again["selective"][cheap] == again["full"][cheap] == layers
    assert dear["selective"] == dear[False]
    # Torch stops before the last product of a layer, unless it is a function of ours.
    assert dear["full"] - dear[False] in (6 * layers, 7 * layers)
    attention = {k: sum(n for op, n in again[k].items() if "dot_product" in op) for k in again}
    assert attention["selective"] == attention[False] < attention["full"]


@pytest.mark.slow
def test_auto_recomputes_as_few_layers_as_memory_needs_and_never_another_gradient(
    tiny_of_quickstart, start
):
    batches = grpo_batches(seq_len=4096)[0]
    worker = start(backend_settings(tiny_of_quickstart, gradient_checkpointing=False))
    kept_with_none, _ = kept_and_run_again(worker, batches[0])
    expected = gradient_of(worker, batches)
    auto = {"gradient_checkpointing": "auto", "activation_memory_gib": 1.0}
    worker = start(backend_settings(tiny_of_quickstart, **auto))
    assert "1.00 GiB (activation_memory_gib)" in worker.activations

    def chosen() -> float:
        worker.backend._optimizer.zero_grad()
        metrics = worker.backend.accumulate_gradient(batches, version=0).metrics
        found = [value.flatten() for _, value in worker.backend.export_gradient()]
        assert torch.equal(torch.cat(found), expected)
        return metrics["activations/recomputed_layers"].mean

    # No row of this length was measured before, so all layers but the last are recomputed.
    assert [chosen(), chosen()] == [2, 0]
    checkpointing = worker.backend._checkpointing
    num_tokens, layer_bytes = checkpointing.found
    assert num_tokens == sum(batch.num_tokens - batch.num_shared_tokens for batch in batches)
    assert 0.8 * kept_with_none < 3 * layer_bytes < kept_with_none
    for room, expected_layers in ((2.9, 1), (2.0, 2), (0.0, 2)):
        checkpointing.limit(room * layer_bytes)
        assert chosen() == expected_layers


@pytest.mark.slow
def test_what_is_left_for_activations_is_that_of_the_fullest_rank(tiny, start, monkeypatch):
    worker = start(backend_settings(tiny, gradient_checkpointing="auto"))
    assert "half of" in worker.activations
    checkpointing = AdaptiveCheckpointing(())
    trainer = TrainerSection(gradient_checkpointing="auto")
    rooms = [ActivationRoom(3e9, "more"), ActivationRoom(1e9, "least")]
    monkeypatch.setattr(fsdp_backend, "gather_values", lambda mine: rooms)
    assert "0.93 GiB (least)" in limit_activations(checkpointing, trainer, CPU)


@pytest.mark.slow
def test_padding_at_the_end_of_a_row_changes_nothing(tiny, start):
    batches = grpo_batches(seq_len=128)[0]
    worker = start(backend_settings(tiny, dtype="float64"))
    expected = gradient_of(worker, batches)
    worker = start(backend_settings(tiny, dtype="float64", pad_to_multiple_of=48))
    row = worker.backend._row(batches[0])
    assert len(row.token_ids_T) % 48 == 0 < len(row.token_ids_T) - batches[0].num_tokens
    difference = gradient_of(worker, batches) - expected
    assert difference.norm() < 1e-12 * expected.norm()


@pytest.mark.slow
def test_a_master_weight_moves_where_a_bfloat16_one_would_not(tiny, start):
    """An update of 1e-6 is far below one unit of bfloat16 near 1, where the norms' weights are."""
    settings = backend_settings(tiny, learning_rate=1e-6)
    mixed = settings.model.model_copy(update={"mixed_precision_dtype": "bfloat16"})
    worker = start(replace(settings, model=mixed))
    name = "model.norm.weight"
    before = dict(worker.export_weights())[name].clone()
    row = worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    after = dict(worker.export_weights())[name]
    assert after.dtype == torch.float32
    assert row["grad_norm"] > 0
    moved = (after - before).abs()
    assert 0 < moved.max() <= 1.1e-6
    assert torch.equal(after.bfloat16(), before.bfloat16())


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "file"])
def test_a_base_model_trains_with_the_template_of_the_settings(tiny, start, tmp_path, form):
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    described = json.loads((base / "tokenizer_config.json").read_text())
    described.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(described))
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    model = ModelSection(model=str(base), chat_template=TEMPLATE if form == "text" else str(file))
    with pytest.raises(ConfigError, match="has no chat template; set chat_template"):
        load_tokenizer(ModelSection(model=str(base)))
    worker = start(replace(backend_settings(base), model=model))
    worker.train_step(grpo_batches(seq_len=128)[0], version=0)
    worker.save_pretrained(tmp_path / "export")
    exported = load_tokenizer(ModelSection(model=str(tmp_path / "export")))
    assert exported.chat_template == TEMPLATE
    assert list(template_problems(model)) == []


@pytest.mark.slow
def test_temperatures_are_not_rounded_with_the_activations(tiny, start, monkeypatch):
    seen = []

    def spy(hidden, head, targets, temperatures, **options):
        weight = head.weight_VH
        seen.append((hidden.dtype, weight.dtype, temperatures, options["wide_logits"]))
        return chunked_logprobs(hidden, head, targets, temperatures, **options)

    monkeypatch.setattr(packed, "chunked_logprobs", spy)
    settings = backend_settings(tiny)
    mixed = settings.model.model_copy(update={"mixed_precision_dtype": "bfloat16"})
    worker = start(replace(settings, model=mixed))
    seen.clear()
    (batch, *_) = grpo_batches(seq_len=128)[0]
    worker.logprobs([replace(batch, temperatures_T=np.full_like(batch.temperatures_T, 0.7))])
    ((hidden_dtype, weight_dtype, temperatures_M, is_wide),) = seen
    assert hidden_dtype == weight_dtype == torch.bfloat16
    assert temperatures_M.dtype == torch.float32
    assert set(temperatures_M.tolist()) == {float(np.float32(0.7))}
    assert is_wide


@pytest.mark.slow
def test_a_forward_leaves_no_rounded_copy_behind(tiny, start):
    """What is exported is the master weight, also right after log-probs in bfloat16.

    Servers get it as they compute: rounded once.
    """
    settings = backend_settings(tiny)
    mixed = settings.model.model_copy(update={"mixed_precision_dtype": "bfloat16"})
    worker = start(replace(settings, model=mixed))
    expected = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
    worker.logprobs(grpo_batches(seq_len=128)[0])
    for name, value in worker.export_weights():
        assert torch.equal(value, expected[name])
    for name, value in worker.transfer_weights():
        assert torch.equal(value, expected[name].to(torch.bfloat16))


def steps(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().clone()


def test_bfloat16_moments_follow_float32_ones():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(300, 40, 50, generator=generator) * 0.1 + 0.02
    settings = TrainerSection(learning_rate=1e-3, weight_decay=0.01)
    results = {}
    for name in ("adamw", "adamw_bf16"):
        torch.manual_seed(1)
        parameter = torch.nn.Parameter(torch.ones(40, 50))
        chosen = settings.model_copy(update={"optimizer": name})
        optimizer = make_optimizer([parameter], chosen, CPU, seed=0)
        results[name] = steps(optimizer, parameter, gradients) - 1
        kept = optimizer.state[parameter]["exp_avg_sq"].dtype
        assert kept == (torch.float32 if name == "adamw" else torch.bfloat16)
    difference = (results["adamw_bf16"] - results["adamw"]).norm() / results["adamw"].norm()
    assert difference < 0.02


def test_moments_in_cpu_memory_give_the_same_steps_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(20, 40, 50, generator=generator)
    settings = TrainerSection(learning_rate=1e-3, weight_decay=0.1)
    found = {}
    for offload in (False, True):
        parameter = torch.nn.Parameter(torch.ones(40, 50))
        chosen = settings.model_copy(update={"optimizer_cpu_offload": offload})
        optimizer = make_optimizer([parameter], chosen, CPU, seed=0)
        assert isinstance(optimizer, OffloadedAdamW) is offload
        half = steps(optimizer, parameter, gradients[:10])
        again = torch.nn.Parameter(half)
        resumed = make_optimizer([again], chosen, CPU, seed=0)
        resumed.load_state_dict(optimizer.state_dict())
        found[offload] = steps(resumed, again, gradients[10:])
    assert torch.equal(found[True], found[False])


class MovedTo(TorchDispatchMode):
    """Notes where operations put their results, and in which dtype."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.add((result.device.type, result.dtype))
        return result


@pytest.mark.parametrize(
    ("kind", "device", "more", "dtype"),
    [
        (OffloadedAdamW, "meta", {}, torch.float32),
        (LowPrecisionAdamW, "cpu", {"seed": 0}, torch.bfloat16),
    ],
)
def test_restored_moments_never_take_more_memory_than_they_are_kept_in(kind, device, more, dtype):
    """The device `meta` stands for a GPU that has no room for them."""
    parameter = torch.nn.Parameter(torch.empty(4, 5, device=device))
    made = partial(kind, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, **more)
    moments = {name: torch.ones(4, 5, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    earlier = made([{"params": [parameter], "weight_decay": 0.1}])
    earlier.state[parameter] = {"step": torch.tensor(3.0), **moments}
    again = made([{"params": [parameter], "weight_decay": 0.1}])
    with MovedTo() as moved:
        again.load_state_dict(earlier.state_dict())
    assert moved.found <= {("cpu", dtype)}
    assert again.state[parameter]["step"] == 3.0
    for name, moment in moments.items():
        restored = again.state[parameter][name]
        assert (restored.device, restored.dtype) == (CPU, dtype)
        assert torch.equal(restored, moment)


def test_moments_of_another_optimizer_are_kept_in_the_form_of_this_one():
    parameter = torch.nn.Parameter(torch.ones(4, 5))
    section = TrainerSection(optimizer="adamw_bf16", learning_rate=1e-3)
    adams = [
        make_optimizer([parameter], section.model_copy(update=changed), CPU, seed=0)
        for changed in ({}, {"optimizer_cpu_offload": True})
    ]
    parameter.grad = torch.ones(4, 5)
    for earlier, later, dtype in ((*adams, torch.float32), (*adams[::-1], torch.bfloat16)):
        earlier.step()
        later.load_state_dict(earlier.state_dict())
        assert later.state[parameter]["exp_avg"].dtype == dtype
        later.step()


def test_what_is_rounded_at_random_depends_on_seed_step_weight_and_shard_alone(monkeypatch):
    gradients = torch.randn(6, 40, 50, generator=torch.Generator().manual_seed(0))

    def after(*, seed=0, shard=0, stops=False) -> list[torch.Tensor]:
        place = ShardPlace(shard, 2)
        monkeypatch.setattr(optimizer, "shard_place", lambda _: place)
        parameters = [torch.nn.Parameter(torch.ones(40, 50)) for _ in range(2)]
        settings = TrainerSection(learning_rate=1e-3, optimizer="adamw_bf16")
        adam = make_optimizer(parameters, settings, CPU, seed=seed)
        for number, gradient in enumerate(gradients):
            if stops and number == 3:
                earlier = adam.state_dict()
                adam = make_optimizer(parameters, settings, CPU, seed=seed)
                adam.load_state_dict(earlier)
            for parameter in parameters:
                parameter.grad = gradient.clone()
            adam.step()
        return [adam.state[parameter]["exp_avg"] for parameter in parameters]

    first, second = after()
    assert not torch.equal(first, second)
    assert torch.equal(after()[0], first)
    assert torch.equal(after(stops=True)[1], second)
    assert not torch.equal(after(seed=1)[0], first)
    assert not torch.equal(after(shard=1)[0], first)


def test_rounding_at_random_is_right_on_average_and_exact_where_it_can_be():
    torch.manual_seed(0)
    value = torch.full((20_000,), 1.0 + 0.3 * 2**-7)
    rounded = round_at_random(value).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean() == pytest.approx(value[0].item(), abs=1e-4)
    exact = torch.tensor([0.0, -1.5, 3.0, float("inf"), float("nan")])
    assert torch.equal(round_at_random(exact)[:4].float(), exact[:4])
    assert round_at_random(exact)[4].isnan()


@pytest.mark.slow
def test_rounding_to_nearest_would_stand_still():
    """Why it is at random: the second moment of a constant gradient must reach its square."""
    parameter = torch.nn.Parameter(torch.zeros(256))
    optimizer = LowPrecisionAdamW([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, seed=0)
    torch.manual_seed(0)
    steps(optimizer, parameter, torch.full((2000, 256), 0.5))
    second = optimizer.state[parameter]["exp_avg_sq"].float().mean()
    expected = 0.25 * (1 - 0.999**2000)
    assert second == pytest.approx(expected, rel=0.01)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(2000):
        nearest = nearest.float().lerp(torch.tensor([0.25]), 0.001).bfloat16()
    assert nearest.item() < 0.8 * expected


@pytest.mark.slow
def test_decay_leaves_norms_alone(tiny, start):
    worker = start(backend_settings(tiny, weight_decay=0.5))
    decays = {
        parameter.ndim: group["weight_decay"]
        for group in worker.backend._optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {2: 0.5, 1: 0.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "adamw_8bit"}, "adamw_8bit.*GPU.*adamw_bf16"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload.*GPU"),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload.*GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(tiny, start, options, expected):
    with pytest.raises(ConfigError, match=expected):
        start(backend_settings(tiny, **options))
    assert not torch.distributed.is_initialized(), "another rank can be started in this process"


@pytest.mark.slow
def test_bfloat16_moments_continue_from_a_checkpoint(tiny, start, tmp_path):
    settings = backend_settings(tiny, optimizer="adamw_bf16")
    batches = grpo_batches(seq_len=128)[0]
    worker = start(settings)
    worker.train_step(batches, version=0)
    worker.save_checkpoint(tmp_path / "state")
    worker.train_step(batches, version=1)
    expected = {name: value.clone() for name, value in worker.export_weights()}
    worker = start(settings)
    worker.load_checkpoint(tmp_path / "state")
    worker.train_step(batches, version=1)
    assert all(torch.equal(value, expected[name]) for name, value in worker.export_weights())


@pytest.mark.slow
def test_an_updated_reference_comes_back_with_a_checkpoint(tiny, start, tmp_path):
    settings = with_reference(backend_settings(tiny))
    batches = grpo_batches(seq_len=128)[0]
    worker = start(settings)
    worker.train_step(batches, version=0)
    worker.backend.update_reference()
    (expected,) = worker.backend.reference_logprobs(batches[:1])
    worker.save_checkpoint(tmp_path / "state")
    worker = start(settings)
    assert not np.array_equal(worker.backend.reference_logprobs(batches[:1])[0], expected)
    worker.load_checkpoint(tmp_path / "state")
    assert np.array_equal(worker.backend.reference_logprobs(batches[:1])[0], expected)


@pytest.mark.slow
def test_eight_bit_moments_train_and_continue(tiny, start, tmp_path, monkeypatch):
    """Its step is compiled for a GPU in a run; here it runs uncompiled, on sharded weights."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "low-bit-optimizers")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(optimizer, "_adamw_8bit", lambda device: optimizer.load_adamw_8bit())
    batches = grpo_batches(seq_len=128)[0]

    def moved(worker) -> dict[str, torch.Tensor]:
        for version in range(2):
            worker.train_step(batches, version=version)
        return {name: value.clone() for name, value in worker.export_weights()}

    wide = moved(start(backend_settings(tiny)))
    worker = start(backend_settings(tiny, optimizer="adamw_8bit"))
    narrow = moved(worker)
    initial = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
    difference = sum(((wide[name] - narrow[name]) ** 2).sum() for name in wide) ** 0.5
    assert difference < 0.05 * sum(((wide[n] - initial[n]) ** 2).sum() for n in wide) ** 0.5
    worker.save_checkpoint(tmp_path / "state")
    expected = moved(worker)
    worker = start(backend_settings(tiny, optimizer="adamw_8bit"))
    worker.load_checkpoint(tmp_path / "state")
    assert all(torch.equal(value, expected[name]) for name, value in moved(worker).items())
