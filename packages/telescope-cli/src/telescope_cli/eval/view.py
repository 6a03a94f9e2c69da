"""Output of `telescope eval`: progress on stderr while it runs, the result on stdout."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from telescope_cli.console import EscapingConsole, print_table, report_console
from telescope_core.base.number_text import counted, format_metric
from telescope_core.base.terminal import redraws
from telescope_core.base.types import StopReason
from telescope_core.evals import EvalResult, EvalSettings
from telescope_core.evals.result import (
    TABLE_HEAD,
    RewardSoFar,
    count_lines,
    success_measures,
    table_lines,
)
from telescope_core.evals.runner import reusable
from telescope_core.records.rows import RolloutRow

_UNLIMITED_WIDTH = 10_000
_MOST_ERRORS = 5
_ERROR_CHARACTERS = 600

AsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")
]


def stderr_console() -> Console:
    """Return a console for all output other than the result."""
    return EscapingConsole(stderr=True)


def tell(text: str, style: str = "") -> None:
    """Print a line beside the result."""
    stderr_console().print(Text(text, style=style), soft_wrap=True)


@contextmanager
def announced(text: str) -> Generator[Callable[[str], None], None, None]:
    """Show `text` while the block runs, and after it what the block says it is doing.

    Without a terminal, print `text` as one line.
    """
    console = stderr_console()
    if redraws(console):
        with console.status(Text(text)) as status:
            yield lambda activity: status.update(Text(f"{text}: {activity}"))
    else:
        console.print(Text(text), soft_wrap=True)
        yield lambda activity: None


class EvalProgress:
    """A progress bar with the running mean; without a terminal, a line after each tenth."""

    def __init__(
        self, settings: EvalSettings, *, done: Sequence[RolloutRow], whole_groups: bool
    ) -> None:
        self._total = settings.num_examples * settings.rollouts
        self._console = stderr_console()
        self._count = 0
        self._num_failed = 0
        self._reward = RewardSoFar()
        self.bar = Progress(
            TextColumn("rollouts"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[mean]}"),
            console=self._console,
            transient=True,
            disable=not redraws(self._console),
        )
        """Entered while the rollouts are played."""
        self._task = self.bar.add_task("rollouts", total=self._total, mean="")
        kept = reusable(done, settings, whole_groups=whole_groups)
        if kept:
            recorded = counted(len(kept), "rollout")
            self._console.print(f"resuming: {recorded} already recorded", highlight=False)
        self._count = len(kept)
        for row in kept:
            self._reward.add(row.example_id, row.group_id, row.reward or 0.0)

    def update(self, row: RolloutRow) -> None:
        """Count one finished rollout."""
        self._count += 1
        if row.reward is None:
            self._num_failed += 1
        else:
            self._reward.add(row.example_id, row.group_id, row.reward)
        self.bar.update(self._task, completed=self._count, mean=self._running_mean())
        tenths_before = (self._count - 1) * 10 // self._total
        if not redraws(self._console) and self._count * 10 // self._total > tenths_before:
            text = f"{self._count}/{self._total} rollouts, {self._running_mean()}"
            self._console.print(text, highlight=False)

    def note(self, line: str) -> None:
        """Print `line` above the bar, where it stays."""
        self._console.print(Text(line, style="yellow"), soft_wrap=True)

    def _running_mean(self) -> str:
        so_far = self._reward.mean
        mean = "no reward yet" if so_far is None else f"reward {format_metric(so_far)}"
        return mean + (f", {self._num_failed} failed" if self._num_failed else "")


def print_result(result: EvalResult, folder: Path) -> None:
    """Print `result` in at most 80 columns, with the denominator of each number."""
    console = report_console()
    settings = result.settings
    console.print(Text(f"{result.environment} {result.environment_version}", style="bold"))
    console.print(Text(f"model {result.model or 'unnamed'}"))
    console.print(
        f"{counted(settings.num_examples, 'example')} x "
        f"{counted(settings.rollouts, 'rollout')}, "
        f"temperature {settings.sampling.temperature_text}, "
        f"max_tokens {settings.sampling.max_tokens}, {settings.split} split"
    )
    print_table(console, result_table(result))
    for line in count_lines(result):
        console.print(Text(line))
    for warning in _warnings(result):
        console.print(Text(f"Note: {warning}", style="yellow"))
    console.print(Text(f"Results: {folder} (report.html, results.json)"), soft_wrap=True)


def first_errors(rows: Sequence[RolloutRow]) -> list[str]:
    """Return the first error of each kind, in order of occurrence."""
    errors: dict[str, str] = {}
    for row in rows:
        if row.reward is None:
            reason = row.status_reason or row.status
            errors.setdefault(reason, row.error or reason)
    return list(errors.values())


def print_unreadable(problems: Sequence[str]) -> None:
    """Say which recorded rollouts are left out because they could not be read."""
    if problems:
        count = counted(len(problems), "recorded rollout")
        text = f"Note: {count} could not be read and left out; the first one: {problems[0]}"
        tell(text, style="yellow")


def print_errors(errors: Sequence[str]) -> None:
    """Show one error of each kind of failure."""
    for error in errors[:_MOST_ERRORS]:
        shown = error if len(error) <= _ERROR_CHARACTERS else f"{error[:_ERROR_CHARACTERS]}..."
        EscapingConsole(highlight=False).print(
            Text(f"Failed: {shown}", style="yellow"), soft_wrap=True
        )


def result_table(result: EvalResult) -> Table:
    """Return the table of estimates and metrics."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(TABLE_HEAD[0])
    for name in TABLE_HEAD[1:]:
        table.add_column(name, justify="right")
    for line in table_lines(result):
        table.add_row(*line)
    return table


