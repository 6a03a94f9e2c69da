"""`telescope eval`: measure a model on an environment, or show the contents of a results folder.

The whole request is checked before the first file is written and before a server is started.
"""

import asyncio
import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from telescope_cli.eval.flags import environment_settings, parse_ks
from telescope_cli.eval.model import model_folder, serve_folder
from telescope_cli.eval.options import (
    ApiKeyEnvOption,
    AsJsonOption,
    BaseUrlOption,
    ConcurrencyOption,
    DeadlineSOption,
    EnvAddressOption,
    EnvironmentOption,
    EnvIsolationOption,
    EnvMemoryLimitMbOption,
    EnvWorkersOption,
    ExamplesOption,
    KOption,
    MaxTokensOption,
    ModelOption,
    OutputOption,
    ReportOption,
    ResumeOption,
    RolloutsOption,
    SeedOption,
    SplitOption,
    TemperatureOption,
)
from telescope_cli.eval.view import (
    EvalProgress,
    first_errors,
    print_errors,
    print_result,
    stderr_console,
)
from telescope_core.environment_record import EnvironmentRecord
from telescope_core.errors import ConfigError, TelescopeError
from telescope_core.evals import EvalFolder, EvalResult, EvalSettings, run_eval
from telescope_core.evals.folder import result_to_json
from telescope_core.evals.settings import check_split
from telescope_core.open import record_environment
from telescope_core.processes.settings import Isolation, ProcessSettings
from telescope_core.records.files import plain
from telescope_core.reports import write_eval_report
from telescope_core.types import JsonValue, Sampling, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """The request of one `telescope eval` command."""

    environment: str
    environment_settings: dict[str, Any]
    model: str | None
    """Model folder, or name of a served model; None = the only model the endpoint serves."""
    base_url: str | None
    """URL of the endpoint; None = `model` is a folder, which is served for this eval."""
    api_key: str | None
    settings: EvalSettings
    processes: ProcessSettings
    """Where the environment runs; this does not affect the results."""
    record: EnvironmentRecord
    """Identity of the environment's code."""

    def manifest(self) -> dict[str, JsonValue]:
        """Return everything that affects the results."""
        code = self.record
        return {
            "environment": self.environment,
            "environment_code": {
                "id": code.id,
                "version": code.version,
                "wheel_sha256": code.wheel_sha256,
                "lock_digest": code.lock_digest,
            },
            "env": self.environment_settings,
            "model": self.model,
            "base_url": self.base_url,
            **asdict(self.settings),
        }


def eval_command(
    context: typer.Context,
    environment: EnvironmentOption = None,
    model: ModelOption = None,
    base_url: BaseUrlOption = None,
    api_key_env: ApiKeyEnvOption = "TELESCOPE_API_KEY",
    examples: ExamplesOption = 64,
    rollouts: RolloutsOption = 4,
    k: KOption = "1",
    split: SplitOption = Split.EVAL,
    temperature: TemperatureOption = 1.0,
    max_tokens: MaxTokensOption = 512,
    seed: SeedOption = None,
    concurrency: ConcurrencyOption = 64,
    deadline_s: DeadlineSOption = 300.0,
    env_workers: EnvWorkersOption = 1,
    env_isolation: EnvIsolationOption = Isolation.AUTO,
    env_memory_limit_mb: EnvMemoryLimitMbOption = None,
    env_address: EnvAddressOption = [],  # noqa: B006 (typer reads it, and copies it)
    output: OutputOption = None,
    resume: ResumeOption = False,
    as_json: AsJsonOption = False,
    report: ReportOption = None,
) -> None:
    """Measure a model on an environment: mean reward, pass@k and pass^k with 95% intervals.

    Settings of the environment itself are flags that begin with --env, such as --env.max_number.

    For example:

      telescope eval math-reasoning --model ./my-model --examples 64 --rollouts 8 --k 1,4

      telescope eval countdown --base-url http://127.0.0.1:8000/v1 --env.max_number 9

      telescope eval --report runs/quickstart
    """
    own_settings = environment_settings(context)
    if report is not None:
        from telescope_cli.eval.report import show_folder

        show_folder(report, as_json=as_json)
        return
    if environment is None:
        raise ConfigError(
            "expected an environment, got none; write: telescope eval ENVIRONMENT --model MODEL, "
            "or telescope eval --report FOLDER"
        )
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    processes = _process_settings(env_isolation, env_workers, env_address, env_memory_limit_mb)
    request = EvalRequest(
        environment=environment,
        environment_settings=own_settings,
        model=model,
        base_url=base_url,
        api_key=os.environ.get(api_key_env),
        settings=EvalSettings(
            num_examples=examples,
            rollouts=rollouts,
            ks=parse_ks(k),
            sampling=sampling,
            concurrency=concurrency,
            deadline_s=deadline_s,
            split=split,
        ),
        processes=processes,
        record=record_environment(environment, processes),
    )
    result, folder = _evaluate(request, output=output, resume=resume)
    _show(result, folder, as_json=as_json)


