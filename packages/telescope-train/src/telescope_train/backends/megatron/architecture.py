"""The architecture of a model as the backend needs it, from its Hugging Face config.

It covers decoders built like Llama: Llama, Mistral, Qwen2 and Qwen3, and the mixtures Mixtral and
Qwen3-MoE. Features of these models that this backend lacks are refused by name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from telescope_core.base.errors import ConfigError
from telescope_train.backends.megatron.layout import ROTATIONS, ModelSizes, config_problems
from telescope_train.models.head import HeadRule, head_rule

_VOCABULARY_MULTIPLE = 128
"""The embedding is padded to a multiple of this, so that it fits other numbers of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ModelSizes):
    """Sizes and options of a decoder like Llama."""

    family: str
    hidden_size: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding that are tokens."""
    norm_eps: float
    is_tied: bool
    """Whether the output head is the embedding."""
    has_qk_norm: bool
    has_qkv_bias: bool
    head_rule: HeadRule
    """Processing of the product of hidden states and head."""
    padding_id: int | None
    """Token whose embedding gets no gradient where it is an input, as in transformers."""
    num_experts_per_token: int = 1
    expert_ffn_size: int = 0
    renormalizes: bool = True
    """Whether the weights of the chosen experts are scaled to sum to 1."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding with padding, the same for every number of ranks."""
        return -(-self.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Return the architecture; ConfigError if this backend cannot train it."""
    family = str(config.model_type)
    for problem in config_problems(config.to_dict()):
        raise ConfigError(problem)
    c: Any = config
    num_experts = getattr(c, "num_experts", None) or getattr(c, "num_local_experts", None)
    return Architecture(
        family=family,
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads or c.num_attention_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        ffn_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        norm_eps=c.rms_norm_eps,
        is_tied=bool(c.tie_word_embeddings),
        has_qk_norm=family in ("qwen3", "qwen3_moe"),
        has_qkv_bias=family == "qwen2",
        head_rule=head_rule(config.to_dict()),
        padding_id=getattr(c, "pad_token_id", None),
        num_experts=num_experts,
        num_experts_per_token=getattr(c, "num_experts_per_tok", 1),
        expert_ffn_size=getattr(c, "moe_intermediate_size", None) or c.intermediate_size,
        renormalizes=bool(getattr(c, "norm_topk_prob", True)),
    )


def empty_model(
    config: PretrainedConfig, *, trust_remote_code: bool, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the Hugging Face model with layers of `dtype`, without memory for its weights."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    if dtype == torch.float64 and hasattr(lm, "set_experts_implementation"):
        lm.set_experts_implementation("eager")  # the others know no float64
    return lm


def rotary_frequencies(lm: PreTrainedModel) -> torch.Tensor:
    """Return the [head_dim / 2] angular frequencies of the model's rotary embedding, float32.

    ConfigError if they depend on the length of the sequence or are scaled afterwards.
    """
    config = lm.config.get_text_config()
    rotary = type(lm.base_model.rotary_emb)(config=config)
    kind = getattr(rotary, "rope_type", "default")
    if kind in ("dynamic", "longrope") or rotary.attention_scaling != 1.0:
        raise ConfigError(
            f"train_backend 'megatron' cannot train a model with {ROTATIONS.format(kind=kind)}; "
            "use train_backend = 'fsdp'"
        )
    return rotary.inv_freq.float().clone()
