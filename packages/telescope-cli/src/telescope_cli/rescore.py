"""`telescope rescore RUN --env NEW`: the rewards of another version of an environment.

The rollouts of a run or an eval are read from its folder and graded by the other version, in its
own process. Nothing is sampled, and nothing in the folder changes.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer

from telescope_cli.env.options import complete_installed
from telescope_cli.eval.command import (
    ConcurrencyOption,
    DeadlineSOption,
    EnvIsolationOption,
    EnvWorkersOption,
)
from telescope_cli.eval.flags import unparsed
from telescope_cli.eval.play import recorded, telling
from telescope_cli.eval.view import AsJsonOption, print_unreadable, tell
from telescope_cli.output import prints_kept_off
from telescope_cli.progress import progress_of
from telescope_cli.rescore_view import print_rescored
from telescope_cli.watch import find_run, run_names
from telescope_core.base.environment_record import EnvironmentRecord, changes
from telescope_core.base.errors import ConfigError, TooManyFailedError, unknown_name
from telescope_core.base.interruptible import run
from telescope_core.base.interrupts import held
from telescope_core.base.open_files import raise_limit
from telescope_core.base.secret_names import (
    hidden,
    names_left_out,
    secret_values,
    secrets_line,
    without_values,
)
from telescope_core.base.terminal import escaped
from telescope_core.base.types import (
    EnvironmentDescription,
    JsonValue,
    RolloutStatus,
    Sampling,
    Split,
)
from telescope_core.environments.author_errors import contained
from telescope_core.evals import EvalFolder, EvalSettings
from telescope_core.evals.rescoring import Graded, Rescored, Tally, grade_again
from telescope_core.evals.result import result_of
from telescope_core.finding.locate import locate_environment
from telescope_core.finding.schemes import adapted
from telescope_core.open import open_environment, record_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.records import RunFolder
from telescope_core.records.files import plain
from telescope_core.records.rows import RolloutRow
from telescope_core.reports import write_eval_report
from telescope_core.settings.config import merged

_IF_USED = "choose another --output, or remove it: a rescore is not continued"
_IF_GONE = "a rescore is not continued: repeat the command"
_MORE_EXAMPLES = 10_000
"""Number of further examples to search, beyond those of the rollouts."""

FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Folder of a run or an eval, or the name of a run in the folder `runs`.",
        autocompletion=run_names,
    ),
]
EnvOption = Annotated[
    str,
    typer.Option(
        "--env",
        help="The version that grades: a name, owner/name@version, file.py:Class, folder.",
        autocompletion=complete_installed,
    ),
]
OfOption = Annotated[
    str | None,
    typer.Option(help="Which environment of the run is graded, where it has several."),
]
StepsOption = Annotated[
    str | None, typer.Option(help="Steps of the run, such as 10-20,40. By default all.")
]
JudgesOption = Annotated[
    bool,
    typer.Option("--ask-judges", help="Also ask judges and simulated users, which can cost money."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(help="New folder for the rollouts with their new rewards, as of an eval."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The rollouts of one environment in the folder of a run or an eval."""

    path: Path
    name: str
    """Name of the environment in the folder."""
    settings: Mapping[str, Any]
    """Its recorded settings, without secrets."""
    split: Split
    sampling: Sampling
    eval_settings: EvalSettings | None = None
    """Settings that the eval was played with; None for a run, and where the folder has none."""
    chat_template: str = ""
    """Digest of the file of a chat template that the eval was played with."""
    model: str
    record: EnvironmentRecord | None
    """Record of its code; None if there is none."""
    num_rollouts: int
    most_examples: int
    """Largest position of an example in an endless split that was played."""
    steps: tuple[int, ...]
    """Steps whose rollouts are graded; empty for an eval."""

    def groups(self) -> Iterator[list[RolloutRow]]:
        """Yield the rollouts of each example, in order; one step of a run is read at a time."""
        if not self.steps:
            yield from EvalFolder(self.path).groups()
        folder = RunFolder(self.path)
        for step in self.steps:
            groups: dict[str, list[RolloutRow]] = {}
            for row in folder.rollouts([step], with_tokens=False):
                if row.environment == self.name:
                    groups.setdefault(row.group_id, []).append(row)
            yield from groups.values()


