"""One rollout: its conversation, tokens, model calls and stages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from telescope_core.base.errors import ConfigError
from telescope_core.base.messages import message_to_record
from telescope_core.base.types import JsonValue, Message
from telescope_core.records.parquet import read_chosen
from telescope_core.records.rows import RolloutRow
from telescope_ui.base.answers import JsonObject, NotThereError
from telescope_ui.files.damage import answering, unreadable, with_details
from telescope_ui.files.database import Database, quoted
from telescope_ui.files.run_files import Listed, step_part
from telescope_ui.index import queries
from telescope_ui.index.block_tables import block_files, block_problems, block_source
from telescope_ui.index.event_tables import all_files, events_of_steps, events_source, usable
from telescope_ui.index.one_run import OneRun
from telescope_ui.pages.rollout_tokens import UNKNOWN, Training, tokens_of, training_of

_NOT_SCALAR = ("tokens", "version_spans", "messages", "conversations", "tools")
_CALL = (
    *("call", "time_s", "duration_s", "server", "version", "queue_s", "first_token_s"),
    *("prefill_s", "decode_s", "num_prompt_tokens", "num_cached_tokens"),
    *("num_completion_tokens", "error", "step"),
)
_KEY = ("group_id", "index", "attempt")
_SIBLING = ("index", "attempt", "status", "reward")
_EVENT = ("time_s", "stage", "call", "server", "version", "reason")
_MAX_ROWS = 10_000
_STEPS_APART = 100
"""Most steps between the drawing of a rollout and its record."""
_NEAR = 8
_AROUND_S = 5.0


Calls = Mapping[tuple[str, str, int, int], Sequence[tuple[Any, ...]]]
"""Model calls by (folder of the eval, or "" in training; group, number in it, attempt)."""


def rollout_page(
    run: OneRun,
    database: Database,
    key: tuple[str, int, int],
    *,
    with_tokens: bool,
    calls: Calls | None = None,
) -> JsonObject:
    """Return the rollout `key`: group, number in it, attempt.

    `calls` holds the calls of many rollouts, for callers that read these together.
    """
    run.index.refresh()
    place = queries.place_of(run.index, *key)
    row = row_at(run, place, with_tokens=True)
    moments = answering(
        database.damage, lambda: _files_of(run, row), lambda: _moments(run, database, row, calls)
    )
    siblings = queries.group_places(run.index, row.group_id)
    extent = extent_of_moments(moments["calls"], moments["events"])
    training = training_of(run.path, row) if with_tokens else UNKNOWN
    return {
        "page": "rollout",
        "run": run.brief(),
        **row_answer(run, row, with_tokens=with_tokens, training=training),
        "reward_parts": reward_parts(row, run.info().reward_weights.get(row.environment, {})),
        "calls": {"columns": moments["calls"]},
        "events": {"columns": moments["events"]},
        "siblings": {
            "columns": {
                **{name: [one[name] for _, one in siblings] for name in _SIBLING},
                "address": [
                    run.address("rollouts", row.group_id, one["index"], one["attempt"])
                    for _, one in siblings
                ],
            }
        },
        "addresses": _addresses(run, key, siblings, extent),
        "problems": [*moments["problems"], *training.problems],
    }


def _moments(run: OneRun, database: Database, row: RolloutRow, known: Calls | None) -> JsonObject:
    """Return the calls and the stages of a rollout, and the unreadable files."""
    steps = (row.step - _STEPS_APART, row.step + _STEPS_APART)
    # Rows are in order of time, so that most of them are passed over by their steps.
    calls = (
        calls_of(run, database, row, within=("step BETWEEN ? AND ?", steps))
        if known is None
        else calls_among(known, row)
    )
    events, problems = _events(run, database, row, drawn=calls["step"])
    problems = [*block_problems(database.damage, run.path, "calls"), *problems]
    return {"calls": calls, "events": events, "problems": problems}


def _files_of(run: OneRun, row: RolloutRow) -> list[Listed]:
    near = events_of_steps(run.path, _steps_around(row.step))
    return [*block_files(run.path, "calls"), *all_files(near.values())]


def _steps_around(step: int) -> list[int]:
    """Return the steps for which a rollout of `step` may have been drawn, nearest first."""
    around = range(max(0, step - _STEPS_APART), step + _STEPS_APART + 1)
    return sorted(around, key=lambda one: abs(one - step))


def row_answer(
    run: OneRun, row: RolloutRow, *, with_tokens: bool, training: Training = UNKNOWN
) -> JsonObject:
    """Return the record of a rollout; its tokens may be a hundred times as much as the rest."""
    return {
        "row": scalars(row),
        "messages": messages_json(row.messages),
        "conversations": [messages_json(one) for one in row.conversations],
        "tools": list(row.tools),
        "tokens": tokens_of(run.path, row, training, with_chains=with_tokens),
    }


def reward_parts(row: RolloutRow, weights: Mapping[str, float]) -> list[JsonObject]:
    """Return the parts of the reward's weighted sum; empty if not known."""
    if row.reward is None or not weights.keys() >= row.rewards.keys():
        return []
    total = math.fsum(weights[name] * value for name, value in row.rewards.items())
    if not math.isclose(total, row.reward, rel_tol=1e-6, abs_tol=1e-6):
        return []
    return [{"name": n, "weight": weights[n], "value": value} for n, value in row.rewards.items()]


