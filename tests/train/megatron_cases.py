"""Models and layouts for the tests of backend megatron, and a slow reference in float64."""

from pathlib import Path

import numpy as np
import torch
from backend_cases import VOCAB, backend_settings, slow_backward
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from telescope_train.config.trainer_section import MegatronSection
from telescope_train.models.tiny import character_tokenizer

NUM_STEPS = 3
TRAINER = {"weight_decay": 0.1, "grad_clip": 1.0, "learning_rate": 1e-3}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in _SIZES.items() if k != "head_dim"}),
    "llama": lambda: LlamaConfig(
        **_SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, num_experts=4, norm_topk_prob=True),
    "mixtral": lambda: MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
}


def make_model(family: str, folder: Path) -> Path:
    """Write a random model of `family` to `folder`, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.1)
            # Away from ties, in which two ways of rounding choose other experts.
            parameter.copy_(spread + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def megatron_settings(model, section, *, dtype="float64", **trainer):
    """Return the settings of a rank with `megatron_*` settings, given without that beginning."""
    from dataclasses import replace

    settings = backend_settings(
        model, dtype=dtype, train_backend="megatron", records=True, **{**TRAINER, **trainer}
    )
    named = {f"megatron_{name}": value for name, value in section.items()}
    return replace(settings, megatron=MegatronSection(**named))


def wide_model(folder: Path):
    """Return transformers' own model in float64, also where it insists on float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = _wide_norm(module)
    rotary = model.base_model.rotary_emb
    frequencies = rotary.inv_freq.double()

    def rotate(x, position_ids):
        angles = position_ids[:, :, None].double() * frequencies
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()

    rotary.forward = rotate
    return model


def supervised_gradient(folder: Path) -> dict[str, np.ndarray]:
    """Return the gradient of the mean negative log-likelihood."""
    model = wide_model(folder)
    slow_backward(model, is_supervised=True)
    return {f"gradient.{n}": v.numpy() for n, v in hub_named(model, "grad")}


def _wide_norm(module):
    def forward(x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (x * scale)

    return forward


def reference(folder: Path) -> dict[str, np.ndarray]:
    """Return the gradient, the norms of NUM_STEPS steps and the weights after them."""
    model = wide_model(folder)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
    )
    found, norms = {}, []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        slow_backward(model)
        if step == 0:
            found |= {f"gradient.{n}": v.numpy().copy() for n, v in hub_named(model, "grad")}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    found |= {f"weight.{n}": v.numpy().copy() for n, v in hub_named(model)}
    return {**found, "norms": np.array(norms)}


def hub_named(model, field=None):
    """Yield (name on the hub, tensor) of the parameters, or of their gradients."""
    family = model.config.model_type
    for name, parameter in model.named_parameters():
        value = (parameter if field is None else getattr(parameter, field)).detach()
        block, gate, up, down = "mlp.", "gate_proj", "up_proj", "down_proj"
        if family == "mixtral":
            block, gate, up, down = "block_sparse_moe.", "w1", "w3", "w2"
            name = name.replace("mlp.gate.", "block_sparse_moe.gate.")
        if name.endswith("experts.gate_up_proj"):
            prefix = name.replace("mlp.experts.gate_up_proj", f"{block}experts.")
            for expert, both in enumerate(value):
                for matrix, half in zip((gate, up), both.chunk(2), strict=True):
                    yield f"{prefix}{expert}.{matrix}.weight", half
        elif name.endswith("experts.down_proj"):
            prefix = name.replace("mlp.experts.down_proj", f"{block}experts.")
            for expert, one in enumerate(value):
                yield f"{prefix}{expert}.{down}.weight", one
        else:
            yield name, value


def worst_difference(found, expected, kind: str) -> float:
    """Return the largest difference of any tensor, relative to that tensor's largest number."""
    names = [name for name in expected if name.startswith(kind)]
    assert sorted(names) == sorted(name for name in found if name.startswith(kind))
    return max(
        float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max())
        for name in names
    )
