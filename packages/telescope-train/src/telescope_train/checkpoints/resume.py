"""Resolve `resume_from_checkpoint`: where a run continues, and what may differ.

`latest` continues a run in its own folder. The path of a checkpoint starts another run from it.
With `resume_if_saved`, a run continues in its folder if it can and starts there otherwise, for
queues that give the same command for the first try and every later one. Imports no torch.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from telescope_core.base.code_files import file_changes, source_files
from telescope_core.base.environment_record import EnvironmentRecord, all_changes
from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.file_proofs import quick_digest
from telescope_core.base.folders import why_not_writable
from telescope_core.base.number_text import counted
from telescope_core.base.secret_names import without_secrets
from telescope_core.base.types import RolloutStatus
from telescope_core.records import Resume, RunFolder, RunState
from telescope_core.records.folders import end_replacing
from telescope_core.records.identity import NOTHING_SAVED, now
from telescope_train.checkpoints.folders import (
    NO_INPUTS,
    FoundCheckpoints,
    RunCheckpoint,
    by_its_path,
    by_moving_it,
    checkpoints_folder,
    complete_checkpoints,
    find_checkpoints,
    read_whole,
    require_start,
    unproved,
)
from telescope_train.config.earlier import in_names_of_today
from telescope_train.config.eval_folders import evals_left
from telescope_train.config.origin import SettingOrigin, origin_of
from telescope_train.config.run_folder import run_folder, run_folder_problems
from telescope_train.config.schema import TrainConfig
from telescope_train.rollouts.accept import BUILT_IN
from telescope_train.rollouts.sampled import SamplerState

LATEST = "latest"
_IGNORED = re.compile(r"(run\.(name|output_dir|debug)|checkpoint|ray)(\.|$)")
_FIXED = re.compile(
    r"(run\.seed|model\.(model|model_dtype|chat_template|enable_thinking|trust_remote_code)"
    r"|environments\[\d+\]\.(name|weight|split|env)|trainer\.(train_backend|optimizer|use_lora|lora_)"
    r"|megatron\.megatron_use_distributed_optimizer)"
)
"""Settings that define the meaning of weights, optimizer state and place in the data."""
Records: TypeAlias = Mapping[str, EnvironmentRecord]
"""Name of each environment in the settings -> record of its present code."""
MODEL = "model.model"
"""Setting, and first part of the inputs, of the model that a run begins with."""
REFERENCE = "algorithm.reference_model"
_DATASET = "dataset"
FIXED = (MODEL, "model.chat_template", _DATASET, "environments")
"""Inputs that must not change, because the saved state depends on them."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "*.txt", "*.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The point at which a run continues."""

    checkpoint: RunCheckpoint
    is_same_run: bool
    """Whether the run continues in its folder; if not, a new run begins with this checkpoint."""
    changed: tuple[str, ...]
    """Permitted differences from the checkpoint's settings and environments, one line each."""
    is_at_last_step: bool
    """Whether the run has taken its last step, so that only the work after it is left."""
    notes: tuple[str, ...]
    """Remarks on the checkpoint: newer damaged ones, and files without proof."""

    @property
    def lines(self) -> list[str]:
        """The lines about it for people."""
        done = counted(self.checkpoint.step, "step")
        begins = f"continuing from {self.checkpoint.path} ({done} done)"
        if not self.changed:
            return [begins]
        return [begins, "changed since:", *(f"  {line}" for line in self.changed)]


