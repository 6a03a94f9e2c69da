"""`report.html` of a run: the pages of `telescope ui` in one file; without it, the report of core.

Trainers know no pages, so the commands write it: at the end of a training, and on request.
"""

import shlex
from importlib.util import find_spec
from pathlib import Path

from rich.text import Text

from telescope_cli.console import EscapingConsole
from telescope_cli.progress import progress_of
from telescope_core.base.errors import TelescopeError
from telescope_core.records import RunFolder
from telescope_core.records.room import not_written
from telescope_core.reports import write_train_report

_ELSEWHERE = "`telescope ui {run} --export FILE.html --one-file` writes the pages to another place"


def write_run_report(run: RunFolder) -> Path | None:
    """Write `report.html` of `run` and return its path; None, with a message, if it cannot be.

    Where only the pages cannot be written, the report of core is there, and the message says why.
    """
    path = None
    try:
        path = write_train_report(run)
        if find_spec("telescope_ui") is None:
            return path
        from telescope_ui.web.export import IN_ONE_FILE, export_one_file

        with progress_of("writing report.html", unit="pages") as on_progress:
            export_one_file(
                [run.path], path, num_rollouts=IN_ONE_FILE, replaces=True, tell=on_progress
            )
    except (OSError, TelescopeError) as error:
        refused = not_written(error) if isinstance(error, OSError) else None
        what = "report.html was not written" if path is None else "report.html is the plain one"
        EscapingConsole(stderr=True).print(
            Text(
                f"{what}: {refused or error}; {_ELSEWHERE.format(run=shlex.quote(str(run.path)))}"
            ),
            soft_wrap=True,
        )
    return path
