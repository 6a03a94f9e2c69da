"""`RunFolder`: writes and reads everything that one run records.

Files are appended line by line, or written and then renamed, so that a folder can be read during
the run and after it was killed. A RunFolder keeps no open files, and no state except its path and
what a resume has replaced.
"""

import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from telescope_core.base.environment_record import EnvironmentRecord
from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.folders import make_folder
from telescope_core.base.secret_names import without_secrets, without_values
from telescope_core.base.types import JsonValue, RolloutStatus
from telescope_core.records.blocks import read_blocks
from telescope_core.records.eval_points import EvalPoint
from telescope_core.records.events import AttemptEvent, read_events
from telescope_core.records.files import (
    append_json_line,
    is_of_step,
    num_damaged_lines,
    read_json,
    read_json_lines,
    read_records,
    record_from,
    require_utf8,
    why_no_object,
    write_json,
    write_json_lines,
    write_state,
)
from telescope_core.records.folders import claimed, whole_file
from telescope_core.records.identity import (
    FORMAT_VERSION,
    Resume,
    RunInfo,
    RunState,
    new_run_info,
    now,
    resumed_run_info,
)
from telescope_core.records.parquet import (
    count_rows,
    examples_of_rows,
    read_rows,
    rewards_of_rows,
    write_rows,
    writer_options,
)
from telescope_core.records.restarts import Restart
from telescope_core.records.rows import RolloutRow, without_secrets_in
from telescope_core.records.servers import ServerEvent
from telescope_core.records.step_files import (
    StepPart,
    merge,
    part_of,
    parts_in,
    separate,
    step_path,
)
from telescope_core.records.timeline import (
    CALLS_FOLDER,
    GAUGES_FOLDER,
    TIMELINE_FOLDER,
    GaugeSample,
    ModelCall,
    TimelineSpan,
)
from telescope_core.records.token_facts import (
    TOKEN_FACTS_FOLDER,
    WRITER_OPTIONS,
    TurnFacts,
    read_facts,
    write_facts,
)

SETTINGS_FILE = "settings.json"
"""File with the settings that were set, those that differ from their defaults, and all defaults."""

_KIND_OF_LINES = {
    "servers.jsonl": ServerEvent,
    "restarts.jsonl": Restart,
    "eval_points.jsonl": EvalPoint,
}
"""File of a run -> type of the record in each of its lines."""


