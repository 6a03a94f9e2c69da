"""Writes runs as a static folder, or one run as one file: the front end, and the data of its pages.

A page opened from a file may load scripts beside it, and nothing else, so in a folder data are
scripts too. In one file they stand in the page, packed.
"""

import base64
import gzip
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import NamedTuple, TypeVar

import duckdb

from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.records.files import write_text
from telescope_core.records.identity import now
from telescope_core.reports.style import PAGE_STYLE
from telescope_core.reports.train_report import train_report
from telescope_ui.base.answers import JsonObject, as_json, error_body, status_of
from telescope_ui.base.parameters import (
    CompareParameters,
    CurveParameters,
    EvalParameters,
    InfraParameters,
    LogsParameters,
    OverviewParameters,
    RolloutsParameters,
    TimelineParameters,
)
from telescope_ui.files.database import Database, opened
from telescope_ui.files.eval_files import EvalPlace, eval_keys, rows_of
from telescope_ui.index import queries
from telescope_ui.index.one_run import OneRun
from telescope_ui.index.runs import Runs
from telescope_ui.pages.compare import compare_page
from telescope_ui.pages.config import config_page
from telescope_ui.pages.evals import eval_page, eval_rollout_page, evals_page, standalone_eval_page
from telescope_ui.pages.groups import example_page, group_page
from telescope_ui.pages.infra import infra_page
from telescope_ui.pages.logs import logs_page
from telescope_ui.pages.overview import overview_page
from telescope_ui.pages.rollout import calls_of_groups, rollout_page
from telescope_ui.pages.rollouts import rollouts_page, with_addresses
from telescope_ui.pages.runs import runs_page
from telescope_ui.pages.timeline import timeline_page
from telescope_ui.web.shell import STATIC

FORMAT = 1
_BASE = '<base href="/">'
_INDEX_WAIT_S = 3600.0
_MAX_COMPARED = 12
_LOG_LINES = 5000
_ABOUT = "export.js"
_BEGIN = b"window.TELESCOPE_EXPORT = "
IN_FOLDER, IN_ONE_FILE = 500, 40
"""Rollouts of a run, and of each of its evals, where no number is given."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""The page of one file can load nothing, whatever a model wrote into it."""

Page = tuple[str, Callable[[], JsonObject]]
Asked = TypeVar("Asked", bound=CurveParameters)


class Exported(NamedTuple):
    """Result of an export."""

    page: Path
    num_pages: int
    num_unreadable: int
    """Pages that say only why they cannot be read."""


