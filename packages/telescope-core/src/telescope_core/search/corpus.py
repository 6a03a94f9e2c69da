"""The protocol of search backends, and `LocalCorpus`: one in memory, without a network.

`is_same_answer` compares the short answers that are searched for.
"""

import asyncio
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from telescope_core.base.errors import EndpointError, EnvironmentLoadError


class SearchError(EndpointError):
    """A search backend failed; the rollout fails and has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a corpus or of the web."""

    address: str
    """Address for opening it: a URL, or an id in the corpus."""
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One result of a search."""

    address: str
    title: str
    snippet: str
    """A few words of the page."""


class SearchBackend(Protocol):
    """Searches and reads pages; raises SearchError on failure and never returns nothing instead."""

    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        """Return at most `limit` hits, best first."""
        ...

    async def page(self, address: str) -> Page | None:
        """Return the page at `address`; None if there is none."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...


_WORD = re.compile(r"\w+")
_MAX_WORDS = 32
"""Further words of a query are ignored, because each costs time."""
_SNIPPET_WORDS = 24


class LocalCorpus:
    """An SQLite full-text index over `pages`, ranked by BM25; words of the title count three times.

    A query finds pages with any of its words. Addresses must be distinct.
    """

    def __init__(self, pages: Iterable[Page]) -> None:
        # One connection serves all threads, one query at a time.
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute(
                "create virtual table pages using fts5"
                "(address unindexed, title, text, tokenize = 'porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise EnvironmentLoadError(
                f"the SQLite of this Python cannot search texts ({error}); use a Python whose "
                "sqlite3 module has FTS5"
            ) from error
        rows = [(page.address, page.title, page.text) for page in pages]
        if len({row[0] for row in rows}) < len(rows):
            raise EnvironmentLoadError("two pages of the corpus have the same address; rename one")
        self._database.executemany("insert into pages values (?, ?, ?)", rows)
        self._row_of = {row[0]: number for number, row in enumerate(rows, start=1)}

    def __len__(self) -> int:
        return len(self._row_of)

    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        """Return at most `limit` hits, best first."""
        return await asyncio.to_thread(self._search, query, limit)

    async def page(self, address: str) -> Page | None:
        """Return the page at `address`; None if there is none."""
        return await asyncio.to_thread(self._page, address)

    async def close(self) -> None:
        """Do nothing: the index is released with the corpus."""

    def _search(self, query: str, limit: int) -> list[Hit]:
        words = _WORD.findall(query)[:_MAX_WORDS]
        if not words:
            return []
        # Quoted, so that no word is an operator of the query language.
        match = " OR ".join(f'"{word}"' for word in words)
        found = self._rows(
            "select address, title, snippet(pages, 2, '', '', ' ... ', ?) from pages "
            "where pages match ? order by bm25(pages, 0.0, 3.0, 1.0), rowid limit ?",
            (_SNIPPET_WORDS, match, limit),
        )
        return [Hit(address=row[0], title=row[1], snippet=row[2]) for row in found]

    def _page(self, address: str) -> Page | None:
        row = self._row_of.get(address)
        if row is None:
            return None
        ((title, text),) = self._rows("select title, text from pages where rowid = ?", (row,))
        return Page(address=address, title=title, text=text)

    def _rows(self, query: str, values: tuple[object, ...]) -> list[tuple[str, ...]]:
        with self._lock:
            return self._database.execute(query, values).fetchall()


_OF_NUMBERS = (
    (re.compile(r"(?<![\w)])[-\u2212] ?(?=\d)"), " minus "),
    (re.compile(r"(?<=\d)\.(?=\d)"), " point "),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
)
"""A sign, a decimal point, and thousands separators, each with its replacement."""
_LETTER = r"[^\W\d_]"
_ARTICLE = re.compile(rf"\b(?:an|the)\b|(?<!\.)(?<!\b{_LETTER}\. )\ba\b(?!\. ?{_LETTER}\b)")
"""The letter of initials, such as `U.S.A.` and `A. A. Milne`, is none."""
_OF_NAMES = (
    (re.compile(rf"(?<={_LETTER})['\u2019.](?={_LETTER})"), ""),
    (re.compile(rf"(?<!\w)({_LETTER})\.? (?={_LETTER}(?!\w))"), r"\1"),
    (re.compile(rf"(?<={_LETTER})\+\+(?!{_LETTER})"), "plusplus"),
    (re.compile(rf"(?<={_LETTER})\+(?!{_LETTER})"), "plus"),
    (re.compile(rf"(?<={_LETTER})#(?!{_LETTER})"), "sharp"),
)
"""O'Neil is ONeil, U.S. and U. S. are US; but C++ and C# are neither C nor each other."""
_NO_WORD = re.compile(r"[^\w]+")
_LONGEST = 1000


def plain_answer(text: str) -> str:
    """Return `text` in lower case without accents, articles and punctuation.

    Signs that make another value or name of it, as in -5, 1.5 and C++, are written as words.
    """
    spread = unicodedata.normalize("NFKD", text[:_LONGEST].casefold())
    letters = "".join(one for one in spread if not unicodedata.combining(one))
    for sign, word in _OF_NUMBERS:
        letters = sign.sub(word, letters)
    letters = _ARTICLE.sub(" ", letters)
    for sign, word in _OF_NAMES:
        letters = sign.sub(word, letters)
    return " ".join(_NO_WORD.sub(" ", letters).split())


def is_same_answer(said: str, wanted: str) -> bool:
    """Return whether an answer equals `wanted` up to spelling; an empty answer never does."""
    plain = plain_answer(said)
    return len(said) <= _LONGEST and bool(plain) and plain == plain_answer(wanted)
