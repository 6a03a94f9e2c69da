"""Report what steps lost of their batches, once for each cause, and in the run's summary.

Metrics hold every number. A person reads the terminal, where a step that trained on a quarter of
its batch looks like any other.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from telescope_core.base.terminal import foreign
from telescope_core.base.types import Rollout, RolloutStatus
from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPointState
from telescope_core.records.servers import ServerState
from telescope_train.rollouts.failures import Boundary, boundary_of
from telescope_train.rollouts.sampled import SampledBatch
from telescope_train.step.credit import NoCredit

LEAST_TRAINED = 0.5
"""Share of the groups of a batch below which a step counts as one of few groups."""
NUM_FEW_STEPS = 3
"""Consecutive steps of few groups after which the run reports them."""
_MOST_STEPS_READ = 50
"""Most steps whose rollouts are read for the most frequent error of a run."""
_MOST_ERROR_CHARACTERS = 300
REMEDIES = {
    Boundary.ENVIRONMENT: "correct the environment where the error says",
    Boundary.REWARD: "correct the reward, which must return a number for every answer",
    Boundary.CONTEXT_LENGTH: "raise max_model_len, or leave out examples with long prompts",
    Boundary.ENDPOINT: "look at servers.jsonl and logs/inference-*.jsonl of the run folder",
    Boundary.PROCESS: "look at logs/environment*.jsonl of the run folder",
    Boundary.TIMEOUT: "raise rollout_timeout_s, or bound what the environment's code does",
}
"""Advice for failures of each cause."""


class Losses:
    """Reports losses while the run goes on."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._told: set[tuple[str, Boundary, str]] = set()
        self._few: list[Mapping[str, float]] = []
        self._has_told_few = False

    def note(self, step: int, batch: SampledBatch, row: Mapping[str, float]) -> None:
        """Report new losses in the batch of `step`, whose metrics are `row`."""
        played = [rollout for group in batch.groups for rollout in group.rollouts]
        causes: dict[tuple[str, Boundary, str], list[Rollout]] = {}
        for rollout in (*played, *batch.replaced):
            if rollout.status is RolloutStatus.FAILED:
                cause = (rollout.environment, boundary_of(rollout), rollout.status_reason)
                causes.setdefault(cause, []).append(rollout)
        for cause, failed in causes.items():
            if cause not in self._told:
                self._told.add(cause)
                self._warn(failures_text(step, failed, len(played)))
        self._watch_groups(step, row)

    def _watch_groups(self, step: int, row: Mapping[str, float]) -> None:
        total, left_out = row.get("groups/total", 0.0), row.get("groups/discarded", 0.0)
        is_few = total - left_out < LEAST_TRAINED * total
        self._few = [*self._few, row][-NUM_FEW_STEPS:] if is_few else []
        if len(self._few) >= NUM_FEW_STEPS and not self._has_told_few:
            self._has_told_few = True
            self._warn(few_groups_text(step, self._few))


def failures_text(step: int, failed: Sequence[Rollout], num_rollouts: int) -> str:
    """Return the text about attempts that failed for one cause."""
    name, boundary = failed[0].environment, boundary_of(failed[0])
    error = _most_frequent(rollout.error for rollout in failed)
    advice = REMEDIES[boundary]
    if error.endswith(said := advice.partition(",")[0]):
        advice = advice.removeprefix(f"{said}, ")
    return (
        f"step {step}: {len(failed)} failed attempts at the {num_rollouts} rollouts of the batch, "
        f"of {name} ({boundary}): {error}; {advice}. Further ones are only counted, "
        f"in failures/{boundary} and in the summary"
    )


def few_groups_text(step: int, rows: Sequence[Mapping[str, float]]) -> str:
    """Return the text about consecutive steps that each trained on few groups."""
    total = sum(row["groups/total"] for row in rows)
    left_out = sum(row["groups/discarded"] for row in rows)
    reasons = {one: sum(row.get(f"groups/{one}", 0.0) for row in rows) for one in NoCredit}
    listed = ", ".join(f"{one} {count:.0f}" for one, count in reasons.items() if count)
    return (
        f"steps {step - len(rows) + 1} to {step} trained on {total - left_out:.0f} of {total:.0f} "
        f"groups ({listed or 'no reason is known'}); the others have no gradient, so a step "
        "costs the same and teaches less. Choose examples that the model solves sometimes but not "
        "always, set should_accept_fn to draw others in their place, or mend what fails"
    )


def losses_of(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the losses of a run for its summary, from the `rows` of metrics and its records."""

    def total(metric: str) -> int:
        return round(sum(row.get(metric) or 0.0 for row in rows))

    failing = [int(row["step"]) for row in rows if row.get("rollouts/failed")]
    error, remedy = "", ""
    if failing:
        known = set(folder.rollout_steps())
        steps = [step for step in failing[-_MOST_STEPS_READ:] if step in known]
        failed = [
            row
            for row in folder.rollouts(steps, with_tokens=False)
            if row.status is RolloutStatus.FAILED
        ]
        error = _most_frequent(row.error for row in failed)
    causes = {one.value: total(f"failures/{one}") for one in Boundary}
    if any(causes.values()):
        remedy = REMEDIES[Boundary(max(causes, key=lambda one: causes[one]))]
    points = folder.eval_points()
    missing = (EvalPointState.SKIPPED, EvalPointState.FAILED)
    return {
        "rollouts": total("rollouts/total"),
        "rollouts_failed": total("rollouts/failed"),
        "attempts_failed": total("rollouts/failed_attempts"),
        "causes": {name: count for name, count in causes.items() if count},
        "most_frequent_error": error,
        "remedy": remedy,
        "groups": total("groups/total"),
        "groups_left_out": total("groups/discarded"),
        "workers_replaced": _increments(rows, prefix="workers/", suffix="/restarts"),
        "servers_lost": sum(one.state is ServerState.LOST for one in folder.server_events()),
        "requests_sent_again": total("requests/sent_again"),
        "evals_without_result": sum(point.state in missing for point in points),
    }


def _most_frequent(errors: Iterable[str | None]) -> str:
    counts = Counter(" ".join((error or "").split()) for error in errors)
    return foreign(counts.most_common(1)[0][0], _MOST_ERROR_CHARACTERS) if counts else ""


def _increments(rows: Sequence[Mapping[str, Any]], *, prefix: str, suffix: str) -> int:
    """Return the total increase of counters, each of which restarts at 0 when a run is resumed."""
    before: dict[str, float] = {}
    risen = 0.0
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix) and name.endswith(suffix) and value is not None:
                last = before.get(name, 0.0)
                risen += value - last if value >= last else value
                before[name] = value
    return round(risen)
