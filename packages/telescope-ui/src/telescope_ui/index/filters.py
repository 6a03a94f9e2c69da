"""Filters of rollouts as conditions in SQL: values are bound, columns are those of the index."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from telescope_ui.base.answers import ParameterError
from telescope_ui.base.parameters import RolloutsParameters
from telescope_ui.files.database import quoted
from telescope_ui.index.columns import Column

_EQUAL = (
    *("environment", "status", "status_reason", "stop_reason", "error", "example_id", "group_id"),
)
"""Text columns with the parameters that list their permitted values."""
_SIGN = re.compile("<=|>=|!=|<|>|=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition in SQL and its bound values."""

    sql: str
    values: tuple[object, ...]


def has_signal(*, is_discarding: bool) -> str:
    """Return the aggregate in SQL over the rollouts of a group: whether the step learned from it.

    Rewards alone do not say so, because penalties tell equal ones apart. `is_discarding`: whether
    the run leaves out groups without an advantage. Then what it kept has one, which for a match is
    that of its seats and not that of the rollout.
    """
    taught = "advantage != 0 OR status = 'kept'" if is_discarding else "advantage != 0"
    return f"coalesce(bool_or({taught}), false)"


def condition_of(
    asked: RolloutsParameters, columns: Mapping[str, Column], *, is_discarding: bool = True
) -> Condition:
    """Return the condition for rows of `{rollouts}`; `is_discarding` as in `has_signal`.

    Raises ParameterError for a column that is not there or a condition that cannot be read.
    """
    found: list[tuple[str, tuple[object, ...]]] = []
    for sql, value in (
        ("step >= ?", asked.step_from),
        ("step <= ?", asked.step_to),
        ("reward >= ?", asked.reward_from),
        ("reward <= ?", asked.reward_to),
        ("is_truncated = ?", asked.truncated),
    ):
        if value is not None:
            found.append((sql, (value,)))
    if asked.version is not None:
        found.append(("? BETWEEN oldest_version AND newest_version", (asked.version,)))
    if asked.attempts != "all":
        found.append(("is_replaced = ?", (asked.attempts == "replaced",)))
    for name in _EQUAL:
        if values := getattr(asked, name):
            marks = ", ".join("?" * len(values))
            found.append((f"{quoted(name)} IN ({marks})", tuple(values)))
    found += [_comparison(text, columns) for text in asked.where]
    found += [_tag(text, columns) for text in asked.tag]
    if asked.group in ("signal", "no_signal"):
        found.append(_by_signal(asked, is_discarding=is_discarding))
    elif asked.group:
        is_mixed = "minimum < maximum" if asked.group == "mixed" else "minimum = maximum"
        groups = f"SELECT step, environment, group_id FROM {{groups}} WHERE {is_mixed}"
        found.append((f"(step, environment, group_id) IN ({groups})", ()))
    return Condition(
        sql=" AND ".join(sql for sql, _ in found) or "true",
        values=tuple(value for _, values in found for value in values),
    )


def _by_signal(asked: RolloutsParameters, *, is_discarding: bool) -> tuple[str, tuple[object, ...]]:
    bounds = {"step >= ?": asked.step_from, "step <= ?": asked.step_to}
    known = {sql: value for sql, value in bounds.items() if value is not None}
    taught = has_signal(is_discarding=is_discarding)
    # Groups that were rejected, or that failures left too few rollouts, were not compared at all.
    wanted = taught if asked.group == "signal" else f"count(advantage) > 0 AND NOT {taught}"
    groups = (
        f"SELECT step, environment, group_id FROM {{rollouts}} "
        f"WHERE {' AND '.join(['NOT is_replaced', *known])} GROUP BY ALL HAVING {wanted}"
    )
    return f"(step, environment, group_id) IN ({groups})", tuple(known.values())


def _comparison(text: str, columns: Mapping[str, Column]) -> tuple[str, tuple[object, ...]]:
    # The name of a column may have signs in it, too.
    parts = (
        (text[: one.start()].strip(), one[0], text[one.end() :]) for one in _SIGN.finditer(text)
    )
    name, sign, number = next((one for one in parts if one[0] in columns), ("", "", ""))
    column = columns.get(name)
    if column is None or column.kind == "text":
        numbers = [c.name for c in columns.values() if c.kind != "text"]
        raise ParameterError(
            f"where: expected a column and a number, as reward>=0.5, got {text!r}; columns with "
            f"numbers are {', '.join(numbers)}"
        )
    try:
        value = float(number)
    except ValueError:
        raise ParameterError(f"where: expected a number after {sign!r} in {text!r}") from None
    shown = quoted(column.name)
    as_number = f"CAST({shown} AS DOUBLE)" if column.kind == "truth" else shown
    return f"{as_number} {sign} ?", (value,)


def _tag(text: str, columns: Mapping[str, Column]) -> tuple[str, tuple[object, ...]]:
    # The name of a tag may have this sign in it, too.
    names = [text, *(text[:at] for at, sign in enumerate(text) if sign == "=")]
    name = next((one for one in names if f"tags/{one}" in columns), "")
    column = columns.get(f"tags/{name}")
    if column is None:
        known = [one.removeprefix("tags/") for one in columns if one.startswith("tags/")]
        raise ParameterError(
            f"tag: expected NAME=VALUE or NAME of a known tag, got {text!r}; "
            + (f"known tags are {', '.join(known)}" if known else "this run has no tags")
        )
    if name != text:
        return f"{quoted(column.name)} = ?", (text[len(name) + 1 :],)
    return f"{quoted(column.name)} IS NOT NULL", ()
