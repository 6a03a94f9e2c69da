"""`/runs/{run}/rollouts`: filter, sort, search and count the rollouts of all steps."""

from collections.abc import Sequence
from functools import lru_cache

from telescope_core.records.timeline import CALLS_FOLDER
from telescope_ui.base.answers import JsonObject
from telescope_ui.base.parameters import RolloutsParameters
from telescope_ui.base.wrong_addresses import unfit, unfit_steps
from telescope_ui.files.damage import answering
from telescope_ui.files.database import Database
from telescope_ui.files.run_files import Listed
from telescope_ui.index import queries
from telescope_ui.index.block_tables import block_files, block_source, source_of
from telescope_ui.index.filters import Condition, condition_of
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.search import Cursor, Search

_HIDDEN = ("row",)
_MAX_SERVERS = 1000


def rollouts_page(run: OneRun, database: Database, asked: RolloutsParameters) -> JsonObject:
    """Return a page of rollouts, the hits of a search, or a histogram."""
    state = run.index.refresh()
    condition = condition_of(asked, run.index.columns(), is_discarding=run.is_discarding())
    # Files that are damaged are found here, before others read them.
    servers = servers_of(run, database)
    if asked.server:
        condition = _of_servers(run, database, condition, asked.server)
    base: JsonObject = {"run": run.brief(), "index": state}
    if asked.distribution:
        column = run.index.column(asked.distribution)
        found = queries.distribution(run.index, condition, column, bins=asked.bins)
        return {"page": "distribution", **base, **found}
    if asked.q:
        search = Search(run.index, run.path, condition=condition, text=asked.q)
        cursor = Cursor.from_text(asked.cursor) if asked.cursor else None
        hits = search.page(limit=asked.limit, cursor=cursor)
        answer: JsonObject = {"total": None, "columns": hits.columns, "search": hits.search}
    else:
        rows = queries.page(
            run.index, condition, sort=asked.sort, limit=asked.limit, offset=asked.offset
        )
        answer = {"total": queries.count(run.index, condition), "columns": rows}
    answer["columns"] = with_addresses(run, answer["columns"])
    choices = run.index.remembered("choices", lambda: queries.choices(run.index))
    choices = {**choices, "server": servers}
    steps = queries.steps(run.index)
    return {
        "page": "rollouts",
        **base,
        **answer,
        "scalar_columns": [
            {"name": column.name, "kind": column.kind} for column in run.index.columns().values()
        ],
        "choices": choices,
        "steps": steps,
        "hints": _hints(asked, choices, steps) if state["is_complete"] else [],
    }


def _hints(asked: RolloutsParameters, choices: JsonObject, steps: JsonObject) -> list[str]:
    """Return sentences about filters that match nothing, with similar values."""
    few = {name: values for name, values in choices.items() if len(values) < queries.MAX_VALUES}
    hints = list(unfit({name: getattr(asked, name) for name in few}, few))
    of_steps = unfit_steps(asked.step_from, asked.step_to, steps)
    return hints if of_steps is None else [*hints, of_steps]


def with_addresses(run: OneRun, columns: JsonObject) -> JsonObject:
    """Return columns of rollouts with the address of each."""
    keys = zip(*(columns[name] for name in ("group_id", "index", "attempt")), strict=True)
    shown = {name: values for name, values in columns.items() if name not in _HIDDEN}
    return {**shown, "address": [run.address("rollouts", *key) for key in keys]}


def _of_servers(
    run: OneRun, database: Database, condition: Condition, servers: Sequence[str]
) -> Condition:
    """Return `condition`, restricted to rollouts sampled in part by one of `servers`."""
    calls = block_source(
        database.damage, run.path, "calls", ("group_id", "index", "attempt", "server")
    )
    if calls is None:
        return Condition(sql="false", values=())
    marks = ", ".join("?" * len(servers))
    own = (
        '(group_id, "index", attempt) IN (SELECT (group_id, "index", attempt) FROM '
        f"{calls.sql} WHERE server IN ({marks}))"
    )
    return Condition(
        sql=f"{condition.sql} AND {own}",
        values=(*condition.values, *calls.values, *servers),
    )


def servers_of(run: OneRun, database: Database) -> list[str]:
    """Return the servers that answered model calls."""
    files = block_files(run.path, CALLS_FOLDER)
    found = {name for file in files for name in _servers_in(database, file)}
    return sorted(found)[:_MAX_SERVERS]


@lru_cache(maxsize=4096)
def _servers_in(database: Database, file: Listed) -> tuple[str, ...]:
    """Return the servers in a file; `stamp` identifies its content."""

    def found() -> JsonObject:
        if (calls := source_of(database.damage, CALLS_FOLDER, [file], ("server",))) is None:
            return {"rows": []}
        sql = f"SELECT DISTINCT server FROM {calls.sql} WHERE server != '' LIMIT {_MAX_SERVERS}"
        return {"rows": database.rows(sql, calls.values)}

    return tuple(row[0] for row in answering(database.damage, lambda: [file], found)["rows"])
