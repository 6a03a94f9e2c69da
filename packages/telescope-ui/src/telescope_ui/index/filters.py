"""Filters of rollouts as conditions in SQL: values are bound, columns are those of the index."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from telescope_ui.base.answers import ParameterError
from telescope_ui.files.database import quoted
from telescope_ui.index.columns import Column

_CONDITION = re.compile(r"(?s)(.+?)(<=|>=|!=|<|>|=)(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Requested properties of rollouts; empty or None = any."""

    step_from: int | None = None
    step_to: int | None = None
    equal: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Text column -> permitted values."""
    reward_from: float | None = None
    reward_to: float | None = None
    truncated: bool | None = None
    version: int | None = None
    attempts: str = "last"
    """`last`, `replaced` or `all`."""
    where: Sequence[str] = ()
    """`COLUMN>=NUMBER`."""
    tags: Sequence[str] = ()
    """`NAME=VALUE` or `NAME`."""
    group: str = ""
    """`mixed` or `equal`; empty for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition in SQL and its bound values."""

    sql: str
    values: tuple[object, ...]


def condition_of(filters: Filters, columns: Mapping[str, Column]) -> Condition:
    """Return the condition for rows of `{rollouts}`.

    Raises ParameterError for a column that is not there or a condition that cannot be read.
    """
    found: list[tuple[str, tuple[object, ...]]] = []
    for sql, value in (
        ("step >= ?", filters.step_from),
        ("step <= ?", filters.step_to),
        ("reward >= ?", filters.reward_from),
        ("reward <= ?", filters.reward_to),
        ("is_truncated = ?", filters.truncated),
    ):
        if value is not None:
            found.append((sql, (value,)))
    if filters.version is not None:
        found.append(("? BETWEEN oldest_version AND newest_version", (filters.version,)))
    if filters.attempts != "all":
        found.append(("is_replaced = ?", (filters.attempts == "replaced",)))
    for name, values in filters.equal.items():
        if values:
            marks = ", ".join("?" * len(values))
            found.append((f"{quoted(name)} IN ({marks})", tuple(values)))
    found += [_comparison(text, columns) for text in filters.where]
    found += [_tag(text, columns) for text in filters.tags]
    if filters.group:
        is_mixed = "minimum < maximum" if filters.group == "mixed" else "minimum = maximum"
        groups = f"SELECT step, environment, group_id FROM {{groups}} WHERE {is_mixed}"
        found.append((f"(step, environment, group_id) IN ({groups})", ()))
    return Condition(
        sql=" AND ".join(sql for sql, _ in found) or "true",
        values=tuple(value for _, values in found for value in values),
    )


def _comparison(text: str, columns: Mapping[str, Column]) -> tuple[str, tuple[object, ...]]:
    match = _CONDITION.fullmatch(text)
    column = None if match is None else columns.get(match[1].strip())
    if match is None or column is None or column.kind == "text":
        numbers = [c.name for c in columns.values() if c.kind != "text"]
        raise ParameterError(
            f"where: expected a column and a number, as reward>=0.5, got {text!r}; columns with "
            f"numbers are {', '.join(numbers)}"
        )
    try:
        value = float(match[3])
    except ValueError:
        raise ParameterError(f"where: expected a number after {match[2]!r} in {text!r}") from None
    name = quoted(column.name)
    as_number = f"CAST({name} AS DOUBLE)" if column.kind == "truth" else name
    return f"{as_number} {match[2]} ?", (value,)


def _tag(text: str, columns: Mapping[str, Column]) -> tuple[str, tuple[object, ...]]:
    name, is_given, value = text.partition("=")
    column = columns.get(f"tags/{name}")
    if column is None:
        known = [one.removeprefix("tags/") for one in columns if one.startswith("tags/")]
        raise ParameterError(
            f"tag: expected NAME=VALUE or NAME of a known tag, got {text!r}; "
            + (f"known tags are {', '.join(known)}" if known else "this run has no tags")
        )
    if is_given:
        return f"{quoted(column.name)} = ?", (value,)
    return f"{quoted(column.name)} IS NOT NULL", ()
