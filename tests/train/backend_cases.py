"""Settings and batches shared by the tests of the backend and by the ranks they start."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from telescope_train.backends.protocol import BackendSettings
from telescope_train.batches.batch import PackedBatch, TrainingSample, TurnPart
from telescope_train.batches.packing import pack
from telescope_train.batches.weighting import token_weights
from telescope_train.config.schema import AlgorithmSection, ModelSection, TrainerSection
from telescope_train.models.file_names import KNOWN_MIXTURES
from telescope_train.models.layers import stay_wide
from telescope_train.models.tiny import character_tokenizer

VOCAB = 103


def backend_settings(
    model, *, dtype="float32", algorithm=True, records=False, **trainer
) -> BackendSettings:
    return BackendSettings(
        model=ModelSection.model_construct(
            **{**ModelSection(model=str(model)).model_dump(), "model_dtype": dtype},
            **{},
        ).model_copy(update={"mixed_precision_dtype": dtype}),
        trainer=TrainerSection(**{"learning_rate": 1e-3, "entropy_chunk_size": 7, **trainer}),
        algorithm=AlgorithmSection(use_tis=True) if algorithm else None,
        seed=0,
        number_of_steps=10,
        record_token_facts=records,
    )


def samples(num=8, seed=0) -> list[TrainingSample]:
    """Samples of very different lengths, temperatures and advantages; one per rollout."""
    generator = np.random.default_rng(seed)
    return [_sample(generator, index) for index in range(num)]


def _sample(generator, index) -> TrainingSample:
    length = int(generator.integers(3, 40))
    mask = np.arange(length) >= int(generator.integers(1, length - 1))
    num_first = (int(mask.sum()) + 1) // 2
    return TrainingSample(
        token_ids=generator.integers(VOCAB, size=length, dtype=np.int32),
        mask=mask,
        behavior_logprobs=np.where(mask, -4.5 - generator.random(length), np.nan).astype("f4"),
        advantage=float(generator.normal()),
        temperature=float(generator.choice([0.7, 1.0, 1.3])),
        oldest_version=0,
        newest_version=0,
        group_id=f"g{index // 4}",
        rollout_index=index % 4,
        environment="toy",
        turns=(TurnPart(0, num_first), TurnPart(2, int(mask.sum()) - num_first)),
    )


def grpo_batches(*, seq_len, num_ranks=1, order=None) -> list[list[PackedBatch]]:
    """Return the batches of each rank for one and the same set of samples."""
    chosen = samples()
    if order is not None:
        chosen = [chosen[index] for index in np.random.default_rng(order).permutation(len(chosen))]
    weights_N = token_weights(chosen, "token", max_tokens=64)
    return pack(chosen, weights_N, seq_len=seq_len, num_ranks=num_ranks)


def gradient_of(worker, batches) -> dict[str, np.ndarray]:
    """Return the gradient of `batches` alone, whatever the rank has accumulated before."""
    if hasattr(worker.backend, "_stepper"):
        worker.backend._stepper.clear()
    else:
        for parameter in worker.backend._policy.parameters():
            parameter.grad = None
    worker.backend.accumulate_gradient(batches, version=0)
    return exported_gradient(worker)


def exported_gradient(worker) -> dict[str, np.ndarray]:
    """Return what a rank has accumulated so far."""
    return {name: value.numpy().copy() for name, value in worker.backend.export_gradient()}


def relative_difference(found, expected) -> float:
    difference = math.sqrt(sum(((found[n] - expected[n]) ** 2).sum() for n in expected))
    return difference / math.sqrt(sum((value**2).sum() for value in expected.values()))


def slow_model(folder):
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    eager = {"experts_implementation": "eager"} if kind in KNOWN_MIXTURES else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    stay_wide(model, [model])
    return model


def slow_gradient(folder) -> dict[str, np.ndarray]:
    """One sample at a time through transformers' own attention and logits; use_tis by hand."""
    model = slow_model(folder)
    slow_backward(model)
    return {name: value.grad.numpy() for name, value in model.named_parameters()}