class RunFolder:
    """The folder of one run; `create` starts one, `open` reads one."""

    def __init__(self, path: Path | str) -> None:
        self.path = path = Path(path)
        self.rollouts_path = path / "rollouts"
        """Folder of the rollouts; `records.step_files` names the files."""
        self.attempts_path = path / "attempts"
        """Folder of attempts that no step was trained on, in files as those of the rollouts."""
        self.events_path = path / "events"
        """Folder of the events of attempts; `records.step_files` names the files."""
        self.evals_path = path / "evals"
        """Folder of the evals of the run, with one folder for each."""
        self.logs_path = path / "logs"
        """Folder for the logs of the run's processes."""
        self.checkpoints_path = path / "checkpoints"
        """Folder of the checkpoints."""
        self.report_path = path / "report.html"
        """Path of the HTML report."""
        self.token_facts_path = path / TOKEN_FACTS_FOLDER
        """Folder of the trainer's measurements of tokens; `records.step_files` names the files."""
        self.hide: Collection[str] = ()
        """Values of secrets that are removed from everything an environment reports about
        rollouts."""
        self._finished = dict[str, bytes]()
        """Files of a finished run that is continued, until its records are deleted."""

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        config: Mapping[str, JsonValue],
        name: str = "",
        replace: bool = False,
    ) -> "RunFolder":
        """Start a run in `path`, which must be new or empty.

        With `replace`, an older run in the same folder is removed. A run that is still running and
        a folder that does not hold a run are refused even then, and so is a path that is not UTF-8.
        """
        require_utf8(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(_no_run(path))
        make_folder(path)
        run = cls(path)
        with claimed(path):
            if any(path.iterdir()):
                _make_way(path, replace=replace)
            for folder in (run.rollouts_path, run.evals_path, run.logs_path):
                folder.mkdir()
            write_json(path / "config.json", without_secrets(config))
            run._write_info(new_run_info(name or path.name))
        return run

    @classmethod
    def begin(cls, path: Path, *, name: str, has_ended_elsewhere: bool = False) -> "RunFolder":
        """Record that `name` continues in `path` from now on; existing files stay.

        For training that keeps metrics alone, such as `telescope sft`. A finished run that ends
        before `drop_after` is called is as it was. A run that is still running is refused, see
        `require_ended`.
        """
        make_folder(path)
        run = cls(path)
        with claimed(path):
            run.require_ended(has_ended_elsewhere=has_ended_elsewhere)
            if (read_json(path / "run.json") or {}).get("state") == RunState.FINISHED:
                run._remember_finished()
            run._write_info(new_run_info(name))
        return run

    @classmethod
    def open(cls, path: Path | str) -> "RunFolder":
        """Return the run in `path`; raises ConfigError when there is none."""
        run = cls(path)
        if not run.path.is_dir():
            raise ConfigError(f"{path}: no such folder; expected the folder of a run")
        run.info()
        return run

    @classmethod
    def resume(
        cls,
        path: Path,
        *,
        config: Mapping[str, JsonValue],
        resume: Resume,
        has_ended_elsewhere: bool = False,
    ) -> "RunFolder":
        """Continue the run in `path`; its records stay until `drop_after` is called.

        A finished run that ends before that is as it was, because its results are still valid. A
        run that is still running is refused. `has_ended_elsewhere`: the caller knows that the run
        has ended if it was on another machine.
        """
        run = cls.open(path)
        with claimed(path):
            info = run.info()
            if not (has_ended_elsewhere and info.may_run_elsewhere):
                _require_ended(path, info)
            if info.state is RunState.FINISHED:
                run._remember_finished()
            run._write_info(resumed_run_info(info, resume))
            write_json(path / "config.json", without_secrets(config))
        return run

    def go_back(self, restart: Restart) -> None:
        """Record that a running run goes back to `restart.step` and takes later steps again.

        Their records are deleted. Raises TelescopeError if the folder was removed.
        """
        self.require_here()
        append_json_line(self.path / "restarts.jsonl", asdict(restart))
        self.drop_after(restart.step)

    def restarts(self) -> list[Restart]:
        """Return the restarts of trainer ranks, oldest first."""
        return read_records(self.path / "restarts.jsonl", Restart)

    def adopt_metrics(self, source: "RunFolder", step: int) -> None:
        """Copy the metrics of another run up to `step`, so that curves are complete."""
        for row in source.metrics():
            if row["step"] <= step:
                self.log_metrics(row)

    def note_resume(self, resume: Resume) -> None:
        """Record that this run starts from a checkpoint of another run."""
        info = self.info()
        self._write_info(info.model_copy(update={"resumes": (*info.resumes, resume)}))

    def note_chat_template(self, found: Mapping[str, JsonValue]) -> None:
        """Record the effects of the chat template on sampled turns."""
        self._write_info(self.info().model_copy(update={"chat_template": dict(found)}))

    def note_environments(self, found: Mapping[str, EnvironmentRecord]) -> None:
        """Record the environments of this run, by their names in its settings."""
        self._write_info(self.info().model_copy(update={"environments": dict(found)}))

    def note_inputs(self, found: Mapping[str, str]) -> None:
        """Record the digests of the files that this run reads beside its environments."""
        self._write_info(self.info().model_copy(update={"inputs": dict(found)}))

    def note_reward_ranges(
        self,
        found: Mapping[str, tuple[float, float]],
        *,
        weights: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Record the least and the largest reward of environments, by their names.

        `weights`: the factor of each part in the sum that a reward is.
        """
        parts = {name: dict(one) for name, one in (weights or {}).items()}
        update = {"reward_ranges": dict(found), "reward_weights": parts}
        self._write_info(self.info().model_copy(update=update))

    def note_settings(
        self, given: Sequence[str], chosen: Sequence[str], defaults: Mapping[str, JsonValue]
    ) -> None:
        """Record which settings were set, which differ from their defaults, and all defaults.

        All go by `section.key`.
        """
        found = {"set": list(given), "chosen": list(chosen), "defaults": dict(defaults)}
        self.require_here()
        write_json(self.path / SETTINGS_FILE, found)

    def events(self, step: int | None = None) -> list[AttemptEvent]:
        """Return the events of attempts, by step and time, by default of all steps."""
        return read_events(self.events_path, step=step)

    def timeline(self) -> Iterator[TimelineSpan]:
        """Yield the spans of the driver and the trainer ranks, in the order of their ends."""
        return read_blocks(self.path / TIMELINE_FOLDER, TimelineSpan)

    def calls(self) -> Iterator[ModelCall]:
        """Yield the requests to inference servers, in the order of their ends."""
        return read_blocks(self.path / CALLS_FOLDER, ModelCall)

    def gauges(self) -> Iterator[GaugeSample]:
        """Yield the samples of meters, in the order in which they were read."""
        return read_blocks(self.path / GAUGES_FOLDER, GaugeSample)

    def info(self) -> RunInfo:
        """Return the identity and state of the run."""
        fields = read_json(self.path / "run.json")
        if fields is None:
            why = why_no_object(self.path / "run.json")
            if (self.path / "eval.json").is_file():
                shown = shlex.join(["telescope", "eval", "--report", str(self.path)])
                why = f"it is that of an eval, which {shown} shows"
            raise ConfigError(f"{self.path}: expected the folder of a run, but {why}")
        version = fields.get("format_version", 1)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ConfigError(
                f"{self.path} is a run folder of format {version}, and this version reads up to "
                f"{FORMAT_VERSION}; upgrade telescope-core to read it"
            )
        try:
            return RunInfo.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{self.path / 'run.json'}: {where}: {first['msg']}") from None

    def config(self) -> dict[str, Any]:
        """Return the resolved settings, without secrets; empty when config.json cannot be read."""
        return without_secrets(read_json(self.path / "config.json") or {})

    def require_ended(self, *, has_ended_elsewhere: bool = False) -> None:
        """Raise ConfigError while training goes on here that `begin` started.

        `has_ended_elsewhere` is a promise that it has ended if it was on another machine. A folder
        without a run, or with a damaged `run.json`, counts as ended.
        """
        try:
            info = self.info()
        except ConfigError:
            return
        if has_ended_elsewhere and info.may_run_elsewhere:
            return
        if info.observed_state is RunState.RUNNING:
            gone = f"; if that machine is gone, remove {self.path / 'run.json'}"
            raise ConfigError(
                f"{self.path} belongs to training that is still going on (process {info.pid} on "
                f"{info.host}); wait for it, stop it, or choose another output"
                f"{gone if info.may_run_elsewhere else ''}"
            )

    def require_here(self) -> None:
        """Raise TelescopeError if the folder was removed since the run began.

        Called before each write, which would make the folder anew and be in the way of the one
        that is brought back.
        """
        if (self.path / "run.json").exists():
            return
        # Processes of the run on other machines, or ones that start again, make it for their logs.
        # A folder that is moved to where one is gets into it.
        first = ""
        if self.path.exists():
            first = f"move away what was written to {self.path} since, "
        raise TelescopeError(
            f"the run folder {self.path} is gone: it was removed or moved while the run went on. "
            f"If it was moved, {first}move it back and resume the run (telescope train ... "
            "--resume); if it was removed, what the run recorded is lost with it: begin again"
        )

    def finish(self) -> None:
        """Mark the run as finished."""
        self._end(RunState.FINISHED, "")

    def fail(self, reason: str) -> None:
        """Mark the run as failed, and record why."""
        self._end(RunState.FAILED, reason)

    def interrupt(self, reason: str) -> None:
        """Mark the run as ended by a signal, which `reason` names."""
        self._end(RunState.INTERRUPTED, reason)

    def log_metrics(self, row: Mapping[str, JsonValue]) -> None:
        """Append one row of metrics; non-finite numbers are recorded as null."""
        self.require_here()
        append_json_line(self.path / "metrics.jsonl", row)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics in the order of their steps; each has an integer `step`.

        Of several rows of a step, which two processes in one folder leave, the last one counts.
        """
        rows = filter(is_of_step, read_json_lines(self.path / "metrics.jsonl"))
        newest = {row["step"]: row for row in rows}
        return [newest[step] for step in sorted(newest)]

    def num_damaged_lines(self) -> dict[str, int]:
        """Return how many whole lines are left out because they are damaged, by file.

        Files without one are left out too.
        """
        found = {"metrics.jsonl": num_damaged_lines(self.path / "metrics.jsonl", is_of_step)}
        for name, kind in _KIND_OF_LINES.items():
            is_row = partial(_is_record, kind=kind)
            found[name] = num_damaged_lines(self.path / name, is_row)
        return {name: count for name, count in found.items() if count}

    def log_server(self, event: ServerEvent) -> None:
        """Append an event of an inference server."""
        self.require_here()
        append_json_line(self.path / "servers.jsonl", asdict(event))

    def server_events(self) -> list[ServerEvent]:
        """Return the events of the inference servers, oldest first; see `records.servers`."""
        return read_records(self.path / "servers.jsonl", ServerEvent)

    def last_step(self) -> int:
        """Return the step of the newest row of metrics; 0 = there is none."""
        return max((row["step"] for row in self.metrics()), default=0)

    def log_eval_point(self, point: EvalPoint) -> None:
        """Append the outcome of an eval."""
        self.require_here()
        append_json_line(self.path / "eval_points.jsonl", asdict(point))

    def eval_points(self) -> list[EvalPoint]:
        """Return the outcomes of the run's evals, in the order in which they were known."""
        return read_records(self.path / "eval_points.jsonl", EvalPoint)

    def write_rollouts(self, step: int, rows: Iterable[RolloutRow]) -> Path:
        """Write all rollouts of `step`, whatever their status, and return the file's path."""
        self.require_here()
        path = step_path(self.rollouts_path, step)
        write_rows(path, (without_secrets_in(row, self.hide) for row in rows))
        for folder in (self.rollouts_path, self.attempts_path):
            merge(folder, up_to=step - 1, options=writer_options())
        return path

    def write_attempts(self, step: int, rows: Iterable[RolloutRow]) -> Path:
        """Write the attempts at rollouts of `step` that are not in its file of rollouts."""
        self.require_here()
        self.attempts_path.mkdir(exist_ok=True)
        path = step_path(self.attempts_path, step)
        write_rows(path, (without_secrets_in(row, self.hide) for row in rows))
        return path

    def write_token_facts(self, step: int, rows: Iterable[TurnFacts]) -> Path:
        """Write the trainer's measurements of the tokens of `step`, and return the file's path."""
        self.require_here()
        path = step_path(self.token_facts_path, step)
        write_facts(path, rows)
        merge(self.token_facts_path, up_to=step - 1, options=WRITER_OPTIONS)
        return path

    def token_facts(self, step: int) -> Iterator[TurnFacts]:
        """Yield the trainer's measurements of the tokens of `step`; none if not recorded."""
        part = part_of(self.token_facts_path, step)
        return iter(()) if part is None else read_facts(part)

    def attempts(self, *, with_tokens: bool = True) -> list[RolloutRow]:
        """Return every attempt that a later one replaced, or that the end of the run cut short.

        None of them is among the `rollouts`.
        """
        return list(read_rows(parts_in(self.attempts_path).values(), with_tokens=with_tokens))

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts were written, in order."""
        return list(parts_in(self.rollouts_path))

    def rollouts(
        self, steps: Sequence[int] | None = None, *, with_tokens: bool = True
    ) -> list[RolloutRow]:
        """Return the rollouts of `steps`, by default of all steps."""
        return list(read_rows(self._rollout_parts(steps), with_tokens=with_tokens))

    def count_rollouts(
        self, steps: Sequence[int] | None = None
    ) -> Counter[tuple[str, RolloutStatus]]:
        """Return (environment, status) -> number of rollouts of `steps`, by default of all."""
        return count_rows(self._rollout_parts(steps))

    def rewards(self, step: int) -> Iterator[tuple[str, str, float]]:
        """Yield (environment, example id, reward) of each rollout of `step` that has a reward."""
        return rewards_of_rows(self._rollout_parts([step]))

    def trained_examples(self, up_to_step: int | None = None) -> set[tuple[str, str]]:
        """Return (environment, example id) of all examples that were played for training.

        Includes the run from which this one started.
        """
        every = parts_in(self.rollouts_path).items()
        parts = [part for step, part in every if up_to_step is None or step <= up_to_step]
        return examples_of_rows(parts) | self._pairs("trained_before")

    def held_out_examples(self) -> set[tuple[str, str]]:
        """Return (environment, example id) of all examples that evals hold out of training."""
        return self._pairs("held_out")

    def write_examples(
        self, *, held_out: Iterable[tuple[str, str]], trained_before: Iterable[tuple[str, str]]
    ) -> None:
        """Write `examples.json`: held-out examples, and those an earlier run was trained on.

        Both are pairs of (environment, example id), with the names of the run's settings.
        """
        self.require_here()
        fields = {"held_out": held_out, "trained_before": trained_before}
        write_json(self.path / "examples.json", {k: _by_name(v) for k, v in fields.items()})

    def _pairs(self, field: str) -> set[tuple[str, str]]:
        named = (read_json(self.path / "examples.json") or {}).get(field, {})
        return {(name, example_id) for name, ids in named.items() for example_id in ids}

    def eval_folders(self) -> list[Path]:
        """Return the folders of the run's evals, sorted by name."""
        return sorted(path for path in self.evals_path.glob("*") if path.is_dir())

    def write_self_tests(self, tests: Sequence[Mapping[str, JsonValue]]) -> None:
        """Write `self_tests.json`: the measurements made before training began."""
        self.require_here()
        write_json(self.path / "self_tests.json", {"tests": tests})

    def self_tests(self) -> list[dict[str, Any]]:
        """Return the self-tests; empty if the run ended before them."""
        return (read_json(self.path / "self_tests.json") or {}).get("tests", [])

    def write_summary(self, summary: Mapping[str, JsonValue]) -> None:
        """Write `summary.json`."""
        self.require_here()
        write_json(self.path / "summary.json", summary)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary; None if the run ended before it was written."""
        return read_json(self.path / "summary.json")

    def drop_after(self, step: int, *, keeps_evals_after: bool = False) -> None:
        """Delete the records after `step`, whose steps are about to be repeated, and the summary.

        `keeps_evals_after`: no step is left, so that evals after training stay valid.
        """
        self._finished.clear()
        self._keep_lines("metrics.jsonl", lambda row: is_of_step(row) and row["step"] <= step)
        # A run that goes on beyond its last step will have another one evaluated as the last.
        self._keep_lines(
            "eval_points.jsonl",
            lambda row: (
                _is_record(row, EvalPoint)
                and row["version"] <= step
                and (keeps_evals_after or row["tag"] != "after")
            ),
        )
        for folder in (self.rollouts_path, self.attempts_path, self.token_facts_path):
            is_facts = folder == self.token_facts_path
            separate(folder, after=step, options=WRITER_OPTIONS if is_facts else writer_options())
            for path in folder.glob("step-*.parquet"):
                if int(path.stem.removeprefix("step-")) > step:
                    path.unlink()
        for folder in self.eval_folders():
            tag = re.search(r"-(?:step-(\d+)|after)$", folder.name)
            is_later = tag is not None and tag[1] is not None and int(tag[1]) > step
            if is_later or (tag is not None and tag[1] is None and not keeps_evals_after):
                shutil.rmtree(folder)
        for name in ("summary.json", "report.html"):
            (self.path / name).unlink(missing_ok=True)

    def _keep_lines(self, name: str, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        path = self.path / name
        if path.exists():
            write_json_lines(path, [row for row in read_json_lines(path) if is_kept(row)])

    def _rollout_parts(self, steps: Sequence[int] | None) -> Iterable[StepPart]:
        folder = self.rollouts_path
        if steps is None:
            return parts_in(folder).values()
        return [part_of(folder, step) or StepPart(step_path(folder, step)) for step in steps]

    def _remember_finished(self) -> None:
        replaced = (self.path / name for name in ("config.json", SETTINGS_FILE, "run.json"))
        self._finished = {one.name: one.read_bytes() for one in replaced if one.is_file()}

    def _end(self, state: RunState, reason: str) -> None:
        self.require_here()
        if self._finished:
            for name, content in self._finished.items():
                with whole_file(self.path / name) as partial:
                    partial.write_bytes(content)
            return
        changes = {"state": state, "reason": reason, "ended_at": now()}
        self._write_info(self.info().model_copy(update=changes))

    def _write_info(self, info: RunInfo) -> None:
        fields = without_values(info.model_dump(mode="json"), self.hide)
        write_state(self.path / "run.json", fields)


def _is_record(row: Mapping[str, Any], kind: type) -> bool:
    return record_from(row, kind) is not None


def _by_name(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, example_id in sorted(pairs):
        found.setdefault(name, []).append(example_id)
    return found


def _require_ended(path: Path, info: RunInfo) -> None:
    if info.observed_state is RunState.RUNNING:
        raise ConfigError(
            f"{path} belongs to a run that is still running (process {info.pid} on {info.host}); "
            "wait for it, stop it, or choose another name"
        )


def _make_way(path: Path, *, replace: bool) -> None:
    """Remove the run in `path`, or raise ConfigError with the reason for keeping it."""
    if read_json(path / "run.json") is None:
        raise ConfigError(_no_run(path))
    info = RunFolder(path).info()
    _require_ended(path, info)
    if not replace:
        raise ConfigError(
            f"{path} holds an earlier run ({info.observed_state}, started {info.started_at}); "
            "choose another name, or remove the folder"
        )
    # The folder itself stays, because whoever waits for its lock would hold that of a removed one.
    for one in path.iterdir():
        shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()


def _no_run(path: Path) -> str:
    return (
        f"{path} exists and is neither an empty folder nor the folder of a run; "
        "choose another name or output folder"
    )


def where_its_model_is(folder: Path) -> str | None:
    """Return the advice for a run or a checkpoint that was given as a model; None if it is none."""
    if (folder / "run.json").is_file():
        kind, exported = "a run", folder / "checkpoints" / "final" / "hf"
    elif (folder / "checkpoint.json").is_file():
        kind, exported = "a checkpoint", folder / "hf"
    else:
        return None
    if (exported / "config.json").is_file():
        return f"it is the folder of {kind}, whose model is {str(exported)!r}"
    command = shlex.join(["telescope", "export", str(folder), "--output", "MODEL"])
    return f"it is the folder of {kind}: run {command}, and give MODEL"
