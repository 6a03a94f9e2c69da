"""Sizes of published models, as their `config.json` says them."""

from typing import Any


def _qwen3(
    hidden: int, layers: int, heads: int, width: int, *, tied: bool, kv_heads: int = 8
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
    }


QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "8B": _qwen3(4096, 36, 32, 12_288, tied=False),
    "14B": _qwen3(5120, 40, 40, 17_408, tied=False),
    "32B": _qwen3(5120, 64, 64, 25_600, tied=False),
}
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28_672,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
