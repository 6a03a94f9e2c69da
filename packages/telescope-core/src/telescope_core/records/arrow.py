"""PyArrow, which is needed only to read and write rollout files."""

from typing import Any

from telescope_core.base.errors import ConfigError


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