def row_at(run: OneRun, place: queries.Place, *, with_tokens: bool) -> RolloutRow:
    """Return the row at `place`; raises NotThereError if its file has gone."""
    (row,) = rows_at(run, [place], with_tokens=with_tokens)
    return row


def rows_at(run: OneRun, places: Sequence[queries.Place], *, with_tokens: bool) -> list[RolloutRow]:
    """Return the rows at `places`, each file read once; raises NotThereError if one has gone."""
    found: dict[queries.Place, RolloutRow] = {}
    for folder, step in dict.fromkeys((place.folder, place.step) for place in places):
        own = [place for place in places if (place.folder, place.step) == (folder, step)]
        name = f"step-{step:06d}.parquet"
        rows: list[RolloutRow] | None = None
        try:
            part = step_part(run.path, folder, step)
            if part is not None:
                name = part.path.name
                rows = read_chosen(part, [place.row for place in own], with_tokens=with_tokens)
        except ConfigError as error:
            why = f"{folder}/{name} cannot be read: {unreadable(name)}"
            why = f"{why}; the other files of the run can"
            raise ConfigError(with_details(why, error)) from None
        if rows is None:
            raise NotThereError(
                f"{folder}/{name} is gone: the run went back to an earlier step, or was deleted; "
                "load the page of rollouts again"
            )
        found |= zip(own, rows, strict=True)
    return [found[place] for place in places]


def scalars(row: RolloutRow) -> JsonObject:
    """Return every field of a row except its text and tokens."""
    names = [name for name in RolloutRow.__dataclass_fields__ if name not in _NOT_SCALAR]
    fields = {name: getattr(row, name) for name in names}
    return {**fields, "info": [asdict(one) for one in row.info]}


def messages_json(messages: Sequence[Message]) -> list[JsonObject]:
    """Return messages with every field; the text is unchanged, including markup."""
    fields: JsonObject = {"role": "", "content": "", "tool_call_id": "", "refusal": ""}
    found: list[JsonObject] = []
    for message in messages:
        one = dict(message_to_record(message))
        reasoning = one.pop("reasoning_content", "") or ""
        calls: JsonValue = one.pop("tool_calls", None) or []
        found.append({**fields, "images": [], **one, "reasoning": reasoning, "tool_calls": calls})
    return found


def calls_of(
    run: OneRun, database: Database, row: RolloutRow, *, within: tuple[str, Sequence[object]]
) -> JsonObject:
    """Return the model calls of a rollout; `within`: a condition in SQL and its values."""
    names = (*_KEY, *_CALL, "environment")
    source = block_source(database.damage, run.path, "calls", names)
    if source is None:
        return queries.as_columns(_CALL, [])
    sql = (
        f'SELECT {", ".join(_CALL)} FROM {source.sql} WHERE group_id = ? AND "index" = ? '
        f"AND attempt = ? AND {within[0]} ORDER BY call, time_s LIMIT {_MAX_ROWS}"
    )
    values = [*source.values, row.group_id, row.index, row.attempt, *within[1]]
    return queries.as_columns(_CALL, database.rows(sql, values))


