"""Search tools over pages: a protocol for backends, a local corpus, and an environment on both."""

from telescope_core.search.corpus import (
    Hit,
    LocalCorpus,
    Page,
    SearchBackend,
    SearchError,
    is_same_answer,
    plain_answer,
)
from telescope_core.search.environment import SearchConfig, SearchEnvironment

__all__ = [
    "Hit",
    "LocalCorpus",
    "Page",
    "SearchBackend",
    "SearchConfig",
    "SearchEnvironment",
    "SearchError",
    "is_same_answer",
    "plain_answer",
]