def resume_point(
    config: TrainConfig, records: Records, inputs: Mapping[str, str] = NO_INPUTS
) -> ResumePoint | None:
    """Return where the run continues; None if it starts from the beginning.

    `inputs`: digests of the other files that it reads, see `inputs_of`.

    Raises ConfigError if the run is going on, if there is no such checkpoint, if settings differ
    that must be the same, or if files that are read here have changed since they were written.
    """
    _require_ended(config)
    own, given = checkpoints_folder(config), config.checkpoint.resume_from_checkpoint
    if config.checkpoint.resume_if_saved and _has_saved(own):
        given = LATEST
    if given is None:
        return None
    passed_over: list[str] = []
    if given == LATEST:
        end_replacing(own)
        found = find_checkpoints(own)
        checkpoint, is_same_run = _newest(found, own, config), True
        passed_over = found.broken_after(checkpoint)
    else:
        checkpoint, is_same_run = read_whole(Path(given).expanduser(), by_its_path), False
        if checkpoint.path.resolve().parent == own.resolve():
            raise ConfigError(_of_own_folder(checkpoint, config))
    is_at_last_step = is_same_run and checkpoint.step == config.run.number_of_steps
    if passed_over:
        _require_not_finished(checkpoint, passed_over, config)
    if is_at_last_step:
        _require_unfinished(checkpoint, config)
    elif checkpoint.step >= config.run.number_of_steps:
        raise ConfigError(_no_step_left(checkpoint, config))
    if not checkpoint.manifest.has_training_state and not (
        is_at_last_step and is_over(config, checkpoint)
    ):
        raise ConfigError(
            f"{str(checkpoint.path)!r} holds weights alone (checkpoint_save_training_state = "
            "false); use `telescope export`, and train the export as a new model"
        )
    before = in_names_of_today(checkpoint.manifest.config)
    now_ = config.model_dump(mode="json")
    changed = (
        # Values of secrets are not in the checkpoint: they come again with the settings.
        *_allowed_changes(
            without_secrets(before, keeps_names=False),
            without_secrets(now_, keeps_names=False),
            origin_of(config),
        ),
        *_environment_changes(checkpoint, config, records),
        *input_changes(checkpoint, inputs),
    )
    if not (is_at_last_step and is_over(config, checkpoint)):
        state = require_start(checkpoint, by_moving_it if is_same_run else by_its_path)
        _require_room(state, checkpoint, config)
    return ResumePoint(
        checkpoint=checkpoint,
        is_same_run=is_same_run,
        changed=changed,
        is_at_last_step=is_at_last_step,
        notes=(
            *(f"{line}; {checkpoint.path.name} is taken instead" for line in passed_over),
            *unproved(checkpoint),
            *([] if is_same_run else _other_differences(checkpoint, config)),
        ),
    )


def _require_room(
    state: SamplerState | None, checkpoint: RunCheckpoint, config: TrainConfig
) -> None:
    """Raise ConfigError if a rollout that waits for training is longer than `seq_len`."""
    if state is None or checkpoint.step == config.run.number_of_steps:
        return
    longest = max(
        (
            turn.completion.tokens.completion_end
            for group in state.groups
            for rollout in group.rollouts
            for turn in rollout.turns
            if rollout.status is RolloutStatus.KEPT and turn.completion.tokens is not None
        ),
        default=0,
    )
    seq_len = config.trainer.seq_len
    if longest > seq_len:
        raise ConfigError(
            f"{str(checkpoint.path)!r} holds rollouts that were sampled ahead and are trained on "
            f"next, of up to {longest} tokens, and trainer.seq_len is {seq_len}; raise it to at "
            f"least {longest}"
        )


def is_over(config: TrainConfig, checkpoint: RunCheckpoint) -> bool:
    """Return whether a run that continues from `checkpoint` needs only its summary."""
    is_last = checkpoint.ends(config.run.number_of_steps)
    return is_last and not evals_left(config, RunFolder.open(run_folder(config)))


def newest_to_go_on(config: TrainConfig, point: ResumePoint | None) -> RunCheckpoint | None:
    """Return the newest checkpoint of a run that began at `point`, to continue from.

    None means its beginning, because no checkpoint exists yet from which training can continue.
    """
    name, started_at = config.run.name, _started_at(config)
    whole = [
        one
        for one in complete_checkpoints(checkpoints_folder(config))
        if one.is_of(name, started_at) and one.manifest.has_training_state
    ]
    if whole:
        return whole[-1]
    return None if point is None else point.checkpoint


