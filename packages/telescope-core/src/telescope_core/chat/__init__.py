"""Chat endpoints: `ChatClient` works with any OpenAI-compatible one."""

from typing import TYPE_CHECKING

from telescope_core.base.lazy import lazy_names

if TYPE_CHECKING:
    from telescope_core.chat.client import ChatClient

__all__ = ["ChatClient"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, ("client",))
