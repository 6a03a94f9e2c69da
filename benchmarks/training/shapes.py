"""The shapes that are trained, and the FLOPs of training them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from telescope_train.models.tiny import character_tokenizer


class Shape(NamedTuple):
    """A Qwen3 with tied embeddings."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def matrix_parameters(self) -> int:
        """Parameters that multiply activations: all matrices, the head included, no norms."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.vocab * self.hidden

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of forward and backward over samples of these lengths.

        6 for each matrix parameter and token, and for causal attention 6 L^2 times the width of all
        heads in each layer. What is computed twice to save memory is not counted.
        """
        pairs = sum(length * length for length in lengths)
        attention = 6.0 * pairs * self.heads * self.head_dim * self.layers
        return 6.0 * self.matrix_parameters * sum(lengths) + attention


def sample_lengths(rng: np.random.Generator, seq_len: int, num_batches: int) -> list[int]:
    """Return lengths of samples that fill `num_batches` rows of `seq_len` tokens, lognormal.

    The median is a fifth of a row.
    """
    lengths: list[int] = []
    while sum(lengths) < num_batches * seq_len:
        length = int(seq_len / 5 * np.exp(0.6 * rng.standard_normal()))
        lengths.append(max(16, min(length, seq_len, num_batches * seq_len - sum(lengths))))
    return [length for length in lengths[:-1] if length >= 16]


TINY = Shape("tiny", 64, 128, 2, 4, 2, 16, 512)
QWEN3 = (
    Shape("Qwen3 0.6B", 1024, 3072, 28, 16, 8, 128, 151_936),
    Shape("Qwen3 1.7B", 2048, 6144, 28, 16, 8, 128, 151_936),
    Shape("Qwen3 4B", 2560, 9728, 36, 32, 8, 128, 151_936),
)


def write_random_model(shape: Shape, folder: Path, device: torch.device) -> None:
    """Write a model of that shape with random weights, and a tokenizer that fits any vocabulary."""
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
