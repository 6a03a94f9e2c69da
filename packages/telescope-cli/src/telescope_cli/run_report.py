"""`report.html` of a run: the pages of `telescope ui` in one file; without it, the report of core.

Trainers know no pages, so the commands write it: at the end of a training, and on request.
"""

from importlib.util import find_spec
from pathlib import Path

from rich.text import Text

from telescope_cli.console import EscapingConsole
from telescope_cli.progress import progress_of
from telescope_core.base.errors import TelescopeError
from telescope_core.records import RunFolder
from telescope_core.records.room import not_written
from telescope_core.reports import write_train_report


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

        with progress_of("writing report.html", unit="pages") as tell:
            export_one_file([run.path], path, num_rollouts=IN_ONE_FILE, replaces=True, tell=tell)
    except (OSError, TelescopeError) as error:
        why = (isinstance(error, OSError) and not_written(error)) or error
        why = f"{why}; `telescope ui {run.path} --export` writes the pages to another place"
        told = Text(f"report.html was not written: {why}")
        EscapingConsole(stderr=True).print(told, soft_wrap=True)
    return path


def write_finished_report(run: RunFolder) -> None:
    """Write `report.html` of a run that has just finished; a signal only ends the writing.

    The command still ends with 0: after another code, a queue would begin the run anew.
    """
    try:
        write_run_report(run)
    except KeyboardInterrupt:
        told = f"telescope: the run has finished; {run.report_path} has no pages of rollouts"
        EscapingConsole(stderr=True).print(Text(told), soft_wrap=True)
