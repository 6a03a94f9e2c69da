"""A Qwen3-architecture model of about 0.6M parameters with a character tokenizer, made locally.

The quickstart and the tests train it: it takes the real code paths in seconds instead of hours.
"""

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from telescope_core.base.errors import ConfigError
from telescope_core.base.file_proofs import proofs_of
from telescope_core.records.files import read_json, write_json
from telescope_core.records.folders import whole_folder
from telescope_train.models.load import no_progress_bars

PAD, UNK, END = "<|pad|>", "<|unk|>", "<|end|>"
MAX_TOKENS = 2048
"""Longest sequence, in tokens."""
INITIAL_STD = 0.08
"""About 1 / sqrt(128), the hidden size: at 0.02 the model learns several times slower."""
PROOFS = "TINY_MODEL"
"""File with the proofs of all others, by which a tiny model that nobody has changed is known."""
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""Template in which a new message only appends tokens: no separator depends on what follows."""


def make_tiny_model(folder: str | Path, *, seed: int) -> Path:
    """Write the model, its tokenizer and chat template to `folder`; returns `folder`.

    The folder appears complete or not at all. A tiny model there is replaced, and anything else
    refused.
    """
    folder = Path(folder)
    require_tiny(folder)
    with whole_folder(folder) as partial, no_progress_bars():
        tokenizer = character_tokenizer()
        tokenizer.save_pretrained(partial)
        _random_model(tokenizer, seed).save_pretrained(partial)
        proofs = proofs_of(partial, {})
        write_json(partial / PROOFS, {name: one.model_dump() for name, one in proofs.items()})
    return folder


def require_tiny(folder: Path) -> None:
    """Raise ConfigError if `folder` holds anything but what `make_tiny_model` wrote there.

    A tiny model that was trained has the same config, so the contents of all files decide.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    proofs = read_json(folder / PROOFS) or {}
    found = proofs_of(folder, {}) if proofs else {}
    found.pop(PROOFS, None)
    if not proofs or {name: one.model_dump() for name, one in found.items()} != proofs:
        raise ConfigError(
            f"make_tiny_model writes random weights to {str(folder)!r}, which exists and is not "
            "a model that make_tiny_model wrote and nobody changed; remove make_tiny_model to "
            "train the model that is there, name another folder, or remove it"
        )


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per printable ASCII character, newline and special mark."""
    marks = [PAD, UNK, END, *(f"<|{role}|>" for role in ROLES)]
    characters = ["\n", " ", *string.ascii_letters, *string.digits, *string.punctuation]
    vocabulary = {token: index for index, token in enumerate([*marks, *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
    )


def _random_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=INITIAL_STD,
        tie_word_embeddings=True,
        dtype="float32",
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model
