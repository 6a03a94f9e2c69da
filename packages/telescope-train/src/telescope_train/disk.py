"""Making sure that what was written is on disk before it is given its name."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush the contents of every file to disk, so that a rename cannot arrive before them."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