def _require_ended(config: TrainConfig) -> None:
    """Raise ConfigError while the run in the folder of the config is going on."""
    path = run_folder(config)
    try:
        info = RunFolder.open(path).info()
    except TelescopeError:
        return  # there is no run, or what is wrong with it is said when it is needed
    if info.observed_state is not RunState.RUNNING:
        return
    section = config.checkpoint
    resumes = section.resume_if_saved or section.resume_from_checkpoint == LATEST
    if section.resume_if_saved and info.may_run_elsewhere:
        # A queue starts a job again when its earlier try has ended, also one on a machine that is
        # lost.
        return
    going_on = f"the run in {path} is still going on (process {info.pid} on {info.host})"
    if info.name != config.run.name:
        raise ConfigError(
            f"{going_on}, as its run.json says, which is that of the run {info.name!r}: if the "
            "folder is a copy, this is the process of the original. Wait for that run or stop it, "
            "or start another run with a --name that no run has, and --resume_from_checkpoint "
            f"{checkpoints_folder(config)}/step-..."
        )
    if not info.may_run_elsewhere:
        wait = "stop it before you resume it" if resumes else "wait for it or stop it"
        raise ConfigError(f"{going_on}; {wait}, or give another --name")
    raise ConfigError(
        f"{going_on}, as far as can be known here; stop it there before you resume it, or give "
        "another --name; if that machine is gone, --resume-if-saved goes on with it"
    )


def location_problems(config: TrainConfig, point: ResumePoint | None) -> list[str]:
    """Return why the run cannot be written to, or continued in, the folder of the config."""
    is_same_run = point is not None and point.is_same_run
    if not is_same_run and not _begins_again(config, point):
        go_on = _how_to_go_on(config, point)
        found = run_folder_problems(config, go_on=go_on) or _foreign_checkpoints(config)
        return found or _write_problems(config)
    try:
        folder = RunFolder.open(run_folder(config))
    except TelescopeError as error:
        return [str(error)]
    if not _begins_again(config, point):
        return _write_problems(config)
    return _why_not_again(config, folder, point) or _write_problems(config)


def _how_to_go_on(config: TrainConfig, point: ResumePoint | None) -> str:
    """Return what takes up a run that is in the folder of `config`; "" if nothing does."""
    if _any_checkpoints(checkpoints_folder(config)):
        return "--resume to go on with its run"
    try:
        if _why_not_again(config, RunFolder.open(run_folder(config)), point):
            return ""
    except TelescopeError:
        return ""
    return "--resume-if-saved to begin its run again, since it saved nothing"


def _write_problems(config: TrainConfig) -> list[str]:
    """Return why the run folder, or the one for checkpoints, takes no files."""
    if why := why_not_writable(folder := run_folder(config)):
        return [f"the run folder {folder} cannot be written: {why}"]
    if why := why_not_writable(folder := checkpoints_folder(config)):
        return [
            f"the folder for checkpoints {folder} cannot be written: {why}; set "
            "checkpoint.checkpoint_dir to another place"
        ]
    return []


def _foreign_checkpoints(config: TrainConfig) -> list[str]:
    """Return why a new run cannot save where checkpoints of an earlier one of its name are."""
    own = checkpoints_folder(config)
    paths = _any_checkpoints(own)
    if not paths:
        return []
    return [
        f"{str(own)!r} holds checkpoints of an earlier run ({max(paths).name}), which this one "
        "would take for its own and remove; give another --name or --checkpoint_dir, or move that "
        "folder. To go on with the earlier run, bring back its run folder and add --resume"
    ]


