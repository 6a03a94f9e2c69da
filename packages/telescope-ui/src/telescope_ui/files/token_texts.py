"""The text of single tokens, from the `tokenizer.json` of a checkpoint of the run.

Only the vocabulary is read, so no library of tokenizers is needed. Bytes of one character that lie
in several tokens are shown at the last of them.
"""

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec

from telescope_ui.files.run_files import Stamp, folders, inside, stamp_of

_MAX_BYTES = 64 * 2**20
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """Turns ids into pieces of text."""

    def __init__(self, tokens: dict[int, bytes]) -> None:
        self._tokens = tokens

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id; together they are the text of all."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return [decoder.decode(self._tokens.get(one, f"<{one}>".encode())) for one in ids]


def texts_for(run: Path) -> TokenTexts | None:
    """Return the texts of the tokens of a run; None if it has no readable tokenizer."""
    for folder in reversed(folders(run, "checkpoints")):
        path = inside(run, "checkpoints", folder.name, "model", "tokenizer.json")
        stamp = None if path is None else stamp_of(path)
        if path is not None and stamp is not None and stamp.size <= _MAX_BYTES:
            return _read(path, stamp)
    return None


@lru_cache(maxsize=4)
def _read(path: Path, stamp: Stamp) -> TokenTexts | None:
    """Return the texts in a file; `stamp` identifies the content in the cache."""
    try:
        content: object = msgspec.json.decode(path.read_bytes())
        return TokenTexts(_tokens(cast(dict[str, Any], content)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _tokens(content: dict[str, Any]) -> dict[int, bytes]:
    vocabulary: Any = content["model"]["vocab"]
    pairs: list[tuple[str, int]]
    if isinstance(vocabulary, dict):
        pairs = list(cast(dict[str, int], vocabulary).items())
    else:
        pairs = [(entry[0], number) for number, entry in enumerate(vocabulary)]
    is_byte_level = (
        '"ByteLevel"'
        in msgspec.json.encode([content.get("decoder"), content.get("pre_tokenizer")]).decode()
    )
    table = _bytes_of_characters() if is_byte_level else None
    found = {number: _bytes(token, table) for token, number in pairs}
    added_tokens: list[dict[str, Any]] = content.get("added_tokens") or []
    for added in added_tokens:
        found[added["id"]] = added["content"].encode("utf-8", "replace")
    return found


def _bytes(token: str, table: dict[str, int] | None) -> bytes:
    if table is not None and all(character in table for character in token):
        return bytes(table[character] for character in token)
    match = _BYTE.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8", "replace")


def _bytes_of_characters() -> dict[str, int]:
    """Return the character for each byte in byte-level vocabularies, as in GPT-2.

    Printable bytes become themselves, and the others become characters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table: dict[str, int] = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + number): byte for number, byte in enumerate(others)}
