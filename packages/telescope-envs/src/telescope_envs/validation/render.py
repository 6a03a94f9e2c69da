"""A report as text for a terminal of 80 columns, and as Markdown. Pure."""

import textwrap
from collections.abc import Iterator, Mapping

from telescope_core.base.number_text import counted
from telescope_envs.validation.policy import CHECKS
from telescope_envs.validation.records import SETTINGS, CheckResult, Level, Outcome, Report

WIDTH = 80
_FACTS = {
    "rollouts_tried": "{:g} rollouts tried",
    "reward_floor": "reward floor {:g}",
    "rollouts_per_second": "{:g} rollouts/s with a scripted model",
    "reward_p99_ms": "reward p99 {:g} ms",
    "memory_mb": "{:g} MB in a worker",
    "import_s": "import {:g} s",
    "network_cut_by": "network cut by {}",
}
_MAX_SAID = 200


Marks = Mapping[Outcome, str]
"""The mark to show before a check, by its outcome."""
_LEFT_OUT = "-"
PLAIN: Marks = {Outcome.PASS: "+", Outcome.WARN: "!", Outcome.FAIL: "x"}
SYMBOLS: Marks = {**PLAIN, Outcome.PASS: "\u2713", Outcome.FAIL: "\u2717"}


def as_text(report: Report, marks: Marks = PLAIN) -> str:
    """Return the report as lines of at most 80 columns."""
    lines = [f"{_name(report)}: {report.verdict}"]
    lines += _wrapped(_about(report), "  ")
    for level in Level:
        checks = [check for check in report.checks if check.level is level]
        lines += ["", *_level_lines(level, checks, report.facts, marks)]
    lines += ["", *_wrapped(f"measured: {_measured(report.facts)}", "")]
    lines += _wrapped(_advice(report), "")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def evidence_text(report: Report) -> str:
    """Return findings of checks and inconclusive checks, without those that passed."""
    lines: list[str] = []
    for check in report.checks:
        if check.evidence:
            lines += _finding_lines(check, PLAIN)
        elif check.outcome is Outcome.INCONCLUSIVE:
            said = f"{check.id}: {check.outcome}. {check.reason}"
            lines += _wrapped(said, f"  {_LEFT_OUT} ")
    return "\n".join([*lines, *_wrapped(_advice(report), "")])


def as_markdown(report: Report) -> str:
    """Return the report as a Markdown page."""
    lines = [f"# {_name(report)}: {report.verdict}", "", _about(report), ""]
    lines += ["| check | outcome | |", "|---|---|---|"]
    for check in report.checks:
        about = check.reason or CHECKS[check.id].what if check.id in CHECKS else check.reason
        lines.append(f"| `{check.id}` | {check.outcome} | {about} |")
    for check in report.checks:
        if not check.evidence:
            continue
        lines += ["", f"## {check.id}: {check.outcome}", ""]
        for one in check.evidence:
            where = f"example `{one.example_id}`: " if one.example_id else ""
            lines.append(f"- {where}{one.text}")
            if one.completion:
                lines += ["", *(f"      {line}" for line in one.completion.splitlines()), ""]
        lines += ["", f"To do: {check.fix}"]
    lines += ["", "## Measured", "", _measured(report.facts), ""]
    return "\n".join(lines)


def _name(report: Report) -> str:
    return f"{report.environment} {report.version}".strip()


def _about(report: Report) -> str:
    checked_on = f"checked on {report.checked_on}, " if report.checked_on else ""
    given = f"settings {report.facts[SETTINGS]}, " if SETTINGS in report.facts else ""
    return (
        f"{checked_on}{given}policy {report.policy}, levels up to {report.level}, "
        f"{counted(report.num_examples, 'example')} of each split, Python {report.python}, "
        f"report {report.sha256[:12]}"
    )


def _level_lines(
    level: Level, checks: list[CheckResult], facts: Mapping[str, float | str], marks: Marks
) -> Iterator[str]:
    passed = [check for check in checks if check.outcome is Outcome.PASS]
    applicable = [check for check in checks if check.outcome is not Outcome.NOT_APPLICABLE]
    took = facts.get(f"{level}_s")
    time = f", {took:g} s" if isinstance(took, float) else ""
    yield f"{level}: {len(passed)} of {len(applicable)} checks passed{time}"
    if passed:
        names = " ".join(check.id.partition(".")[2] for check in passed)
        yield from _wrapped(names, f"  {marks[Outcome.PASS]} ")
    left_out: dict[str, list[str]] = {}
    for check in checks:
        if check.evidence:
            yield from _finding_lines(check, marks)
        elif check.outcome is not Outcome.PASS:
            reason = f"{check.outcome}: {check.reason}"
            left_out.setdefault(reason, []).append(check.id.partition(".")[2])
    for reason, names in left_out.items():
        yield from _wrapped(f"{' '.join(names)} ({reason})", f"  {_LEFT_OUT} ")


def _finding_lines(check: CheckResult, marks: Marks) -> Iterator[str]:
    what = CHECKS[check.id].what if check.id in CHECKS else ""
    yield from _wrapped(
        f"{check.id}: {check.outcome}. Expected: {what}",
        f"  {marks.get(check.outcome, _LEFT_OUT)} ",
    )
    for one in check.evidence:
        where = f"example {one.example_id!r}: " if one.example_id else ""
        yield from _wrapped(f"{where}{one.text}", "      ")
        if one.completion:
            said = " ".join(one.completion.split())
            shown = said if len(said) <= _MAX_SAID else f"{said[:_MAX_SAID]}..."
            yield from _wrapped(f"said: {shown}", "        ")
    yield from _wrapped(f"fix: {check.fix}", "      ")


def _measured(facts: Mapping[str, float | str]) -> str:
    found = [text.format(facts[name]) for name, text in _FACTS.items() if name in facts]
    return ", ".join(found) or "nothing"


def _advice(report: Report) -> str:
    failed, warned = report.found(Outcome.FAIL), report.found(Outcome.WARN)
    if failed:
        return f"{len(failed)} to correct before it can be published: {_ids(failed)}"
    if warned and not report.found(Outcome.INCONCLUSIVE):
        return f"it can be published; {len(warned)} to look at: {_ids(warned)}"
    open_ = report.found(Outcome.INCONCLUSIVE)
    if open_:
        return (
            f"{len(open_)} not conclusive: {_ids(open_)}. Nothing failed, but too little could be "
            "tried to publish it. Validate it again when the machine is less busy; if that does "
            "not help, make waits in its code shorter and rewards cheaper"
        )
    owed = report.found(Outcome.NOT_RUN)
    if owed and report.is_complete:
        return f"{len(owed)} could not be done: {_ids(owed)}"
    return "" if report.is_complete else "publishing requires all levels"


def _ids(checks: list[CheckResult]) -> str:
    return ", ".join(check.id for check in checks)


def _wrapped(text: str, first: str) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        text,
        width=WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )
