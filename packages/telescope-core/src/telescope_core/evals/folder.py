"""The folder of one eval: `eval.json`, `rollouts.jsonl`, `attempts.jsonl` and `results.json`.

`rollouts.jsonl` grows by one line with each finished rollout, and `attempts.jsonl` with each
attempt at one that was replaced or cut short. What a resumed eval plays again stands twice in
`rollouts.jsonl` until it ends. A folder has one writer at a time.
"""

import json
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from pydantic import TypeAdapter, ValidationError

from telescope_core.base.code_files import file_changes
from telescope_core.base.errors import ConfigError, NoRoomError, TelescopeError
from telescope_core.base.folders import make_folder
from telescope_core.base.secret_names import without_secrets, without_values
from telescope_core.base.types import JsonValue, Sampling
from telescope_core.evals.result import EvalResult
from telescope_core.evals.settings import UNSENT, EvalSettings
from telescope_core.records.files import (
    append_content,
    append_json_line,
    damaged,
    plain,
    read_json,
    read_json_lines,
    why_no_object,
    write_json,
    write_state,
)
from telescope_core.records.folders import claimed, whole_file
from telescope_core.records.identity import RunInfo, RunState, new_run_info, now
from telescope_core.records.rows import (
    RolloutRow,
    row_from_json,
    row_to_json,
    without_pictures,
)

_RESULT = TypeAdapter(EvalResult)
_SETTINGS = TypeAdapter(EvalSettings)
_FILES = ("environment_files", "model_files")
_MAY_CHANGE = frozenset(
    {
        *("num_examples", "positions", "rollouts", "ks"),
        *("concurrency", "max_retries", "max_failures_in_a_row", "base_url"),
        *_FILES,  # compared one by one
    }
)
"""Settings that may differ when an eval is continued: its size, its speed and its place."""


_IF_USED = "choose another --output, or add --resume to continue an eval"

RolloutKey: TypeAlias = tuple[str, int]
"""Group id and index in the group."""


class RecordedRows(NamedTuple):
    """The rollouts of a folder, and the lines that could not be read."""

    rows: list[RolloutRow]
    problems: list[str]
    """One line for each rollout that could not be read: its place, and the reason."""


