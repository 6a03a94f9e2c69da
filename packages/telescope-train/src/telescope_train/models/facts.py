"""A model's sizes and limits from the `config.json` in its folder. Does not import torch.

Covers dense decoders like Llama and Qwen, and Qwen3-MoE and Mixtral. For others the parameter count
is unknown rather than guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from telescope_core.base.errors import ConfigError
from telescope_train.models.file_names import KNOWN_MIXTURES
from telescope_train.models.head import head_rule
from telescope_train.models.location import locate_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes that are needed for checks of memory and lengths."""

    num_parameters: int | None
    """All parameters, tied ones once."""
    vocab_size: int | None
    """Rows of the embedding."""
    max_positions: int | None
    """Longest sequence, in tokens, for which the model was made."""
    kv_values_per_token: int | None
    """Values in the key-value cache for one token, over all layers."""
    hidden_size: int | None = None
    """Width of the hidden states."""
    num_body_parameters: int | None = None
    """Parameters that a token meets in all layers and the final norm, without embeddings and output
    head: of a mixture, those of the experts that it is sent to."""
    num_head_parameters: int | None = None
    """Values in the matrix of the output head, whether or not it is tied."""
    num_matrix_parameters: int | None = None
    """Values in the matrices of all layers, those of all experts included."""
    attention_width: int | None = None
    """Heads times their size, summed over all layers."""
    num_layers: int | None = None
    """Decoder layers."""
    num_heads: int | None = None
    """Attention heads in a layer."""
    num_kv_heads: int | None = None
    """Key and value heads in a layer."""
    ffn_size: int | None = None
    """Width of a dense feed-forward layer."""
    num_experts: int | None = None
    """Number of experts in a layer; None = a dense model."""
    reference: "ModelFacts | None" = None
    """Those of `reference_model`; None = there is none."""
    family: str | None = None
    """Value of `model_type` in the config."""
    attention_limits: tuple[str, ...] = ()
    """Names in the config of what makes attention more than causal: windows, soft caps."""
    head_dim: int | None = None
    """Width of an attention head."""
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    """All fields of the `config.json`; empty if it is not known."""


EXPERT_SETTINGS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in configs for the number of experts in a layer."""
_TIED_BY_THEMSELVES = frozenset(
    {"cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2"}
)
"""Model types with a tied output head even if config.json does not say so."""
WINDOW_SETTINGS = ("sliding_window", "attention_chunk_size")
"""Names in configs for the number of tokens that a layer attends to, if limited."""
CAP_SETTINGS = ("attn_logit_softcapping",)
"""Names in configs for a soft cap of attention scores."""
_WINDOWED = frozenset(
    {
        *("mistral", "mixtral", "ministral", "ministral3", "phi3", "starcoder2"),
        *("cohere2", "gemma2", "gemma3_text"),
    }
)
"""Model types whose layers have the window of the config, where it lists no `layer_types`."""
_WINDOWED_LAYERS = ("sliding_attention", "chunked_attention")
"""Values in `layer_types` of layers with a window."""
_CAPPED = frozenset({"gemma2", "vaultgemma"})
"""Model types that have the soft cap of the config."""
UNKNOWN_FACTS = ModelFacts(
    num_parameters=None, vocab_size=None, max_positions=None, kv_values_per_token=None
)


def read_model_facts(model: str, *, output_dir: str = "runs") -> ModelFacts:
    """Return the facts of a local folder, or unknown ones for an id on the Hugging Face Hub.

    Raises ConfigError for a path that does not exist and for a folder without a model. A name that
    starts with `output_dir` is always taken as a path, never as an id.
    """
    path = Path(locate_model(model, output_dir=output_dir)) / "config.json"
    if not path.is_file():
        return UNKNOWN_FACTS
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"model {model!r}: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"model {model!r}: expected the fields of a model in {path}, got "
            f"{type(config).__name__}; download the model again"
        )
    return facts_of(cast(Mapping[str, object], config))


def facts_of(config: Mapping[str, object]) -> ModelFacts:
    """Return the facts in a parsed `config.json`.

    Raises ConfigError for a mixture of unknown type, and for an output head with unknown fields.
    """
    head_rule(config)
    sizes = {key: value for key, value in config.items() if type(value) is int}
    _require_known(sizes, config.get("model_type"))
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    layers, vocab_size = sizes.get("num_hidden_layers"), sizes.get("vocab_size")
    if not (hidden and heads and layers and vocab_size):
        return ModelFacts(
            num_parameters=None,
            vocab_size=vocab_size,
            max_positions=sizes.get("max_position_embeddings"),
            kv_values_per_token=None,
            hidden_size=hidden,
        )
    head_dim = sizes.get("head_dim") or hidden // heads
    kv_heads = sizes.get("num_key_value_heads") or heads
    mlps = _mlp_sizes(config, sizes, hidden, layers)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    norms = 2 * hidden + (2 * head_dim if str(config.get("model_type")).startswith("qwen3") else 0)
    if config.get("attention_bias") or config.get("model_type") == "qwen2":
        norms += head_dim * (heads + 2 * kv_heads)
    is_tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED_BY_THEMSELVES)
    embeddings = vocab_size * hidden * (1 if is_tied else 2)
    rest = hidden + layers * (attention + norms)
    return ModelFacts(
        num_parameters=None if mlps is None else embeddings + rest + mlps.kept,
        vocab_size=vocab_size,
        max_positions=sizes.get("max_position_embeddings"),
        kv_values_per_token=2 * layers * kv_heads * head_dim,
        hidden_size=hidden,
        num_body_parameters=None if mlps is None else rest + mlps.met,
        num_head_parameters=vocab_size * hidden,
        num_matrix_parameters=None if mlps is None else layers * attention + mlps.kept,
        attention_width=layers * heads * head_dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=sizes.get("intermediate_size"),
        num_experts=sizes.get("num_experts") or sizes.get("num_local_experts"),
        family=None if config.get("model_type") is None else str(config.get("model_type")),
        attention_limits=_attention_limits(config),
        head_dim=head_dim,
        config=config,
    )


def _attention_limits(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return what is known to limit the attention of some layer; other types have stray fields."""
    kinds, family = config.get("layer_types"), config.get("model_type")
    is_limited = family in _WINDOWED
    if isinstance(kinds, list):
        is_limited = any(kind in _WINDOWED_LAYERS for kind in cast(list[str], kinds))
    windows, caps = WINDOW_SETTINGS * is_limited, CAP_SETTINGS * (family in _CAPPED)
    return tuple(name for name in (*windows, *caps) if config.get(name))


