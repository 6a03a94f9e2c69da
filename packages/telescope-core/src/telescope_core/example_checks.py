"""`as_text`: an id or an answer of a row as text, for environments that read tables."""

from telescope_core.examples.checks import (
    as_text,
)

__all__ = [
    "as_text",
]
