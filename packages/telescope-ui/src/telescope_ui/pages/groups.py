"""Rollouts beside each other: those of a group, and those of an example over steps."""

import statistics
from typing import Any

from telescope_core.base.types import Message
from telescope_core.records.rows import RolloutRow
from telescope_ui.base.answers import JsonObject, NotThereError
from telescope_ui.base.wrong_addresses import unfit
from telescope_ui.files.database import quoted
from telescope_ui.index import queries
from telescope_ui.index.one_run import OneRun
from telescope_ui.pages.evals import example_in_evals
from telescope_ui.pages.rollout import messages_json, rows_at, scalars

_MAX_ROLLOUTS = 64
_MAX_OF_EXAMPLE = 5000
_COLUMNS = (
    *("step", "group_id", "index", "attempt", "status", "reward", "num_completion_tokens"),
    "newest_version",
)


def group_page(run: OneRun, group_id: str) -> JsonObject:
    """Return the rollouts of a group; raises NotThereError if there are none."""
    run.index.refresh()
    places = queries.group_places(run.index, group_id)
    if not places:
        raise NotThereError(f"no group {group_id!r} is recorded in {run.key}")
    rows = rows_at(run, [place for place, _ in places[:_MAX_ROLLOUTS]], with_tokens=False)
    first = rows[0]
    prompt = _prompt(first)
    return {
        "page": "group",
        "run": run.brief(),
        "group_id": group_id,
        "environment": first.environment,
        "example_id": next((row.example_id for row in rows if row.example_id), ""),
        "step": max(row.step for row in rows),
        "reward": _spread([row.reward for row in rows if row.reward is not None]),
        "golden_answers": dict(first.golden_answers),
        "prompt": messages_json(prompt),
        "rollouts": [_rollout(run, row, prompt) for row in rows],
        "is_cut": len(places) > _MAX_ROLLOUTS,
    }


def _rollout(run: OneRun, row: RolloutRow, prompt: tuple[Message, ...]) -> JsonObject:
    # A rollout whose prompt is another one, as with tools that say the time, is shown whole.
    starts_alike = row.messages[: len(prompt)] == prompt
    rest = row.messages[len(prompt) :] if starts_alike else row.messages
    return {
        "row": scalars(row),
        "rewards": dict(row.rewards),
        "metrics": dict(row.metrics),
        "messages": messages_json(rest),
        "address": run.address("rollouts", row.group_id, row.index, row.attempt),
    }


def _prompt(row: RolloutRow) -> tuple[Message, ...]:
    roles = [message.role for message in row.messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    return row.messages[:end]


def _spread(rewards: list[float]) -> JsonObject:
    return {
        "mean": statistics.fmean(rewards) if rewards else None,
        "deviation": statistics.stdev(rewards) if len(rewards) > 1 else None,
        "minimum": min(rewards, default=None),
        "maximum": max(rewards, default=None),
        "count": len(rewards),
    }


def example_page(run: OneRun, environment: str, example_id: str) -> JsonObject:
    """Return the rollouts of one example over all steps and evals."""
    run.index.refresh()
    where = "WHERE environment = ? AND example_id = ?"
    sql = (
        f"SELECT {', '.join(map(quoted, _COLUMNS))} FROM {{rollouts}} {where} "
        f'ORDER BY step DESC, group_id, "index", attempt LIMIT {_MAX_OF_EXAMPLE}'
    )
    key = [environment, example_id]
    rows: list[Any] = run.index.rows(sql, key)
    by_step = (
        "SELECT step, count(reward), avg(reward), min(reward), max(reward) FROM {rollouts} "
        f"{where} AND NOT is_replaced GROUP BY step ORDER BY step"
    )
    evals = example_in_evals(run, environment, example_id)
    if not rows and not evals:
        known = [row[0] for row in run.index.rows("SELECT DISTINCT environment FROM {groups}")]
        near = " ".join(unfit({"environment": [environment]}, {"environment": known}))
        raise NotThereError(
            f"no rollout of the example {example_id!r} of {environment!r} is recorded in {run.key}"
            f"{'; ' if near else ''}{near}"
        )
    columns = queries.as_columns(_COLUMNS, rows)
    columns["address"] = [
        run.address("rollouts", *key)
        for key in zip(columns["group_id"], columns["index"], columns["attempt"], strict=True)
    ]
    names = ("step", "count", "mean", "minimum", "maximum")
    return {
        "page": "example",
        "run": run.brief(),
        "environment": environment,
        "example_id": example_id,
        "columns": columns,
        "by_step": {"columns": queries.as_columns(names, run.index.rows(by_step, key))},
        "evals": evals,
    }