def context_problem(size: int, *, num_heads: int, num_kv_heads: int) -> str | None:
    """Return why heads cannot be split over `size` ranks that share rows; None if they can."""
    if num_heads % size:
        return (
            f"fsdp_context_parallel_size ({size}) must divide the model's {num_heads} attention "
            "heads; lower it"
        )
    if num_kv_heads % size and size % num_kv_heads:
        return (
            f"fsdp_context_parallel_size ({size}) and the model's {num_kv_heads} key-value heads: "
            "one must divide the other; choose another size"
        )
    return None


def tensor_problem(setting: str, size: int, facts: ModelFacts) -> str | None:
    """Return why a server's `size` GPUs cannot share the heads; None if they can, or may."""
    if facts.num_heads is None or facts.num_heads % size == 0:
        return None
    return (
        f"{setting} ({size}) must divide the model's {facts.num_heads} attention heads; change it"
    )


class _MlpSizes(NamedTuple):
    kept: int
    """Parameters of the MLPs of all layers."""
    met: int
    """Parameters that one token uses."""


def _mlp_sizes(
    config: Mapping[str, object], sizes: Mapping[str, int], hidden: int, layers: int
) -> _MlpSizes | None:
    dense = 3 * hidden * sizes.get("intermediate_size", 0)
    experts = sizes.get("num_experts") or sizes.get("num_local_experts")
    if not experts:
        return _MlpSizes(layers * dense, layers * dense) if dense else None
    expert = 3 * hidden * sizes.get("moe_intermediate_size", 0) or dense
    router = hidden * experts
    step, listed = sizes.get("decoder_sparse_step") or 1, config.get("mlp_only_layers")
    plain = set(cast(list[int], listed)) if isinstance(listed, list) else set[int]()
    sparse = sum(layer not in plain and (layer + 1) % step == 0 for layer in range(layers))
    apart = (layers - sparse) * dense
    chosen = sizes.get("num_experts_per_tok", 2)
    return _MlpSizes(
        apart + sparse * (experts * expert + router), apart + sparse * (chosen * expert + router)
    )


def _require_known(sizes: Mapping[str, int], model_type: object) -> None:
    for key in EXPERT_SETTINGS:
        if sizes.get(key) and model_type not in KNOWN_MIXTURES:
            raise ConfigError(
                f"model: {key} = {sizes[key]} makes it a mixture of experts of type "
                f"{model_type!r}; this version trains those of type "
                f"{', '.join(KNOWN_MIXTURES)}, and dense models"
            )
