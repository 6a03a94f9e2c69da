"""`/runs/{run}`: whether it learned and its problems, reward with evals, time, and metrics."""

from telescope_ui.base.answers import JsonObject
from telescope_ui.base.parameters import OverviewParameters
from telescope_ui.files.run_files import inside
from telescope_ui.index.one_run import OneRun, settings_of
from telescope_ui.pages.happened import (
    SmallFiles,
    checkpoints,
    eval_points,
    happened,
    server_events,
)
from telescope_ui.pages.health import tiles, time_spent
from telescope_ui.pages.judged import eval_problems, judged
from telescope_ui.pages.rewards import environment_courses, evals_on_course, reward_course
from telescope_ui.pages.sections import curves_of

_INDEX_WAIT_S = 0.1
"""Wait for the index, in seconds: most of the page does not need it."""


def overview_page(run: OneRun, asked: OverviewParameters) -> JsonObject:
    """Return the overview of a run."""
    names = run.metrics.names()
    index = run.index.refresh(_INDEX_WAIT_S)
    small = SmallFiles(run.path)
    points = eval_points(run)
    found = judged(run)
    saved = checkpoints(run, small)
    return {
        "page": "overview",
        "run": run.brief(),
        "verdict": found.verdict.as_json(),
        "identity": {**_identity(run), "left_s": found.left_s},
        "metric_names": names,
        **curves_of(run, asked),
        "reward": reward_course(run, asked.drawn),
        "rewards": environment_courses(run, asked.drawn),
        "evals": evals_on_course(run, points),
        "time": time_spent(run, points),
        "tiles": tiles(run),
        "diagnoses": found.findings_as_json(run),
        "restarts": run.restarts.rows(),
        "eval_points": points,
        "self_tests": (small.read("self_tests.json") or {}).get("tests", []),
        "checkpoints": saved,
        "happened": happened(
            run, checkpoints=saved, eval_points=points, servers=server_events(run)
        ),
        "summary": small.read("summary.json"),
        "index": index,
        "problems": [
            *run.metrics.problems(),
            *run.line_problems(),
            *small.problems,
            *eval_problems(run).values(),
        ],
    }


def _identity(run: OneRun) -> JsonObject:
    info = run.info()
    known = ("started_at", "ended_at", "reason", "host", "pid", "python", "platform", "versions")
    return {
        **{name: getattr(info, name) for name in known},
        "resumes": [one.model_dump() for one in info.resumes],
        "step": run.metrics.last_step(),
        **settings_of(run),
        "report": run.address("report.html") if inside(run.path, "report.html") else None,
        "last_change_s": run.changed_s(),
        "folder": str(run.named),
    }