def rescore_command(
    context: typer.Context,
    folder: FolderArgument,
    environment: EnvOption,
    of: OfOption = None,
    steps: StepsOption = None,
    ask_judges: JudgesOption = False,
    concurrency: ConcurrencyOption = 64,
    deadline_s: DeadlineSOption = 300.0,
    env_workers: EnvWorkersOption = 1,
    env_isolation: EnvIsolationOption = Isolation.AUTO,
    output: OutputOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Grade the saved rollouts of a run or an eval with another version of an environment.

    Nothing is sampled. The report lists the rewards that would differ, with their examples and
    steps, and the groups from which more or less could be learned. The environment has the recorded
    settings; --env.NAME VALUE changes one of them.

    Rewards that need more than the record are computed by playing the saved turns again. If the
    environment then answers differently, they are left out and named. Judges are left out as well.

    For example:

      telescope rescore quickstart --env ./countdown

      telescope rescore runs/evals/base --env my-name/countdown@0.2.0 --json
    """
    raise_limit()
    left = unparsed(context)
    if left.environments:
        raise ConfigError(
            f"expected one run or eval, got also {left.environments[0]!r}; grade one at a time"
        )
    if adapted(environment) is not None and not ask_judges:
        raise ConfigError(
            f"{environment}: environments of other frameworks may ask judges in ways of their own, "
            "which nothing here can stop; add --ask-judges to allow it"
        )
    saved = _saved(folder, locate_environment(environment).id, of, steps)
    settings = _with_given(saved.settings, left.settings)
    request = _Request(
        saved=saved,
        environment=environment,
        settings=settings,
        record=record_environment(environment, settings=settings),
        processes=ProcessSettings(
            isolation=env_isolation, num_workers=env_workers, asks_models=ask_judges
        ),
        grading=EvalSettings(
            num_examples=1,  # until they are counted
            rollouts=1,
            sampling=saved.sampling,
            concurrency=concurrency,
            deadline_s=deadline_s,
            split=saved.split,
        ),
    )
    with prints_kept_off(as_json), ExitStack() as recording, contained():
        outcome = run(_grade(request, output, recording))
    rescored = outcome.rescored
    code = changes(saved.record, request.record) if saved.record is not None else []
    if as_json:
        fields = {
            "folder": str(saved.path),
            "environment": saved.name,
            "graded_by": {"name": environment, "version": request.record.version},
            "code_changes": code,
            **asdict(rescored),
        }
        typer.echo(json.dumps(without_values(plain(fields), outcome.hide), indent=2))
    else:
        print_rescored(rescored, title=request.title, code_changes=code, hide=outcome.hide)
        if output is not None:
            typer.echo(escaped(f"Rollouts with their new rewards: {output}"))
    if not any(one.num_compared + one.num_new for one in (rescored.reward, *rescored.parts)):
        raise TooManyFailedError(hidden(_why_none(rescored), outcome.hide))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    saved: Saved
    environment: str
    """The version that grades."""
    settings: dict[str, Any]
    record: EnvironmentRecord
    processes: ProcessSettings
    grading: EvalSettings

    @property
    def title(self) -> str:
        """The title of the comparison, for people."""
        version = "" if self.record.version in ("", "0") else f" {self.record.version}"
        return f"{self.saved.path}: {self.saved.name} graded by {self.environment}{version}"

    def manifest(self) -> dict[str, JsonValue]:
        """Return the manifest of the folder for the new rewards."""
        return {
            "rescored": str(self.saved.path),
            "environment": self.environment,
            "environment_files": dict(self.record.files),
            "env": self.settings,
            "model": self.saved.model,
            "split": self.saved.split,
            "steps": list(self.saved.steps),
        }


class _Outcome(NamedTuple):
    rescored: Rescored
    hide: set[str]
    """Values of secrets that are removed from all output."""


async def _grade(request: _Request, output: Path | None, recording: ExitStack) -> _Outcome:
    """Grade the saved rollouts; `recording` records the outcome in the new folder."""
    saved, began_s = request.saved, time.monotonic()
    environment = open_environment(request.environment, request.settings, request.processes)

    environment.tell_secrets(
        lambda names: tell(secrets_line(request.environment, names, os.environ))
    )
    tally, num_done = Tally(), 0
    try:
        description = await environment.describe()
        if saved.split not in description.num_examples:
            raise ConfigError(
                f"{request.environment} has no {saved.split} split, which the rollouts of "
                f"{saved.name} are from"
            )
        read = {os.environ.get(name, "") for name in environment.secrets} - {""}
        hide = read | secret_values(request.settings) | secret_values(os.environ)
        target: EvalFolder | None = None
        if output is not None:
            with held():
                target = EvalFolder.create(output, manifest=request.manifest(), if_used=_IF_USED)
                target.if_gone = _IF_GONE
                recording.enter_context(
                    telling(
                        f"The rewards so far are in {output}, and cannot be continued; remove it, "
                        "or choose another --output, and repeat the command"
                    )
                )
                recording.enter_context(recorded(target))
            target.hide = hide
        with progress_of("grading", unit="rollouts") as on_progress:

            def on_graded(group: Sequence[Graded]) -> None:
                nonlocal num_done
                tally.add(group)
                if target is not None:
                    for one in group:
                        target.append(_new_row(one))
                num_done += len(group)
                on_progress(num_done, saved.num_rollouts)

            await grade_again(
                environment,
                saved.groups(),
                split=saved.split,
                deadline_s=request.grading.deadline_s,
                concurrency=request.grading.concurrency,
                most_examples=saved.most_examples,
                on_graded=on_graded,
            )
    finally:
        await environment.close()
    if target is not None:
        _finish(target, request, description, time.monotonic() - began_s)
    return _Outcome(tally.result(), hide)


def _new_row(one: Graded) -> RolloutRow:
    """Return the row with its new reward; without one, a failed rollout with the reason."""
    row = replace(one.row, reward=None, rewards={}, advantage=None)
    if one.rollout is not None:
        # It begins with the saved notes, unless it was played again. Of what has been noted anew,
        # such as a verdict, the new notes are kept.
        old, new = row.info, one.rollout.info
        new = new[len(old) :] if new[: len(old)] == old else new
        renewed = {note.key for note in new}
        row = replace(
            row,
            reward=one.rollout.reward,
            rewards=one.rollout.rewards,
            metrics={**row.metrics, **one.rollout.metrics},
            golden_answers=one.rollout.golden_answers or row.golden_answers,
            info=(*(note for note in old if note.key not in renewed), *new),
        )
    if row.reward is None:
        reason = one.why_not or "; ".join(f"{part}: {why}" for part, why in one.left_out.items())
        return replace(
            row,
            status=RolloutStatus.FAILED,
            status_reason=one.rollout.status_reason if one.rollout else "NotGradedError",
            error=one.error or reason,
        )
    return replace(row, status=RolloutStatus.KEPT, status_reason="", error=None)


def _finish(
    target: EvalFolder, request: _Request, description: EnvironmentDescription, duration_s: float
) -> None:
    rows = target.rows(pictures_of=())
    sizes = Counter(row.group_id for row in rows)
    # The rollouts are those of the eval: only their rewards are new.
    settings = request.saved.eval_settings or replace(
        request.grading,
        num_examples=max(1, len(sizes)),
        rollouts=max(sizes.values(), default=1),
    )
    result = result_of(
        rows, settings, description, model=request.saved.model, duration_s=duration_s
    )
    target.finish(
        replace(
            result,
            environment_record=request.record,
            environment_settings=request.settings,
            chat_template=request.saved.chat_template,
        )
    )
    write_eval_report(target)


def _why_none(rescored: Rescored) -> str:
    reasons = [f"{number} are not graded, {why}" for why, number in rescored.not_graded.items()]
    reasons += [f"{number} failed with {text}" for text, number in [*rescored.errors.items()][:3]]
    reasons += [
        f"{name} is left out of {number}, {why}"
        for name, parts in rescored.left_out.items()
        for why, number in parts.items()
    ]
    return f"nothing could be graded: {'; '.join(reasons) or 'there is no rollout'}"


def _saved(name: str, environment_id: str, of: str | None, steps: str | None) -> Saved:
    path = find_run(name)
    if not EvalFolder.holds_eval(path):
        return _saved_run(RunFolder.open(path), environment_id, of, steps)
    for option, value in (("--of", of), ("--steps", steps)):
        if value is not None:
            raise ConfigError(f"{option} is for runs, and {path} is an eval; leave it out")
    folder = EvalFolder(path)
    manifest, result, settings = folder.manifest(), folder.result(), folder.settings()
    rows, problems = folder.read(pictures_of=())
    print_unreadable(problems)
    return Saved(
        path=path,
        # Evals of a training run have the entry of its settings.
        name=manifest.get("environment") or manifest["name"],
        settings=manifest.get("env") or {},
        split=Split(manifest.get("split") or Split.EVAL),
        sampling=Sampling(max_tokens=1) if settings is None else settings.sampling,
        eval_settings=settings,
        chat_template=(
            (manifest.get("chat_template") or "") if result is None else result.chat_template
        ),
        model=(manifest.get("model") or "") if result is None else result.model,
        record=result.environment_record if result is not None else None,
        num_rollouts=len(rows),
        most_examples=_MORE_EXAMPLES + max(map(_position, rows), default=0) + len(rows),
        steps=(),
    )


def _saved_run(folder: RunFolder, environment_id: str, of: str | None, steps: str | None) -> Saved:
    config, info = folder.config(), folder.info()
    entries = {one["name"]: one for one in config.get("environments", ())}
    entry = entries[_chosen(list(entries), environment_id, of, folder.path)]
    section, name = config.get("rollout", {}), entry["name"]
    temperature, stop = entry.get("temperature"), tuple(section.get("stop") or ())
    chosen = _steps(steps, folder.rollout_steps(), folder.path)
    return Saved(
        path=folder.path,
        name=name,
        settings=entry.get("env") or {},
        split=Split(entry.get("split") or Split.TRAIN),
        sampling=Sampling(
            max_tokens=entry.get("max_tokens") or section.get("max_tokens") or 1,
            temperature=section.get("temperature") if temperature is None else temperature,
            stop=stop,
            include_stop_str_in_output=(
                bool(stop) and section.get("include_stop_str_in_output", False)
            ),
        ),
        model=folder.path.name,
        record=info.environments.get(name),
        num_rollouts=_number_of(name, folder.count_rollouts(chosen)),
        # Each group has another example, and a few examples are held out of training.
        most_examples=_MORE_EXAMPLES + _number_of(name, folder.count_rollouts()),
        steps=chosen,
    )


def _number_of(name: str, counts: Mapping[tuple[str, RolloutStatus], int]) -> int:
    return sum(number for (one, _), number in counts.items() if one == name)


def _position(row: RolloutRow) -> int:
    """Return the position of an eval's example; 0 if its group does not contain it."""
    found = re.fullmatch(r"eval-(\d+)", row.group_id)
    return int(found[1]) if found else 0


def _chosen(names: Sequence[str], environment_id: str, of: str | None, path: Path) -> str:
    """Return the environment of the run: the named one, or the only one."""
    if of is not None:
        if of not in names:
            raise unknown_name("environment", of, names, f"(in {path})")
        return of
    if not names:
        raise ConfigError(
            f"{path} has no environments; expected a run of telescope train, or an eval"
        )
    if len(names) == 1:
        return names[0]
    same = [one for one in names if _bare(one) == _bare(environment_id)]
    if len(same) == 1:
        return same[0]
    raise ConfigError(
        f"{path} has several environments ({', '.join(names)}), and {environment_id!r} is not the "
        "name of one of them; say with --of NAME which is graded"
    )


def _bare(name: str) -> str:
    """Return a name without owner, version and folder."""
    return name.partition("@")[0].rstrip("/").rpartition("/")[2]


def _steps(text: str | None, known: Sequence[int], path: Path) -> tuple[int, ...]:
    if not known:
        raise ConfigError(
            f"{path} has no rollouts yet; it ended before its first step was recorded"
        )
    if text is None:
        return tuple(known)
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(f"--steps takes steps such as 10-20,40, got {text!r}")
    ranges = [part.partition("-") for part in text.split(",")]
    found = [
        step
        for step in known
        if any(int(first) <= step <= int(last or first) for first, _, last in ranges)
    ]
    if not found:
        raise ConfigError(
            f"--steps {text}: none of them has rollouts; {path} has those of {known[0]} to "
            f"{known[-1]}"
        )
    return tuple(found)


def _with_given(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings merged with the given ones; secrets must be given again."""
    settings = cast(dict[str, Any], merged(recorded, given))
    if left_out := next(names_left_out(settings), ""):
        raise ConfigError(
            f"the setting {left_out!r} of the environment is a secret, which the folder does not "
            f"hold; give it again with --env.{left_out.partition('[')[0]} VALUE"
        )
    return settings