def print_results(
    console: Console, heads: Sequence[str], rows: Sequence[tuple[Sequence[str], EvalResult | None]]
) -> None:
    """Print one line for each eval: its names under `heads`, and its numbers.

    The smallest k has an interval. Further ones stand behind it if they fit; else a line says where
    they are.
    """
    ks = sorted({k for _, result in rows if result is not None for k in result.pass_at}) or [1]
    measures = [success_measures(result) for _, result in rows if result is not None]
    names = dict.fromkeys(name for one in measures for name in one)
    further = [name for name in names if name != f"pass@{ks[0]}"]
    table = _table_of_results(heads, rows, ks[0], further)
    unlimited = console.options.update_width(_UNLIMITED_WIDTH)
    if not further or Measurement.get(console, unlimited, table).maximum <= console.width:
        print_table(console, table)
        return
    print_table(console, _table_of_results(heads, rows, ks[0], []))
    text = f"Also {', '.join(further)} of each: telescope eval --report FOLDER"
    console.print(Text(text))


def _table_of_results(
    heads: Sequence[str],
    rows: Sequence[tuple[Sequence[str], EvalResult | None]],
    k: int,
    further: Sequence[str],
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0) if further else (0, 1))
    for name in heads:
        table.add_column(name)
    for name in (f"pass@{k}", "95% interval", *further, "reward", "scored"):
        table.add_column(name, justify="right")
    for names, result in rows:
        missing = [*["-"] * (3 + len(further)), "failed"]
        table.add_row(*names, *(missing if result is None else _result_cells(result, k, further)))
    return table


def _result_cells(result: EvalResult, k: int, further: Sequence[str]) -> list[str]:
    """Return pass@k, its interval, further measures, the mean reward and the number scored."""
    solved = result.pass_at.get(k)
    measures = success_measures(result)
    others = [measures.get(name) for name in further]
    return [
        f"{solved.mean:.3f}" if solved else "-",
        solved.interval_text if solved else "-",
        *(f"{one.mean:.3f}" if one else "-" for one in others),
        format_metric(result.reward.mean) if result.reward else "-",
        f"{result.num_scored}/{result.num_rollouts}",
    ]


def _warnings(result: EvalResult) -> list[str]:
    warnings: list[str] = []
    settings = result.settings
    if settings.sampling.temperature == 0.0 and settings.rollouts > 1:
        warnings.append(
            "temperature 0 gives the same answer in every rollout; more rollouts add nothing."
        )
    if result.num_tasks < settings.num_examples:
        warnings.append(
            f"only {result.num_tasks} of the {settings.num_examples} examples differ; all rollouts "
            "of a repeated example count as one task."
        )
    for k, estimate in sorted(result.pass_at.items()):
        counted = estimate.num_tasks if estimate else 0
        if counted < result.num_tasks:
            warnings.append(
                f"pass@{k} covers only {counted} of {result.num_tasks} examples; "
                f"the others have fewer than {k} scored rollouts."
            )
    if reached := result.stop_reasons.get(StopReason.CONTEXT_LENGTH):
        warnings.append(
            f"{reached} of {result.num_scored} scored rollouts reached the end of the model's "
            "context; serve the model with a longer one, or lower --max-tokens."
        )
    if result.num_failed:
        warnings.append(
            "failed rollouts have no reward and are left out; the second line counts each with "
            f"the minimum reward, {result.reward_min:g}."
        )
    return warnings
