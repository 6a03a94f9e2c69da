"""`RunOverview`: a summary of a run folder in any state. Data only, without layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from telescope_core.evals.folder import read_results
from telescope_core.evals.result import EvalResult
from telescope_core.records.files import damaged, lines_left_out, read_json
from telescope_core.records.identity import RunInfo, RunState
from telescope_core.records.run_folder import RunFolder

EDGE_STEPS = 20
"""Most steps that are averaged at the start and at the end of a run."""


class Edges(NamedTuple):
    """Means over the first and the last steps of a run, `num_steps` each, which never overlap."""

    first: float | None
    """Mean over the first steps; None = there are too few steps."""
    last: float | None
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """A summary of one run."""

    path: Path
    info: RunInfo
    state: RunState
    num_steps: int
    rewards: tuple[float | None, ...]
    """Mean reward of each step over all sampled rollouts; see `reward_curve`."""
    edges: Edges
    """Mean reward at the start and at the end."""
    counts: Mapping[str, Mapping[str, int]]
    """Environment -> status -> number of rollouts."""
    evals: Mapping[str, EvalResult]
    """Name of the eval's folder -> result."""
    unfinished_evals: tuple[str, ...]
    """Names of the folders of evals without a result."""
    problems: tuple[str, ...]
    """Sentences about what is left out because it is damaged."""


def problems_of(run: RunFolder, unreadable_evals: Mapping[str, str]) -> list[str]:
    """Return sentences about what is left out because it is damaged.

    `unreadable_evals`: folder of an eval -> why its result cannot be read.
    """
    lines = [lines_left_out(name, count) for name, count in run.num_damaged_lines().items()]
    config = run.path / "config.json"
    if config.exists() and read_json(config) is None:
        lines.append(damaged(config.name))
    return [*lines, *unreadable_evals.values()]


def overview_of(run: RunFolder) -> RunOverview:
    """Read `run`, even if it was killed or is still running."""
    rows = run.metrics()
    rewards = reward_curve(rows)
    counts: dict[str, dict[str, int]] = {}
    for (environment, status), number in sorted(run.count_rollouts().items()):
        counts.setdefault(environment, {})[status.value] = number
    folders = run.eval_folders()
    results, unreadable = read_results(folders)
    info = run.info()
    return RunOverview(
        path=run.path,
        info=info,
        state=info.observed_state,
        num_steps=len(rows),
        rewards=tuple(rewards),
        edges=edge_means(rewards),
        counts=counts,
        evals=results,
        unfinished_evals=tuple(
            one.name for one in folders if one.name not in results and one.name not in unreadable
        ),
        problems=tuple(problems_of(run, unreadable)),
    )


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return one metric of every row; None for a row without it."""
    values = [row.get(name) for row in rows]
    return [float(value) if isinstance(value, int | float) else None for value in values]


def reward_curve(
    rows: Sequence[Mapping[str, Any]], environment: str | None = None
) -> list[float | None]:
    """Return the mean reward of each step, including the groups that were rejected.

    The mean over accepted groups alone would stay near the middle, however much the policy learns.
    """
    name = "mean" if environment is None else f"{environment}/mean"
    sampled, accepted = column(rows, f"task_reward/{name}"), column(rows, f"reward/{name}")
    return [kept if every is None else every for every, kept in zip(sampled, accepted, strict=True)]


def edge_means(values: Sequence[float | None]) -> Edges:
    """Return the means of the first and of the last steps.

    A tenth of the steps each, because a longer window swallows the change that it is to show.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return Edges(None, None, 0)
    count = max(1, min(EDGE_STEPS, len(known) // 10))
    return Edges(sum(known[:count]) / count, sum(known[-count:]) / count, count)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None when all are None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
