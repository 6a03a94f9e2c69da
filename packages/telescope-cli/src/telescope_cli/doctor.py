"""`telescope doctor RUN`: whether a run learned, what went wrong in it, and what to try."""

import json
import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer

from telescope_cli.watch import RunArgument, find_run
from telescope_core.base.number_text import counted
from telescope_core.base.terminal import escaped, report_width
from telescope_core.diagnosis import RULES, Finding, History, Kind, diagnose
from telescope_core.evals import read_results
from telescope_core.records import RunFolder
from telescope_core.reports.overview import problems_of
from telescope_core.reports.verdict import run_verdict

_TITLES = {
    Kind.BROKEN: "Broken: nothing can be learned like this",
    Kind.UNHEALTHY: "Unhealthy: good runs do not show this",
    Kind.SLOW: "Slow: it learns, and time is lost",
}

JsonOption = Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")]


def doctor_command(run: RunArgument, as_json: JsonOption = False) -> None:
    """Say whether a run learned, what went wrong or goes wrong in it, and what to try.

    It looks at the metrics of the steps and at the evals, so that it works on any run folder, of a
    run that goes on too. The exit code is 0 if nothing that goes on is broken, and 1 otherwise.

    For example:

      telescope doctor quickstart

      telescope doctor runs/quickstart --json
    """
    folder = RunFolder.open(find_run(run))
    history = History.of_rows(folder.metrics())
    found, verdict = diagnose(history), run_verdict(folder)
    problems = problems_of(folder, read_results(folder.eval_folders()).problems)
    reason = folder.info().observed_reason
    if as_json:
        rows = [one.as_json() for one in found]
        told = {"step": history.last_step, "verdict": verdict.as_json(), "findings": rows}
        typer.echo(json.dumps({**told, "reason": reason, "problems": problems}, indent=1))
    else:
        said = [f"{folder.path.name}: {verdict.text}"]
        if reason:
            said += [f"Why it ended: {reason}", "To go on: repeat its command with --resume."]
        for line in _lines(said, history, found):
            typer.echo(escaped(line))
        for problem in problems:
            typer.echo("\n" + escaped(textwrap.fill(f"Note: {problem}.", report_width())))
    is_broken = any(one.kind is Kind.BROKEN and not one.is_over for one in found)
    raise typer.Exit(1 if is_broken else 0)


def _lines(said: list[str], history: History, found: list[Finding]) -> Iterator[str]:
    yield from [*(line for text in said for line in textwrap.wrap(text, report_width())), ""]
    steps = "no step" if not history.last_step else counted(history.last_step, "step")
    if not found:
        yield from textwrap.wrap(
            f"None of {len(RULES)} rules found anything in {steps}. That is no proof that all is "
            "well: rules are silent unless they are sure, and most need five steps.",
            report_width(),
        )
        return
    yield f"{counted(len(found), 'finding')} in {steps}"
    for kind, title in _TITLES.items():
        of_kind = [one for one in found if one.kind is kind]
        if of_kind:
            yield from ["", title]
        for one in of_kind:
            yield from _finding(one)


def _finding(one: Finding) -> Iterator[str]:
    steps = f"since step {one.first_step}"
    if one.is_over:
        steps = f"steps {one.first_step} to {one.last_step}, over since"
    where = f" in {one.environment}" if one.environment else ""
    yield f"  {one.rule}{where} ({steps})"
    for text in (one.cause, f"To do: {one.remedy}", f"Metrics: {', '.join(one.metrics)}"):
        yield from textwrap.wrap(
            text,
            report_width(),
            initial_indent=" " * 4,
            subsequent_indent=" " * 4,
            break_on_hyphens=False,
        )
