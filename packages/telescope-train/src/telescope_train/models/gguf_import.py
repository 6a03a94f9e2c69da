"""Convert a GGUF file, the format of llama.cpp, into a model folder for training and serving.

transformers reads the file and unpacks its quantized weights. The output is an ordinary folder of
safetensors with a tokenizer and the file's chat template. Facts that a GGUF file gives only to
llama.cpp, such as how text is split before its merges apply, are mended or reported.
"""

import importlib.util
import math
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from telescope_core.base.errors import ConfigError
from telescope_core.records.folders import whole_folder
from telescope_train.models.load import no_progress_bars, require_loaded, torch_dtype
from telescope_train.models.location import first_line, require_replaceable
from telescope_train.models.saving import save_model
from telescope_train.models.source import quiet_transformers

MAGIC = b"GGUF"
"""The first bytes of every GGUF file."""
SENTENCE = (
    "The sun rises in the east and sets in the west. Water freezes at zero degrees, and two plus "
    "two is four."
)
"""Plain text that any language model finds likely."""
SPLIT_AT_DIGITS = ("smollm", "refact", "command-r", "starcoder")
"""Values of `tokenizer.ggml.pre` that put each digit in a token of its own and then split as GPT-2
does, which transformers does not know."""
SPLIT_AS_GPT2 = ("gpt-2", "default", "")
"""Values for which transformers is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedModel:
    """The written model, and facts about it."""

    path: Path
    architecture: str
    """`model_type` in its config.json."""
    num_parameters: int
    """Number of values in its weights, tied ones once."""
    nats_per_token: float
    """Mean surprise at a plain English sentence; log(vocabulary) for a model that knows nothing."""
    notes: tuple[str, ...]
    """Remarks on this import; empty if there are none."""


def import_gguf(source: Path, output: Path, *, dtype: str = "float32") -> ImportedModel:
    """Write the model in the GGUF file `source` to the folder `output`, completely or not at all.

    `dtype` is the dtype of the written weights. Quantized weights are unpacked in float32 first.
    Raises ConfigError for a file that is no GGUF file, for a model that transformers cannot read
    from one, and for an `output` that holds something other than a model.
    """
    wanted = torch_dtype(dtype)
    _require_gguf(source)
    require_replaceable(output)
    tokenizer, tokenizer_notes = _tokenizer(source)
    model = _model(source)
    nats = _surprise(model, tokenizer)
    with whole_folder(output) as partial, no_progress_bars():
        tokenizer.save_pretrained(partial)
        save_model(model.to(wanted), partial)
    return ImportedModel(
        path=output,
        architecture=str(model.config.model_type),
        num_parameters=model.num_parameters(),
        nats_per_token=nats,
        notes=(*tokenizer_notes, *_doubts(nats, model.config.get_text_config().vocab_size)),
    )


def _require_gguf(source: Path) -> None:
    if not source.is_file():
        advice = ""
        if source.is_dir():
            found = sorted(path.name for path in source.glob("*.gguf"))
            advice = f"; it is a folder that holds {', '.join(found) or 'no .gguf file'}"
        raise ConfigError(f"expected a GGUF file, and {str(source)!r} is not a file{advice}")
    with source.open("rb") as file:
        head = file.read(len(MAGIC))
    if head != MAGIC:
        raise ConfigError(
            f"{str(source)!r} is not a GGUF file: it starts with {head!r} in place of {MAGIC!r}"
        )
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"reading a GGUF file needs {' and '.join(missing)}; "
            "run: pip install 'telescope-train[gguf]'"
        )


@contextmanager
def _translate_errors(source: Path) -> Iterator[None]:
    try:
        # That weights are unpacked is what was asked for.
        with warnings.catch_warnings(), quiet_transformers():
            warnings.simplefilter("ignore")
            yield
    # The readers of transformers and gguf meet a damaged file with whatever they trip over.
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
        MemoryError,
        struct.error,
    ) as error:
        raise ConfigError(
            f"{str(source)!r} cannot be read: {first_line(error)}; is the file complete, and its "
            "architecture one that transformers reads from GGUF?"
        ) from error


def _tokenizer(source: Path) -> tuple[PreTrainedTokenizerFast, tuple[str, ...]]:
    with _translate_errors(source):
        tokenizer: Any = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        split, is_byte_level = _split_of(source)
    notes: list[str] = []
    if is_byte_level and split in SPLIT_AT_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif is_byte_level and split not in SPLIT_AS_GPT2 and not _has_own_split(tokenizer):
        notes.append(
            f"the file splits text as {split!r}, which is not known here; it is split as GPT-2 "
            "does, so some texts become other tokens than in pretraining"
        )
    if tokenizer.chat_template is None:
        notes.append(
            "the file has no chat template: give one as `chat_template` to train or evaluate, or "
            "take an instruct model"
        )
    return tokenizer, tuple(notes)


def _has_own_split(tokenizer: Any) -> bool:
    """Return whether transformers knew the text splitting of the file; else it splits as GPT-2."""
    return isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence)


def _split_of(source: Path) -> tuple[str, bool]:
    """Return the splitting in the file, and whether its tokens are bytes (BPE)."""
    from gguf import GGUFReader  # only those who import a GGUF file have it

    fields = GGUFReader(source).fields

    def text(name: str) -> str:
        field = fields.get(name)
        return "" if field is None else str(field.contents())

    return text("tokenizer.ggml.pre"), text("tokenizer.ggml.model") == "gpt2"


def _model(source: Path) -> PreTrainedModel:
    """Return the model with plain float32 weights, as if they had never been quantized."""
    with _translate_errors(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    model, info = loaded
    require_loaded(str(source), model, info)
    config = model.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    # transformers refuses to save what came from a GGUF file, packed or not.
    model.hf_quantizer, model.is_quantized = None, False
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{end: getattr(config, end, None) for end in ends})
    return model.eval()


def _surprise(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return the mean nats per token of a plain sentence; nan if it has less than two tokens."""
    ids = torch.tensor([tokenizer(SENTENCE)["input_ids"]])
    if ids.shape[1] < 2:
        return math.nan
    with torch.inference_mode():
        return float(model(input_ids=ids, labels=ids).loss)


def _doubts(nats: float, vocab_size: int) -> tuple[str, ...]:
    most = 0.7 * math.log(vocab_size)
    if nats <= most:
        return ()
    return (
        f"a plain English sentence costs it {nats:.1f} nats a token, nearly as much as guessing "
        f"({math.log(vocab_size):.1f}); unless it never saw English, the file was read wrongly",
    )
