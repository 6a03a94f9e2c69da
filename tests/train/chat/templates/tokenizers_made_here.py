"""Small tokenizers of the two kinds that models have, with a family's special tokens.

Neither splits text into words first, so that merges cross every border that a template draws: a
newline joins the mark before it, a role joins what follows.
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

FIXTURES = Path(__file__).parent / "fixtures"
GAP = "\u2581"
"""How sentencepiece writes a space."""
_SAID = (
    'assistant\n4\nuser\n2+2=\nsystem\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    "</tool_call>\n<think>\n\n</think>\n\nThe answer is 4.\n\n"
)


@cache
def _byte_level() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer.to_str()


@cache
def _sentencepiece_like() -> str:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained.train_from_iterator(_corpus(), trainers.BpeTrainer(vocab_size=220, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), GAP, *model["vocab"]]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(GAP, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer.to_str()


def _corpus() -> list[str]:
    return [_SAID * 3, *_SAID.splitlines(keepends=True)]


def make_tokenizer(
    *,
    kind: str,
    template: str,
    special: list[str],
    plain: list[str],
    bos: str | None,
    eos: str,
    pad: str,
    takes_space: bool,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer; `plain` are tokens that are not special, `special` those that are.

    With `bos` it adds that token to whatever it encodes, as many do. With `takes_space` a special
    token swallows the white space behind it.
    """
    text = _byte_level() if kind == "bytes" else _sentencepiece_like()
    inner = Tokenizer.from_str(text)
    inner.add_special_tokens(
        [
            AddedToken(mark, rstrip=takes_space and mark in special, normalized=False)
            for mark in dict.fromkeys([*([bos] if bos else []), *special, eos, pad])
        ]
    )
    inner.add_tokens([AddedToken(mark, normalized=False) for mark in plain])
    if bos:
        inner.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=template,
        # Some tokenizers in use have this on: it must not touch what a policy sees.
        clean_up_tokenization_spaces=True,
    )


def one_by_one(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return ids that decode to `text` but that the tokenizer itself would not choose."""
    inner = tokenizer.backend_tokenizer
    ids: list[int] = []
    for piece in inner.encode(text, add_special_tokens=False).tokens:
        token_id = inner.token_to_id(piece)
        if token_id in tokenizer.added_tokens_decoder or piece.startswith("<0x"):
            ids.append(token_id)
        else:
            ids += [inner.token_to_id(character) for character in piece]
    assert None not in ids
    return ids
