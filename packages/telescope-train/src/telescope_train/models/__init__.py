"""Models the trainer runs: loading them, making a tiny one, rendering chats for them."""

from telescope_train.models.load import LoadedModel, load_model, load_tokenizer
from telescope_train.models.tiny import make_tiny_model

__all__ = ["LoadedModel", "load_model", "load_tokenizer", "make_tiny_model"]
