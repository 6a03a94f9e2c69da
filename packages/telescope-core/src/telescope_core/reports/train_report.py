"""`report.html` of a training run: reward curves, held-out evals, run health.

It is written from the run folder alone, so it can be made during a run, at its end, or after it
was killed.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from telescope_core.base.number_text import counted, style_of
from telescope_core.diagnosis import Finding, History, diagnose
from telescope_core.evals.stats import Estimate
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.files import write_text
from telescope_core.records.identity import RunState
from telescope_core.records.rows import RolloutRow
from telescope_core.records.run_folder import RunFolder
from telescope_core.reports import html
from telescope_core.reports.before_after import (
    BeforeAfter,
    Moment,
    before_and_after,
    trained_evals,
)
from telescope_core.reports.differences import sentence
from telescope_core.reports.overview import (
    RunOverview,
    column,
    edge_means,
    mean_of,
    overview_of,
    reward_curve,
)
from telescope_core.reports.rollouts_html import run_samples, sample_list
from telescope_core.reports.sparkline import moving_average
from telescope_core.reports.svg import (
    IntervalRow,
    Series,
    interval_chart,
    line_chart,
    stacked_bar,
)
from telescope_core.reports.verdict import run_verdict

TIME_PARTS = (
    ("time/generate_s", "sampling"),
    ("time/train_s", "training"),
    ("time/sync_s", "weight sync to servers"),
    ("time/wait_s", "everything else"),
)
"""Metrics whose sum is the time of a step, with their labels."""
_MOST_POINTS = 12
"""Most evals of an environment that are drawn between the first and the last."""
_KINDS = {
    "kept": "kept",
    "discarded": "discarded",
    "failed": "failed",
    "cancelled": "canceled",
    "truncated": "truncated",
}
"""Kinds of rollouts in the filter, beside their step."""
_CURVES = (
    ("entropy", "Entropy", "nats per token"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("completion_len/mean", "Completion length", "tokens, mean"),
    ("mismatch/max", "Log-prob mismatch", "sampler vs. trainer, nats, maximum of the step"),
    ("staleness/mean", "Staleness", "weight versions, mean"),
    ("loss/total", "Loss", ""),
)


def finding_section(findings: Sequence[Finding]) -> str:
    """Return what is wrong with the run by the rules of `telescope doctor`."""
    if not findings:
        return ""
    rows = [
        (
            f"{one.rule} in {one.environment}" if one.environment else one.rule,
            f"{one.first_step} to {one.last_step}" if one.is_over else f"since {one.first_step}",
            one.cause,
            one.remedy,
        )
        for one in findings
    ]
    head = ["finding", "steps", "what is seen", "what to do"]
    return f"<h2>What is wrong</h2>{html.table(head, rows, num_text_columns=len(head))}"


def environment_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the environments that have a reward column, in order of appearance."""
    pattern = re.compile(r"reward/(.+)/mean")
    found = (pattern.fullmatch(key) for row in rows for key in row)
    return list(dict.fromkeys(match[1] for match in found if match))


