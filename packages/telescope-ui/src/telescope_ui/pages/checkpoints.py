"""Small files of a run that pages read as a whole: summary, self-tests, checkpoints."""

from functools import lru_cache
from pathlib import Path

from telescope_core.records.files import read_json
from telescope_ui.base.answers import JsonObject, NotThereError
from telescope_ui.files.run_files import Stamp, folders, inside, object_in, stamp_of
from telescope_ui.index.one_run import OneRun

_MAX_CHECKPOINTS = 1000
_MAX_MANIFEST_BYTES = 4 * 2**20


class SmallFiles:
    """Reads JSON files; one that is too large is left out, with a note on the page."""

    def __init__(self, run: Path) -> None:
        """Read in the resolved folder `run`."""
        self._run = run
        self.problems: list[str] = []

    def read(self, name: str) -> JsonObject | None:
        """Return the object in a file of the run; None if there is none."""
        try:
            return object_in(self._run, name)
        except NotThereError as error:
            self.problems.append(str(error))
            return None

    def manifest(self, name: str) -> JsonObject | None:
        """Return the time of a checkpoint; None if it is not complete."""
        path = inside(self._run, "checkpoints", name, "checkpoint.json")
        stamp = None if path is None else stamp_of(path)
        if path is None or stamp is None:
            return None
        if stamp.size > _MAX_MANIFEST_BYTES:
            self.problems.append(
                f"checkpoints/{name}/checkpoint.json has {stamp.size / 2**20:,.0f} MiB, and at "
                f"most {_MAX_MANIFEST_BYTES // 2**20} are read; the checkpoint is not listed"
            )
            return None
        return _manifest(path, stamp)


@lru_cache(maxsize=4096)
def _manifest(path: Path, stamp: Stamp) -> JsonObject | None:
    """Read the shown fields of a manifest; `stamp` identifies its content."""
    found = read_json(path)
    return None if found is None else {name: found.get(name) for name in ("step", "created_at")}


def checkpoints(run: OneRun, small: SmallFiles | None = None) -> list[JsonObject]:
    """Return the checkpoints of the run, in order of time."""
    small = small or SmallFiles(run.path)
    found: list[JsonObject] = []
    for folder in folders(run.path, "checkpoints")[:_MAX_CHECKPOINTS]:
        about = small.manifest(folder.name)
        if about is not None:
            found.append({"name": folder.name, **about})
    return sorted(found, key=lambda one: str(one["created_at"]))
