"""`telescope eval`: measure models on environments, or show the contents of a results folder.

The whole request is checked before the first file is written and before a server is started.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from telescope_cli.eval.flags import parse_ks, unparsed
from telescope_cli.eval.model import template_text
from telescope_cli.eval.play import evaluate
from telescope_cli.eval.request import EvalRequest, checked
from telescope_cli.eval.selection import parse_selection
from telescope_cli.eval.show import require_enough, show_outcomes
from telescope_cli.eval.view import AsJsonOption
from telescope_core.base.errors import ConfigError
from telescope_core.base.types import JsonValue, Sampling, Split
from telescope_core.chat.client import ApiKey
from telescope_core.evals import EvalSettings
from telescope_core.open import record_environment
from telescope_core.processes.settings import Isolation, ProcessSettings

_USUAL_VARIABLE = "TELESCOPE_API_KEY"
_OWN = {
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "temperature": "--temperature",
    "seed": "--seed",
    "stop": "--stop",
    "model": "--model",
}
_NOT_OURS = {
    "messages": "the environment writes the conversation",
    "tools": "the environment names its tools",
    "stream": "answers are recorded when they are complete",
    "n": "--rollouts asks several times",
}

EnvironmentOption = Annotated[
    str | None,
    typer.Argument(help="Installed environments: a name, owner/name, or module:Class."),
]
ModelOption = Annotated[
    list[str],
    typer.Option(
        help="Model folder, or the name of a served model with --base-url; may be repeated."
    ),
]
BaseUrlOption = Annotated[
    str | None,
    typer.Option(help="URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        help="What replaces the chat template of a model folder: a Jinja file, or the name of a "
        "shipped template.",
    ),
]
ApiKeyEnvOption = Annotated[
    str | None,
    typer.Option(
        help="Environment variable that holds the endpoint's API key; TELESCOPE_API_KEY if not "
        "given."
    ),
]
ExamplesOption = Annotated[
    str | None,
    typer.Option(
        help="Number of examples, all, or positions such as 0-9,20.",
        show_default="64, or all if there are fewer",
    ),
]
ExampleOption = Annotated[
    list[str], typer.Option(help="Id of an example to play; may be repeated.")
]
ShuffleOption = Annotated[
    int | None,
    typer.Option(help="Seed; choose the examples at random from the whole split."),
]
RolloutsOption = Annotated[int, typer.Option(help="Rollouts per example.")]
KOption = Annotated[
    str, typer.Option("--k", help="Values of k for pass@k and pass^k, such as 1,4.")
]
SplitOption = Annotated[Split, typer.Option(help="Split to play.")]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 = greedy. Without it, 1 for a model folder, and the "
        "endpoint's own for an endpoint."
    ),
]
TopPOption = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")]
StopOption = Annotated[
    list[str], typer.Option(help="Text that ends a turn; may be repeated.", show_default=False)
]
ReasoningEffortOption = Annotated[
    str | None, typer.Option(help="How long a reasoning model thinks, in the endpoint's words.")
]
ExtraBodyOption = Annotated[
    str | None,
    typer.Option(help="Further fields of each request, as JSON, such as '{\"top_k\": 20}'."),
]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens per turn.")]
SeedOption = Annotated[int | None, typer.Option(help="Random seed for sampling.")]
ConcurrencyOption = Annotated[int, typer.Option(help="Most rollouts at the same time.")]
DeadlineSOption = Annotated[float, typer.Option(help="Most seconds per rollout.")]
EnvWorkersOption = Annotated[int, typer.Option(help="Number of environment processes.")]
EnvIsolationOption = Annotated[
    Isolation,
    typer.Option(help="Run the environment in separate processes, or in this one (none)."),
]
EnvMemoryLimitMbOption = Annotated[
    int | None, typer.Option(min=64, help="Memory limit of each environment process, in MiB.")
]
EnvAddressOption = Annotated[
    list[str],
    typer.Option(help="host:port of a worker that runs elsewhere; may be repeated."),
]
MaxFailedOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Largest share of rollouts that may fail; above it, the exit code is 7.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the results; must be new or empty. Several evals get a folder each in it."
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the eval in --output, or play more examples or rollouts."
    ),
]
ReportOption = Annotated[
    Path | None, typer.Option(help="Show the contents of a run or eval folder.")
]


def eval_command(
    context: typer.Context,
    environment: EnvironmentOption = None,
    model: ModelOption = [],  # noqa: B006 (typer reads lists, and copies them)
    base_url: BaseUrlOption = None,
    chat_template: ChatTemplateOption = None,
    api_key_env: ApiKeyEnvOption = None,
    examples: ExamplesOption = None,
    example: ExampleOption = [],  # noqa: B006
    shuffle: ShuffleOption = None,
    rollouts: RolloutsOption = 4,
    k: KOption = "1",
    split: SplitOption = Split.EVAL,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    stop: StopOption = [],  # noqa: B006 (typer reads it, and copies it)
    reasoning_effort: ReasoningEffortOption = None,
    extra_body: ExtraBodyOption = None,
    max_tokens: MaxTokensOption = 512,
    seed: SeedOption = None,
    concurrency: ConcurrencyOption = 64,
    deadline_s: DeadlineSOption = 300.0,
    env_workers: EnvWorkersOption = 1,
    env_isolation: EnvIsolationOption = Isolation.AUTO,
    env_memory_limit_mb: EnvMemoryLimitMbOption = None,
    env_address: EnvAddressOption = [],  # noqa: B006
    max_failed: MaxFailedOption = 0.1,
    output: OutputOption = None,
    resume: ResumeOption = False,
    as_json: AsJsonOption = False,
    report: ReportOption = None,
) -> None:
    """Measure models on environments: mean reward, pass@k and pass^k with 95% intervals.

    Several environments, and --model several times, are evaluated one after the other. Settings of
    the environments themselves are flags that begin with --env, such as --env.max_number.

    For example:

      telescope eval math-reasoning --model ./my-model --examples 64 --rollouts 8 --k 1,4

      telescope eval countdown --base-url http://127.0.0.1:8000/v1 --env.max_number 9

      telescope eval --report runs/quickstart
    """
    left = unparsed(context)
    if report is not None:
        from telescope_cli.eval.report import show_folder

        return show_folder(report, as_json=as_json)
    if environment is None:
        raise ConfigError(
            "expected an environment, got none; write: telescope eval ENVIRONMENT --model MODEL, "
            "or telescope eval --report FOLDER"
        )
    names = _distinct("environment", [environment, *left.environments])
    processes = _process_settings(env_isolation, env_workers, env_address, env_memory_limit_mb)
    first = EvalRequest(
        environment=names[0],
        environment_settings=left.settings,
        model=None,
        base_url=base_url,
        chat_template=template_text(chat_template, base_url),
        api_key=_api_key(api_key_env),
        settings=_settings(context.params),
        selection=parse_selection(examples, example, shuffle),
        processes=processes,
        record=record_environment(names[0], processes, settings=left.settings),
    )
    requests = checked(_each(first, models=_distinct("model", model), environments=names))
    outcomes = evaluate(requests, output=output, resume=resume)
    show_outcomes(outcomes, as_json=as_json)
    require_enough(outcomes, max_failed=max_failed)


def _settings(options: Mapping[str, Any]) -> EvalSettings:
    return EvalSettings(
        num_examples=1,  # until the split is known
        rollouts=options["rollouts"],
        ks=parse_ks(options["k"]),
        sampling=_sampling(options),
        concurrency=options["concurrency"],
        deadline_s=options["deadline_s"],
        split=options["split"],
    )


def _each(
    first: EvalRequest, *, models: Sequence[str], environments: Sequence[str]
) -> list[EvalRequest]:
    """Return one request for each pair, model by model."""
    return [
        replace(
            first,
            environment=name,
            model=model,
            record=record_environment(name, first.processes, settings=first.environment_settings),
        )
        for model, name in product(models or [None], environments)
    ]


def _distinct(what: str, names: Sequence[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what} {name!r} is given twice; give it once")
    return list(names)


def _process_settings(
    isolation: Isolation, num_workers: int, addresses: list[str], memory_limit_mb: int | None
) -> ProcessSettings:
    return ProcessSettings(
        isolation=isolation,
        num_workers=num_workers,
        addresses=tuple(addresses),
        memory_limit_bytes=None if memory_limit_mb is None else memory_limit_mb * 2**20,
    )


def _api_key(variable: str | None) -> ApiKey:
    """Return the key in the environment variable that was named, or else in the default one.

    Raises ConfigError when a variable was named and is not set: without its key, the endpoint
    would refuse every request.
    """
    value = os.environ.get(variable or _USUAL_VARIABLE, "")
    if variable is not None and not value:
        raise ConfigError(
            f"--api-key-env {variable}: this environment variable is not set; export it before "
            "the command, or leave the option out for an endpoint without a key"
        )
    return ApiKey(value, variable or _USUAL_VARIABLE)


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Return the sampling settings in the `options` of the command.

    Without a temperature, an endpoint uses its default. A model folder, which is served for this
    eval, gets 1, so that the model's own distribution is sampled.
    """
    extra = _object(options["extra_body"])
    # Sent even as 1, which differs from leaving it out where the endpoint has another default.
    for name in ("top_p", "reasoning_effort"):
        if options[name] is not None:
            if name in extra:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--extra-body and {option} both set {name}; give it once")
            extra[name] = options[name]
    is_folder = options["base_url"] is None
    temperature = options["temperature"]
    return Sampling(
        max_tokens=options["max_tokens"],
        temperature=1.0 if temperature is None and is_folder else temperature,
        seed=options["seed"],
        stop=tuple(options["stop"]),
        extra=extra,
    )


def _object(text: str | None) -> dict[str, JsonValue]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"--extra-body must be a JSON object such as '{{\"top_k\": 20}}', got {text!r}"
        )
    for name in cast(dict[str, Any], fields):
        if name in _OWN:
            raise ConfigError(f"--extra-body: {name} has an option of its own, {_OWN[name]}")
        if name in _NOT_OURS:
            raise ConfigError(f"--extra-body: {name} cannot be given: {_NOT_OURS[name]}")
    return cast(dict[str, JsonValue], fields)
