"""`report.html` of one eval: its estimates with intervals, failures and sample rollouts."""

from html import escape
from pathlib import Path

from telescope_core.base.number_text import counted, format_metric
from telescope_core.base.solved import is_solved
from telescope_core.evals.folder import EvalFolder
from telescope_core.evals.result import (
    EvalResult,
    clusters_note,
    counts_of,
    duration_note,
    left_out_of,
    metric_lines,
    reward_parts,
    spent_in,
    success_measures,
)
from telescope_core.records.files import write_text
from telescope_core.records.rows import RolloutRow
from telescope_core.reports import html
from telescope_core.reports.rollouts_html import NUM_SAMPLES, pick, sample_list
from telescope_core.reports.svg import IntervalRow, interval_chart
from telescope_core.reports.train_report import format_duration

_KINDS = {
    "solved": "solved",
    "unsolved": "not solved",
    "failed": "failed",
    "truncated": "truncated",
}


def write_eval_report(folder: EvalFolder) -> Path | None:
    """Write `report.html` of `folder` and return its path; None when the eval has no result."""
    result = folder.result()
    if result is None:
        return None
    parts = [
        _header(result),
        _estimates(result),
        _failures(result),
        _parts(result),
        _metrics(result),
        _samples(folder, result),
        _settings(folder),
    ]
    path = folder.path / "report.html"
    write_text(path, html.page(f"{result.environment} - Telescope eval", parts))
    return path


def _header(result: EvalResult) -> str:
    settings = result.settings
    facts = [
        (str(settings.num_examples), "examples"),
        (str(settings.rollouts), "rollouts per example"),
        (f"{result.num_scored:,}", "rollouts scored"),
        (f"{result.num_failed:,}", "rollouts failed, not scored"),
        *((f"{one.number:,}", one.text) for one in counts_of(result)),
        *spent_in(result),
        *((f"{one.number:,}", one.text) for one in left_out_of(result)),
    ]
    title = f"{result.environment} {result.environment_version}"
    return (
        f"<h1>{escape(title)}</h1>"
        f'<p class="soft">Model {escape(result.model or "unnamed")}, '
        f"temperature {settings.sampling.temperature_text}, {settings.split.value} split, "
        f"{format_duration(result.duration_s)}{duration_note(result)}</p>"
        f'<p class="soft">{escape(_code(result))}</p>'
        f"{html.facts(facts)}"
    )


def _code(result: EvalResult) -> str:
    code = result.environment_record
    if code is None:
        return ""
    parts = [code.text]
    if code.wheel_sha256:
        parts.append(f"wheel sha256 {code.wheel_sha256}")
    if code.registry:
        parts.append(f"from {code.registry}")
    return ", ".join(parts)


def _estimates(result: EvalResult) -> str:
    rows = [
        IntervalRow(
            label=f"{name} ({counted(e.num_tasks, 'example')})", mean=e.mean, low=e.low, high=e.high
        )
        for name, e in success_measures(result).items()
        if e is not None
    ]
    if not rows:
        return ""
    reward = ""
    if result.reward is not None and result.reward_max > result.reward_min:
        means = [("reward", result.reward)]
        if result.num_failed and result.reward_with_failures is not None:
            means.append(("failures at minimum", result.reward_with_failures))
        span = (result.reward_min, result.reward_max)
        chart = interval_chart(
            [
                IntervalRow(label=name, mean=e.mean, low=e.low, high=e.high, color=1)
                for name, e in means
            ],
            label="Mean reward",
            x_range=span,
        )
        reward = html.figure("Mean reward", chart)
    chart = interval_chart(rows, label="Shares of solved examples with 95% intervals")
    return (
        "<h2>Results</h2>"
        '<p class="soft">95% intervals, clustered by example; pass@k is estimated from all '
        f"rollouts of an example. {clusters_note(result)}</p>"
        f'<div class="grid-2">{html.figure("Success", chart)}{reward}</div>'
    )


def _failures(result: EvalResult) -> str:
    if not result.failures:
        return ""
    rows = [(reason, str(count)) for reason, count in result.failures.items()]
    return (
        "<h2>Failures</h2>"
        '<p class="soft">These rollouts have no reward and are not part of any mean.</p>'
        f"{html.table(['reason', 'rollouts'], rows)}"
    )


def _parts(result: EvalResult) -> str:
    rows = [(name, about, format_metric(mean)) for name, about, mean in reward_parts(result)]
    if not rows:
        return ""
    return (
        "<h2>Parts of the reward</h2>"
        '<p class="soft">Unweighted means over examples, as of the reward.</p>'
        f"{html.table(['reward', '', 'mean'], rows, num_text_columns=2)}"
    )


def _metrics(result: EvalResult) -> str:
    if not result.metrics:
        return ""
    rows = [(name, about, format_metric(mean)) for name, about, mean in metric_lines(result)]
    return (
        "<h2>Metrics</h2>"
        '<p class="soft">Means over the scored rollouts that have the metric.</p>'
        f"{html.table(['metric', '', 'mean'], rows, num_text_columns=2)}"
    )


def _samples(folder: EvalFolder, result: EvalResult) -> str:
    # Read once more for those alone that are shown: all of them may not fit into the memory.
    recorded = folder.read(pictures_of=())
    picked = [(row.group_id, row.index) for row in pick(recorded.rows, NUM_SAMPLES)]
    whole = {(row.group_id, row.index): row for row in folder.rows(pictures_of=set(picked))}
    rows = [whole[key] for key in picked if key in whole]
    if not rows:
        return ""
    threshold = result.success_threshold
    shown = sample_list(rows, _KINDS, kinds_of=lambda row: _kinds(row, threshold), with_step=False)
    count = len(recorded.rows)
    text = f"{len(rows)} of {count:,} rollouts, best and worst in turn. All are in rollouts.jsonl."
    if recorded.problems:
        text += f" {len(recorded.problems)} could not be read: {recorded.problems[0]}."
    return f'<h2>Rollouts</h2><p class="soft">{escape(text)}</p>{shown}'


def _kinds(row: RolloutRow, threshold: float) -> list[str]:
    if row.reward is None:
        kinds = ["failed"]
    else:
        kinds = ["solved" if is_solved(row.reward, threshold) else "unsolved"]
    return [*kinds, "truncated"] if row.is_truncated else kinds


def _settings(folder: EvalFolder) -> str:
    rows = html.flat_settings(folder.manifest())
    return f"<h2>Settings</h2>{html.table(['setting', 'value'], rows, num_text_columns=2)}"
