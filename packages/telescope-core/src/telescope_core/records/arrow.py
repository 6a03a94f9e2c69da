"""PyArrow, which is needed only to read and write rollout files."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from telescope_core.base.errors import ConfigError

Row = TypeVar("Row")


def arrow_modules() -> tuple[Any, Any]:
    """Return the modules `pyarrow` and `pyarrow.parquet`; raises ConfigError without them."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "rollout files need pyarrow, which is not installed; "
            "run: pip install 'telescope-core[records]'"
        ) from None
    return pyarrow, pyarrow.parquet


@contextmanager
def reading(path: Path, what: str) -> Generator[None]:
    """Raise ConfigError that names the file, a `what`, for anything that fails while it is read.

    ValueError, KeyError and TypeError are of rows that are none, as of a newer version.
    """
    arrow, _ = arrow_modules()
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a readable {what}: {error}") from None


def in_chunks(
    rows: Iterable[Row], size_of: Callable[[Row], int], chunk_size: int
) -> Iterator[list[Row]]:
    """Yield `rows` in lists whose sizes add up to about `chunk_size`; no list is empty."""
    chunk: list[Row] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += size_of(row)
        if size >= chunk_size:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