def _any_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not."""
    found = find_checkpoints(folder)
    return [*found.broken, *(one.path for one in found.complete)]


def _started_at(config: TrainConfig) -> str:
    """Return when the run in the folder of `config` began; "" if there is none."""
    try:
        return RunFolder.open(run_folder(config)).info().started_at
    except TelescopeError:
        return ""


def _begins_again(config: TrainConfig, point: ResumePoint | None) -> bool:
    """Return whether an earlier try that saved nothing is repeated in its folder."""
    is_same_run = point is not None and point.is_same_run
    has_folder = (run_folder(config) / "run.json").is_file()
    return config.checkpoint.resume_if_saved and not is_same_run and has_folder


def _why_not_again(config: TrainConfig, folder: RunFolder, point: ResumePoint | None) -> list[str]:
    """Return why a run that began at `point` may not start over and lose its records."""
    begun = 0 if point is None else point.checkpoint.step
    where = f"checkpoint.resume_if_saved: the run in {folder.path}"
    none = f"{str(checkpoints_folder(config))!r} holds no complete checkpoint"
    if folder.info().state is RunState.FINISHED:
        return [
            f"{where} is finished, and {none}; give another --name, or move its folder, to train "
            "it again"
        ]
    every = folder.config().get("checkpoint", {}).get("checkpoint_every", 0)
    num_steps = folder.last_step() - begun
    # The one that was due last may not have been whole yet when the run ended.
    if every and num_steps >= 2 * every:
        return [
            f"{where} took {num_steps} steps and saved every {every}, but {none}; bring back the "
            "folder with its checkpoints, or move the run's folder to begin again"
        ]
    return []


def open_run_folder(
    config: TrainConfig,
    point: ResumePoint | None,
    records: Records,
    inputs: Mapping[str, str] = NO_INPUTS,
) -> RunFolder:
    """Return the run folder to write to: a new one, or the one of the continued run.

    Records of steps that will be repeated are still in it, see `drop_repeated`.
    """
    folder = _opened(config, point)
    folder.note_environments(records)
    folder.note_inputs(inputs)
    origin = origin_of(config)
    folder.note_settings(origin.given, origin.chosen, origin.defaults)
    return folder


def drop_repeated(point: ResumePoint | None, folder: RunFolder) -> None:
    """Delete the records of the steps that a run from `point` will take again.

    Called once everything is ready for them, because nothing brings these records back.
    """
    is_done = point is not None and point.is_at_last_step
    folder.drop_after(0 if point is None else point.checkpoint.step, keeps_evals_after=is_done)


def trained_before(point: ResumePoint, folder: RunFolder) -> set[tuple[str, str]] | None:
    """Return (environment, example id) of all examples that trained the checkpoint's weights.

    None if the checkpoint is no longer in the folder of its run, so that this is unknown.
    """
    source = folder if point.is_same_run else _run_of(point.checkpoint)
    return None if source is None else source.trained_examples(point.checkpoint.step)


def _opened(config: TrainConfig, point: ResumePoint | None) -> RunFolder:
    path, settings = run_folder(config), config.model_dump(mode="json")
    begins_again = _begins_again(config, point)
    if point is None and not begins_again:
        return RunFolder.create(path, config=settings, name=config.run.name)
    source = None if point is None or point.is_same_run else _run_of(point.checkpoint)
    resume = Resume(
        at=now(),
        step=0 if point is None else point.checkpoint.step,
        checkpoint=NOTHING_SAVED if point is None else str(point.checkpoint.path),
        run="" if source is None else str(source.path),
        changed=() if point is None else point.changed,
    )
    if point is None or point.is_same_run or begins_again:
        return RunFolder.resume(
            path,
            config=settings,
            resume=resume,
            has_ended_elsewhere=config.checkpoint.resume_if_saved,
        )
    folder = RunFolder.create(path, config=settings, name=config.run.name)
    folder.note_resume(resume)
    if source is not None:
        folder.adopt_metrics(source, point.checkpoint.step)
    return folder


def _has_saved(folder: Path) -> bool:
    end_replacing(folder)
    # A run whose checkpoints have lost a part has saved something: nothing is begun over it.
    return bool(_any_checkpoints(folder))


def _newest(found: FoundCheckpoints, folder: Path, config: TrainConfig) -> RunCheckpoint:
    if not found.complete and found.broken:
        lacking = [f"{path}: {why}" for path, why in sorted(found.broken.items())]
        raise ConfigError(
            f"{str(folder)!r} holds no complete checkpoint; bring what is missing from a copy, "
            f"or move these folders away and start again from the beginning:\n{_lines(lacking)}"
        )
    if not found.complete:
        raise ConfigError(_nothing_to_resume(folder, config))
    newest = found.complete[-1]
    if newest.manifest.run != config.run.name:
        raise ConfigError(_of_own_folder(newest, config))
    if not newest.is_of(config.run.name, _started_at(config)):
        raise ConfigError(
            f"{str(newest.path)!r} belongs to another run of the name {config.run.name!r}, which "
            f"began at {newest.manifest.started_at}; move the checkpoints of that run elsewhere"
        )
    return newest


def _of_own_folder(checkpoint: RunCheckpoint, config: TrainConfig) -> str:
    """Return why a run cannot begin at this checkpoint in its own folder, and what to do.

    If it is of another name, somebody has renamed or copied the folder of the run that wrote it.
    """
    name, run = checkpoint.manifest.run, run_folder(config)
    if name == config.run.name:
        return (
            f"{config.checkpoint.resume_from_checkpoint!r} is a checkpoint of this run; continue "
            f"its newest one with resume_from_checkpoint = {LATEST!r}, or start another run from "
            "it with a --name of its own"
        )
    back, flags, first = run.with_name(name), f"--name {name} --resume", ""
    if back.exists():
        elsewhere = run.parent / "elsewhere"
        back, first = elsewhere / name, f"mkdir -p {elsewhere} && "
        flags += f" --output_dir {elsewhere}"
    how = f"To go on with that run, move it ({first}mv {run} {back}) and give {flags}; to"
    if config.checkpoint.checkpoint_dir is not None:
        # It holds checkpoints alone, and their run's folder is not known here.
        how = "To"
    return (
        f"{str(checkpoint.path)!r} belongs to the run {name!r}, not to {config.run.name!r}: its "
        f"folder was renamed or copied. {how} start another run from it, give a --name that no "
        f"run has, and --resume_from_checkpoint {checkpoint.path}"
    )


def _nothing_to_resume(folder: Path, config: TrainConfig) -> str:
    """Return why a run cannot continue, and what to do; `folder`: that of its checkpoints."""
    run = run_folder(config)
    if not (run / "run.json").is_file():
        return (
            f"--resume (resume_from_checkpoint = {LATEST!r}): there is no run in {str(run)!r}, and "
            f"{str(folder)!r} holds no complete checkpoint; start it without --resume, or give the "
            "--name and --output_dir that it had"
        )
    return (
        f"--resume (resume_from_checkpoint = {LATEST!r}): the run in {str(run)!r} has no complete "
        f"checkpoint: {str(folder)!r} holds no complete checkpoint; move its folder or give "
        "another --name, and start it again from the beginning without --resume, with "
        "checkpoint_every set, so that it can go on the next time (--resume-if-saved begins "
        "again in its folder)"
    )


def _require_not_finished(
    checkpoint: RunCheckpoint, passed_over: Sequence[str], config: TrainConfig
) -> None:
    """Raise if an older checkpoint would repeat steps of a finished run."""
    if RunFolder.open(run_folder(config)).info().state is RunState.FINISHED:
        raise ConfigError(
            f"the run is finished, and {'; '.join(passed_over)}. The newest whole one is "
            f"{checkpoint.path}; bring the file back from a copy, or move the newer ones away to "
            f"take the steps after {checkpoint.step} again"
        )


def _require_unfinished(checkpoint: RunCheckpoint, config: TrainConfig) -> None:
    run = run_folder(config)
    if RunFolder.open(run).info().state is RunState.FINISHED:
        # The report comes after everything else, so that a kill may have left a finished run alone.
        raise ConfigError(
            f"{_no_step_left(checkpoint, config)}. If its report.html is missing or too short, "
            f"as after a kill, {shlex.join(['telescope', 'eval', '--report', str(run)])} writes it"
        )


def _no_step_left(checkpoint: RunCheckpoint, config: TrainConfig) -> str:
    return (
        f"{str(checkpoint.path)!r} has {checkpoint.step} steps, and number_of_steps is "
        f"{config.run.number_of_steps}, so nothing is left to do; raise number_of_steps"
    )


def _allowed_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], origin: SettingOrigin
) -> tuple[str, ...]:
    """Return the settings that differ; raises ConfigError for one that must not differ.

    A setting that an earlier version did not know is no difference at its default, nor at the
    value that the run decides on where nobody set it.
    """
    before, defaults = dict(before), origin.defaults
    if "environments" in before:
        pair = before["environments"], after["environments"]
        before["environments"] = _completed(*pair, "environments", defaults)
    if "evals" in before.get("evals", {}):
        pair = before["evals"]["evals"], after["evals"]["evals"]
        completed = _completed(*pair, "evals.evals", defaults)
        before["evals"] = {**before["evals"], "evals": completed}
    old, new = dict(_flat(before)), dict(_flat(after))
    unset = {name: new[name] for name in defaults.keys() & new.keys() - {*origin.given}}
    old = {name: one for name, one in defaults.items() if name in new} | unset | old
    changed = {
        name: f"{name}: {old.get(name, 'not set')!r} -> {new.get(name, 'not set')!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and not _IGNORED.match(name)
    }
    fixed = [line for name, line in changed.items() if _FIXED.match(name)]
    if fixed:
        raise ConfigError(
            "a run can be resumed only with the model, optimizer, environments and seed that it "
            f"had; restore these settings, or start from an export of the weights:\n{_lines(fixed)}"
        )
    return tuple(changed.values())


def _completed(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    table: str,
    defaults: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the entries of a list of tables, with what is new in those of `after`."""
    now_ = {one["name"]: one for one in after}

    def new(name: str) -> dict[str, Any]:
        keys = {key: f"{table}.{name}.{key}" for key in now_.get(name, ())}
        return {key: defaults[full] for key, full in keys.items() if full in defaults}

    return [{**new(one["name"]), **one} for one in before]


