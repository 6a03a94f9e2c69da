"""The data folder, which holds installed environments, their records and cached wheels."""

import os
import sys
from pathlib import Path

VARIABLE = "TELESCOPE_HOME"


def data_folder() -> Path:
    """Return `$TELESCOPE_HOME`, or else a folder of this interpreter, so each has its own."""
    chosen = os.environ.get(VARIABLE, "")
    return (
        Path(chosen).expanduser().absolute() if chosen else Path(sys.prefix) / "share" / "telescope"
    )
