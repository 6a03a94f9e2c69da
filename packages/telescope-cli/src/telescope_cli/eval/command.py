"""`telescope eval`: measure models on environments, or show the contents of a results folder.

The whole request is checked before the first file is written and before a server is started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import typer

from telescope_cli.eval.endpoint import api_key, sampling_of
from telescope_cli.eval.flags import parse_ks, unparsed
from telescope_cli.eval.model import template_text
from telescope_cli.eval.options import (
    ApiKeyEnvOption,
    AsJsonOption,
    BaseUrlOption,
    ChatTemplateOption,
    ConcurrencyOption,
    DeadlineSOption,
    EnvAddressOption,
    EnvironmentOption,
    EnvIsolationOption,
    EnvMemoryLimitMbOption,
    EnvWorkersOption,
    ExampleOption,
    ExamplesOption,
    ExtraBodyOption,
    KOption,
    MaxFailedOption,
    MaxTokensOption,
    ModelOption,
    OutputOption,
    ReasoningEffortOption,
    ReportOption,
    ResumeOption,
    RolloutsOption,
    SeedOption,
    ShuffleOption,
    SplitOption,
    StopOption,
    TemperatureOption,
    TopPOption,
)
from telescope_cli.eval.play import evaluate
from telescope_cli.eval.request import EvalRequest, checked
from telescope_cli.eval.selection import parse_selection
from telescope_cli.eval.show import require_enough, show_outcomes
from telescope_core.base.errors import ConfigError
from telescope_core.base.types import Split
from telescope_core.evals import EvalSettings
from telescope_core.open import record_environment
from telescope_core.processes.settings import Isolation, ProcessSettings


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
        api_key=api_key(api_key_env),
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
        sampling=sampling_of(options),
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
