"""Print the result of `telescope rescore`: tables and sentences in 80 columns."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telescope_cli.console import print_table, report_console
from telescope_cli.eval.compare import difference_cells
from telescope_core.base.number_text import counted, style_of
from telescope_core.base.secret_names import hidden
from telescope_core.base.terminal import escaped
from telescope_core.evals.rescoring import PartChange, Rescored, RewardChange, StepChange

_MOST_STEP_LINES = 8
_MOST_LARGEST = 5
_MOST_ERRORS = 3
_ERROR_CHARACTERS = 300
_ANSWER_CHARACTERS = 50


def print_rescored(
    rescored: Rescored, *, title: str, code_changes: Sequence[str], hide: Collection[str]
) -> None:
    """Print the result, without the values in `hide`."""
    console = report_console()
    console.print(Text(escaped(title), style="bold"), soft_wrap=True)
    counts = f"{rescored.num_graded} of {counted(rescored.num_rollouts, 'rollout')} graded"
    # Rollouts of an eval are of step 0.
    steps = rescored.steps if rescored.steps and rescored.steps[-1].step else ()
    told = f", {counted(len(steps), 'step')}" if steps else ""
    console.print(Text(f"{counts}{told}"))
    for line in code_changes:
        _print_wrapped(console, f"Code: {line}")
    print_table(console, _parts_table([rescored.reward, *rescored.parts]))
    if one := rescored.reward.difference:
        _print_wrapped(
            console,
            f"Means are over {counted(one.num_tasks, 'example')}, each compared with itself. "
            "The interval says what to expect of other examples like these.",
        )
    for line in _left_out_lines(rescored):
        _print_wrapped(console, line)
    for line in _group_lines(rescored):
        _print_wrapped(console, line)
    if len(rescored.steps) > 1 and rescored.reward.num_rose + rescored.reward.num_fell:
        print_table(console, _steps_table(rescored.steps))
    if rescored.largest:
        console.print(Text("Largest differences, one for each example:"))
    for one in rescored.largest[:_MOST_LARGEST]:
        for line in _largest_lines(one):
            console.print(Text(escaped(hidden(line, hide))), soft_wrap=True)
    for text, number in list(rescored.errors.items())[:_MOST_ERRORS]:
        shown = escaped(hidden(text, hide))
        cut = shown if len(shown) <= _ERROR_CHARACTERS else f"{shown[:_ERROR_CHARACTERS]}..."
        console.print(Text(f"Failed ({number}): {cut}", style="yellow"), soft_wrap=True)


def _print_wrapped(console: Console, text: str) -> None:
    console.print(Text(textwrap.fill(escaped(text), console.width, subsequent_indent="  ")))


def _parts_table(parts: Sequence[PartChange]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    table.add_column("", overflow="fold")
    columns = ("rollouts", "rose", "fell", "failed", "before", "after", "change", "95% interval")
    for name in columns:
        table.add_column(name, justify="right")
    for number, part in enumerate(parts):
        name = escaped(part.name) if number == 0 else f"  {escaped(part.name)}"
        counts = (part.num_compared, part.num_rose, part.num_fell, part.num_failed)
        means = difference_cells(part.difference)[:4] if part.difference else ["-"] * 4
        table.add_row(Text(name), *map(str, counts), *means)
    return table


def _left_out_lines(rescored: Rescored) -> Iterator[str]:
    for why, number in rescored.not_graded.items():
        yield f"Not graded: {counted(number, 'rollout')}, {why}."
    for name, reasons in rescored.left_out.items():
        for why, number in reasons.items():
            yield f"Left out: {name} of {counted(number, 'rollout')}, {why}."
    if any("asks a" in why for reasons in rescored.left_out.values() for why in reasons):
        yield "Judges and simulated users are asked with --ask-judges, which can cost money."
    if rescored.reward.num_left_out:
        number = counted(rescored.reward.num_left_out, "rollout")
        yield f"The reward as a whole is not known for {number}."
    for part in (rescored.reward, *rescored.parts):
        if part.num_new:
            number = counted(part.num_new, "rollout")
            yield f"With {_named(part, rescored)} only now: {number}."
        if part.num_gone:
            number = counted(part.num_gone, "rollout")
            yield f"With {_named(part, rescored)} no more: {number}."


def _named(part: PartChange, rescored: Rescored) -> str:
    return "a reward" if part is rescored.reward else f"the part {part.name}"


def _group_lines(rescored: Rescored) -> Iterator[str]:
    groups = rescored.groups
    if not groups.num_compared:
        return
    yield (
        f"Of {counted(groups.num_compared, 'group')}, {len(groups.gained)} had equal rewards and "
        "would have had different ones, so that they could be learned from; "
        f"{len(groups.lost)} had different ones and would have had equal ones."
    )


def _steps_table(steps: Sequence[StepChange]) -> Table:
    """Return the means of ranges of steps, in a few lines however many steps there are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("steps", "rollouts", "rose", "fell", "before", "after", "change"):
        table.add_column(name, justify="right")
    size = -(-len(steps) // _MOST_STEP_LINES)
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        number = sum(one.num_compared for one in part)
        before = sum(one.before * one.num_compared for one in part) / number
        after = sum(one.after * one.num_compared for one in part) / number
        name = f"{part[0].step}" if len(part) == 1 else f"{part[0].step} to {part[-1].step}"
        counts = (number, sum(one.num_rose for one in part), sum(one.num_fell for one in part))
        style = style_of(before, after, after - before)
        means = (f"{before:{style}}", f"{after:{style}}", f"{after - before:+{style}}")
        table.add_row(name, *map(str, counts), *means)
    return table


def _largest_lines(one: RewardChange) -> Iterable[str]:
    step = f"step {one.step}, " if one.step else ""
    style = style_of(one.before, one.after)
    yield (
        f"  {one.before:{style}} -> {one.after:{style}}  {step}rollout {one.group_id}/{one.index}, "
        f"example {one.example_id}"
    )
    if any(one.answers):
        yield f"    right answer: {_end(one.answers[0])} -> {_end(one.answers[1])}"
    yield f"    answer ends: {_end(one.completion)}"


def _end(text: str) -> str:
    """Return the last characters of a text, with its spaces and line ends visible."""
    return ascii(text[-_ANSWER_CHARACTERS:])