def reward_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the reward curve of each environment."""
    names = environment_names(rows)
    figures: list[str] = []
    for color, name in enumerate(names):
        series = reward_series(rows, name, color)
        chart = line_chart([series], label=f"Training reward of {name}", x_label="step")
        figures.append(html.figure(name, chart, note=_edge_note(reward_curve(rows, name))))
    if not figures:
        return ""
    return (
        "<h2>Training reward</h2>"
        '<p class="soft">Faint: each step. Bold: moving average over '
        f"{counted(_window(len(rows)), 'step')}.</p>"
        f'<div class="grid-2">{"".join(figures)}</div>'
    )


def reward_series(rows: Sequence[Mapping[str, Any]], name: str, color: int) -> Series:
    """Return the smoothed reward of one environment, with the raw values drawn behind it."""
    values = reward_curve(rows, name)
    return Series(
        name=name,
        xs=_steps(rows),
        values=moving_average(values, window=_window(len(rows))),
        faint_values=values,
        color=color,
    )


def _window(num_rows: int) -> int:
    return max(1, min(20, num_rows // 10))


def _edge_note(values: Sequence[float | None]) -> str:
    first, last, _ = edge_means(values)
    if first is None or last is None:
        return ""
    style = style_of(first, last)
    return f"first steps {first:{style}}, last steps {last:{style}}"


def eval_section(
    changes: Sequence[BeforeAfter], environments: Sequence[str], points: Sequence[EvalPoint] = ()
) -> str:
    """Return the estimates with intervals, and those of `points` that are not sound."""
    if not changes:
        return f"<h2>Evals</h2>{_unsound(points)}" if _unsound(points) else ""
    trained = [one.name for one in changes if not one.is_held_out]
    figures: list[str] = []
    for index, change in enumerate(changes):
        # An environment keeps the color of its reward curve.
        known = change.name in environments
        color = environments.index(change.name) if known else index
        shown = _thinned(change.estimates)
        rows = [
            IntervalRow(
                label=moment.label,
                mean=estimate.mean,
                low=estimate.low,
                high=estimate.high,
                color=5 if moment is change.moments[0] and len(change.moments) > 1 else color,
            )
            for moment, estimate in shown
        ]
        names = " and ".join(dict.fromkeys(one.label for one, _ in (*shown[:1], *shown[-1:])))
        chart = interval_chart(rows, label=f"{change.measure} of {change.name}, {names}")
        note = "" if change.comparison is None else f"{sentence(change.comparison.main)}."
        figures.append(html.figure(change.name, chart, note=note))
    title, of_what = f"Held-out {changes[0].measure}", "On examples that are never trained on"
    if trained:
        title = f"{changes[0].measure} of evals"
        of_what = f"Not held out: the run trains on what evals play of {', '.join(trained)}"
    return (
        f"<h2>{escape(title)}</h2>"
        f'<p class="soft">{escape(of_what)}; '
        "95% intervals, clustered by example. The change is judged by the difference of each "
        "example, not by these intervals.</p>"
        f'<div class="grid-2">{"".join(figures)}</div>{_unsound(points)}'
    )


def _thinned(points: list[tuple[Moment, Estimate]]) -> list[tuple[Moment, Estimate]]:
    """Return the first and the last point, and at most `_MOST_POINTS` evenly spaced between."""
    between = points[1:-1]
    every = -(-len(between) // _MOST_POINTS) or 1
    return [*points[:1], *between[::-1][::every][::-1], *points[1:][-1:]]


def _unsound(points: Sequence[EvalPoint]) -> str:
    texts = [escape(point.text) for point in points if point.state is not EvalPointState.DONE]
    if not texts:
        return ""
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f'<p class="soft">Evals that have no result of a single version:</p><ul>{items}</ul>'


def time_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the division of the steps' time."""
    seconds = [(text, sum(v or 0.0 for v in column(rows, key))) for key, text in TIME_PARTS]
    total = sum(size for _, size in seconds)
    if not total:
        return ""
    legend = [
        (f"{text} {size / total:.0%} ({format_duration(size)})", color)
        for color, (text, size) in enumerate(seconds)
    ]
    bar = stacked_bar(seconds, label="Where the time went: " + ", ".join(t for t, _ in legend))
    return f"<h2>Where the time went</h2><figure>{bar}{html.keys(legend)}</figure>"


