"""`telescope eval compare A B`: two evals of the same examples, by the difference of each one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from telescope_cli.console import print_table, report_console
from telescope_cli.eval.view import AsJsonOption
from telescope_core.base.errors import ConfigError
from telescope_core.base.types import JsonValue
from telescope_core.evals import Comparison, Difference, EvalFolder, EvalResult, compare_results
from telescope_core.records.files import plain
from telescope_core.reports.differences import cautions, format_p, sentence, style_of_difference


def compare_command(
    before: Annotated[Path, typer.Argument(help="Folder of the first eval.")],
    after: Annotated[Path, typer.Argument(help="Folder of the second eval.")],
    as_json: AsJsonOption = False,
) -> None:
    """Compare two evals of the same examples, paired by example.

    Each example is compared with itself, and the interval is that of the mean difference. The last
    column is the least true difference that these examples would show in 4 of 5 comparisons.

    For example:

      telescope eval compare runs/evals/base runs/evals/trained

      telescope eval compare runs/r1/evals/countdown-before runs/r1/evals/countdown-after
    """
    results = [_result(path) for path in (before, after)]
    comparison = compare_results(*results, is_graded_again=_is_graded_again(before, after))
    if as_json:
        typer.echo(json.dumps(plain(comparison_to_json(comparison)), indent=2))
        return
    console = report_console()
    for word, path, result in zip(("before", "after"), (before, after), results, strict=True):
        line = f"{word}: {path} ({result.environment} {result.environment_version}, "
        console.print(Text(f"{line}model {result.model or 'unnamed'})"), soft_wrap=True)
    print_table(console, difference_table(comparison))
    console.print(Text(f"{sentence(comparison.main)}."))
    for caution in cautions(comparison):
        console.print(Text(f"Note: {caution}", style="yellow"))


def comparison_to_json(comparison: Comparison) -> dict[str, JsonValue]:
    """Return `comparison` as a JSON object, with values derived from its numbers."""
    differences: list[JsonValue] = [difference_to_json(one) for one in comparison.differences]
    sides: dict[str, JsonValue] = {
        name: {**asdict(one), "num_missing": one.num_missing}
        for name, one in (("before", comparison.before), ("after", comparison.after))
    }
    return {**asdict(comparison), **sides, "differences": differences}


def difference_to_json(one: Difference) -> dict[str, JsonValue]:
    """Return `one` as a JSON object, with values derived from its numbers."""
    return {**asdict(one), "change": one.change, "is_shown": one.is_shown}


def difference_table(comparison: Comparison) -> Table:
    """Return one line for each measure."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("measure")
    for name in ("before", "after", "change", "95% interval", "p", "tasks", "could show"):
        table.add_column(name, justify="right")
    for one in comparison.differences:
        table.add_row(one.measure, *difference_cells(one))
    return table


def difference_cells(one: Difference) -> list[str]:
    """Return before, after, change, interval, p, number of tasks and detectable difference."""
    style = style_of_difference(one)
    interval = "-" if one.low is None else f"{one.low:+{style}} to {one.high:+{style}}"
    return [
        f"{one.before:{style}}",
        f"{one.after:{style}}",
        f"{one.change:+{style}}",
        interval,
        "-" if one.p is None else format_p(one.p).removeprefix("= ").replace("< ", "<"),
        str(one.num_tasks),
        "-" if one.detectable is None else f"{one.detectable:{style}}",
    ]


def _is_graded_again(*paths: Path) -> bool:
    """Return whether one of two evals is a rescore of the other: its rollouts are the same."""
    folders = [EvalFolder(path) for path in paths]
    if not any(one.info() and "rescored" in one.manifest() for one in folders):
        return False
    old, new = (
        {(row.group_id, row.index): row.messages for row in one.rows(pictures_of=())}
        for one in folders
    )
    shared = old.keys() & new.keys()
    return bool(shared) and all(old[key] == new[key] for key in shared)


def _result(path: Path) -> EvalResult:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; expected the folder of an eval")
    if not EvalFolder.holds_eval(path):
        raise ConfigError(
            f"{path} holds no eval (eval.json); give the folder of an eval, such as "
            "runs/evals/NAME, or RUN/evals/NAME-before of a training run"
        )
    result = EvalFolder(path).result()
    if result is None:
        raise ConfigError(
            f"{path}: this eval has no result yet; if nobody plays it, finish it: repeat its "
            f"command with --output {path} --resume, or resume the training run that it belongs to"
        )
    return result