def input_changes(checkpoint: RunCheckpoint, inputs: Mapping[str, str]) -> list[str]:
    """Return the input files that differ; raises ConfigError for one that must not differ."""
    before = checkpoint.manifest.inputs
    if not any(name.startswith(_DATASET) for name in before):
        # Earlier versions did not read the folder of a dataset for this.
        inputs = {name: one for name, one in inputs.items() if not name.startswith(_DATASET)}
    changed = file_changes(before, inputs)
    fixed = [line for line in changed if line.startswith(tuple(f"file {one}" for one in FIXED))]
    if fixed:
        raise ConfigError(
            f"files that {str(checkpoint.path)!r} depends on are not what they were, under the "
            "same settings; bring them back, or start another run from an export of the "
            f"weights:\n{_lines(fixed)}"
        )
    return changed


def _environment_changes(
    checkpoint: RunCheckpoint, config: TrainConfig, records: Records
) -> list[str]:
    """Return the differences in environments' code; raises ConfigError if not allowed."""
    changed = all_changes(checkpoint.manifest.environment_records, records)
    if changed and not config.checkpoint.allow_changed_environments:
        raise ConfigError(
            "the code of the environments differs from what "
            f"{str(checkpoint.path)!r} was trained on, so rewards may not be comparable. Bring the "
            "earlier code back (of installed environments by `telescope env sync` with the "
            "telescope.lock of that time), or go on with the code that is there now by "
            f"--allow-changed-environments:\n{_lines(changed)}"
        )
    return [f"environment {line}" for line in changed]