def calls_of_groups(run: OneRun, database: Database, groups: Sequence[str]) -> Calls:
    """Return the model calls of all rollouts of `groups`, of training and of evals."""
    names = ("environment", *_KEY, *_CALL)
    source = block_source(database.damage, run.path, "calls", names)
    if source is None:
        return {}
    sql = (
        f"SELECT {', '.join(map(quoted, names))} FROM {source.sql} "
        "WHERE group_id IN (SELECT unnest(?)) ORDER BY call, time_s"
    )
    found: dict[tuple[str, str, int, int], list[tuple[Any, ...]]] = {}
    for environment, group_id, index, attempt, *call in database.rows(
        sql, (*source.values, list(groups))
    ):
        folder = environment if call[_CALL.index("step")] is None else ""
        found.setdefault((folder, group_id, index, attempt), []).append(tuple(call))
    return found


def calls_among(known: Calls, row: RolloutRow, folder: str = "") -> JsonObject:
    """Return the model calls of a rollout among those of many."""
    own = known.get((folder, row.group_id, row.index, row.attempt), ())
    at = _CALL.index("step")
    near = [one for one in own if folder or abs(one[at] - row.step) <= _STEPS_APART]
    return queries.as_columns(_CALL, near[:_MAX_ROWS])


def _events(
    run: OneRun, database: Database, row: RolloutRow, *, drawn: Sequence[int | None]
) -> tuple[JsonObject, list[str]]:
    """Return the stages of a rollout, and the unreadable files.

    They are stored under the step that the rollout was drawn for, which its calls tell. Without
    recorded calls, the step of its training is tried, and then the steps around that, the nearest
    first.
    """
    likely = dict.fromkeys([*(step for step in drawn if step is not None), row.step])
    others = [step for step in _steps_around(row.step) if step not in likely]
    problems: list[str] = []
    for steps in (list(likely), others[:_NEAR], others[_NEAR:]):
        found = usable(database.damage, events_of_steps(run.path, steps).values())
        problems += found.problems
        source = events_source(found.files, (*_EVENT, *_KEY))
        if source is None:
            continue
        sql = (
            f'SELECT {", ".join(_EVENT)} FROM {source.sql} WHERE group_id = ? AND "index" = ? '
            f"AND attempt = ? ORDER BY time_s LIMIT {_MAX_ROWS}"
        )
        values = [*source.values, row.group_id, row.index, row.attempt]
        rows = database.rows(sql, values)
        if rows:
            return queries.as_columns(_EVENT, rows), problems
    return queries.as_columns(_EVENT, []), problems


def extent_of_moments(calls: JsonObject, events: JsonObject) -> tuple[float, float] | None:
    """Return the start of the first and the end of the last of some calls and stages."""
    times: list[float] = [time_s for time_s in calls["time_s"] if time_s is not None]
    times += [
        time_s + (duration_s or 0.0)
        for time_s, duration_s in zip(calls["time_s"], calls["duration_s"], strict=True)
        if time_s is not None
    ]
    times += [time_s for time_s in events["time_s"] if time_s is not None]
    return (min(times), max(times)) if times else None


def _addresses(
    run: OneRun,
    key: tuple[str, int, int],
    siblings: Sequence[tuple[queries.Place, JsonObject]],
    extent: tuple[float, float] | None,
) -> JsonObject:
    keys = [(key[0], about["index"], about["attempt"]) for _, about in siblings]
    at = keys.index(key)
    sql = (
        'SELECT environment, example_id FROM {rollouts} WHERE group_id = ? AND "index" = ? '
        "AND attempt = ? LIMIT 1"
    )
    environment, example_id = run.index.rows(sql, key)[0]
    return {
        "group": run.address("groups", key[0]),
        "example": run.address("examples", environment, example_id) if example_id else None,
        "timeline": timeline_around(run, extent),
        "previous": run.address("rollouts", *keys[at - 1]) if at > 0 else None,
        "next": run.address("rollouts", *keys[at + 1]) if at + 1 < len(keys) else None,
    }


def timeline_around(run: OneRun, extent: tuple[float, float] | None) -> str | None:
    """Return the address of the timeline around `extent`; None without one."""
    if extent is None:
        return None
    margin_s = _AROUND_S + 0.1 * (extent[1] - extent[0])
    around = f"?from={extent[0] - margin_s:.3f}&to={extent[1] + margin_s:.3f}"
    return run.address("timeline") + around


def key_of(group_id: str, index: str, attempt: str) -> tuple[str, int, int]:
    """Return the key of a rollout from the parts of an address; raises NotThereError."""
    if not (index.isdecimal() and attempt.isdecimal() and len(index) < 10 and len(attempt) < 10):
        raise NotThereError(
            f"expected GROUP/INDEX/ATTEMPT with two numbers, got {index!r} and {attempt!r}"
        )
    return group_id, int(index), int(attempt)
