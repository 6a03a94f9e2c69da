"""The folder of one eval: `eval.json`, `rollouts.jsonl` and `results.json`.

`rollouts.jsonl` grows by one line with each finished rollout.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from telescope_core.errors import ConfigError
from telescope_core.evals.result import EvalResult
from telescope_core.records.files import (
    append_json_line,
    plain,
    read_json,
    read_json_lines,
    write_json,
)
from telescope_core.records.identity import RunInfo, RunState, new_run_info, now
from telescope_core.records.rows import RolloutRow, row_from_json, row_to_json
from telescope_core.types import JsonValue

_RESULT = TypeAdapter(EvalResult)


class EvalFolder:
    """Writes and reads the folder of one eval; keeps no state except its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, *, manifest: Mapping[str, JsonValue]) -> "EvalFolder":
        """Start an eval in `path`, which must be new or empty.

        `manifest` holds everything that affects the results; a resumed eval must have the same one.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"{path} exists and is not an empty folder; choose another --output, "
                "or add --resume to continue an interrupted eval"
            )
        folder = cls(path)
        folder._write(manifest, new_run_info(path.name))
        return folder

    @classmethod
    def resume(cls, path: Path, *, manifest: Mapping[str, JsonValue]) -> "EvalFolder":
        """Continue the eval in `path`; raises ConfigError when any setting differs."""
        folder = cls(path)
        old, new = folder.manifest(), plain(manifest)
        assert isinstance(new, Mapping), "a manifest is an object"
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        if changed:
            listed = "; ".join(
                f"{key}: {old.get(key)!r} then, {new.get(key)!r} now" for key in changed
            )
            raise ConfigError(
                f"{path} was started with different settings ({listed}); use the same settings"
            )
        folder._write(manifest, new_run_info(path.name))
        return folder

    @classmethod
    def holds_eval(cls, path: Path) -> bool:
        """Whether `path` is the folder of an eval."""
        return (path / "eval.json").is_file() or (path / "results.json").is_file()

    def manifest(self) -> dict[str, Any]:
        """Return the manifest that the eval was started with."""
        fields = read_json(self.path / "eval.json")
        if fields is None:
            raise ConfigError(
                f"{self.path}: expected the folder of an eval, but it has no eval.json"
            )
        return fields["manifest"]

    def info(self) -> RunInfo | None:
        """Return the identity and state of the eval; None when there are only results."""
        fields = read_json(self.path / "eval.json")
        return RunInfo.model_validate(fields["run"]) if fields else None

    def append(self, row: RolloutRow) -> None:
        """Record one finished rollout."""
        append_json_line(self.path / "rollouts.jsonl", row_to_json(row))

    def rows(self) -> list[RolloutRow]:
        """Return the rollouts recorded so far; for a rollout played twice, the later record."""
        rows = (row_from_json(fields) for fields in read_json_lines(self.path / "rollouts.jsonl"))
        return list({(row.group_id, row.index): row for row in rows}.values())

    def finish(self, result: EvalResult) -> None:
        """Write the result and mark the eval as finished."""
        write_result(self.path, result)
        self._end(RunState.FINISHED, "")

    def fail(self, reason: str) -> None:
        """Mark the eval as failed, and record why."""
        self._end(RunState.FAILED, reason)

    def result(self) -> EvalResult | None:
        """Return the result; None when the eval has none."""
        return read_result(self.path)

    def _end(self, state: RunState, reason: str) -> None:
        info = self.info()
        assert info is not None, "an eval is started before it ends"
        changes = {"state": state, "reason": reason, "ended_at": now()}
        self._write(self.manifest(), info.model_copy(update=changes))

    def _write(self, manifest: Mapping[str, JsonValue], info: RunInfo) -> None:
        run = info.model_dump(mode="json")
        write_json(self.path / "eval.json", {"manifest": manifest, "run": run})


def write_result(folder: Path, result: EvalResult) -> None:
    """Write `results.json` in `folder` atomically."""
    write_json(folder / "results.json", result_to_json(result))


def result_to_json(result: EvalResult) -> dict[str, JsonValue]:
    """Return `result` as a JSON object."""
    return asdict(result)


def read_result(folder: Path) -> EvalResult | None:
    """Return the result in `folder`; None when there is none."""
    fields = read_json(folder / "results.json")
    if fields is None:
        return None
    try:
        return _RESULT.validate_python(fields, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{folder / 'results.json'}: {where}: {first['msg']}") from None