def _other_differences(checkpoint: RunCheckpoint, config: TrainConfig) -> Iterator[str]:
    """Yield differences, besides settings, of another run that begins at `checkpoint`."""
    chance = "so this run and the one that wrote the checkpoint differ by chance too"
    if not config.rollout.seed_sampling:
        yield f"rollout.seed_sampling is off: tokens are drawn at random, {chance}"
    elif ahead := config.scheduling.max_async_rollout:
        yield (
            f"scheduling.max_async_rollout is {ahead}: which weights sample a token depends on the "
            f"clock, {chance}"
        )
    source = _run_of(checkpoint)
    for resume in source.info().resumes if source is not None else ():
        if resume.step > checkpoint.step and resume.changed:
            yield (
                f"{checkpoint.manifest.run} itself went on from step {resume.step} with other "
                f"settings: {'; '.join(resume.changed)}"
            )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting as (dotted name, value)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif name == "environments":
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}[{index}]")
    else:
        yield name, value


def _lines(changed: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in changed)


def _run_of(checkpoint: RunCheckpoint) -> RunFolder | None:
    """Return the run that wrote `checkpoint`, at its recorded place or around the checkpoint."""
    name = checkpoint.manifest.run
    own = checkpoint.manifest.config.get("run", {})
    # The second one with `checkpoint_dir`, which keeps checkpoints apart from their runs.
    for path in (checkpoint.path.resolve().parent.parent, Path(own.get("output_dir", "")) / name):
        try:
            run = RunFolder.open(path.resolve())
        except ConfigError:
            continue
        if run.info().name == name:
            return run
    return None


