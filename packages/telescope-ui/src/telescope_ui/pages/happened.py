"""Events of a run besides its steps: restarts, lost servers, evals, checkpoints.

They are read from small files of its folder, `SmallFiles` from those that are one object.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from telescope_core.records.eval_points import EvalPointState
from telescope_core.records.files import damaged, read_json
from telescope_core.records.servers import ServerState
from telescope_ui.base.answers import JsonObject, NotThereError
from telescope_ui.files.run_files import Stamp, folders, inside, object_in, stamp_of
from telescope_ui.index.one_run import OneRun, seconds_of
from telescope_ui.pages.rewards import untrained

_MOST = 1000
"""Most moments, the newest ones, because a server may be lost again and again."""
_MAX_CHECKPOINTS = 1000
_MAX_MANIFEST_BYTES = 4 * 2**20


def happened(
    run: OneRun,
    *,
    checkpoints: Sequence[JsonObject],
    eval_points: Sequence[JsonObject],
    servers: Sequence[JsonObject],
) -> list[JsonObject]:
    """Return the events, newest first: `{"time_s", "kind", "text", "why", "address"}`."""
    found = [
        *_lives(run),
        *_servers(run, servers),
        *_evals(run, eval_points),
        *_first_untrained(run),
        *(
            _moment(seconds_of(one["created_at"]), "checkpoint", f"Checkpoint {one['name']}.")
            for one in checkpoints
        ),
    ]
    return sorted(found, key=lambda one: -(one["time_s"] or 0.0))[:_MOST]


def _moment(
    time_s: float | None, kind: str, text: str, why: str = "", address: str = ""
) -> JsonObject:
    return {"time_s": time_s, "kind": kind, "text": text, "why": why, "address": address}


def _lives(run: OneRun) -> Iterator[JsonObject]:
    """Yield the times when the run began, was resumed, restarted its trainer, and ended."""
    info = run.info()
    yield _moment(seconds_of(info.started_at), "run", "The run began.")
    for one in info.resumes:
        why = f"changed: {', '.join(one.changed)}" if one.changed else ""
        text = f"Resumed from step {one.step} ({one.checkpoint})."
        yield _moment(seconds_of(one.at), "restart", text, why)
    for row in run.restarts.rows():
        text = (
            f"The trainer was started again from step {row.get('step')}; it had reached step "
            f"{row.get('reached')}."
        )
        yield _moment(row.get("time_s"), "restart", text, str(row.get("reason", "")))
    if info.ended_at is not None:
        text = f"The run ended: {info.observed_state.value}."
        yield _moment(seconds_of(info.ended_at), "run", text, info.reason)


def _servers(run: OneRun, events: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Yield the times when a server was lost, given up, or restarted."""
    for one in events:
        address = run.address("infra")
        about = (one["time_s"], "server")
        if one["state"] == ServerState.LOST:
            yield _moment(*about, f"The server {one['server']} was lost.", one["reason"], address)
        elif one["state"] == ServerState.GIVEN_UP:
            text = f"The server {one['server']} was given up."
            yield _moment(*about, text, one["reason"], address)
        elif one["state"] == ServerState.STARTING and one["life"] > 1:
            text = f"The server {one['server']} was started again, for the {one['life']}. time."
            yield _moment(*about, text, one["reason"], address)


def _evals(run: OneRun, points: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Yield the evals whose outcome is not as planned."""
    for one in points:
        if one.get("state") != EvalPointState.DONE:
            text = f"The eval {one.get('name')} {one.get('tag')} was {one.get('state')}."
            folder = one.get("folder")
            address = run.address("evals", folder) if folder else ""
            yield _moment(one.get("time_s"), "eval", text, str(one.get("reason", "")), address)


def _first_untrained(run: OneRun) -> Iterator[JsonObject]:
    """Yield the first step in which nothing was trained."""
    for first, last in untrained(run)[:1]:
        text = f"Step {first} is the first one in which nothing was trained"
        text += "." if first == last else f", and so it stays until step {last}."
        time_s = None
        if "time_s" in run.metrics.names():
            (at,) = run.metrics.columns(["time_s"], first=first, last=first).values["time_s"]
            time_s = None if math.isnan(at) else at
        address = run.address("rollouts") + f"?step_from={first}&step_to={first}"
        yield _moment(time_s, "step", text, "no group had a signal", address)


def eval_points(run: OneRun) -> list[JsonObject]:
    """Return the outcome of each eval, with its folder if that exists."""
    there = {path.name for path in folders(run.path, "evals")}
    found: list[JsonObject] = []
    for point in run.eval_points.rows():
        # Older runs recorded no folder, and named it so where the name of the eval allowed it.
        folder = point.get("folder") or f"{point.get('name')}-{point.get('tag')}"
        found.append({**point, "folder": folder if folder in there else None})
    return found


def server_events(run: OneRun) -> list[JsonObject]:
    """Return the events of servers, oldest first."""
    # Every field of the schema, of which a line may lack some.
    fields = {"server": "", "role": "", "life": 1, "state": "", "version": None, "reason": ""}
    return [{**fields, **row} for row in run.server_events.rows()]


class SmallFiles:
    """Reads JSON files; one that is damaged or too large is left out, with a note on the page."""

    def __init__(self, run: Path) -> None:
        """Read in the resolved folder `run`."""
        self._run = run
        self.problems: list[str] = []

    def read(self, name: str) -> JsonObject | None:
        """Return the object in a file of the run; None if there is none."""
        try:
            found = object_in(self._run, name)
        except NotThereError as error:
            self.problems.append(str(error))
            return None
        if found is None and inside(self._run, name) is not None:
            self.problems.append(damaged(name))
        return found

    def manifest(self, name: str) -> JsonObject | None:
        """Return the time of a checkpoint; None if it is not complete."""
        path = inside(self._run, "checkpoints", name, "checkpoint.json")
        stamp = None if path is None else stamp_of(path)
        if path is None or stamp is None:
            return None
        if stamp.size > _MAX_MANIFEST_BYTES:
            self.problems.append(
                f"checkpoints/{name}/checkpoint.json has {stamp.size / 2**20:,.0f} MiB, and at "
                f"most {_MAX_MANIFEST_BYTES // 2**20} are read; the checkpoint is not listed"
            )
            return None
        found = _manifest(path, stamp)
        # A run that goes on removes old checkpoints, also between the two looks at this one.
        if found is None and path.exists():
            self.problems.append(damaged(f"checkpoints/{name}/checkpoint.json"))
        return found


@lru_cache(maxsize=4096)
def _manifest(path: Path, stamp: Stamp) -> JsonObject | None:
    """Read the shown fields of a manifest; `stamp` identifies its content."""
    found = read_json(path)
    return None if found is None else {name: found.get(name) for name in ("step", "created_at")}


def checkpoints(run: OneRun, small: SmallFiles | None = None) -> list[JsonObject]:
    """Return the checkpoints of the run, in order of time."""
    small = small or SmallFiles(run.path)
    found: list[JsonObject] = []
    for folder in folders(run.path, "checkpoints")[:_MAX_CHECKPOINTS]:
        about = small.manifest(folder.name)
        if about is not None:
            found.append({"name": folder.name, **about})
    return sorted(found, key=lambda one: str(one["created_at"]))
