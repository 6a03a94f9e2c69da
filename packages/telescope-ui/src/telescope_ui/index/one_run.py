"""`OneRun`: one run folder, and the parts that have been read so far."""

import os
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import msgspec

from telescope_core.base.decoders import convert
from telescope_core.base.errors import ConfigError
from telescope_core.base.secret_names import without_secrets
from telescope_core.records.eval_points import EvalPoint
from telescope_core.records.files import record_from, require_utf8
from telescope_core.records.identity import RunInfo
from telescope_core.records.restarts import Restart
from telescope_core.records.run_folder import SETTINGS_FILE, RunFolder
from telescope_ui.base.answers import JsonObject
from telescope_ui.files.database import Database
from telescope_ui.files.json_lines import JsonLines
from telescope_ui.files.run_files import Stamp, inside, object_in, stamp_of, stamp_of_folder
from telescope_ui.index.course import Course
from telescope_ui.index.metrics_table import MetricsTable
from telescope_ui.index.run_index import RunIndex
from telescope_ui.index.stage_index import StageIndex


class _ServerLine(msgspec.Struct):
    """What pages show of an event of a server; lines may lack all but the time."""

    time_s: float
    server: str = ""
    role: str = ""
    life: int = 1
    state: str = ""
    version: int | None = None
    reason: str = ""


def _is_record(row: JsonObject, kind: type) -> bool:
    return record_from(row, kind) is not None


def _is_server_event(row: JsonObject) -> bool:
    try:
        convert(row, _ServerLine)
    except msgspec.ValidationError:
        return False
    return True


class SettingsOrigin(NamedTuple):
    """Origin of the values of settings, by `section.key`."""

    given: list[str] | None
    """Settings that were set; None if the run did not record it."""
    chosen: list[str] | None
    """Settings that differ from their defaults; None if the run did not record it."""
    defaults: dict[str, Any]


