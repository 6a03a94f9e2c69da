"""`telescope eval --report FOLDER`: show a run or eval folder, even one that was killed."""

import json
from pathlib import Path

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from telescope_cli.console import print_table, report_console
from telescope_cli.eval.compare import comparison_to_json
from telescope_cli.eval.view import print_result, print_results, print_unreadable, tell
from telescope_cli.run_report import write_run_report
from telescope_cli.watch import find_run
from telescope_core.base.errors import ConfigError
from telescope_core.base.number_text import counted, format_metric, style_of
from telescope_core.base.types import JsonValue
from telescope_core.evals import EvalFolder, read_results
from telescope_core.evals.folder import result_to_json
from telescope_core.evals.result import RewardSoFar
from telescope_core.records import RunFolder
from telescope_core.records.files import plain
from telescope_core.records.identity import RunInfo, RunState
from telescope_core.reports import RunOverview, overview_of, sparkline
from telescope_core.reports.before_after import before_and_after
from telescope_core.reports.verdict import RunVerdict, run_verdict


def show_folder(path: Path, *, as_json: bool) -> None:
    """Print the contents of `path`, or of the run of that name in `runs`.

    Raises ConfigError when it is neither a run nor an eval.
    """
    path = find_run(str(path), if_unknown="or give the folder of a run or of an eval")
    if EvalFolder.holds_eval(path):
        _show_eval(EvalFolder(path), as_json=as_json)
    elif (path / "run.json").is_file():
        run = RunFolder.open(path)
        _show_run(overview_of(run), run_verdict(run), as_json=as_json)
        if not as_json:
            # A killed run may not have written its own.
            if (report := write_run_report(run)) is None:
                raise typer.Exit(1)
            report_console().print(Text(f"Report: {report}"), soft_wrap=True)
    else:
        _show_evals(path, as_json=as_json)


def _show_evals(path: Path, *, as_json: bool) -> None:
    """Print each eval in the folder of a command that played several."""
    folders = [EvalFolder(one) for one in sorted(path.iterdir()) if EvalFolder.holds_eval(one)]
    if not folders:
        raise ConfigError(
            f"{path} holds neither a run (run.json) nor an eval (eval.json), nor folders of evals; "
            "give the folder of a run, of an eval, or of several evals"
        )
    if as_json:
        typer.echo(json.dumps(plain([_eval_to_json(one) for one in folders]), indent=2))
        return
    for number, folder in enumerate(folders):
        if number:
            typer.echo()
        _show_eval(folder, as_json=False)


def _eval_to_json(folder: EvalFolder) -> dict[str, JsonValue]:
    results, unreadable = read_results([folder.path])
    result, info = results.get(folder.path.name), folder.info()
    rows, problems = folder.read(pictures_of=())
    return {
        "path": str(folder.path),
        "state": info.observed_state if info else None,
        "num_rollouts_recorded": len(rows),
        "unreadable": [*unreadable.values(), *problems],
        "result": result_to_json(result) if result else None,
    }


def _show_eval(folder: EvalFolder, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(plain(_eval_to_json(folder)), indent=2))
        return
    results, unreadable = read_results([folder.path])
    result, info = results.get(folder.path.name), folder.info()
    rows, problems = folder.read(pictures_of=())
    for problem in unreadable.values():
        tell(f"Note: {problem}", style="yellow")
    print_unreadable(problems)
    if result is not None:
        print_result(result, folder.path)
        return
    if info is None:
        return
    so_far = RewardSoFar()
    for row in rows:
        if row.reward is not None:
            so_far.add(row.example_id, row.group_id, row.reward)
    console = report_console()
    console.print(Text(f"eval {folder.path}", style="bold"), soft_wrap=True)
    console.print(_state_line(info, info.observed_state))
    mean = "" if so_far.mean is None else f", mean reward {format_metric(so_far.mean)} so far"
    console.print(f"{counted(len(rows), 'rollout')} recorded, {so_far.num_scored} scored{mean}")


def _show_run(overview: RunOverview, verdict: RunVerdict, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_overview_to_json(overview, verdict), indent=2))
        return
    console = report_console()
    console.print(Text(f"run {overview.info.name}", style="bold"))
    console.print(_state_line(overview.info, overview.state))
    console.print(Text(verdict.text))
    console.print(f"{counted(overview.num_steps, 'step')} recorded")
    curve = sparkline(overview.rewards, width=console.width - 30)
    first, last, _ = overview.edges
    if curve and first is not None and last is not None:
        style = style_of(first, last)
        console.print(f"reward {first:{style}} {curve} {last:{style}}")
    if overview.counts:
        print_table(console, _count_table(overview))
    if overview.evals:
        rows = [((name,), result) for name, result in overview.evals.items()]
        print_results(console, ("eval",), rows)
    if overview.unfinished_evals:
        unfinished = ", ".join(overview.unfinished_evals)
        console.print(Text(f"evals without a result: {unfinished}"))
    for problem in overview.problems:
        console.print(Text(f"Note: {problem}", style="yellow"), soft_wrap=True)


def _state_line(info: RunInfo, state: RunState) -> Text:
    ended = f"ended {info.ended_at}" if info.ended_at else "interrupted"
    texts = {
        RunState.RUNNING: f"running, process {info.pid} on {info.host}",
        RunState.FINISHED: f"finished {info.ended_at}",
        RunState.FAILED: f"failed {info.ended_at}: {info.reason}",
        RunState.INTERRUPTED: f"{ended}: {info.observed_reason}",
    }
    styles = {RunState.FAILED: "red", RunState.INTERRUPTED: "yellow"}
    return Text(f"{texts[state]} (started {info.started_at})", style=styles.get(state, ""))


def _count_table(overview: RunOverview) -> Table:
    statuses = sorted({status for counts in overview.counts.values() for status in counts})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rollouts of")
    for status in statuses:
        table.add_column(status, justify="right")
    for environment, counts in overview.counts.items():
        table.add_row(environment, *(str(counts.get(status, 0)) for status in statuses))
    return table


def _overview_to_json(overview: RunOverview, verdict: RunVerdict) -> JsonValue:
    return plain(
        {
            "path": str(overview.path),
            "state": overview.state,
            "info": overview.info.model_dump(mode="json"),
            "verdict": verdict.as_json(),
            "num_steps": overview.num_steps,
            "rewards": overview.rewards,
            "first_mean": overview.edges.first,
            "last_mean": overview.edges.last,
            "counts": overview.counts,
            "evals": {name: result_to_json(result) for name, result in overview.evals.items()},
            "unfinished_evals": overview.unfinished_evals,
            "problems": overview.problems,
            "changes": {
                change.name: comparison_to_json(change.comparison)
                for change in before_and_after(overview.evals)
                if change.comparison is not None
            },
        }
    )
