"""Settings files of `telescope eval`, and the evals of a training's settings files.

A file has the options of the command as settings, under the same names. What is set at its top is
for all environments; a table `[[evals]]` is for one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from telescope_cli.eval.flags import parse_ks
from telescope_cli.eval.names import HERE, REASONS
from telescope_cli.eval.selection import is_number, parse_selection
from telescope_core.base.errors import ConfigError, TelescopeError
from telescope_core.base.json_text import read_json
from telescope_core.base.types import Split
from telescope_core.finding.locate import locate_environment
from telescope_core.processes.settings import Isolation
from telescope_core.settings.config import SUFFIXES, load_config, merged, read_settings_file

if TYPE_CHECKING:
    from telescope_train.config.schema import EvalEntry, TrainConfig

_Count = Annotated[int, Field(ge=1)]
_NotNegative = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Name = Annotated[str, Field(min_length=1)]


def _check_examples(value: int | str) -> int | str:
    try:
        parse_selection(str(value), (), None)
    except ConfigError:
        raise ValueError("expected a number, all, or positions such as 0-9,20") from None
    return value


def _check_k(value: int | tuple[int, ...] | str) -> int | tuple[int, ...] | str:
    try:
        parse_ks(_ks_text(value))
    except ConfigError:
        raise ValueError("expected a number, or a list of numbers such as [1, 4]") from None
    return value


def _ks_text(value: int | tuple[int, ...] | str) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "")


class _PlayedSettings(BaseModel):
    """What may differ from environment to environment: the options of these names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    examples: Annotated[int | str, AfterValidator(_check_examples)] | None = None
    example: tuple[str, ...] | None = None
    shuffle: int | None = None
    rollouts: _Count | None = None
    k: Annotated[int | tuple[int, ...] | str, AfterValidator(_check_k)] | None = None
    split: Split | None = None
    temperature: _NotNegative | None = None
    top_p: _Share | None = None
    stop: tuple[_Name, ...] | None = None
    reasoning_effort: str | None = None
    extra_body: dict[str, JsonValue] | None = None
    max_tokens: _Count | None = None
    seed: int | None = None
    concurrency: _Count | None = None
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    env_workers: _Count | None = None
    env_isolation: Isolation | None = None
    env_memory_limit_mb: Annotated[int, Field(ge=64)] | None = None
    env_address: tuple[str, ...] | None = None
    env: dict[str, JsonValue] | None = None
    """Settings of the environment itself, which are `--env.NAME` on the command line."""


class EvalTable(_PlayedSettings):
    """One environment of a file."""

    name: _Name


def _no_tables(one: object) -> object:
    if isinstance(one, dict):
        raise ValueError("expected a name; settings of an environment are a table [[evals]]")
    return one


class EvalFile(_PlayedSettings):
    """A settings file of `telescope eval`."""

    model: str | tuple[str, ...] | None = None
    base_url: str | None = None
    chat_template: str | None = None
    api_key_env: str | None = None
    max_failed: _Share | None = None
    output: _Name | None = None
    environments: tuple[Annotated[_Name, BeforeValidator(_no_tables)], ...] = ()
    """Environments without settings of their own."""
    evals: tuple[EvalTable, ...] = ()


_ONCE = "it is of one command and no setting of what is played; give it as the option --{}"
FOREIGN = {
    flag.lstrip("-").replace("-", "_"): here.partition(":")[0].lstrip("-").replace("-", "_")
    for flag, here in HERE.items()
    if not here.startswith("--resume")
} | {"env_addresses": "env_address"}
"""Setting of another program, or of `[[evals]]` in a run -> setting here."""
_REFUSED = {
    **{flag.lstrip("-").replace("-", "_"): why for flag, why in REASONS.items()},
    **{one.replace("-", "_"): _ONCE.format(one) for one in ("resume", "dry-run", "json", "report")},
    "eval_every": "it says when a run evaluates; `telescope eval` also takes the run's whole file",
}


_OF_SFT = {"number_of_steps", "number_of_epochs", "dataset"}
"""Settings of which a file of `telescope sft` has one, beside `output`."""


