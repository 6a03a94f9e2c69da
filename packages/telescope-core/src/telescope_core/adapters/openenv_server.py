"""The old import path of `telescope_adapters.serving.openenv_server`."""

import sys
from typing import Any

from telescope_core.adapters import moved_to
from telescope_core.base.errors import EnvironmentLoadError


def __getattr__(name: str) -> Any:
    return getattr(moved_to("telescope_adapters.serving.openenv_server"), name)


if __name__ == "__main__":
    try:
        main = moved_to("telescope_adapters.serving.openenv_server").main
    except EnvironmentLoadError as error:
        sys.exit(f"error: {error}")
    main()
