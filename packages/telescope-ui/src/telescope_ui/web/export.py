"""Writes runs as a static folder: the front end, and the data of each page as a script.

A page opened from a file may load scripts beside it, and nothing else, so data are scripts too.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.records.identity import now
from telescope_ui.base.answers import JsonObject, as_json, error_body, status_of
from telescope_ui.base.parameters import (
    CompareParameters,
    EvalParameters,
    InfraParameters,
    LogsParameters,
    OverviewParameters,
    RolloutsParameters,
    TimelineParameters,
)
from telescope_ui.files.database import Database, cache_folder
from telescope_ui.files.eval_files import EvalPlace, eval_keys, rows_of
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.runs import Runs
from telescope_ui.pages.compare import compare_page
from telescope_ui.pages.config import config_page
from telescope_ui.pages.evals import eval_page, eval_rollout_page, evals_page
from telescope_ui.pages.groups import example_page, group_page
from telescope_ui.pages.infra import infra_page
from telescope_ui.pages.logs import logs_page
from telescope_ui.pages.overview import overview_page
from telescope_ui.pages.rollout import rollout_page
from telescope_ui.pages.rollouts import rollouts_page
from telescope_ui.pages.runs import runs_page
from telescope_ui.pages.timeline import timeline_page
from telescope_ui.web.shell import STATIC

FORMAT = 1
_BASE = '<base href="/">'
_INDEX_WAIT_S = 3600.0
_MAX_COMPARED = 12
_LOG_LINES = 5000

Page = tuple[str, Callable[[], JsonObject]]


class Exported(NamedTuple):
    """What was written."""

    page: Path
    num_pages: int


def export_runs(folders: Sequence[Path], target: Path, *, num_rollouts: int) -> Exported:
    """Write the runs in `folders` to `target`, which must be new or empty.

    `num_rollouts` newest rollouts of each run are written, with their groups and examples, and as
    many of each eval.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder; choose another --export")
    page = _page()
    database = Database(cache_folder())
    runs: Runs | None = None
    try:
        runs = Runs(folders, database)
        (target / "data").mkdir(parents=True)
        shutil.copytree(STATIC, target / "static", ignore=shutil.ignore_patterns("index.html"))
        places: dict[str, str] = {}
        for address, data in _pages(runs, database, num_rollouts):
            name = f"data/{len(places) + 1:06d}.js"
            key = _as_script(as_json(address))
            content = b"window.TELESCOPE_EXPORT.loaded[%b] = %b;\n"
            (target / name).write_bytes(content % (key, _as_script(as_json(_data(data)))))
            places[address] = name
    finally:
        if runs is not None:
            runs.close()
        database.close()
    fields = {"format": FORMAT, "created_at": now(), "pages": places, "loaded": {}}
    script = b"window.TELESCOPE_EXPORT = %b;\n" % _as_script(as_json(fields))
    (target / "export.js").write_bytes(script)
    (target / "index.html").write_text(page, encoding="utf-8")
    return Exported(target / "index.html", len(places))


def _page() -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    before, found, after = page.replace(_BASE, "").partition("<script")
    assert found, "the page of the front end loads a script"
    return f'{before}<script src="export.js"></script>\n{found}{after}'


def _as_script(content: bytes) -> bytes:
    """Return JSON as a part of a script: no `<`, and no line end that JSON has and scripts lack."""
    plain = content.replace(b"<", b"\\u003c")
    return plain.replace("\u2028".encode(), b"\\u2028").replace("\u2029".encode(), b"\\u2029")


def _data(page: Callable[[], JsonObject]) -> JsonObject:
    try:
        return page()
    except TelescopeError as error:
        return error_body(status_of(error), str(error))


def _pages(runs: Runs, database: Database, num_rollouts: int) -> Iterator[Page]:
    yield "/", lambda: runs_page(runs)
    found = sorted(runs.all(), key=lambda run: run.key)
    if 1 < len(found) <= _MAX_COMPARED:
        keys = [run.key for run in found]
        address = "/compare?" + "&".join(f"run={key}" for key in keys)
        yield address, lambda: compare_page(found, CompareParameters(run=keys))
    for run in found:
        yield from _pages_of(run, database, num_rollouts)


def _pages_of(run: OneRun, database: Database, num_rollouts: int) -> Iterator[Page]:
    try:
        run.info()
        run.index.refresh(_INDEX_WAIT_S)
        run.stages.refresh(_INDEX_WAIT_S)
    except TelescopeError as error:
        body = error_body(status_of(error), str(error))
        yield run.address(), lambda: body
        return
    logs = LogsParameters(limit=_LOG_LINES)
    plain: list[Page] = [
        (run.address(), lambda: overview_page(run, OverviewParameters())),
        (run.address("timeline"), lambda: timeline_page(run, database, TimelineParameters())),
        (run.address("infra"), lambda: infra_page(run, database, InfraParameters())),
        (run.address("evals"), lambda: evals_page(run)),
        (run.address("logs"), lambda: logs_page(run, logs)),
        (run.address("config"), lambda: config_page(run)),
    ]
    yield from plain
    for folder in eval_keys(run.path):
        yield run.address("evals", folder), _eval(run, folder)
        yield from _eval_rollouts(run, database, folder, num_rollouts)
    yield from _rollouts(run, database, num_rollouts)


def _eval(run: OneRun, folder: str) -> Callable[[], JsonObject]:
    return lambda: eval_page(run, folder, EvalParameters())


def _eval_rollouts(run: OneRun, database: Database, folder: str, num: int) -> Iterator[Page]:
    """Yield rollouts of an eval: one of each example first, which its page leads to."""
    rows = [placed.row for placed in rows_of(EvalPlace(run.path, folder))]
    seen: set[str] = set()
    first = [not (row.example_id in seen or seen.add(row.example_id)) for row in rows]
    ordered = sorted(zip(first, rows, strict=True), key=lambda pair: not pair[0])
    for _, row in ordered[:num]:
        key = (row.group_id, row.index)
        yield (
            run.address("evals", folder, "rollouts", *key),
            _eval_rollout(run, database, folder, key),
        )


def _eval_rollout(
    run: OneRun, database: Database, folder: str, key: tuple[str, int]
) -> Callable[[], JsonObject]:
    return lambda: eval_rollout_page(run, database, folder, key)


def _rollouts(run: OneRun, database: Database, num: int) -> Iterator[Page]:
    # More rows than a page that is asked for over the network may have.
    asked = RolloutsParameters().model_copy(update={"limit": num})
    page = rollouts_page(run, database, asked)
    yield run.address("rollouts"), lambda: page
    columns = page["columns"]
    for key in zip(columns["group_id"], columns["index"], columns["attempt"], strict=True):
        yield run.address("rollouts", *key), _rollout(run, database, key)
    for group in dict.fromkeys(columns["group_id"]):
        yield run.address("groups", group), _group(run, group)
    examples = zip(columns["environment"], columns["example_id"], strict=True)
    for environment, example in dict.fromkeys(examples):
        if example:
            yield run.address("examples", environment, example), _example(run, environment, example)


def _rollout(
    run: OneRun, database: Database, key: tuple[str, int, int]
) -> Callable[[], JsonObject]:
    return lambda: rollout_page(run, database, key, with_tokens=True)


def _group(run: OneRun, group: str) -> Callable[[], JsonObject]:
    return lambda: group_page(run, group)


def _example(run: OneRun, environment: str, example: str) -> Callable[[], JsonObject]:
    return lambda: example_page(run, environment, example)