def export_runs(
    folders: Sequence[Path],
    target: Path,
    *,
    num_rollouts: int,
    replaces: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the runs in `folders` to `target`, which is new or empty.

    It holds the pages of about `num_rollouts` of each run, over all steps, with their groups and
    examples, and as many of each eval. `replaces`: remove an existing export first; an interrupted
    one is always removed. `tell` is called with the number of pages written and the total. Pages
    can be opened from the beginning, so that an interrupted export can be read as far as it got.
    """
    _require_room(target, replaces=replaces)
    page = _page()
    with _opened(folders) as (runs, database):
        found = list(_pages(runs, database, num_rollouts))
        places = {address: f"data/{at:06d}.js" for at, (address, _) in enumerate(found, 1)}
        # Only now, as the runs can be read, goes what an export left there. What is written first
        # tells that it is one, so that the next one may begin anew.
        target.mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "created_at": now(), "pages": places, "loaded": {}}
        _write_about(target, {**about, "is_complete": False})
        for name in ("data", "static"):
            shutil.rmtree(target / name, ignore_errors=True)
        (target / "data").mkdir(parents=True)
        shutil.copytree(STATIC, target / "static", ignore=shutil.ignore_patterns("index.html"))
        (target / "index.html").write_text(page, encoding="utf-8")
        num_unreadable = 0
        for at, (address, page_data) in enumerate(found):
            tell(at, len(found))
            data = _data(page_data)
            num_unreadable += "error" in data
            key = _as_script(as_json(address))
            content = b"window.TELESCOPE_EXPORT.loaded[%b] = %b;\n"
            place = target / places[address]
            place.write_bytes(content % (key, _as_script(as_json(data))))
        tell(len(found), len(found))
    _write_about(target, {**about, "is_complete": True})
    return Exported(target / "index.html", len(places), num_unreadable)


def export_one_file(
    folders: Sequence[Path],
    target: Path,
    *,
    num_rollouts: int,
    replaces: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the only run in `folders` to the file `target`, which loads nothing else.

    It has the same pages as `export_runs` writes. A browser without scripts shows the report that
    core writes. `replaces`: a file that is there is written anew. Raises TelescopeError where a
    file of the run cannot be read.
    """
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; --one-file needs the name of a file")
    if target.exists() and not replaces:
        raise ConfigError(f"{target} exists; choose another --export, or --force writes it anew")
    try:
        with _opened(folders) as (runs, database):
            there, evals = runs.all(), runs.evals()
            if len(there) != 1 or evals:
                raise ConfigError(
                    f"--one-file needs the folder of one run, got {len(there)} runs and "
                    f"{len(evals)} evals; name one run, or write a folder without --one-file"
                )
            run = there[0]
            found = list(_pages(runs, database, num_rollouts))
            data: dict[str, JsonObject] = {}
            for address, page in found:
                tell(len(data), len(found))
                data[address] = _data(page)
            tell(len(found), len(found))
            write_text(target, _one_file(run, data))
    except duckdb.Error as error:
        raise TelescopeError(f"a file of the run cannot be read: {error}") from error
    return Exported(target, len(data), sum("error" in one for one in data.values()))


@contextmanager
def _opened(folders: Sequence[Path]) -> Generator[tuple[Runs, Database]]:
    with opened() as database:
        runs = Runs(folders, database)
        try:
            yield runs, database
        finally:
            runs.close()


def _one_file(run: OneRun, data: Mapping[str, JsonObject]) -> str:
    """Return the page: the front end, the data of its pages, and a report without scripts."""
    packed = base64.b64encode(gzip.compress(as_json(data), mtime=0)).decode()
    about: JsonObject = {
        **{"format": FORMAT, "created_at": now(), "is_complete": True, "first": run.address()},
        **{"pages": {}, "loaded": {}, "packed": packed},
    }
    style, program = ((STATIC / name).read_text(encoding="utf-8") for name in ("app.css", "app.js"))
    assert "</script" not in program, "the program of the front end can stand in a page"
    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    parts = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(run.info().name)} - Telescope</title>",
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
        f'<style>{style}</style>\n</head>\n<body>\n<div id="app"></div>',
        f"<noscript><style>{PAGE_STYLE}</style><main>",
        *train_report(run.folder),
        "</main></noscript>",
        f"<script>{(_BEGIN + _as_script(as_json(about))).decode()};</script>",
        f"<script>{program}</script>\n</body>\n</html>\n",
    )
    return "\n".join(parts)


