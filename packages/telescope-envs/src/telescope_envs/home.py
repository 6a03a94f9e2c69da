"""The data folder: where installed environments, their records and cached wheels are."""

import os
import sys
from pathlib import Path

VARIABLE = "TELESCOPE_HOME"


def data_folder() -> Path:
    """Return `$TELESCOPE_HOME`, else a folder of this interpreter's, so each has its own."""
    chosen = os.environ.get(VARIABLE, "")
    return (
        Path(chosen).expanduser().absolute() if chosen else Path(sys.prefix) / "share" / "telescope"
    )