class EvalFolder:
    """Writes and reads the folder of one eval; it holds no secrets, because others may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hide: Collection[str] = ()
        """Values of secrets that are removed from everything that is written from now on."""
        self.if_gone = (
            "if it was moved, repeat the command with its new place as --output and --resume"
        )
        """What to do if the folder was removed meanwhile, for errors."""
        self._is_resumed = False

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        manifest: Mapping[str, JsonValue],
        if_used: str = _IF_USED,
    ) -> "EvalFolder":
        """Start an eval in `path`, which must be new or empty; `if_used` says what to do otherwise.

        `manifest` holds everything that affects the results; `resume` decides which parts may
        change.
        """
        folder = cls(path)
        folder._require_free(if_used)
        make_folder(path)
        with claimed(path):
            folder._require_free(if_used)
            folder._write(manifest, new_run_info(path.name))
        return folder

    @classmethod
    def create_beside(cls, path: Path, *, manifest: Mapping[str, JsonValue]) -> "EvalFolder":
        """Start an eval in `path`, or in `path`-2, `path`-3, ... if other evals have the name."""
        make_folder(path.parent)
        for number in count(1):
            free = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                free.mkdir()
            except FileExistsError:
                continue
            return cls.create(free, manifest=manifest)
        raise AssertionError("there is always another number")

    @classmethod
    def resume(cls, path: Path, *, manifest: Mapping[str, JsonValue]) -> "EvalFolder":
        """Continue the eval in `path`, or let it grow.

        Examples, rollouts per example and k may become more, and concurrency, retries and the
        address of the endpoint may be others. Raises ConfigError when anything else differs, and
        while another process writes to the folder.
        """
        folder = cls.require_resumable(path, manifest=manifest)
        with claimed(path):
            cls.require_resumable(path, manifest=manifest)
            # Of an earlier session that was killed before it could do so.
            folder._remove_torn_line()
            folder._move_replaced()
            folder._is_resumed = True
            folder._write(manifest, new_run_info(path.name))
        return folder

    @classmethod
    def require_resumable(cls, path: Path, *, manifest: Mapping[str, JsonValue]) -> "EvalFolder":
        """Return the folder if `resume` can continue its eval, or raise; writes nothing."""
        if not path.exists():
            raise ConfigError(
                f"{path}: there is no such folder, so there is nothing to continue; begin the eval "
                "without --resume, or correct --output"
            )
        folder = cls(path)
        # Values of secrets are not in the folder: they come again with the command.
        then, now = (
            without_secrets(_with_unset(_completed(cast(Any, one))), keeps_names=False)
            for one in (folder.manifest(), plain(manifest))
        )
        folder._require_ended()
        if refused := _refused(then, now):
            raise ConfigError(
                f"{path} was started with different settings ({'; '.join(refused)}); use the "
                "same settings, or another --output"
            )
        return folder

    @classmethod
    def require_free(cls, path: Path) -> None:
        """Raise ConfigError if `create` would refuse `path`; writes nothing."""
        cls(path)._require_free(_IF_USED)

    @classmethod
    def holds_eval(cls, path: Path) -> bool:
        """Return whether `path` is the folder of an eval."""
        return (path / "eval.json").is_file() or (path / "results.json").is_file()

    def manifest(self) -> dict[str, Any]:
        """Return the manifest that the eval was started with, without secrets."""
        fields = read_json(self.path / "eval.json")
        if fields is None:
            why = why_no_object(self.path / "eval.json")
            raise ConfigError(f"{self.path}: expected the folder of an eval, but {why}")
        return without_secrets(fields["manifest"])

    def info(self) -> RunInfo | None:
        """Return the identity and state of the eval; None when there are only results."""
        fields = read_json(self.path / "eval.json")
        return RunInfo.model_validate(fields["run"]) if fields else None

    def append(self, row: RolloutRow) -> None:
        """Record one finished rollout. Raises TelescopeError if the folder was removed."""
        self._require_here()
        append_json_line(self.path / "rollouts.jsonl", without_values(row_to_json(row), self.hide))

    def append_attempt(self, row: RolloutRow) -> None:
        """Record an attempt that is not the final rollout: it was played again, or canceled.

        Raises TelescopeError if the folder was removed.
        """
        self._require_here()
        append_json_line(self.path / "attempts.jsonl", without_values(row_to_json(row), self.hide))

    def attempts(self) -> list[RolloutRow]:
        """Return the attempts recorded by `append_attempt`; none of them is among the `rows`."""
        lines = read_json_lines(self.path / "attempts.jsonl")
        return [row_from_json(fields) for fields in lines]

    def rows(self, pictures_of: Container[RolloutKey] | None = None) -> list[RolloutRow]:
        """Return the readable rollouts recorded so far; see `read`."""
        return self.read(pictures_of).rows

    def read(self, pictures_of: Container[RolloutKey] | None = None) -> RecordedRows:
        """Return the rollouts recorded so far, and which of them could not be read.

        For a rollout played twice, this is the later record. A last line that a kill cut short is
        no problem: its rollout was not finished. Those that are not in `pictures_of` come
        without their pictures, which may not fit into the memory; None = all come whole.
        """
        rows: dict[RolloutKey, RolloutRow] = {}
        problems: list[str] = []
        for number, line in enumerate(self._lines(), start=1):
            row = _row_in(line)
            if isinstance(row, RolloutRow):
                key = row.group_id, row.index
                is_whole = pictures_of is None or key in pictures_of
                rows[key] = row if is_whole else without_pictures(row)
            elif line.endswith(b"\n"):
                problems.append(f"rollouts.jsonl, line {number}: {row}")
        return RecordedRows(list(rows.values()), problems)

    def groups(self) -> Iterator[list[RolloutRow]]:
        """Yield the readable rollouts of each example, whole; one example is read at a time."""
        places: dict[str, dict[int, int]] = {}
        start = 0
        for line in self._lines():
            row = _row_in(line)
            if isinstance(row, RolloutRow):
                places.setdefault(row.group_id, {})[row.index] = start
            start += len(line)
        if not places:
            return
        with (self.path / "rollouts.jsonl").open("rb") as stream:
            for group in places.values():
                rows: list[RolloutRow] = []
                for place in group.values():
                    stream.seek(place)
                    rows.append(row_from_json(json.loads(stream.readline())))
                yield rows

    def _lines(self) -> Iterator[bytes]:
        path = self.path / "rollouts.jsonl"
        if path.exists():
            with path.open("rb") as stream:
                yield from stream

    def _remove_torn_line(self) -> None:
        """Remove a last line that a kill cut short; its rollout is played again."""
        end, last = 0, b""
        for line in self._lines():
            end, last = end + len(line), line
        if last and not last.endswith(b"\n") and isinstance(_row_in(last), Exception):
            os.truncate(self.path / "rollouts.jsonl", end - len(last))

    def _move_replaced(self) -> None:
        """Move the earlier records of rollouts that were played twice to `attempts.jsonl`."""
        latest: dict[RolloutKey, int] = {}
        replaced: set[int] = set()
        for number, line in enumerate(self._lines()):
            row = _row_in(line)
            if isinstance(row, RolloutRow):
                key = (row.group_id, row.index)
                if key in latest:
                    replaced.add(latest[key])
                latest[key] = number
        if not replaced:
            return
        attempts = self.path / "attempts.jsonl"
        # A kill before the rename leaves lines in both files: they are not added once more.
        written = attempts.read_bytes() if attempts.exists() else b""
        there = set(written.splitlines(keepends=True))
        for number, line in enumerate(self._lines()):
            if number in replaced and line not in there:
                append_content(attempts, line)
        with whole_file(self.path / "rollouts.jsonl") as temporary, temporary.open("wb") as stream:
            stream.writelines(
                line for number, line in enumerate(self._lines()) if number not in replaced
            )

    def finish(self, result: EvalResult, *, stopped: str = "") -> None:
        """Write the result and mark the eval as finished, or as failed if `stopped` says why.

        Raises TelescopeError if the folder was removed.
        """
        self._require_here()
        write_json(self.path / "results.json", without_values(result_to_json(result), self.hide))
        self._end(RunState.FAILED if stopped else RunState.FINISHED, stopped)

    def fail(self, reason: str) -> None:
        """Mark the eval as failed, and record why; of a removed folder there is nothing to mark."""
        if self.info() is not None:
            self._end(RunState.FAILED, reason)

    def end_unless_ended(self, state: RunState, reason: str) -> None:
        """Mark the eval as failed or interrupted, if it has not ended yet."""
        info = self.info()
        if info is not None and info.state is RunState.RUNNING:
            self._end(state, reason)

    def result(self) -> EvalResult | None:
        """Return the result; None when the eval has none. Raises ConfigError for a damaged one."""
        return read_result(self.path)

    def settings(self) -> EvalSettings | None:
        """Return the settings of the eval, also of one that has not ended; None if it holds none.

        The manifest of an eval of a training run has them in another form, and so has that of a
        rescore: only their results hold them. Raises ConfigError for a damaged result.
        """
        result = self.result()
        if result is not None:
            return result.settings
        manifest = self.manifest()
        try:
            return _SETTINGS.validate_python(_as_read(manifest, manifest), strict=False)
        except ValidationError:
            return None

    def _require_here(self) -> None:
        """Raise TelescopeError if the folder was removed, which writing would make anew."""
        if not (self.path / "eval.json").exists():
            raise TelescopeError(
                f"the folder {self.path} is gone: it was removed or moved while the eval went on; "
                f"{self.if_gone}"
            )

    def _require_free(self, if_used: str) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; choose another --output")
        self._require_ended()
        if self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} exists and is not an empty folder; {if_used}")

    def _require_ended(self) -> None:
        info = self.info()
        if info is not None and info.observed_state is RunState.RUNNING:
            raise ConfigError(
                f"{self.path} belongs to an eval that is still running (process {info.pid} on "
                f"{info.host}, since {info.started_at}); wait for it, stop it, or choose another "
                "--output"
            )

    def _end(self, state: RunState, reason: str) -> None:
        info = self.info()
        assert info is not None, "an eval is started before it ends"
        if self._is_resumed:
            # Without room for it, the next session does it.
            with suppress(NoRoomError):
                self._move_replaced()
        changes = {"state": state, "reason": reason, "ended_at": now()}
        self._write(self.manifest(), info.model_copy(update=changes))

    def _write(self, manifest: Mapping[str, JsonValue], info: RunInfo) -> None:
        run = without_values(info.model_dump(mode="json"), self.hide)
        shown = without_secrets(plain(manifest))
        write_state(self.path / "eval.json", {"manifest": shown, "run": run})


def _with_unset(settings: Any) -> Any:
    """Return the settings of an eval at an endpoint, with null for sampling that was not sent.

    Earlier versions recorded there the value that changes nothing.
    """
    found: dict[str, Any] = {**settings} if isinstance(settings, Mapping) else {}
    if not isinstance(found.get("sampling"), dict):
        return cast(Any, settings)
    sampling: dict[str, Any] = found["sampling"]
    unset = {name: None for name, value in UNSENT.items() if sampling.get(name) == value}
    return {**found, "sampling": {**sampling, **unset}}


def _completed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with the defaults of settings that the version which wrote it lacked."""
    sampling: Any = manifest.get("sampling", {})
    if isinstance(sampling, Mapping):  # else the file is damaged, and differs
        sampling = {**_defaults(Sampling), **cast(Mapping[str, Any], sampling)}
    return {**_defaults(EvalSettings), **manifest, "sampling": sampling}


