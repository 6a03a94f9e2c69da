"""`telescope watch RUN`: the view of a running run that somebody else started."""

import json
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.interrupts import NUMBERS, Interrupted
from telescope_core.base.terminal import escaped, report_width
from telescope_core.records import RunFolder, RunInfo, RunState
from telescope_core.records.eval_points import EvalPoint
from telescope_core.records.files import is_of_step, record_from
from telescope_core.records.follow import LineTail
from telescope_core.records.restarts import Restart
from telescope_core.records.servers import ServerEvent, ServerState
from telescope_core.reports.verdict import run_verdict

LOOK_EVERY_S = 0.5
_FILES = {
    "step": "metrics.jsonl",
    "server": "servers.jsonl",
    "restart": "restarts.jsonl",
    "eval": "eval_points.jsonl",
}
"""Kind of event -> file that records it."""
_IF_JUST_STARTED = (
    "one that was just started has no folder for some seconds, while its settings are checked: try "
    "again then"
)


def run_names(incomplete: str) -> list[str]:
    """Return the names of runs in the folder `runs`, for completion by a shell.

    Shells evaluate what is offered, so names that would be code for one of them are left out: a
    folder may come from somebody else.
    """
    names = (name for name in _known(Path("runs")) if name.startswith(incomplete))
    return [name for name in names if re.fullmatch(r"[\w .@%+=,-]+", name)]


def _known(runs: Path) -> list[str]:
    return sorted(one.parent.name for one in runs.glob("*/run.json"))


RunArgument = Annotated[
    str,
    typer.Argument(
        help="Folder of the run, or the name of one in the folder `runs`.",
        autocompletion=run_names,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print everything that happens as one object per line.")
]


def watch_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """Watch a run that goes on, from any terminal, until it ends.

    The exit code is 0 if the run has finished, and 1 if it failed or its process is gone. A run
    that has ended already is shown as it ended. Ctrl-C ends the view and not the run.

    For example:

      telescope watch quickstart

      telescope watch runs/quickstart --json
    """
    folder = RunFolder.open(find_run(run, if_unknown=_IF_JUST_STARTED))
    # Nothing is stopped but the view: the words of a command that stops would be read as the run's.
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_view)
    try:
        state = _as_json(folder) if as_json else _on_screen(folder)
    except Interrupted as error:
        if error.number is not signal.SIGINT:
            raise
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if state is RunState.FINISHED else 1)


