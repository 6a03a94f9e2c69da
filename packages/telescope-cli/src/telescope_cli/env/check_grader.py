"""`telescope env check-grader`."""

import textwrap

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    ExamplesOption,
    FixtureRowsOption,
    JsonOption,
    TriedArgument,
    progress,
    split_names,
)
from telescope_cli.env.validate import NOT_CONCLUSIVE, subject_of
from telescope_envs import validation
from telescope_envs.validation import GraderReport, ValidationOptions, Verdict
from telescope_envs.validation.findings import shortened
from telescope_envs.validation.runner import DEFAULT_EXAMPLES

_WIDTH = 80
_MAX_SHOWN = 10


def check_grader(
    target: TriedArgument = ".",
    examples: ExamplesOption = DEFAULT_EXAMPLES,
    fixture_rows: FixtureRowsOption = False,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which wrong answers, near the right one, a grader accepts.

    Plays the gold answer of each example, and the same with another value in it: another sign,
    factor, unit, symbol or order, or one more. Exits with 1 when a gold answer is refused or
    another value is taken for right, and with 8 when no other value could be tried.

    Example: telescope env check-grader math-datasets
    """
    options = ValidationOptions(
        num_examples=examples,
        allow_sdist=split_names(allow_sdist),
        fixture_rows=fixture_rows,
        progress=progress,
    )
    report = validation.check_grader(subject_of(target), options)
    typer.echo(report.model_dump_json(indent=2) if as_json else _text(report))
    if report.verdict is Verdict.FAIL:
        raise typer.Exit(1)
    if report.verdict is Verdict.INCONCLUSIVE:
        raise typer.Exit(NOT_CONCLUSIVE)


def _text(report: GraderReport) -> str:
    name = f"{report.environment} {report.version}".strip()
    lines = [f"{name}: {report.verdict}, {report.num_examples} examples", ""]
    lines.append(f"{'answer':<16}{'tried':>6}{'equal':>7}{'failed':>8}  what it is")
    for kind in report.kinds:
        counts = f"{kind.num_tried:>6}{kind.num_equal:>7}{kind.num_failed:>8}"
        lines.append(f"{kind.kind:<16}{counts}  {kind.what}")
    for one in report.wrong[:_MAX_SHOWN]:
        verb = "takes for right" if one["is_solved"] else "refuses"
        reward = "no reward" if one["reward"] is None else f"{one['reward']:g}"
        lines += ["", *_wrapped(f"{one['kind']}: the grader {verb} ({reward})")]
        lines += _wrapped(f"{shortened(one['said'])!r}", "  ")
        lines += _wrapped(
            f"where {one['right']!r} is right, in example {one['example_id']!r}", "  "
        )
    if len(report.wrong) > _MAX_SHOWN:
        lines += ["", f"and {len(report.wrong) - _MAX_SHOWN} more; --json shows all"]
    if report.not_tried:
        lines += ["", "not tried:"]
        for said in report.not_tried:
            lines += _wrapped(said, "  ")
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