def _defaults(settings: type[EvalSettings | Sampling]) -> dict[str, JsonValue]:
    found = {one.name: one.default for one in fields(settings) if one.default is not MISSING}
    return {name: plain(value) for name, value in found.items()}


def _as_read(manifest: Mapping[str, Any], settings: Any) -> Any:
    """Return the settings that an eval with `manifest` has recorded, as they are meant today."""
    # Evals of a training run have no URL, and sample with all of their settings.
    return _with_unset(settings) if "base_url" in manifest else settings


def _row_in(line: bytes) -> RolloutRow | Exception:
    """Return the row in a line of `rollouts.jsonl`, or why it cannot be read."""
    try:
        return row_from_json(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        return error


def _refused(old: Mapping[str, Any], new: JsonValue) -> list[str]:
    """Return one text for each setting that keeps an eval from being continued."""
    assert isinstance(new, Mapping), "a manifest is an object"
    now: Mapping[str, Any] = new
    changed = sorted({key for key in {*old, *new} if old.get(key) != new.get(key)})
    refused = [
        text
        for key in changed
        if key not in _MAY_CHANGE
        for text in _differences(key, old.get(key), now.get(key))
    ]
    # Evals that were begun by an earlier version have none of them.
    for key in _FILES:
        refused += file_changes(old.get(key) or {}, now.get(key) or {})
    for key in ("num_examples", "rollouts"):
        before, after = old.get(key), new.get(key)
        if isinstance(before, int) and isinstance(after, int) and after < before:
            refused.append(f"{key}: {before} then, {after} now; it may only grow")
    if not _positions(old) <= _positions(new):
        refused.append("other examples; those of the start must be among them")
    return refused


def _differences(key: str, then: JsonValue, now: JsonValue) -> list[str]:
    """Return a text for each field of a setting that differs; one for a setting without fields."""
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return [f"{key}: {then!r} then, {now!r} now"]
    fields = sorted({name for name in {*then, *now} if then.get(name) != now.get(name)})
    return [
        text
        for name in fields
        for text in _differences(f"{key}.{name}", then.get(name), now.get(name))
    ]


def _positions(manifest: Mapping[str, Any]) -> set[int]:
    chosen = manifest.get("positions") or range(manifest.get("num_examples") or 0)
    return set(chosen)


def write_result(folder: Path, result: EvalResult) -> None:
    """Write `results.json` in `folder` atomically."""
    write_json(folder / "results.json", result_to_json(result))


def result_to_json(result: EvalResult) -> dict[str, JsonValue]:
    """Return `result` as a JSON object, without secrets."""
    return without_secrets(asdict(result))


class ReadResults(NamedTuple):
    """The results of several evals, and those that could not be read."""

    results: dict[str, EvalResult]
    """Name of the eval's folder -> result."""
    problems: dict[str, str]
    """Name of the folder of an eval whose result cannot be read -> the reason."""


def read_results(folders: Iterable[Path]) -> ReadResults:
    """Return the results in `folders`; evals without a result are in neither part."""
    results: dict[str, EvalResult] = {}
    problems: dict[str, str] = {}
    for folder in folders:
        try:
            result = read_result(folder)
        except ConfigError as error:
            problems[folder.name] = str(error)
            continue
        if result is not None:
            results[folder.name] = result
    return ReadResults(results, problems)


def read_result(folder: Path) -> EvalResult | None:
    """Return the result in `folder`; None when there is none.

    Raises ConfigError for a result that cannot be read.
    """
    path = folder / "results.json"
    fields = read_json(path)
    if fields is None:
        if path.exists():
            raise ConfigError(damaged(str(path)))
        return None
    about: dict[str, Any] = read_json(folder / "eval.json") or {}
    manifest: dict[str, Any] = about.get("manifest") or {}
    if fields.get("environment_settings") is None:
        fields["environment_settings"] = manifest.get("env")
    fields["settings"] = _as_read(manifest, fields.get("settings"))
    # Evals of earlier versions have values of secrets there.
    fields["environment_settings"] = without_secrets(fields["environment_settings"])
    try:
        return _RESULT.validate_python(fields, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
