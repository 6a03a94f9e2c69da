"""The application: the function for each address."""

import asyncio
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import duckdb
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from telescope_core.base.errors import TelescopeError, unknown_name
from telescope_ui.base import parameters as asked_for
from telescope_ui.base.answers import JsonObject, NotThereError, as_json, error_response, status_of
from telescope_ui.base.guard import Guard
from telescope_ui.base.wrong_addresses import no_page
from telescope_ui.files.damage import with_details
from telescope_ui.files.database import Database
from telescope_ui.files.run_files import inside
from telescope_ui.index.runs import Runs
from telescope_ui.pages.compare import compare_examples_page, compare_page, difference_page
from telescope_ui.pages.config import config_page
from telescope_ui.pages.evals import (
    eval_page,
    eval_rollout_page,
    eval_rollouts_page,
    evals_page,
    standalone_eval_page,
)
from telescope_ui.pages.groups import example_page, group_page
from telescope_ui.pages.infra import infra_page
from telescope_ui.pages.logs import logs_page
from telescope_ui.pages.overview import overview_page
from telescope_ui.pages.rollout import key_of, rollout_page
from telescope_ui.pages.rollouts import rollouts_page
from telescope_ui.pages.runs import runs_page
from telescope_ui.pages.timeline import timeline_page, trace_page
from telescope_ui.web.live import Watcher, events_for
from telescope_ui.web.shell import STATIC, Shell

_OF_REPORT = {
    "content-security-policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; "
    "img-src data:; frame-ancestors 'none'"
}
"""Reports may be written by others, so they are shown without scripts and without an origin."""

_LIST_S = 0.25
"""Time to read what is new in the list of runs, before it is shown without the rest."""


