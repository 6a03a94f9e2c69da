"""`SearchEnvironment`: the tools search, open and find over a backend, page by page."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.environments.building import class_location
from telescope_core.environments.episode import Episode
from telescope_core.environments.settings import EnvironmentConfig
from telescope_core.environments.tool_functions import ToolError, tool
from telescope_core.environments.tool_threads import OpenedOnce
from telescope_core.environments.toolbox import ToolConfig
from telescope_core.environments.tools import ToolEnvironment
from telescope_core.search.corpus import Page, SearchBackend

_MAX_QUERY = 1000
_MAX_FOUND = 8
_AROUND = 160
"""Characters shown around a text that is found."""


class SearchConfig(ToolConfig):
    """Settings of the search tools; subclass it to add your own."""

    max_results: Annotated[int, Field(ge=1, le=50)] = 5
    """Most results of one search."""
    part_characters: Annotated[int, Field(ge=200, le=100_000)] = 3000
    """Size of a part, in characters; longer pages are opened part by part."""


class SearchEnvironment(ToolEnvironment):
    """An environment in which the policy searches pages and reads them before it answers.

    A subclass defines `open_backend`. The addresses of the pages that a rollout opened are in
    `opened(episode)`. A backend that fails fails the rollout.
    """

    Config = SearchConfig
    config: Any
    max_turns = 12

    def __init__(self, config: EnvironmentConfig | None = None) -> None:
        super().__init__(config)
        # Two underscores: an author's own attributes must not replace these.
        self.__backend = OpenedOnce(self.__open)

    def open_backend(self) -> SearchBackend:
        """Return the backend; called once, when the first tool is used."""
        raise EnvironmentLoadError(
            f"{class_location(type(self))} must define open_backend(self) and return a "
            "SearchBackend, such as LocalCorpus(pages)"
        )

    async def backend(self) -> SearchBackend:
        """Return the backend of all rollouts; opens it in a thread the first time."""
        return await self.__backend.get()

    def __open(self) -> SearchBackend:
        backend = self.open_backend()
        self.on_close(backend.close)
        return backend

    @tool
    async def search(self, query: str) -> str:
        """Search for pages. Returns their titles and addresses with a few words of each.

        Args:
            query: Words to search for.
        """
        if not query.strip():
            raise ToolError("the query is empty; give words to search for")
        hits = await (await self.backend()).search(query[:_MAX_QUERY], self.config.max_results)
        if not hits:
            return "nothing was found; try other words"
        return "\n\n".join(f"{one.title}\naddress: {one.address}\n{one.snippet}" for one in hits)

    @tool
    async def open(self, address: str, episode: Episode[Any], part: int = 1) -> str:
        """Read a page.

        Args:
            address: Address of the page, from a search.
            episode: The rollout, which remembers its pages.
            part: Which part of a long page, 1 first.
        """
        page = await self._page(address, episode)
        parts = parts_of(page.text, self.config.part_characters)
        if not 1 <= part <= len(parts):
            raise ToolError(f"{address} has the parts 1 to {len(parts)}, and not {part}")
        of = f" (part {part} of {len(parts)})" if len(parts) > 1 else ""
        return f"{page.title}{of}\n\n{parts[part - 1]}"

    @tool
    async def find(self, address: str, text: str, episode: Episode[Any]) -> str:
        """Find a text in a page. Returns the places where it stands.

        Args:
            address: Address of the page, from a search.
            text: What to find, a word or a few words.
            episode: The rollout, which remembers its pages.
        """
        page = await self._page(address, episode)
        places = places_of(text.strip(), page.text)
        if not places:
            return f"{text[:200]!r} is not in {page.title}"
        return "\n\n".join(f"... {place} ..." for place in places)

    async def _page(self, address: str, episode: Episode[Any]) -> Page:
        pages = episode.state.setdefault("pages", {})
        if address not in pages:
            page = await (await self.backend()).page(address.strip()[:2000])
            if page is None:
                raise ToolError(f"there is no page at {address[:200]!r}; take one from a search")
            pages[address] = page
        return pages[address]


def opened(episode: Episode[Any]) -> set[str]:
    """Return the addresses of the pages that a rollout has read."""
    return {page.address for page in episode.state.get("pages", {}).values()}


def parts_of(text: str, size: int) -> list[str]:
    """Return `text` in parts of at most `size` characters, cut between words where that works."""
    parts: list[str] = []
    rest = text
    while len(rest) > size:
        cut = max(rest.rfind(" ", 0, size), rest.rfind("\n", 0, size))
        cut = cut if cut > size // 2 else size
        parts.append(rest[:cut].rstrip())
        rest = rest[cut:].lstrip()
    return [*parts, rest]


def places_of(text: str, page: str) -> Sequence[str]:
    """Return the first places of `text` in `page`, in any case, with the words around it."""
    wanted, lower = text.casefold(), page.casefold()
    if not wanted or len(lower) != len(page):
        lower = page
        wanted = text
    found: list[str] = []
    start = lower.find(wanted) if wanted else -1
    while start >= 0 and len(found) < _MAX_FOUND:
        end = start + len(wanted) + _AROUND
        found.append(" ".join(page[max(0, start - _AROUND) : end].split()))
        start = lower.find(wanted, end)
    return found
