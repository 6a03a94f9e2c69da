"""`telescope env validate` and `check-grader`: what an environment and its grader do wrong."""

import asyncio
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.env.options import (
    AllowSdistOption,
    ExamplesOption,
    FixtureRowsOption,
    JsonOption,
    TriedArgument,
    given_settings,
    progress,
    split_names,
)
from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.number_text import counted
from telescope_core.base.terminal import report_width
from telescope_core.finding.code_names import names_class
from telescope_core.finding.locate import locate_environment
from telescope_core.finding.schemes import adapted
from telescope_envs.validation import (
    LEVELS,
    GraderReport,
    Level,
    Report,
    Subject,
    ValidationOptions,
    Verdict,
    installed_subject,
    project_subject,
    validate_subject,
)
from telescope_envs.validation import check_grader as report_of_grader
from telescope_envs.validation.findings import shortened
from telescope_envs.validation.render import PLAIN, SYMBOLS, as_markdown, as_text
from telescope_envs.validation.runner import DEFAULT_EXAMPLES

_ALL = "all"
_MAX_SHOWN = 10
_NOT_CONCLUSIVE = 8
"""Exit code when nothing failed but too little could be tried; 1 to 7 are those of errors."""
_REPORT_FORMATS = (".json", ".md")


def validate(
    context: typer.Context,
    target: TriedArgument = ".",
    level: Annotated[
        str,
        typer.Option(
            "--level",
            metavar="|".join([*LEVELS, _ALL]),
            help="The last level to run; each level includes the ones before it.",
        ),
    ] = _ALL,
    examples: ExamplesOption = DEFAULT_EXAMPLES,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.")] = False,
    fixture_rows: FixtureRowsOption = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the report: FILE.json or FILE.md."),
    ] = None,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check an environment: its files, loading, rewards, leaks and tools.

    The environment's code runs in processes without network access and with their own home folder.
    Exits with 1 when the environment must not be published as it is, and with 8 when nothing failed
    but too little could be tried to know, as on a busy machine.

    Settings of the environment, such as the address of a judge, are given as --env.NAME VALUE.

    For harbor:FOLDER it plays the solution of each task, which must earn the maximum, and nothing.

    Example: telescope env validate ./my-env --report report.md
    """
    settings = given_settings(context)
    if report is not None and report.suffix not in _REPORT_FORMATS:
        raise ConfigError(
            f"--report {str(report)!r} must end in {' or '.join(_REPORT_FORMATS)}: JSON for "
            "programs, Markdown for people"
        )
    named = adapted(target)
    if named is not None and named.scheme == "harbor":
        if level != _ALL or strict or fixture_rows or settings or report is not None or allow_sdist:
            raise ConfigError(
                f"{target}: tasks of Harbor are checked by their own solution; only --examples and "
                "--json are for them"
            )
        return _check_tasks(target, examples, as_json=as_json)
    if level not in (*LEVELS, _ALL):
        raise unknown_name("level", level, [*(str(one) for one in LEVELS), _ALL])
    options = ValidationOptions(
        level=LEVELS[-1] if level == _ALL else Level(level),
        num_examples=examples,
        allow_sdist=split_names(allow_sdist),
        fixture_rows=fixture_rows,
        settings=settings,
        progress=progress,
    )
    made = validate_subject(subject_of(target), options)
    if report is not None:
        _write(made, report)
    if as_json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        encoding = (sys.stdout.encoding or "").lower()
        typer.echo(as_text(made, SYMBOLS if encoding.startswith("utf") else PLAIN), nl=False)
    if made.verdict is Verdict.INCONCLUSIVE:
        raise typer.Exit(_NOT_CONCLUSIVE)
    if made.verdict is Verdict.FAIL or (strict and made.verdict is Verdict.WARN):
        raise typer.Exit(1)


def _check_tasks(target: str, num_tasks: int, *, as_json: bool) -> None:
    """Play the solution of each task of Harbor, and nothing at all, and show what they earn."""
    from telescope_adapters.harbor import TaskCheck, check_tasks

    def tell(check: TaskCheck) -> None:
        if not as_json:
            earned = ("-" if one is None else f"{one:g}" for one in (check.solution, check.nothing))
            columns = "".join(f"{one:>10}" for one in earned)
            typer.echo(f"{columns}  {'ok' if not check.problems else 'PROBLEM'}  {check.task}")

    if not as_json:
        typer.echo(f"{'solution':>10}{'nothing':>10}")
    config = locate_environment(target).config
    checks = asyncio.run(check_tasks(config, num_tasks, tell))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in checks], indent=2))
    for one in checks if not as_json else ():
        for problem in one.problems:
            typer.echo(f"{one.task}: {problem}")
    if any(one.problems for one in checks):
        raise typer.Exit(1)


def subject_of(target: str) -> Subject:
    """Return the project folder, wheel or installed environment that a command names."""
    path = Path(target).expanduser()
    if names_class(target):
        raise ConfigError(
            f"{target} is code without a project, and the checks read a project's metadata; create "
            "one with: telescope env init NAME, put the code into it, and validate its folder"
        )
    if path.is_file():
        if path.suffix != ".whl":
            raise ConfigError(f"{target} is not a wheel; give a project folder, a wheel or a name")
        return Subject(label=path.name, wheel_name=path.name, wheel=path.read_bytes())
    is_path = adapted(target) is None and (
        target.startswith((".", "~", "/")) or target.count("/") > 1 or path.suffix == ".whl"
    )
    if (path / "pyproject.toml").is_file() or is_path:
        return project_subject(path)
    try:
        return installed_subject(target)
    except ConfigError as error:
        if path.is_dir():
            return project_subject(path)
        if adapted(target) is not None:
            raise
        raise ConfigError(f"{error}; there is also no project folder or wheel {target!r}") from None


def _write(made: Report, path: Path) -> None:
    text = made.canonical_json.decode() if path.suffix == ".json" else as_markdown(made)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {str(path)!r} cannot be written: {error.strerror}") from error


def check_grader(
    context: typer.Context,
    target: TriedArgument = ".",
    examples: ExamplesOption = DEFAULT_EXAMPLES,
    fixture_rows: FixtureRowsOption = False,
    allow_sdist: AllowSdistOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which wrong answers, near the right one, a grader accepts.

    Plays the gold answer of each example, and the same with another value in it: another sign,
    factor, unit, symbol or order, or one more. Exits with 1 when a gold answer is refused or
    another value is taken for right, and with 8 when other values could not be tried, or less than
    half of them, or of one kind, got a reward. Settings of the environment are given as
    --env.NAME VALUE.

    Example: telescope env check-grader math-datasets
    """
    options = ValidationOptions(
        num_examples=examples,
        allow_sdist=split_names(allow_sdist),
        fixture_rows=fixture_rows,
        settings=given_settings(context),
        progress=progress,
    )
    report = report_of_grader(subject_of(target), options)
    typer.echo(report.model_dump_json(indent=2) if as_json else _grader_text(report))
    if report.verdict is Verdict.FAIL:
        raise typer.Exit(1)
    if report.verdict is Verdict.INCONCLUSIVE:
        raise typer.Exit(_NOT_CONCLUSIVE)


def _grader_text(report: GraderReport) -> str:
    name = f"{report.environment} {report.version}".strip()
    lines = [f"{name}: {report.verdict}, {counted(report.num_examples, 'example')}", ""]
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
    if report.failed:
        first = report.failed[0]
        count = f"{len(report.failed)} answer{'s' * (len(report.failed) > 1)} without a reward"
        lines += [
            "",
            *_wrapped(f"{count}, because the rollout failed; the first is {first['kind']}:"),
        ]
        lines += _wrapped(f"{shortened(first['said'])!r}", "  ")
        lines += _wrapped(first["error"], "  ")
    if report.not_tried:
        lines += ["", "not tried:"]
        for said in report.not_tried:
            lines += _wrapped(said, "  ")
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, report_width(), initial_indent=indent, subsequent_indent=f"{indent}  "
    )
