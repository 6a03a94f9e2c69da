"""`report.html` of a training run: reward curves, held-out evals, run health.

It is written from the run folder alone, so it can be made during a run, at its end, or after it
was killed.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from telescope_core.diagnosis import History, diagnose
from telescope_core.records.files import write_text
from telescope_core.records.identity import RunState
from telescope_core.records.run_folder import RunFolder
from telescope_core.reports import html
from telescope_core.reports.before_after import before_and_after
from telescope_core.reports.overview import RunOverview, column, mean_of, overview_of
from telescope_core.reports.train_sections import (
    TIME_PARTS,
    environment_names,
    eval_section,
    evidence_section,
    finding_section,
    format_duration,
    reward_section,
    sample_section,
    settings_section,
    time_section,
)
from telescope_core.reports.verdict import run_verdict


def write_train_report(run: RunFolder) -> Path:
    """Write `report.html` of `run` and return its path."""
    write_text(run.report_path, html.page(f"{run.info().name} - Telescope run", train_report(run)))
    return run.report_path


def train_report(run: RunFolder) -> list[str]:
    """Return the parts of the report of `run`, one after the other, as HTML without a frame."""
    rows = run.metrics()
    overview = overview_of(run)
    changes = before_and_after(overview.evals)
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
    ended = f", ended {escape(info.ended_at)}" if info.ended_at else ""
    return (
        f'<h1>{escape(info.name)}<span class="badge {tone}">{overview.state.value}</span></h1>'
        f'<p class="soft">Started {escape(info.started_at)}{ended} on {escape(info.host)}</p>'
        f'<p class="lead">{escape(run_verdict(run).text)}</p>{reason}'
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