def _end_view(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def find_run(name: str, *, if_unknown: str = "") -> Path:
    """Return the folder of a run by its path, or by its name in `runs`.

    Raises ConfigError with the nearest names, and `if_unknown`, if there is none.
    """
    path, runs = Path(name), Path("runs")
    if path.is_dir():
        return path
    known = _known(runs)
    if name in known:
        return runs / name
    if known:
        raise unknown_name("run", name, known, f"({if_unknown})" if if_unknown else "")
    raise ConfigError(
        f"{name}: no such folder, and there is no run in {runs}; expected the folder of a run"
        + (f" ({if_unknown})" if if_unknown else "")
    )


class _Happened(NamedTuple):
    kind: str
    """A key of `_FILES`."""
    row: dict[str, Any]


class _Files:
    """The files of a run that record events."""

    def __init__(self, folder: RunFolder) -> None:
        self._files = {kind: LineTail(folder.path / name) for kind, name in _FILES.items()}
        self.is_anew = False
        """Whether steps were taken back since the last call, so that the next events are all there
        are."""

    def read(self) -> Iterator[_Happened]:
        """Yield the events since the last call, steps last."""
        for kind in ("restart", "server", "eval", "step"):
            # That of the steps is set last.
            self.is_anew = self._files[kind].is_rewritten()
            for row in self._files[kind].rows():
                if kind != "step" or is_of_step(row):
                    yield _Happened(kind, row)


def _as_json(folder: RunFolder) -> RunState:
    files = _Files(folder)
    while True:
        # Asked before the files are read: what a run wrote before its end is then told.
        info = folder.info()
        for happened in files.read():
            typer.echo(json.dumps({"kind": happened.kind, **happened.row}))
        if info.observed_state is not RunState.RUNNING:
            end = {"kind": "end", "state": f"{info.observed_state}", "reason": info.observed_reason}
            typer.echo(json.dumps(end))
            return info.observed_state
        time.sleep(LOOK_EVERY_S)


def _on_screen(folder: RunFolder) -> RunState:
    from telescope_train.observability.terminal import LiveView, print_summary

    files, info, config = _Files(folder), folder.info(), folder.config()
    before = list(files.read())
    steps = [one.row for one in before if one.kind == "step"]
    total = config.get("run", {}).get("number_of_steps", 0)
    names = [one["name"] for one in config.get("environments", ())]
    begun_ago_s = _seconds_since(info, steps)
    with LiveView(total, names, rows_before=steps, begun_ago_s=begun_ago_s) as view:
        view.phase(f"watching {folder.path}")
        while info.observed_state is RunState.RUNNING:
            time.sleep(LOOK_EVERY_S)
            info = folder.info()
            happened = list(files.read())
            for text in filter(None, map(_text, happened)):
                view.note(text)
            new = [one.row for one in happened if one.kind == "step"]
            if files.is_anew:
                pairs = enumerate(zip(steps, new, strict=False))
                differs = (at for at, (old, row) in pairs if old != row)
                num_kept = next(differs, min(len(steps), len(new)))
                del steps[num_kept:], new[:num_kept]
                view.go_back(steps)
            for row in new:
                steps.append(row)
                view.update(row)
    summary, verdict = folder.summary(), run_verdict(folder)
    if info.observed_state is RunState.FINISHED and summary is not None:
        shown: dict[str, Any] = {**summary, "verdict": verdict.as_json()}
        # The folder may have been moved since the run.
        for key, own in (("export", "checkpoints/final/hf"), ("report", "report.html")):
            told: list[str | None] = [str(folder.path / own), shown.get(key)]
            shown[key] = next((one for one in told if one and Path(one).exists()), None)
        print_summary(shown)
    else:
        why = f": {info.observed_reason}" if info.observed_reason else ""
        # Several runs may have the same name.
        is_own = info.name == folder.path.resolve().name
        name = info.name if is_own else f"{info.name} ({folder.path})"
        ended = f"run {name} {info.observed_state} after step {folder.last_step()}{why}"
        # A line that a program reads stays whole.
        width = report_width() if sys.stdout.isatty() else 0
        for line in (ended, verdict.text):
            whole = escaped(line)
            typer.echo(textwrap.fill(whole, width, break_on_hyphens=False) if width else whole)
    return info.observed_state


def _text(happened: _Happened) -> str:
    """Return the text of an event for people; empty = nothing to show, or a damaged line."""
    from telescope_train.observability.terminal import restart_text

    if happened.kind == "restart":
        restart = record_from(happened.row, Restart)
        return "" if restart is None else restart_text(restart)
    if happened.kind == "eval":
        point = record_from(happened.row, EvalPoint)
        return "" if point is None else point.text
    if happened.kind == "step" or (event := record_from(happened.row, ServerEvent)) is None:
        return ""
    if event.state in (ServerState.LOST, ServerState.GIVEN_UP):
        return f"inference server {event.server} {event.state}: {event.reason}"
    if event.state is ServerState.LOADING:
        return f"inference server {event.server} answers again, and waits for the weights"
    return ""


def _seconds_since(info: RunInfo, steps: Sequence[dict[str, Any]]) -> float:
    """Return the seconds for which a run has gone on since it was started or last resumed.

    For a killed one, this is the time until its last step.
    """
    ended = datetime.now(UTC)
    if info.ended_at:
        ended = datetime.fromisoformat(info.ended_at)
    elif info.observed_state is RunState.INTERRUPTED:
        last = next((row["time_s"] for row in reversed(steps) if row.get("time_s")), None)
        ended = datetime.fromtimestamp(last, UTC) if last else _begun(info)
    return max(0.0, (ended - _begun(info)).total_seconds())


def _begun(info: RunInfo) -> datetime:
    return datetime.fromisoformat(info.resumes[-1].at if info.resumes else info.started_at)
