"""`telescope compare RUN FORK`: how two runs differ, and whether the second one did better."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from telescope_cli.eval.compare import comparison_to_json, difference_cells, difference_to_json
from telescope_cli.watch import find_run, run_names
from telescope_core.base.errors import ConfigError
from telescope_core.base.number_text import counted
from telescope_core.base.terminal import escaped, report_width
from telescope_core.evals import EvalFolder
from telescope_core.records import RunFolder
from telescope_core.records.files import plain
from telescope_core.reports.run_comparison import RunComparison, compare_runs

MOST_TOLD = 20
_KEYS = ("before", "after")


def compare_command(
    before: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or the name of one in `runs`.",
            autocompletion=run_names,
        ),
    ],
    after: Annotated[
        str,
        typer.Argument(
            metavar="FORK",
            help="The other run: a fork of it, or any that is alike.",
            autocompletion=run_names,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Say in which settings two runs differ, and whether the second one did better.

    Evals are paired by example, and the reward of training by step, over the examples that both
    runs played at that step. Nothing is sampled, and nothing is written.

    For example:

      telescope train --fork quickstart --at 20 --learning_rate 1e-5

      telescope compare quickstart quickstart-fork-20
    """
    paths = [find_run(name) for name in (before, after)]
    for path in paths:
        if EvalFolder.holds_eval(path):
            raise ConfigError(f"{path} is an eval; evals are compared by telescope eval compare")
    runs = [RunFolder.open(path) for path in paths]
    if runs[0].path.resolve() == runs[1].path.resolve():
        raise ConfigError(f"expected two runs, got {before} and {after}, which are one folder")
    comparison = compare_runs(*runs)
    if as_json:
        typer.echo(json.dumps(plain(_to_json(runs, comparison)), indent=2))
        return
    for line in (*_head(runs, comparison), *_table(comparison), ""):
        typer.echo(escaped(line))
    for text in (comparison.verdict, *(f"Note: {note}" for note in comparison.notes)):
        for line in textwrap.wrap(text, report_width(), break_on_hyphens=False):
            typer.echo(escaped(line))


def _head(runs: list[RunFolder], comparison: RunComparison) -> Iterator[str]:
    for word, run in zip(("before", "after"), runs, strict=True):
        state = run.info().observed_state
        yield f"{word}: {run.path} ({state}, {counted(run.last_step(), 'step')})"
    if comparison.fork is not None:
        yield f"after goes on from step {comparison.fork.step} of before"
    yield ""
    if not comparison.settings:
        yield "No setting differs but names, folders and ports."
    else:
        yield "Settings that differ"
        yield from _most(list(_settings(comparison)))
    if comparison.code:
        yield "Code that differs"
        yield from _most(comparison.code)


def _settings(comparison: RunComparison) -> Iterator[str]:
    """Yield settings; of an environment or eval that only one run has, only its name."""
    tables = [
        one.name.removesuffix("name")
        for one in comparison.settings
        if one.name.endswith(".name") and len(one.values) == 1
    ]
    for one in comparison.settings:
        if one.name.startswith(tuple(tables)) and not one.name.endswith(".name"):
            continue
        told = [json.dumps(one.values[key]) if key in one.values else "not there" for key in _KEYS]
        follows = " (nobody set it: it follows from others)"
        end = follows if one.name in comparison.following else ""
        yield f"{one.name}: {told[0]} -> {told[1]}{end}"


def _most(texts: Sequence[str]) -> Iterator[str]:
    for text in texts[:MOST_TOLD]:
        yield from textwrap.wrap(
            text,
            report_width(),
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    if len(texts) > MOST_TOLD:
        yield f"  and {len(texts) - MOST_TOLD} more, which --json tells"


def _table(comparison: RunComparison) -> Iterator[str]:
    if not comparison.evals and not comparison.training:
        return
    yield ""
    yield _row("measure", "before", "after", "change", "95% interval", "p", "pairs")
    yield "-" * report_width()
    for one in comparison.evals:
        yield f"{one.name} {f'after step {one.step}' if one.step else 'before training'}"
        for difference in one.comparison.differences:
            yield _row(f"  {difference.measure}", *difference_cells(difference)[:-1])
    for one in comparison.training:
        yield f"training on {one.environment}, steps {one.first_step} to {one.last_step}"
        yield _row(f"  {one.difference.measure}", *difference_cells(one.difference)[:-1])


def _row(measure: str, *cells: str) -> str:
    widths = (9, 9, 9, 19, 9, 8)
    return f"{measure:<16}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
    )


def _to_json(runs: list[RunFolder], comparison: RunComparison) -> dict[str, Any]:
    fork = comparison.fork
    return {
        **{
            key: {
                "folder": str(run.path),
                "state": f"{run.info().observed_state}",
                "steps": run.last_step(),
            }
            for key, run in zip(_KEYS, runs, strict=True)
        },
        "fork": None if fork is None else {"step": fork.step, "changed": fork.changed},
        "settings": [
            {"name": one.name, **one.values, "follows": one.name in comparison.following}
            for one in comparison.settings
        ],
        "code": comparison.code,
        "evals": [
            {"name": one.name, "step": one.step, **comparison_to_json(one.comparison)}
            for one in comparison.evals
        ],
        "training": [
            {**asdict(one), "difference": difference_to_json(one.difference)}
            for one in comparison.training
        ],
        "outcome": comparison.outcome,
        "verdict": comparison.verdict,
        "notes": comparison.notes,
    }