def _require_room(target: Path, *, replaces: bool) -> None:
    """Raise ConfigError unless `target` is new, empty, or an export that is replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    about = target / _ABOUT
    content = about.read_bytes() if target.is_dir() and about.is_file() else b""
    if not content.startswith(_BEGIN):
        raise ConfigError(f"{target} exists and is not an empty folder; choose another --export")
    if not replaces and b'"is_complete":false' not in content:
        raise ConfigError(f"{target} has an export already; --force writes it anew")


def _write_about(target: Path, fields: JsonObject) -> None:
    temporary = target / f".{_ABOUT}"
    temporary.write_bytes(b"%b%b;\n" % (_BEGIN, _as_script(as_json(fields))))
    temporary.replace(target / _ABOUT)


def _page() -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    before, found, after = page.replace(_BASE, "").partition("<script")
    assert found, "the page of the front end loads a script"
    return f'{before}<script src="{_ABOUT}"></script>\n{found}{after}'


def _as_script(content: bytes) -> bytes:
    """Return JSON as a part of a script: no `<`, and no line end that JSON has and scripts lack."""
    plain = content.replace(b"<", b"\\u003c")
    return plain.replace("\u2028".encode(), b"\\u2028").replace("\u2029".encode(), b"\\u2029")


def _data(page: Callable[[], JsonObject]) -> JsonObject:
    try:
        return page()
    except (TelescopeError, OSError, duckdb.Error) as error:
        return error_body(status_of(error), str(error))


def _pages(runs: Runs, database: Database, num_rollouts: int) -> Iterator[Page]:
    yield "/", lambda: runs_page(runs)
    found = sorted(runs.all(), key=lambda run: run.key)
    if 1 < len(found) <= _MAX_COMPARED:
        keys = [run.key for run in found]
        address = "/compare?" + "&".join(f"run={key}" for key in keys)
        yield address, lambda: _whole(partial(compare_page, found), CompareParameters(run=keys))
    for run in found:
        yield from _pages_of(run, database, num_rollouts)
    evals = runs.evals()
    for one in sorted(evals, key=lambda one: one.key):
        yield one.address(), partial(standalone_eval_page, one, evals, EvalParameters())
        yield one.address("logs"), partial(logs_page, one, LogsParameters(limit=_LOG_LINES))
        yield from _eval_rollouts(one, database, "", num_rollouts)


def _whole(page: Callable[[Asked], JsonObject], asked: Asked) -> JsonObject:
    """Return a page with the curves of all of its sections."""
    sections = [one["name"] for one in page(asked)["sections"]]
    # The extremes of so many curves would fill what is kept of a thinned one.
    return page(asked.model_copy(update={"section": sections, "points": 2000}))


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
        (run.address(), lambda: _whole(partial(overview_page, run), OverviewParameters())),
        (run.address("timeline"), lambda: timeline_page(run, database, TimelineParameters())),
        (run.address("infra"), lambda: infra_page(run, database, InfraParameters())),
        (run.address("evals"), lambda: evals_page(run)),
        (run.address("logs"), lambda: logs_page(run, logs)),
        (run.address("config"), lambda: config_page(run)),
    ]
    yield from plain
    for folder in eval_keys(run.path):
        yield run.address("evals", folder), partial(eval_page, run, folder, EvalParameters())
        yield from _eval_rollouts(run, database, folder, num_rollouts)
    yield from _rollouts(run, database, num_rollouts)


def _eval_rollouts(run: OneRun, database: Database, folder: str, num: int) -> Iterator[Page]:
    """Yield rollouts of an eval; first one of each example, to which its page links."""
    rows = [placed.row for placed in rows_of(EvalPlace(run.path, folder))]
    seen: set[str] = set()
    first = [not (row.example_id in seen or seen.add(row.example_id)) for row in rows]
    ordered = sorted(zip(first, rows, strict=True), key=lambda pair: not pair[0])
    shown = [row for _, row in ordered[:num]]
    calls = cache(partial(calls_of_groups, run, database, [row.group_id for row in shown]))
    for row in shown:
        key = (row.group_id, row.index)
        place = ("evals", folder) if folder else ()
        yield (
            run.address(*place, "rollouts", *key),
            lambda key=key: eval_rollout_page(
                run, database, folder, key, with_tokens=True, known=calls()
            ),
        )


def _rollouts(run: OneRun, database: Database, num: int) -> Iterator[Page]:
    page = rollouts_page(run, database, RolloutsParameters(limit=1))
    columns = with_addresses(run, queries.spread(run.index, num))
    yield run.address("rollouts"), lambda: {**page, "columns": columns}
    groups = list(dict.fromkeys(columns["group_id"]))
    calls = cache(partial(calls_of_groups, run, database, groups))
    for key in zip(columns["group_id"], columns["index"], columns["attempt"], strict=True):
        yield (
            run.address("rollouts", *key),
            lambda key=key: rollout_page(run, database, key, with_tokens=True, calls=calls()),
        )
    for group in groups:
        yield run.address("groups", group), partial(group_page, run, group)
    examples = zip(columns["environment"], columns["example_id"], strict=True)
    for environment, example in dict.fromkeys(examples):
        if example:
            address = run.address("examples", environment, example)
            yield address, partial(example_page, run, environment, example)