def inputs_of(
    model: str,
    *,
    chat_template: str | None,
    accept_fn: str | None = None,
    dataset: str | None = None,
    reference_model: str | None = None,
) -> dict[str, str]:
    """Return the digest of each file that a run reads besides its environments.

    Settings name the place of a model, a template or a function, but not its content. Keys are
    `setting: file`; for a Hub id the value is its commit.

    `accept_fn`: `module:function` in the settings. `dataset`: a file of examples, or a
    folder of such files. Missing files are left out; their readers report them.
    """
    found = dict(_of_model(MODEL, model))
    if reference_model is not None:
        found |= _of_model(REFERENCE, reference_model)
    given = {"model.chat_template": chat_template, _DATASET: dataset}
    for setting, name in given.items():
        # A template may also be its text, which is longer than a path may be.
        if name is not None and len(name) < 1024 and (path := Path(name).expanduser()).is_file():
            found[f"{setting}: {name}"] = quick_digest(path)
    if dataset is not None and (folder := Path(dataset).expanduser()).is_dir():
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            name = path.relative_to(folder).as_posix()
            # Readers of rows take no hidden files, such as the marks that downloads leave.
            if "/." not in f"/{name}":
                found[f"{_DATASET}: {dataset}/{name}"] = quick_digest(path)
    if accept_fn is not None and accept_fn not in BUILT_IN:
        sources = source_files(accept_fn.partition(":")[0])
        found |= {f"rollout.should_accept_fn: {name}": value for name, value in sources.items()}
    return found


def _of_model(setting: str, name: str) -> Iterator[tuple[str, str]]:
    folder = Path(name).expanduser()
    if folder.is_dir():
        for path in sorted({path for kind in _MODEL_FILES for path in folder.glob(kind)}):
            yield f"{setting}: {path.name}", quick_digest(path)
        return
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return
    if isinstance(cached, str):
        yield f"{setting}: commit", Path(cached).parent.name