def evidence_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the numbers that show whether the run was healthy."""
    entries: list[tuple[str, str]] = []
    for key, name, text in (
        ("mismatch/max", "largest log-prob mismatch, nats", "{:.2g}"),
        ("staleness/max", "largest staleness, versions", "{:.0f}"),
    ):
        values = [value for value in column(rows, key) if value is not None]
        if values:
            entries.append((text.format(max(values)), name))
    for key, name in (("mismatch/k3", "mean mismatch, k3"), ("staleness/mean", "mean staleness")):
        mean = mean_of(column(rows, key))
        if mean is not None:
            entries.append((f"{mean:.2g}", name))
    for key, name in (("pack/fill", "mean packing fill"), ("truncated/fraction", "truncated")):
        mean = mean_of(column(rows, key))
        if mean is not None:
            entries.append((f"{mean:.1%}", name))
    figures = [
        html.figure(
            title,
            line_chart(
                [Series(name=title, xs=_steps(rows), values=column(rows, key))],
                label=f"{title} over steps",
                x_label="step",
                size=(330, 190),
            ),
            note=note,
        )
        for key, title, note in _CURVES
        if sum(value is not None for value in column(rows, key)) > 1
    ]
    if not entries and not figures:
        return ""
    charts = f'<div class="grid-3">{"".join(figures)}</div>'
    return f"<h2>Health of the run</h2>{html.facts(entries)}{charts}"


def sample_section(run: RunFolder) -> str:
    """Return sample rollouts, early and late, good and bad."""
    rows = run_samples(run)
    if not rows:
        return ""
    first, last = min(row.step for row in rows), max(row.step for row in rows)
    kinds = {f"step-{step}": f"step {step}" for step in sorted({first, last})} | _KINDS
    text = (
        f"{len(rows)} rollouts of steps {first} and {last}, best and worst in turn. All are in the "
        "files of rollouts/."
    )
    shown = sample_list(rows, kinds, kinds_of=_kinds)
    return f'<h2>Sample rollouts</h2><p class="soft">{escape(text)}</p>{shown}'


def _kinds(row: RolloutRow) -> list[str]:
    kinds = [f"step-{row.step}", row.status.value]
    return [*kinds, "truncated"] if row.is_truncated else kinds


def settings_section(run: RunFolder, overview: RunOverview) -> str:
    """Return the settings, the environments and the package versions."""
    settings = html.table(
        ["setting", "value"], html.flat_settings(run.config()), num_text_columns=2
    )
    environments = [
        (name, code.id, code.version, code.place.value, code.wheel_sha256, code.digest)
        for name, code in overview.info.environments.items()
    ]
    head = ["environment", "id", "version", "place", "sha256 of its wheel", "digest"]
    versions = [("python", overview.info.python), *sorted(overview.info.versions.items())]
    return (
        f"<h2>Settings</h2><details><summary>Every setting of the run</summary>{settings}</details>"
        "<details><summary>Environments</summary>"
        f"{html.table(head, environments, num_text_columns=len(head))}</details>"
        "<details><summary>Versions</summary>"
        f"{html.table(['package', 'version'], versions, num_text_columns=2)}</details>"
    )


def _steps(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(row.get("step", index + 1)) for index, row in enumerate(rows)]


def format_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours for people to read."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def write_train_report(run: RunFolder) -> Path:
    """Write `report.html` of `run` and return its path."""
    write_text(run.report_path, html.page(f"{run.info().name} - Telescope run", train_report(run)))
    return run.report_path


def train_report(run: RunFolder) -> list[str]:
    """Return the parts of the report of `run`, one after the other, as HTML without a frame."""
    rows = run.metrics()
    overview = overview_of(run)
    trained = trained_evals(run.config(), overview.info.environments)
    changes = before_and_after(overview.evals, trained)
    return [
        _header(run, overview, rows),
        finding_section(diagnose(History.of_rows(rows))),
        reward_section(rows),
        eval_section(changes, environment_names(rows), run.eval_points()),
        time_section(rows),
        evidence_section(rows),
        sample_section(run),
        settings_section(run, overview),
    ]


def _header(run: RunFolder, overview: RunOverview, rows: Sequence[Mapping[str, Any]]) -> str:
    info = overview.info
    is_well = overview.state in (RunState.FINISHED, RunState.RUNNING)
    tone = "good" if is_well else "bad"
    reason = f'<p class="bad">{escape(info.reason)}</p>' if info.reason else ""
    problems = "".join(f'<p class="bad">{escape(one)}.</p>' for one in overview.problems)
    ended = f", ended {escape(info.ended_at)}" if info.ended_at else ""
    return (
        f'<h1>{escape(info.name)}<span class="badge {tone}">{overview.state.value}</span></h1>'
        f'<p class="soft">Started {escape(info.started_at)}{ended} on {escape(info.host)}</p>'
        f'<p class="lead">{escape(run_verdict(run).text)}</p>{reason}{problems}'
        f"{html.facts(_facts(overview, rows))}"
    )


def _facts(overview: RunOverview, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    counts = list(overview.counts.values())
    seconds = sum(value or 0.0 for key, _ in TIME_PARTS for value in column(rows, key))
    entries = [(str(overview.num_steps), "steps")]
    if seconds:
        entries.append((format_duration(seconds), "in training steps"))
    entries.append((f"{sum(count.get('kept', 0) for count in counts):,}", "rollouts trained on"))
    entries.append((f"{sum(count.get('failed', 0) for count in counts):,}", "rollouts failed"))
    for key, name in (
        ("tokens/rollout_per_s", "tokens sampled per second"),
        ("tokens/train_per_s", "tokens trained per second"),
    ):
        mean = mean_of(column(rows, key))
        if mean is not None:
            entries.append((f"{mean:,.0f}", name))
    return entries