def _process_settings(
    isolation: Isolation, num_workers: int, addresses: list[str], memory_limit_mb: int | None
) -> ProcessSettings:
    return ProcessSettings(
        isolation=isolation,
        num_workers=num_workers,
        addresses=tuple(addresses),
        memory_limit_bytes=None if memory_limit_mb is None else memory_limit_mb * 2**20,
    )


def _show(result: EvalResult, folder: EvalFolder, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(plain(result_to_json(result)), indent=2))
    else:
        print_result(result, folder.path)
    errors = first_errors(folder.rows())
    if result.num_scored == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in result.failures.items())
        raise TelescopeError(
            f"no rollout was scored: {result.num_failed} failed ({reasons}); "
            f"their errors are in {folder.path / 'rollouts.jsonl'}; the first error: {errors[0]}"
        )
    if not as_json:
        print_errors(errors)


def _evaluate(
    request: EvalRequest, *, output: Path | None, resume: bool
) -> tuple[EvalResult, EvalFolder]:
    if request.base_url is None:
        model_folder(request.model)
    asyncio.run(_check(request))
    folder = _open_folder(request, output, resume=resume)
    with _recorded(folder), _endpoint(request, folder) as (base_url, served_model):
        result = asyncio.run(_play(request, folder, base_url, served_model))
    folder.finish(result)
    write_eval_report(folder)
    return result, folder


async def _check(request: EvalRequest) -> None:
    """Open the environment and check the endpoint, so that problems are reported first."""
    from telescope_core.chat.client import ChatClient
    from telescope_core.chat.http import RequestLimits
    from telescope_core.open import open_environment

    environment = open_environment(
        request.environment, request.environment_settings, request.processes
    )
    try:
        check_split(request.settings, await environment.describe())
    finally:
        await environment.close()
    if request.base_url is not None:
        limits = RequestLimits(retry_budget_s=3.0)
        client = ChatClient(request.base_url, request.model, api_key=request.api_key, limits=limits)
        try:
            await client.check()
        finally:
            await client.close()


def _open_folder(request: EvalRequest, output: Path | None, *, resume: bool) -> EvalFolder:
    if resume:
        if output is None:
            raise ConfigError("--resume needs --output with the folder of the interrupted eval")
        return EvalFolder.resume(output, manifest=request.manifest())
    if output is None:
        name = re.sub(r"[^a-z0-9]+", "-", request.environment.lower()).strip("-")
        output = Path("runs", "evals", f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    return EvalFolder.create(output, manifest=request.manifest())


@contextmanager
def _recorded(folder: EvalFolder) -> Generator[None, None, None]:
    """Record in the folder why the eval did not finish, and print how to resume it."""
    try:
        yield
    except TelescopeError as error:
        folder.fail(str(error))
        raise
    except KeyboardInterrupt:
        folder.fail("interrupted from the keyboard")
        stderr_console().print(
            f"Finished rollouts are in {folder.path}; repeat the command with "
            f"--output {folder.path} --resume to continue.",
            highlight=False,
            soft_wrap=True,
        )
        raise


@contextmanager
def _endpoint(
    request: EvalRequest, folder: EvalFolder
) -> Generator[tuple[str, str | None], None, None]:
    """Yield the URL and model name of the endpoint; without one, start a server for it."""
    if request.base_url is not None:
        yield request.base_url, request.model
        return
    with serve_folder(model_folder(request.model), log_path=folder.path / "server.log") as served:
        yield served


async def _play(
    request: EvalRequest, folder: EvalFolder, base_url: str, model: str | None
) -> EvalResult:
    from telescope_core.chat.client import ChatClient
    from telescope_core.chat.http import RequestLimits
    from telescope_core.open import open_environment

    settings = request.settings
    done = folder.rows()
    limits = RequestLimits(request_timeout_s=settings.deadline_s)
    client = ChatClient(base_url, model, api_key=request.api_key, limits=limits)
    processes = replace(request.processes, log_folder=folder.path / "logs")
    environment = open_environment(request.environment, request.environment_settings, processes)
    try:
        with EvalProgress(settings, done=done) as progress:

            def record(row: Any) -> None:
                folder.append(row)
                progress.update(row)

            result = await run_eval(
                environment,
                client,
                settings,
                model=request.model or await client.model(),
                on_rollout=record,
                done=done,
            )
            return replace(result, environment_record=request.record)
    finally:
        await environment.close()
        await client.close()