class OneRun:
    """A run in an opened folder. Everything is read on first use."""

    changing = (
        *("run.json", "metrics.jsonl", "servers.jsonl", "eval_points.jsonl", "restarts.jsonl"),
        *("rollouts", "events", "calls", "logs"),
    )
    """Files and folders that change during the run."""

    def __init__(self, key: str, path: Path, opened: Path, *, database: Database) -> None:
        """`path` must be resolved; `opened` is the folder that the user named."""
        self.key = key
        self.path = path
        self.opened = opened
        self.named = opened / os.path.relpath(path, os.path.realpath(opened))
        """Its folder as a command finds it where the server was started."""
        self.folder = RunFolder(path)
        self.metrics = MetricsTable(path)
        self.course = Course(path)
        self.index = RunIndex(path, database)
        self.stages = StageIndex(path, self.index, database)
        self.restarts = JsonLines(path, "restarts.jsonl", is_row=partial(_is_record, kind=Restart))
        self.eval_points = JsonLines(
            path, "eval_points.jsonl", is_row=partial(_is_record, kind=EvalPoint)
        )
        self.server_events = JsonLines(path, "servers.jsonl", is_row=_is_server_event)
        self.json_lines = (self.restarts, self.eval_points, self.server_events)
        self._lock = Lock()
        self._info: tuple[Stamp, RunInfo] | None = None
        self._config: tuple[Stamp | None, dict[str, Any]] | None = None
        self._kept: tuple[Sequence[Stamp | None], JsonObject] | None = None

    def close(self) -> None:
        """Release the index."""
        self.stages.close()
        self.index.close()

    def info(self) -> RunInfo:
        """Return identity and state; raises ConfigError for a folder that cannot be read."""
        path = inside(self.path, "run.json")
        stamp = None if path is None else stamp_of(path)
        if stamp is None:
            raise ConfigError(f"{self.path.name} has no run.json any more; it was moved or deleted")
        require_utf8(self.path)
        if self._info is None or self._info[0] != stamp:
            object_in(self.path, "run.json")
            self._info = (stamp, self.folder.info())
        return self._info[1]

    def config(self) -> dict[str, Any]:
        """Return the settings; empty if they cannot be read."""
        path = inside(self.path, "config.json")
        stamp = None if path is None else stamp_of(path)
        if self._config is None or self._config[0] != stamp:
            # Runs of earlier versions have values of secrets there.
            self._config = (stamp, without_secrets(object_in(self.path, "config.json") or {}))
        return self._config[1]

    def settings_origin(self) -> SettingsOrigin:
        """Return settings that were set, settings that differ from defaults, and all defaults."""
        found = object_in(self.path, SETTINGS_FILE) or {}
        given, chosen, defaults = (found.get(name) for name in ("set", "chosen", "defaults"))
        is_known = isinstance(chosen, list) and isinstance(defaults, dict)
        return SettingsOrigin(
            given=cast(list[str], given) if is_known and isinstance(given, list) else None,
            chosen=cast(list[str], chosen) if is_known else None,
            defaults=cast(dict[str, Any], defaults) if is_known else {},
        )

    def is_kept(self, stamps: Sequence[Stamp | None]) -> bool:
        """Return whether `kept` has the result for files with these stamps."""
        return self._kept is not None and self._kept[0] == stamps

    def kept(self, stamps: Sequence[Stamp | None], read: Callable[[], JsonObject]) -> JsonObject:
        """Return the cached result of `read` while the run's files have the same stamps."""
        if self._kept is None or self._kept[0] != stamps:
            self._kept = stamps, read()
        return self._kept[1]

    def setting(self, name: str) -> Any:
        """Return the setting `section.key`; None if it is not known."""
        value: Any = self.config()
        for part in name.split("."):
            if not isinstance(value, dict):
                return None
            value = cast(dict[str, Any], value).get(part)
        return value

    def is_discarding(self) -> bool:
        """Return whether the run leaves out groups without an advantage, as it does by default."""
        return self.setting("rollout.discard_group_zero_advantage") is not False

    def line_problems(self) -> list[str]:
        """Return what is left out of the small files of JSON lines, each as a sentence."""
        return [problem for lines in self.json_lines for problem in lines.problems()]

    def brief(self) -> JsonObject:
        """Return the facts about a run for every page."""
        info = self.info()
        return {"key": self.key, "name": info.name, "state": info.observed_state.value}

    def changed_s(self) -> float:
        """Return the time of the last change in the folder, in Unix seconds."""
        # Files of a run that goes on may go between two looks.
        stamps = [stamp_of_folder(self.path, name) for name in self.changing]
        return max((one.mtime_ns / 1e9 for one in stamps if one is not None), default=0.0)

    def address(self, *parts: object) -> str:
        """Return the address of a page of this run."""
        return "/".join(["/runs", self.key, *map(escaped_part, parts)])


def settings_of(run: OneRun) -> JsonObject:
    """Return the settings that distinguish runs."""
    if isinstance(run.setting("model"), str):
        # Settings of supervised training have no sections.
        steps, model = run.setting("number_of_steps"), run.setting("model")
        return {"number_of_steps": steps, "model": model, "algorithm": "sft"}
    return {
        "number_of_steps": run.setting("run.number_of_steps"),
        "model": run.setting("model.model"),
        "algorithm": run.setting("algorithm.algorithm"),
    }


def escaped_part(part: object) -> str:
    """Return one part of a path, escaped for an address."""
    text = str(part).encode("utf-8", "replace")
    return "".join(
        chr(byte) if byte < 128 and (chr(byte).isalnum() or byte in b"._-") else f"%{byte:02X}"
        for byte in text
    )


def seconds_of(iso: str | None) -> float | None:
    """Return the Unix time of a time in ISO 8601; None if it cannot be parsed."""
    try:
        return datetime.fromisoformat(iso or "").timestamp()
    except ValueError:
        return None
