"""The display of a run while it goes on, and at its end. Shows metrics and computes none.

On a terminal, one panel of at most 24 lines is redrawn in place. Elsewhere each step prints one
line.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from telescope_core.base.number_text import counted, format_metric, style_of
from telescope_core.base.secret_names import hidden, secrets_line
from telescope_core.base.terminal import escaped, redraws
from telescope_core.diagnosis import Kind
from telescope_core.records.logs import SHOWN_AS
from telescope_core.records.restarts import Restart
from telescope_core.reports.before_after import label_of, order_of
from telescope_core.reports.sparkline import sparkline

_LOGGER = logging.getLogger(__name__)
_WIDTH = 80
_UNLIMITED_WIDTH = 10_000
_CURVE_WIDTH = 34
_MOST_ENVIRONMENTS = 8
_AVERAGED_STEPS = 20
_TIME_PARTS = (
    ("time/generate_s", "sampling", "blue"),
    ("time/train_s", "training", "green"),
    ("time/sync_s", "weights", "magenta"),
    ("time/wait_s", "all else", "yellow"),
)
_BAR_WIDTH = 20
_LONG_S = 5.0
"""Seconds after which a line tells what a process that starts is doing, where no panel does."""
_TOPICS = {
    "loss": (
        ("total", "loss/total", None),
        ("policy", "loss/policy", None),
        ("entropy", "entropy", None),
        ("grad norm", "grad_norm", None),
    ),
    "tokens": (
        ("sampled/s", "tokens/rollout_per_s", ",.0f"),
        ("trained/s", "tokens/train_per_s", ",.0f"),
        ("per rollout", "completion_len/mean", ".1f"),
        ("cut", "truncated/fraction", ".1%"),
    ),
    "weights": (
        ("version", "version", ".0f"),
        ("stale mean", "staleness/mean", ".2f"),
        ("max", "staleness/max", ".0f"),
        ("mismatch", "mismatch/max", ".1e"),
    ),
    "batch": (
        ("fill", "pack/fill", ".0%"),
        ("failed", "rollouts/failed", ".0f"),
        ("groups dropped", "groups/discarded", ".0f"),
        ("lr", "learning_rate", ".1e"),
    ),
}
"""Lines of numbers: topic -> (label, metric, format) of each number; None = `format_metric`."""


class LiveView:
    """Shows the metrics of a run as they arrive; use it as a context manager."""

    def __init__(
        self,
        total_steps: int,
        environments: Sequence[str],
        *,
        console: Console | None = None,
        rows_before: Sequence[Mapping[str, Any]] = (),
        begun_ago_s: float = 0.0,
        hide: Collection[str] = (),
    ) -> None:
        """`rows_before`: metrics of earlier steps.

        `begun_ago_s`: seconds for which the run has been going on. `hide`: values of secrets, which
        are left out of what is printed.
        """
        self._total_steps = total_steps
        self._environments = list(environments)
        self._console = console or Console()
        self._hide = hide
        self._curves = {"step", *(f"reward/{name}/mean" for name in environments)}
        self._rows: list[Mapping[str, Any]] = []
        """Metrics by step; of all but the last one, only those of curves."""
        self.go_back(rows_before)
        self._phase = ""
        self._begun_ago_s = begun_ago_s
        self._started_s = time.monotonic()
        self._live: Live | None = None
        self._waits: dict[tuple[str, str], tuple[int, float]] = {}
        """Kind of process and what it does -> number of these, and when the first began."""
        self._told_waits: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if redraws(self._console):
            self._live = Live(
                get_renderable=self._panel, console=self._console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Show the present activity of the run."""
        self._phase = text
        _LOGGER.info(text)
        if self._live is None:
            self._print(f"{self._elapsed()} {text}")

    def waits_for(self, activities: Sequence[tuple[str, str]]) -> None:
        """Show what processes that start are doing; [] = none of them is left.

        `activities`: kind of each process, such as "server", and what it does now.
        """
        now_s, before = time.monotonic(), self._waits
        self._waits = {
            key: (number, before[key][1] if key in before else now_s)
            for key, number in Counter(activities).items()
        }
        self._told_waits &= self._waits.keys()
        long = {key for key, (_, since_s) in self._waits.items() if now_s - since_s >= _LONG_S}
        if long - self._told_waits:
            self._told_waits |= long
            text = f"waiting for {self._waits_text()}"
            _LOGGER.info(text)
            if self._live is None:
                self._print(f"{self._elapsed()} {text}")

    def _waits_text(self) -> str:
        now_s = time.monotonic()
        return "; ".join(
            f"{kind if number == 1 else f'{number} {kind}s'}: {activity}, {now_s - since_s:.0f} s"
            for (kind, activity), (number, since_s) in self._waits.items()
        )

    def warn(self, text: str) -> None:
        """Print a text that needs attention, in the way of `note`."""
        self._note(text, level="warning")

    def note(self, text: str) -> None:
        """Print text that stays visible, above the panel if there is one."""
        self._note(text, level="info")

    def _note(self, text: str, *, level: str) -> None:
        # Lines shown here must not go to stderr again, so only the log gets their level.
        _LOGGER.info(text, extra={SHOWN_AS: level})
        self._print(f"{self._elapsed()} {text}")

    def _print(self, line: str) -> None:
        # Lines have texts of others in them, which are no markup.
        self._console.print(Text(escaped(hidden(line, self._hide))), soft_wrap=True)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of one more step."""
        self._add(row)
        _LOGGER.info(self._line(row))
        if self._live is None:
            self._print(self._line(row))

    def _add(self, row: Mapping[str, Any]) -> None:
        if self._rows:
            last = self._rows[-1]
            self._rows[-1] = {name: last[name] for name in self._curves & last.keys()}
        self._rows.append(row)

    def go_back(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Show the metrics of `rows` alone; the steps after them are taken again."""
        self._rows.clear()
        for row in rows:
            self._add(row)

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started_s + self._begun_ago_s)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def _line(self, row: Mapping[str, Any]) -> str:
        each = ", ".join(
            f"{name} {_number(row, f'reward/{name}/mean')}" for name in self._environments
        )
        return (
            f"{self._elapsed()} step {len(self._rows)}/{self._total_steps} "
            f"reward {_number(row, 'reward/mean')} ({each}) "
            f"loss {_number(row, 'loss/total')} entropy {_number(row, 'entropy')} "
            f"{_number(row, 'tokens/rollout_per_s', ',.0f')} tok/s "
            f"{_number(row, 'time/step_s', '.2f')} s"
        )

    def _panel(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress()]
        if self._waits:
            parts.append(Text(escaped(self._waits_text()), style="cyan"))
        if self._rows:
            row = self._rows[-1]
            parts += [self._reward_table(), *_numbers(row, self._width), _time_split(row)]
        return Group(*parts)

    @property
    def _width(self) -> int:
        return min(_WIDTH, self._console.width)

    def _progress(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        step = len(self._rows)
        grid.add_row(
            Text(f"step {step}/{self._total_steps}", style="bold"),
            ProgressBar(total=self._total_steps, completed=step, width=self._width * 3 // 10),
            Text(self._elapsed(), style="dim"),
            Text(escaped(self._phase), style="cyan", overflow="ellipsis", no_wrap=True),
        )
        return grid

    def _reward_table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, width=self._width)
        curve_width = _CURVE_WIDTH - (_WIDTH - self._width)
        table.add_column("reward", ratio=1, overflow="ellipsis", no_wrap=True)
        table.add_column("now", justify="right", min_width=6, no_wrap=True)
        table.add_column(f"mean {_AVERAGED_STEPS}", justify="right", min_width=7, no_wrap=True)
        if curve_width > 0:
            table.add_column("", width=curve_width, no_wrap=True)
        for name in self._environments[:_MOST_ENVIRONMENTS]:
            key = f"reward/{name}/mean"
            values = [row.get(key) for row in self._rows]
            known = [value for value in values if value is not None][-_AVERAGED_STEPS:]
            cells = [
                Text(escaped(name)),
                Text(_number(self._rows[-1], key)),
                Text(format_metric(sum(known) / len(known)) if known else "-"),
            ]
            if curve_width > 0:
                cells.append(Text(sparkline(values, width=curve_width), style="cyan"))
            table.add_row(*cells)
        hidden = len(self._environments) - _MOST_ENVIRONMENTS
        if hidden > 0:
            table.add_row(f"and {hidden} more")
        return table


def _numbers(row: Mapping[str, Any], width: int) -> list[RenderableType]:
    """Return the numbers of one step, with one topic per line; narrow lines are wrapped."""
    grid, lines = Table.grid(padding=(0, 2)), list[RenderableType]()
    for topic, entries in _TOPICS.items():
        cells = [
            Text.assemble((f"{name} ", "dim"), _number(row, key, spec))
            for name, key, spec in entries
        ]
        head = Text(topic, style="bold")
        grid.add_row(head, *cells)
        lines.append(Text("  ").join([head, *cells]))
    return [grid] if width == _WIDTH else lines


def _time_split(row: Mapping[str, Any]) -> Text:
    seconds = [(float(row.get(key) or 0.0), name, style) for key, name, style in _TIME_PARTS]
    total = sum(size for size, _, _ in seconds)
    if not total:
        return Text("")
    line = Text("time     ", style="bold")
    for size, _, style in seconds:
        line.append(chr(0x2588) * round(size / total * _BAR_WIDTH), style=style)
    for size, name, style in seconds:
        line.append(f" {name} ", style=style).append(f"{size / total:.0%}")
    return line


def _number(row: Mapping[str, Any], key: str, spec: str | None = None) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    return format_metric(value) if spec is None else format(value, spec)


def print_resume(lines: Sequence[str]) -> None:
    """Print the checkpoint from which a run continues, and the changed settings."""
    Console().print(Text(escaped("\n".join(lines))), soft_wrap=True)


def print_secrets(name: str, secrets: Sequence[str]) -> None:
    """Print the secrets of an environment by name, and which are set, to standard error."""
    Console(stderr=True).print(Text(secrets_line(name, secrets, os.environ)), soft_wrap=True)


def print_notes(notes: Sequence[str]) -> None:
    """Print the notes about a run that starts."""
    console = Console()
    for note in notes:
        console.print(Text(escaped(f"note: {note}")), soft_wrap=True)


def restart_text(restart: Restart) -> str:
    """Return the line about a restart of trainer ranks."""
    begun = f"checkpoint {restart.checkpoint}" if restart.checkpoint else "the beginning of the run"
    repeated = ""
    if restart.reached > restart.step:
        steps = f"steps {restart.step + 1} to {restart.reached}"
        if restart.reached == restart.step + 1:
            steps = f"step {restart.reached}"
        repeated = f"; {steps} will be taken again"
    advice = "" if restart.checkpoint else " (set checkpoint_every to lose less)"
    return f"{restart.reason}\nstarting the trainer ranks again from {begun}{repeated}{advice}"


def print_summary(summary: Mapping[str, Any], *, console: Console | None = None) -> None:
    """Print the results of a run from the content of its `summary.json`."""
    console = console or Console()
    console.print(Text(escaped(f"\nrun {summary.get('name', '')} finished"), style="bold"))
    if verdict := summary.get("verdict"):
        console.print(Text(escaped(verdict["text"])))
    if rewards := summary.get("rewards"):
        console.print(_reward_line(summary, rewards), highlight=False)
    evals: Mapping[str, Mapping[str, Mapping[str, Any]]] = summary.get("evals") or {}
    if any(evals.values()):
        examples: Mapping[str, Any] = summary.get("examples") or {}
        is_held_out = not examples.get("trained_evals")
        _print_evals(console, evals, "held-out pass@1" if is_held_out else "pass@1")
    wrong = [
        finding["text"]
        for finding in summary.get("findings", ())
        if not finding["is_over"] and finding["kind"] != Kind.SLOW
    ]
    for line in [*_losses(summary.get("losses") or {}), *wrong]:
        console.print(Text(escaped(line), style="yellow"), soft_wrap=True)
    mismatch = summary.get("mismatch_max")
    if mismatch is not None:
        console.print(f"largest log-prob mismatch {mismatch:.1e} nats", highlight=False)
    for label, key in (("model", "export"), ("report", "report")):
        if summary.get(key):
            console.print(Text(escaped(f"{label}: {summary[key]}")), soft_wrap=True)


def _reward_line(summary: Mapping[str, Any], rewards: Sequence[float]) -> str:
    """Return a line with the first and last rewards, and their change over several steps."""
    first, last = summary.get("first_mean"), summary.get("last_mean")
    num_compared = summary.get("compared_steps")
    if first is None or last is None or not num_compared:
        return f"reward {format_metric(rewards[-1])} (too few steps for a change)"
    steps = "first to last step" if num_compared == 1 else f"first to last {num_compared} steps"
    curve = sparkline(rewards, width=26)
    style = style_of(first, last, last - first)
    return f"reward {first:{style}} {curve} {last:{style}} ({last - first:+{style}}, {steps})"


def _losses(losses: Mapping[str, Any]) -> list[str]:
    """Return a line for each loss."""
    lines: list[str] = []
    if losses.get("attempts_failed"):
        attempts = counted(losses["attempts_failed"], "failed attempt")
        causes = ", ".join(f"{name} {count}" for name, count in losses["causes"].items())
        lines.append(
            f"{losses['rollouts_failed']:,} of {counted(losses['rollouts'], 'rollout')} failed, "
            f"after {attempts} ({causes}); {losses['remedy']}"
        )
        if losses["most_frequent_error"]:
            lines.append(f"most often: {losses['most_frequent_error']}")
    if losses.get("groups_left_out"):
        lines.append(
            f"{losses['groups_left_out']:,} of {losses['groups']:,} groups "
            f"{'was' if losses['groups_left_out'] == 1 else 'were'} not trained on"
        )
    for key, one, several, more in (
        ("workers_replaced", "environment worker was", "environment workers were", "replaced"),
        (
            "servers_lost",
            "inference server was",
            "inference servers were",
            "lost; see servers.jsonl",
        ),
        ("requests_sent_again", "request was", "requests were", "sent again"),
        ("evals_without_result", "eval has", "evals have", "no result; see eval_points.jsonl"),
    ):
        if count := losses.get(key):
            lines.append(f"{count:,} {one if count == 1 else several} {more}")
    return lines


def _print_evals(
    console: Console, evals: Mapping[str, Mapping[str, Mapping[str, Any]]], measure: str
) -> None:
    """Print the estimates as a table; where it is too wide for the terminal, as lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(measure)
    moments = sorted({tag for tags in evals.values() for tag in tags} - {"change"}, key=order_of)
    rows = {
        escaped(name): [_estimate(tags.get(tag) or {}) for tag in moments]
        for name, tags in evals.items()
    }
    for number, tag in enumerate(moments):
        widest = max(len(cells[number]) for cells in rows.values())
        table.add_column(label_of(tag), justify="right", no_wrap=True, min_width=widest)
    for name, cells in rows.items():
        table.add_row(Text(name), *cells)
    unlimited = console.options.update_width(_UNLIMITED_WIDTH)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
        return
    for name, cells in rows.items():
        console.print(Text(f"{measure} of {name}:"))
        for tag, cell in zip(moments, cells, strict=True):
            console.print(Text(f"  {label_of(tag)} {cell}"))


def _estimate(numbers: Mapping[str, Any]) -> str:
    mean, low, high = numbers.get("mean"), numbers.get("low"), numbers.get("high")
    if mean is None:
        return "-"
    return f"{mean:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")