class Given(NamedTuple):
    """Values of options, and where each was set."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]


def _given(values: Mapping[str, Any], origin: str) -> Given:
    """Return `values` as set in `origin`, and so are the entries of those that are tables."""
    places = dict.fromkeys(values, origin)
    for name in ("extra_body", "env"):
        places |= dict.fromkeys((f"{name}.{key}" for key in values.get(name) or ()), origin)
    return Given(values, places)


class FileSettings(NamedTuple):
    """What settings files say."""

    shared: Given
    """The settings of all evals."""
    evals: Mapping[str, Given]
    """Environment -> its own settings."""

    def of(self, environment: str) -> Given:
        """Return the own settings of `environment`, which the files may name otherwise."""
        if not self.evals or environment in self.evals:
            return self.evals.get(environment, _NOTHING)
        own = _environment_id(environment)
        found = (given for name, given in self.evals.items() if _environment_id(name) == own)
        return next(found, _NOTHING)


_NOTHING = Given({}, {})
NO_FILES = FileSettings(_NOTHING, {})


def _environment_id(name: str) -> str:
    """Return an id that all names of one environment share; `name` itself if it is not found."""
    try:
        return locate_environment(name).id.partition("@")[0]
    except TelescopeError:
        return name


def require_distinct(environments: Sequence[str]) -> None:
    """Raise ConfigError if an environment is given twice, under whichever of its names."""
    found: dict[str, str] = {}
    for name in environments:
        own = _environment_id(name)
        if own in found:
            also = "" if found[own] == name else f", also as {found[own]!r}"
            raise ConfigError(f"environment {name!r} is given twice{also}; give it once")
        found[own] = name


def names_file(word: str) -> bool:
    """Return whether a word of the command line is meant as a settings file."""
    return word.lower().endswith(SUFFIXES)


def read_files(files: Sequence[Path], *, is_folder: bool) -> FileSettings:
    """Return the settings in `files`, of which later ones override earlier ones.

    `is_folder`: whether a model folder is evaluated and not an endpoint, unless the files name one.
    A model and chat template of a training are those of its folder. Raises ConfigError.
    """
    if not files:
        return NO_FILES
    documents = {str(path): read_settings_file(path) for path in files}
    for file, one in documents.items():
        if "output" in one and not one.keys().isdisjoint(_OF_SFT) and "run" not in one:
            raise ConfigError(
                f"{file}: these are settings of `telescope sft`, which has no evals; write: "
                f"telescope eval ENVIRONMENT --model {one['output']}"
            )
    of_training = [
        f"{file} has {name!r}"
        for file, one in documents.items()
        for name in ("run", "number_of_steps")
        if name in one
    ]
    if of_training:
        try:
            return _of_training(files, is_folder=is_folder)
        except ConfigError as error:
            if len(files) == 1:
                raise
            raise ConfigError(
                f"{error}\nAll files were read as those of a training, because {of_training[0]}"
            ) from None
    config = load_config(EvalFile, files, [], foreign_names=FOREIGN, refused_names=_REFUSED)
    origins: dict[str, str] = {}
    for file, one in documents.items():
        origins |= _given(one, file).origins
    options = _as_options(config)
    places = {one: file for one, file in origins.items() if one.partition(".")[0] in options}
    tables = dict.fromkeys(config.environments, _NOTHING)
    try:
        require_distinct([*config.environments, *(table.name for table in config.evals)])
    except ConfigError as error:
        where = dict.fromkeys(origins[one] for one in ("environments", "evals") if one in origins)
        raise ConfigError(f"{', '.join(where)}: {error}") from None
    for table in config.evals:
        own = f"[[evals]] in {origins['evals']}"
        tables[table.name] = _given(_as_options(table), own)
    return FileSettings(Given(options, places), tables)


def _as_options(settings: _PlayedSettings) -> dict[str, Any]:
    """Return the settings as values that the command's options have."""
    found = settings.model_dump(
        exclude_none=True, exclude_unset=True, exclude={"evals", "environments", "name"}
    )
    for name, value in found.items():
        if name == "examples":
            found[name] = str(value)
        elif name == "k":
            found[name] = _ks_text(value)
        elif name == "model" and isinstance(value, str):
            found[name] = [value]
        elif name == "output":
            found[name] = Path(value)
    return found