def slow_steps(folder, num_steps, *, grad_clip=1.0) -> dict[str, np.ndarray]:
    """The weights after `num_steps` of torch's own AdamW on the gradients of `slow_gradient`."""
    model = slow_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        slow_backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def slow_muon_steps(folder, num_steps, *, grad_clip=1.0, decay=0.0) -> dict[str, np.ndarray]:
    """As `slow_steps`, with Muon in float64 for each matrix of a layer, one at a time."""
    model, rate = slow_model(folder), 1e-3
    named = dict(model.named_parameters())
    matrices = {
        name: value
        for name, value in named.items()
        if ".layers." in name and value.ndim > 1 and not name.endswith("bias")
    }
    others = [value for name, value in named.items() if name not in matrices]
    groups = [
        {"params": [p for p in others if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=rate)
    momenta = {name: np.zeros(value.shape) for name, value in matrices.items()}
    for _ in range(num_steps):
        model.zero_grad()
        slow_backward(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        adam.step()
        for name, value in matrices.items():
            gradient = value.grad.numpy()
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
            nesterov = 0.95 * momenta[name] + 0.05 * gradient
            weights = value.detach().numpy()
            for part in parts_of(name, weights.shape):
                update = slow_orthogonalized(nesterov[part])
                scale = 0.2 * math.sqrt(max(update.shape))
                weights[part] = weights[part] * (1 - rate * decay) - rate * scale * update
    return {name: value.detach().numpy() for name, value in named.items()}


def parts_of(name, shape) -> list[tuple]:
    """Return the indices of the matrices in a parameter: experts, and gates and ups apart."""
    half = shape[-2] // 2
    rows = [slice(half), slice(half, None)] if "gate_up" in name else [slice(None)]
    if len(shape) == 2:
        return [(one,) for one in rows]
    return [(expert, one) for expert in range(shape[0]) for one in rows]


def slow_orthogonalized(matrix) -> np.ndarray:
    """Five steps of the quintic, written with powers of the matrix times its transpose."""
    x = matrix / max(np.sqrt((matrix**2).sum()), 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def slow_backward(model, *, is_supervised=False) -> None:
    """Add the gradient of all samples to `model`, one at a time; use_tis or log-likelihood."""
    chosen = samples()
    num_tokens = sum(int(sample.mask.sum()) for sample in chosen)
    for sample in chosen:
        ids = torch.tensor(sample.token_ids, dtype=torch.long)
        logits = model(ids[None], use_cache=False).logits[0] / np.float32(sample.temperature)
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.tensor(sample.mask[1:])
        behavior = torch.tensor(sample.behavior_logprobs[1:])[mask].double()
        ratio = (logprobs[mask].detach() - behavior).exp().clamp(max=2.0)
        factor = 1.0 if is_supervised else ratio * np.float32(sample.advantage)
        loss = -(factor * logprobs[mask]).sum() / num_tokens
        loss.backward()


def slow_facts(tiny, chosen) -> dict[tuple[str, int, int], list[np.ndarray]]:
    """Log-prob, entropy and effective advantage of the tokens of each turn, as `slow_gradient`.

    By (group, rollout, turn); the effective advantage is that of use_tis.
    """
    model, found = slow_model(tiny), {}
    for sample in chosen:
        ids = torch.tensor(sample.token_ids, dtype=torch.long)
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0] / np.float32(sample.temperature)
        every = logits[:-1].log_softmax(-1)
        logprobs = every.gather(1, ids[1:, None])[:, 0].numpy()[sample.mask[1:]]
        entropy = -(every.exp() * every).sum(-1).numpy()[sample.mask[1:]]
        ratio = np.exp(logprobs - sample.behavior_logprobs[sample.mask]).clip(max=2.0)
        columns, first = (logprobs, entropy, ratio * sample.advantage), 0
        for turn, size in sample.turns:
            own = [column[first : first + size] for column in columns]
            found[sample.group_id, sample.rollout_index, turn] = own
            first += size
    return found


def require_facts(rows, expected) -> None:
    """Assert that `rows` (`TurnFacts`) are those of `slow_facts`, each turn once."""
    assert sorted((row.group_id, row.index, row.turn) for row in rows) == sorted(expected)
    for row in rows:
        logprobs, entropy, effective = expected[row.group_id, row.index, row.turn]
        assert np.abs(np.array(row.logprobs) - logprobs).max(initial=0) < 1e-5
        # Both are rounded to float16.
        np.testing.assert_allclose(row.entropy, entropy, rtol=1e-3)
        np.testing.assert_allclose(row.effective_advantages, effective, rtol=1e-3, atol=1e-6)


def make_mixture(folder, kind) -> Path:
    """Write a random tiny mixture of experts with the tokenizer of the tiny model."""
    character_tokenizer().save_pretrained(folder)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
        "initializer_range": 0.15,
    }
    if kind == "qwen3_moe":
        more = {"num_experts": 5, "moe_intermediate_size": 24, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**sizes, **more, intermediate_size=64, mlp_only_layers=[])
        model = Qwen3MoeForCausalLM(config)
    else:
        config = MixtralConfig(**sizes, num_local_experts=4, intermediate_size=24)
        model = MixtralForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def make_special_head(folder, kind) -> Path:
    """Write a random tiny model with a cap, a scale or a bias at its head; logits are about 5."""
    character_tokenizer().save_pretrained(folder)
    more = {
        # Attention of several ranks knows no soft cap of scores.
        "gemma2": {"head_dim": 8, "final_logit_softcapping": 4.0, "attn_logit_softcapping": None},
        "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
        "phi": {},
    }
    config = CONFIG_MAPPING[kind](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        pad_token_id=0,
        **more[kind],
    )
    model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(4.0)
        if head.bias is not None:
            head.bias.normal_(std=2.0)
    model.save_pretrained(folder)
    return folder


def make_deep_model(folder) -> Path:
    """Write a random dense model of many small tensors, about 155 MB."""
    character_tokenizer().save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=48,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="60MB")
    return folder
