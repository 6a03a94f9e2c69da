"""Queries to the index: pages of rollouts, histograms, and the place of a rollout."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from telescope_ui.base.answers import JsonObject, NotThereError
from telescope_ui.files.database import quoted
from telescope_ui.index.columns import Column
from telescope_ui.index.filters import Condition
from telescope_ui.index.run_index import RunIndex

_ORDER = 'step DESC, environment, group_id, "index", attempt'
MAX_VALUES = 100
"""Most values of a text column in a histogram, or to choose from."""
_CHOICES = ("environment", "status", "stop_reason", "status_reason")
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class Place(NamedTuple):
    """Place of a rollout in the run folder."""

    step: int
    is_replaced: bool
    row: int

    @property
    def folder(self) -> str:
        """Name of the folder with its file."""
        return "attempts" if self.is_replaced else "rollouts"


def count(index: RunIndex, condition: Condition) -> int:
    """Return the number of rollouts that meet `condition`."""
    sql = f"SELECT count(*) FROM {{rollouts}} WHERE {condition.sql}"
    return index.rows(sql, condition.values)[0][0]


def page(
    index: RunIndex, condition: Condition, *, sort: str, limit: int, offset: int
) -> JsonObject:
    """Return the columns of one page of rollouts; `sort` is a column, descending after a `-`."""
    column = index.column(sort.removeprefix("-"))
    direction = "DESC" if sort.startswith("-") else "ASC"
    names = list(index.columns())
    # The rows of the page are found by a few columns, and only then are all columns read.
    sql = (
        f"SELECT {', '.join(map(quoted, names))} FROM {{rollouts}} WHERE rowid IN (SELECT rowid "
        f"FROM {{rollouts}} WHERE {condition.sql} ORDER BY {quoted(column.name)} {direction} "
        f"NULLS LAST, {_ORDER} LIMIT {int(limit)} OFFSET {int(offset)}) "
        f"ORDER BY {quoted(column.name)} {direction} NULLS LAST, {_ORDER}"
    )
    return as_columns(names, index.rows(sql, condition.values))


def spread(index: RunIndex, num: int) -> JsonObject:
    """Return the columns of about `num` rollouts of all steps and environments, newest step first.

    Each environment in each step gives the best, the worst, the first, the last, the second best
    and so on, as many as there is room for; in every other step the worst comes before the best.
    If there are more steps than room, some are left out evenly.
    """
    newest = "FROM {rollouts} WHERE NOT is_replaced"
    steps = sorted(index.rows(f"SELECT step, count(DISTINCT environment) {newest} GROUP BY 1"))
    pairs = sum(number for _, number in steps)
    names = list(index.columns())
    if not pairs or not num:
        return as_columns(names, [])
    every = -(-pairs // num)
    # The last step is always there: it is what people look at first.
    chosen = [step for step, _ in steps[::-1][::every]]
    order = 'environment, group_id, "index", attempt'
    place = "row_number() OVER (PARTITION BY step, environment ORDER BY"
    sql = (
        f"WITH placed AS (SELECT rowid AS id, step, {order}, "
        f"{place} reward DESC NULLS LAST, {order}) AS best, "
        f"{place} reward NULLS LAST, {order}) AS worst, "
        f"{place} {order}) AS first, "
        f'{place} environment DESC, group_id DESC, "index" DESC, attempt DESC) AS last '
        f"{newest} AND step IN (SELECT unnest(?))), "
        "odd AS (SELECT *, list_position(?, step) % 2 AS is_odd FROM placed), "
        f"turns AS (SELECT id, {place} least(4 * best + 1 - is_odd, 4 * worst + is_odd, "
        f"4 * first + 2, 4 * last + 3), {order}) AS turn FROM odd) "
        f"SELECT {', '.join(map(quoted, names))} FROM {{rollouts}} WHERE rowid IN "
        f"(SELECT id FROM turns WHERE turn <= ?) ORDER BY {_ORDER}"
    )
    return as_columns(names, index.rows(sql, [chosen, chosen, max(1, num // pairs)]))


def as_columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> JsonObject:
    """Return rows as one list for each column."""
    lists = zip(*rows, strict=True) if rows else [()] * len(names)
    return {name: list(values) for name, values in zip(names, lists, strict=True)}


def choices(index: RunIndex) -> JsonObject:
    """Return the values of text columns with few values, most frequent first."""
    found: JsonObject = {}
    for name in _CHOICES:
        sql = (
            f"SELECT {quoted(name)}, count(*) AS n FROM {{rollouts}} WHERE {quoted(name)} != '' "
            f"GROUP BY 1 ORDER BY n DESC, 1 LIMIT {MAX_VALUES}"
        )
        found[name] = [row[0] for row in index.rows(sql)]
    return found


def steps(index: RunIndex) -> JsonObject:
    """Return the first and the last step that have rollouts; null without any."""
    first, last = index.rows("SELECT min(step), max(step) FROM {rollouts}")[0]
    return {"first": first, "last": last}


def distribution(index: RunIndex, condition: Condition, column: Column, *, bins: int) -> JsonObject:
    """Return the histogram of a column over the rollouts that meet `condition`."""
    if column.kind == "number":
        return _histogram(index, condition, column, bins=bins)
    name = quoted(column.name)
    sql = (
        f"SELECT CAST({name} AS VARCHAR) AS v, count(*) AS n FROM {{rollouts}} "
        f"WHERE {condition.sql} GROUP BY 1 ORDER BY n DESC, v"
    )
    rows = index.rows(sql, condition.values)
    known = [row for row in rows if row[0] is not None]
    return {
        **{"name": column.name, "kind": "text", "total": sum(row[1] for row in rows)},
        "missing": sum(row[1] for row in rows if row[0] is None),
        **{"mean": None, "minimum": None, "maximum": None, "quantiles": None},
        "bins": as_columns(["value", "count"], known[:MAX_VALUES]),
    }


def _histogram(index: RunIndex, condition: Condition, column: Column, *, bins: int) -> JsonObject:
    name = f"CAST({quoted(column.name)} AS DOUBLE)"
    finite = f"CASE WHEN isfinite({name}) THEN {name} END"
    source = f"(SELECT {finite} AS v FROM {{rollouts}} WHERE {condition.sql})"
    sql = (
        "SELECT count(*), count(v), avg(v), min(v), max(v), "
        f"quantile_cont(v, {list(_QUANTILES)}) FROM {source}"
    )
    total, known, mean, low, high, quantiles = index.rows(sql, condition.values)[0]
    bars: list[tuple[int, float | None, float | None]] = [(0, None, None)] * bins
    width = 0.0
    if known:
        width = (high - low) / bins if high > low else 0.0
        place = f"least(CAST(floor((v - ?) / ?) AS INTEGER), {bins - 1})" if width else "0"
        sql = (
            f"SELECT {place} AS b, count(*), min(v), max(v) FROM {source} WHERE v IS NOT NULL "
            "GROUP BY b"
        )
        values = (*((low, width) if width else ()), *condition.values)
        for at, number, least, most in index.rows(sql, values):
            bars[at] = number, least, most
    if not width:
        bars = bars[:1] if known else []
    edges = [low + width * at for at in range(len(bars))]
    return {
        **{"name": column.name, "kind": "number", "total": total, "missing": total - known},
        **{"mean": mean, "minimum": low, "maximum": high},
        "quantiles": dict(zip(map(str, _QUANTILES), quantiles, strict=True)) if known else None,
        "bins": {
            "low": edges,
            "high": [*edges[1:], high] if edges else [],
            "count": [bar[0] for bar in bars],
            "least": [bar[1] for bar in bars],
            "most": [bar[2] for bar in bars],
        },
    }


def place_of(index: RunIndex, group_id: str, number: int, attempt: int) -> Place:
    """Return the place of a rollout; raises NotThereError."""
    sql = (
        'SELECT step, is_replaced, row FROM {rollouts} WHERE group_id = ? AND "index" = ? '
        "AND attempt = ? ORDER BY is_replaced, step DESC LIMIT 1"
    )
    rows = index.rows(sql, [group_id, number, attempt])
    if not rows:
        raise NotThereError(
            f"no rollout {number}, attempt {attempt}, of a group {group_id!r} is recorded; "
            "the page of rollouts has those that are"
        )
    return Place(*rows[0])


def group_places(index: RunIndex, group_id: str) -> list[tuple[Place, JsonObject]]:
    """Return the place and some columns of every attempt of a group, by number and attempt."""
    names = ("index", "attempt", "status", "reward")
    sql = (
        f"SELECT step, is_replaced, row, {', '.join(map(quoted, names))} FROM {{rollouts}} "
        'WHERE group_id = ? ORDER BY "index", attempt, step'
    )
    rows = index.rows(sql, [group_id])
    return [(Place(*row[:3]), dict(zip(names, row[3:], strict=True))) for row in rows]