def _of_training(files: Sequence[Path], *, is_folder: bool) -> FileSettings:
    """Return the evals of a training, as it plays them itself."""
    try:
        from telescope_train.plan.load import load_train_config
    except ModuleNotFoundError:
        raise ConfigError(
            f"{files[0]}: these are settings of a training, which telescope-train reads; run: "
            "pip install 'telescope-cli[train]', or write a file for `telescope eval`"
        ) from None
    config = load_train_config(files)
    told = ", ".join(map(str, files))
    if not config.evals.evals:
        raise ConfigError(
            f"{told}: this training has no evals; add a table [[evals]] with the name of an "
            "environment"
        )
    shared: dict[str, Any] = {}
    if is_folder:
        shared["model"] = [config.model.model]
        shared["chat_template"] = config.model.chat_template
    shared = {name: value for name, value in shared.items() if value is not None}
    evals: dict[str, Given] = {}
    for entry in config.evals.evals:
        values = _training_options(config, entry)
        evals[entry.name] = _given(values, told)
    return FileSettings(_given(shared, told), evals)


def _training_options(config: "TrainConfig", entry: "EvalEntry") -> dict[str, Any]:
    """Return the options that play `entry` as `telescope_train.evals.beside` does."""
    rollout = config.rollout
    extra: dict[str, JsonValue] = {
        name: getattr(entry, name)
        for name in ("top_k", "min_p", "repetition_penalty")
        if getattr(entry, name) != type(entry).model_fields[name].default
    }
    if rollout.stop and rollout.include_stop_str_in_output:
        extra["include_stop_str_in_output"] = True
    if config.model.enable_thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": config.model.enable_thinking}
    options = {
        "examples": None if entry.num_samples is None else str(entry.num_samples),
        "rollouts": entry.rollouts,
        "k": ",".join(map(str, entry.pass_k)),
        "split": Split(entry.split),
        "or_train": entry.separate_eval_samples,
        "temperature": entry.temperature,
        "top_p": None if entry.top_p == 1 else entry.top_p,
        "max_tokens": entry.max_tokens or rollout.max_tokens,
        "stop": rollout.stop,
        "seed": config.run.seed if rollout.seed_sampling else None,
        "extra_body": extra or None,
        "deadline_s": rollout.rollout_timeout_s,
        "env_workers": rollout.env_workers,
        "env_isolation": Isolation(rollout.env_isolation),
        "env_memory_limit_mb": rollout.env_memory_limit_mb,
        "env_address": entry.env_addresses or None,
        "env": entry.env or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def options_for(
    name: str, files: FileSettings, context: typer.Context, env: Mapping[str, Any]
) -> Given:
    """Return the options for environment `name`: the command line over its table over the rest.

    `env`: settings of environments that the command line has.
    """
    typed = {
        one: value
        for one, value in context.params.items()
        if one in EvalFile.model_fields
        and getattr(context.get_parameter_source(one), "name", "") == "COMMANDLINE"
    }
    if "extra_body" in typed:
        typed["extra_body"] = read_extra_body(typed["extra_body"])
    if env:
        typed["env"] = env
    line = _given(typed, "command line")
    values: dict[str, Any] = {**context.params, "env": {}, "or_train": False}
    origins: dict[str, str] = {}
    for one in (files.shared, files.of(name), line):
        # What chooses examples in one way takes the place of the other ways.
        chosen = one.values.get("examples")
        if "example" in one.values or chosen is not None:
            values |= {"examples": None, "example": []}
        if "example" in one.values or (chosen is not None and not is_number(chosen)):
            values["shuffle"] = None
        for option, value in one.values.items():
            values[option] = merged(values.get(option), value)
        origins |= one.origins
    return Given(values, origins)


def read_extra_body(text: str) -> Mapping[str, Any]:
    """Return the object in `--extra-body`; raises ConfigError for other text."""
    fields, problem = None, ""
    try:
        fields = read_json(text)
    except ValueError as error:
        problem = f" ({error})"
    if not isinstance(fields, dict):
        raise ConfigError(
            f"--extra-body must be a JSON object such as '{{\"top_k\": 20}}', got {text!r}{problem}"
        )
    return fields