class _PagePart(Convertor[str]):
    """One part of a path, which arrives escaped."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return value


def create_app(
    runs: Runs,
    database: Database,
    watcher: Watcher,
    *,
    token: str,
    host: str,
    allowed_hosts: Collection[str] = (),
) -> ASGIApp:
    """Return the application that shows `runs` to holders of `token`."""
    register_url_convertor("part", _PagePart())
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_exception_handler(TelescopeError, _reply)
    app.add_exception_handler(RequestValidationError, _reply_parameter)
    app.add_exception_handler(HTTPException, _reply_status)
    app.add_exception_handler(FileNotFoundError, _reply_gone)
    app.add_exception_handler(OSError, _reply_disk)
    app.add_exception_handler(duckdb.Error, _reply_unreadable)
    # Starlette raises the error again after the answer, so that the server logs its traceback.
    app.add_exception_handler(Exception, _reply_fault)
    _add_lists(app, runs, database)
    _add_run(app, runs, database)
    _add_rollouts(app, runs, database)
    _add_evals(app, runs, database)
    _add_files(app, runs, watcher)
    return Guard(Shell(app), token=token, host=host, allowed_hosts=allowed_hosts)


def _answer(value: JsonObject) -> Response:
    return Response(as_json(value), media_type="application/json")


def _add_lists(app: FastAPI, runs: Runs, database: Database) -> None:
    @app.get("/")
    def _runs(asked: Annotated[asked_for.NoParameters, Query()]) -> Response:
        return _answer(runs_page(runs, most_s=_LIST_S))

    @app.get("/compare")
    def _compare(asked: Annotated[asked_for.CompareParameters, Query()]) -> Response:
        chosen = [runs.get(key) for key in dict.fromkeys(asked.run)]
        return _answer(compare_page(chosen, asked))

    @app.get("/compare/examples")
    def _examples(asked: Annotated[asked_for.CompareExamplesParameters, Query()]) -> Response:
        chosen = [runs.get(key) for key in dict.fromkeys(asked.run)]
        return _answer(compare_examples_page(chosen, database, asked))

    @app.get("/difference")
    def _difference(asked: Annotated[asked_for.DifferenceParameters, Query()]) -> Response:
        return _answer(difference_page(runs, asked))


def _add_run(app: FastAPI, runs: Runs, database: Database) -> None:
    @app.get("/runs/{run:part}")
    def _overview(run: str, asked: Annotated[asked_for.OverviewParameters, Query()]) -> Response:
        return _answer(overview_page(runs.get(run), asked))

    @app.get("/runs/{run:part}/report.html")
    def _report(run: str, asked: Annotated[asked_for.NoParameters, Query()]) -> Response:
        path = inside(runs.get(run).path, "report.html")
        if path is None or not path.is_file():
            raise NotThereError(
                f"{run} has no report; a run writes it at its end, and `telescope eval --report` "
                "with the folder of the run writes it at any time"
            )
        return FileResponse(path, media_type="text/html", headers=_OF_REPORT)

    @app.get("/runs/{run:part}/timeline")
    def _timeline(run: str, asked: Annotated[asked_for.TimelineParameters, Query()]) -> Response:
        return _answer(timeline_page(runs.get(run), database, asked))

    @app.get("/runs/{run:part}/timeline/trace.json")
    def _trace(run: str, asked: Annotated[asked_for.WindowParameters, Query()]) -> Response:
        return _answer(trace_page(runs.get(run), database, asked))

    @app.get("/runs/{run:part}/infra")
    def _infra(run: str, asked: Annotated[asked_for.InfraParameters, Query()]) -> Response:
        return _answer(infra_page(runs.get(run), database, asked))

    @app.get("/runs/{run:part}/logs")
    def _logs(run: str, asked: Annotated[asked_for.LogsParameters, Query()]) -> Response:
        return _answer(logs_page(runs.get(run), asked))

    @app.get("/runs/{run:part}/config")
    def _config(run: str, asked: Annotated[asked_for.NoParameters, Query()]) -> Response:
        return _answer(config_page(runs.get(run)))


def _add_rollouts(app: FastAPI, runs: Runs, database: Database) -> None:
    @app.get("/runs/{run:part}/rollouts")
    def _rollouts(run: str, asked: Annotated[asked_for.RolloutsParameters, Query()]) -> Response:
        return _answer(rollouts_page(runs.get(run), database, asked))

    @app.get("/runs/{run:part}/rollouts/{group:part}/{index:part}/{attempt:part}")
    def _rollout(
        run: str,
        group: str,
        index: str,
        attempt: str,
        asked: Annotated[asked_for.RolloutParameters, Query()],
    ) -> Response:
        key = key_of(group, index, attempt)
        return _answer(rollout_page(runs.get(run), database, key, with_tokens=asked.tokens))

    @app.get("/runs/{run:part}/groups/{group:part}")
    def _group(run: str, group: str, asked: Annotated[asked_for.NoParameters, Query()]) -> Response:
        return _answer(group_page(runs.get(run), group))

    @app.get("/runs/{run:part}/examples/{environment:part}/{example:part}")
    def _example(
        run: str,
        environment: str,
        example: str,
        asked: Annotated[asked_for.NoParameters, Query()],
    ) -> Response:
        return _answer(example_page(runs.get(run), environment, example))


def _add_evals(app: FastAPI, runs: Runs, database: Database) -> None:
    @app.get("/runs/{run:part}/evals")
    def _evals(run: str, asked: Annotated[asked_for.NoParameters, Query()]) -> Response:
        return _answer(evals_page(runs.get(run)))

    @app.get("/runs/{run:part}/evals/{folder:part}")
    def _eval(
        run: str, folder: str, asked: Annotated[asked_for.EvalParameters, Query()]
    ) -> Response:
        return _answer(eval_page(runs.get(run), folder, asked))

    @app.get("/runs/{run:part}/evals/{folder:part}/rollouts/{group:part}/{index:part}")
    def _eval_rollout(
        run: str,
        folder: str,
        group: str,
        index: str,
        asked: Annotated[asked_for.RolloutParameters, Query()],
    ) -> Response:
        _, number, _ = key_of(group, index, "1")
        one, key = runs.get(run), (group, number)
        return _answer(eval_rollout_page(one, database, folder, key, with_tokens=asked.tokens))

    @app.get("/runs/{run:part}/evals/{folder:part}/rollouts")
    def _eval_rollouts(
        run: str, folder: str, asked: Annotated[asked_for.EvalRolloutsParameters, Query()]
    ) -> Response:
        return _answer(eval_rollouts_page(runs.get(run), folder, asked))

    @app.get("/evals/{key:part}/rollouts")
    def _rollouts_of_eval(
        key: str, asked: Annotated[asked_for.EvalRolloutsParameters, Query()]
    ) -> Response:
        return _answer(eval_rollouts_page(runs.get_eval(key), "", asked))

    @app.get("/evals/{key:part}")
    def _standalone(key: str, asked: Annotated[asked_for.EvalParameters, Query()]) -> Response:
        return _answer(standalone_eval_page(runs.get_eval(key), runs.evals(), asked))

    @app.get("/evals/{key:part}/logs")
    def _logs_of_eval(key: str, asked: Annotated[asked_for.LogsParameters, Query()]) -> Response:
        return _answer(logs_page(runs.get_eval(key), asked))

    @app.get("/evals/{key:part}/rollouts/{group:part}/{index:part}")
    def _rollout_of_eval(
        key: str, group: str, index: str, asked: Annotated[asked_for.RolloutParameters, Query()]
    ) -> Response:
        _, number, _ = key_of(group, index, "1")
        one, place = runs.get_eval(key), (group, number)
        return _answer(eval_rollout_page(one, database, "", place, with_tokens=asked.tokens))


def _add_files(app: FastAPI, runs: Runs, watcher: Watcher) -> None:
    @app.get("/static/{name:part}")
    def _static(name: str) -> Response:
        path = inside(STATIC, name) if "/" not in name else None
        if path is None or not path.is_file():
            raise HTTPException(404, f"there is no file {name!r} in the front end")
        return FileResponse(path)

    @app.get("/live")
    async def _live(asked: Annotated[asked_for.LiveParameters, Query()]) -> Response:
        # One that is not there would be waited for without a word.
        for key in asked.run:
            await asyncio.to_thread(runs.either, key)
        listener = watcher.add(asked.run)
        if listener is None:
            raise HTTPException(503, "too many pages are open; close one of them")
        return StreamingResponse(events_for(watcher, listener), media_type="text/event-stream")


def _reply(_: Request, error: Exception) -> Response:
    status = status_of(error)
    return error_response(status, str(error))


def _reply_gone(_: Request, error: Exception) -> Response:
    return error_response(
        404, "a file of the run was deleted while it was read; load the page again"
    )


def _reply_disk(_: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    name = Path(os.fsdecode(error.filename)).name if error.filename else "a file of the run"
    why = with_details(f"{name} cannot be read from its disk; load the page again", error)
    return error_response(409, why)


def _reply_unreadable(_: Request, error: Exception) -> Response:
    why = (
        "a file of the run cannot be read: it was written anew meanwhile, or is damaged; load the "
        "page again"
    )
    return error_response(409, with_details(why, error))


def _reply_fault(_: Request, error: Exception) -> Response:
    return error_response(
        500,
        f"Telescope failed at this page ({type(error).__name__}), which is its own fault; the "
        "traceback is in the log of telescope ui, please report it",
    )


def _reply_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    is_nowhere = error.status_code == 404 and request.scope.get("route") is None
    message = no_page(request.url.path) if is_nowhere else error.detail
    return error_response(error.status_code, message)


def _reply_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    name = str(first["loc"][1] if len(first["loc"]) > 1 else first["loc"][0])
    if first["type"] == "extra_forbidden":
        return error_response(400, str(unknown_name("parameter", name, _known_parameters(request))))
    if first["type"] == "missing":
        return error_response(400, f"the parameter {name!r} is missing, as in: {name}=...")
    return error_response(400, f"{name}: {first['msg']}, got {first.get('input')!r}")


def _known_parameters(request: Request) -> list[str]:
    route: Any = request.scope.get("route")
    models: list[type[BaseModel]] = [
        field.field_info.annotation for field in route.dependant.query_params
    ]
    return [field.alias or name for model in models for name, field in model.model_fields.items()]
