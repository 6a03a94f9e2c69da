"""`telescope eval`: measure models on environments, or show the contents of a results folder.

The whole request is checked before the first file is written and before a server is started.
"""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from telescope_cli.console import EscapingConsole, report_console
from telescope_cli.env.options import complete_installed
from telescope_cli.eval.files import Given, names_file, options_for, read_files, require_distinct
from telescope_cli.eval.flags import parse_ks, unparsed
from telescope_cli.eval.model import template_text
from telescope_cli.eval.names import check_other_name
from telescope_cli.eval.plan import make_plan, render_plan
from telescope_cli.eval.play import EvalOutcome, evaluate, telling
from telescope_cli.eval.request import EvalRequest, checked
from telescope_cli.eval.selection import parse_selection
from telescope_cli.eval.view import (
    AsJsonOption,
    first_errors,
    print_errors,
    print_result,
    print_results,
)
from telescope_cli.output import prints_kept_off
from telescope_cli.progress import waiting
from telescope_core.base.errors import ConfigError, TelescopeError, TooManyFailedError
from telescope_core.base.open_files import raise_limit
from telescope_core.base.types import JsonValue, Sampling, Split
from telescope_core.chat.client import ApiKey, ChatClient
from telescope_core.evals import EvalSettings
from telescope_core.evals.folder import result_to_json
from telescope_core.evals.result import count_lines
from telescope_core.evals.settings import MAX_FAILURES_IN_A_ROW
from telescope_core.open import record_environment
from telescope_core.processes.settings import Isolation, ProcessSettings
from telescope_core.records.files import plain

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
_NOT_BEGUN = "No rollout was played; repeat the command"


def _names_and_verbs(incomplete: str) -> list[str]:
    """Return what may follow `telescope eval`: installed names, and the verb `compare`."""
    return [
        *(one for one in ("compare",) if one.startswith(incomplete)),
        *complete_installed(incomplete),
    ]


EnvironmentOption = Annotated[
    str | None,
    typer.Argument(
        help="Installed environments: a name, owner/name, or module:Class; or settings files.",
        autocompletion=_names_and_verbs,
    ),
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
    str, typer.Option("--k", help="Values of k for pass@k, pass^k and maj@k, such as 1,4.")
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
        help="Largest share of rollouts that may fail; above it, the exit code is 7. Below 1, the "
        "eval stops after 64 failed rollouts in a row.",
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
    Path | None,
    typer.Option(help="Show a run, by folder or by its name in `runs`, or the folder of an eval."),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything and show what would be played, with the first prompt, but play "
        "nothing. An endpoint is not asked.",
    ),
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
    dry_run: DryRunOption = False,
) -> None:
    """Measure models on environments: mean reward, pass@k, pass^k and maj@k, with 95% intervals.

    Several environments, and --model several times, are evaluated one after the other. Settings of
    the environments themselves are flags that begin with --env, such as --env.max_number. Options
    may stand in a TOML or YAML file; those of the command line override it.

    For example:

      telescope eval math-reasoning --model ./my-model --examples 64 --rollouts 8 --k 1,4

      telescope eval countdown --base-url http://127.0.0.1:8000/v1 --env.max_number 9

      telescope eval suite.toml --model ./my-model --dry-run

      telescope eval --report runs/quickstart
    """
    left = unparsed(context, check=check_other_name)
    words = [word for word in (environment, *left.environments) if word is not None]
    if report is not None:
        if words:
            raise ConfigError(f"--report shows results and plays nothing; leave out {words[0]}")
        from telescope_cli.eval.report import show_folder

        return show_folder(report, as_json=as_json)
    paths = [Path(word) for word in words if names_file(word)]
    files = read_files(paths, is_folder=base_url is None)
    names = [word for word in words if not names_file(word)] or list(files.evals)
    if not names:
        raise ConfigError(
            "expected an environment, got none; write: telescope eval ENVIRONMENT --model MODEL, "
            "telescope eval SUITE.toml with a table [[evals]] for each, "
            "or telescope eval --report FOLDER"
        )
    raise_limit()
    if names != list(files.evals):
        require_distinct(names)
    each = {name: options_for(name, files, context, left.settings) for name in names}
    found = each[names[0]].values  # those of all environments are the same in each
    folder: Path | None = found["output"]
    if dry_run:
        return _show_plan(each, output=folder, resume=resume, as_json=as_json)
    requests = _requests(each, resume=resume)
    with prints_kept_off(as_json):
        with telling(_NOT_BEGUN), waiting("reading the model and the environments"):
            requests = checked(requests)
        outcomes = evaluate(requests, output=folder, resume=resume)
    _show_outcomes(outcomes, as_json=as_json)
    _require_enough(outcomes, max_failed=found["max_failed"])


def _show_plan(
    each: Mapping[str, Given], *, output: Path | None, resume: bool, as_json: bool
) -> None:
    problems: list[str] = []
    requests = _requests(each, resume=resume, problems=problems)
    with prints_kept_off(as_json), waiting("reading the model and the environments"):
        plan = make_plan(requests, each, problems, output=output, resume=resume)
    typer.echo(json.dumps(plain(asdict(plan)), indent=2) if as_json else render_plan(plan))
    if plan.problems:
        raise typer.Exit(ConfigError.exit_code)


def _requests(
    each: Mapping[str, Given], *, resume: bool, problems: list[str] | None = None
) -> list[EvalRequest]:
    """Return a request for each model and environment, with its options in `each`.

    `problems`: gets the reasons why some cannot be played, which otherwise are raised.
    """
    requests: list[EvalRequest] = []
    shared = next(iter(each.values())).values
    models: list[str | None] = [*dict.fromkeys(shared["model"])] or [None]
    template, key = None, ApiKey("")
    with _added_to(problems):
        if resume and shared["output"] is None:
            raise ConfigError("--resume needs --output with the folder of the eval to continue")
    with _added_to(problems):
        for name in models:
            if shared["model"].count(name) > 1:
                raise ConfigError(f"model {name!r} is given twice; give it once")
    with _added_to(problems):
        template = template_text(shared["chat_template"], shared["base_url"])
    with _added_to(problems):
        key = _api_key(shared["api_key_env"])
    with _added_to(problems):
        if shared["base_url"] is not None:
            ChatClient(shared["base_url"], api_key=key)  # raises for what is no URL
    with telling(_NOT_BEGUN), waiting("looking the environments up"):
        for name, options in each.items():
            with _added_to(problems, name):
                request = _request(name, options.values)
                whole = replace(request, chat_template=template, api_key=key)
                requests += [replace(whole, model=one) for one in models]
    # Those of one model follow each other, since it is served once.
    return sorted(requests, key=lambda one: models.index(one.model))


@contextmanager
def _added_to(problems: list[str] | None, environment: str = "") -> Generator[None]:
    """Add an error of the block, which is of `environment`, to `problems`; None = let it pass."""
    try:
        yield
    except TelescopeError as error:
        if problems is None:
            raise
        problems.append(f"{environment}: {error}" if environment else str(error))


def _request(name: str, options: Mapping[str, Any]) -> EvalRequest:
    limit_mb = options["env_memory_limit_mb"]
    processes = ProcessSettings(
        isolation=options["env_isolation"],
        num_workers=options["env_workers"],
        addresses=tuple(options["env_address"]),
        memory_limit_bytes=None if limit_mb is None else limit_mb * 2**20,
    )
    settings = EvalSettings(
        num_examples=1,  # until the split is known
        rollouts=options["rollouts"],
        ks=parse_ks(options["k"]),
        sampling=_sampling(options),
        concurrency=options["concurrency"],
        deadline_s=options["deadline_s"],
        split=options["split"],
        max_failures_in_a_row=None if options["max_failed"] == 1 else MAX_FAILURES_IN_A_ROW,
    )
    selection = parse_selection(options["examples"], options["example"], options["shuffle"])
    return EvalRequest(
        environment=name,
        environment_settings=options["env"],
        model=None,
        base_url=options["base_url"],
        chat_template=None,
        api_key=ApiKey("", ""),
        settings=settings,
        selection=replace(selection, or_train=options["or_train"]),
        processes=processes,
        record=record_environment(name, processes, settings=options["env"]),
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
    extra = dict[str, JsonValue](options["extra_body"] or {})
    for name in extra:
        if name in _OWN:
            raise ConfigError(f"--extra-body: {name} has an option of its own, {_OWN[name]}")
        if name in _NOT_OURS:
            raise ConfigError(f"--extra-body: {name} cannot be given: {_NOT_OURS[name]}")
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
        top_p=None,
        top_k=None,
        min_p=None,
        repetition_penalty=None,
        extra=extra,
    )


def _show_outcomes(outcomes: Sequence[EvalOutcome], *, as_json: bool) -> None:
    """Print the result of a single eval, or one table of several."""
    if as_json:
        fields = [_to_json(one) for one in outcomes]
        if len(outcomes) == 1 and outcomes[0].result is not None:
            typer.echo(json.dumps(plain(result_to_json(outcomes[0].result)), indent=2))
        else:
            typer.echo(json.dumps(plain(fields), indent=2))
        return
    if len(outcomes) > 1:
        _print_table(outcomes)
    for one in outcomes:
        if len(outcomes) == 1 and one.result is not None:
            print_result(one.result, one.folder.path)
        elif one.error is not None:
            message = f"Failed: {one.request.name}: {one.error}"
            EscapingConsole(highlight=False).print(Text(message, style="yellow"), soft_wrap=True)
        if one.result is not None and one.result.num_scored:
            print_errors(first_errors(one.folder.rows(pictures_of=())))


def _require_enough(outcomes: Sequence[EvalOutcome], *, max_failed: float) -> None:
    """Raise the first error, or TooManyFailedError if more than `max_failed` of an eval failed."""
    for one in outcomes:
        if one.error is not None:
            raise one.error
    for one in outcomes:
        result = one.result
        if result is None:
            continue
        reasons = ", ".join(f"{reason} {count}" for reason, count in result.failures.items())
        if result.num_scored == 0:
            errors = first_errors(one.folder.rows(pictures_of=()))
            first = f"; the first error: {errors[0]}" if errors else ""
            raise TooManyFailedError(
                f"no rollout was scored: {result.num_failed} failed ({reasons}); their errors are "
                f"in {one.folder.path / 'rollouts.jsonl'}{first}"
            )
        if result.num_failed > max_failed * result.num_rollouts:
            raise TooManyFailedError(
                f"{one.request.name}: {result.num_failed} of {result.num_rollouts} rollouts failed "
                f"({reasons}), more than --max-failed {max_failed:g} allows, so the result may not "
                f"be trusted; repeat the command with --output {one.folder.path} --resume to play "
                "them again, or raise --max-failed"
            )


def _to_json(outcome: EvalOutcome) -> JsonValue:
    return {
        "environment": outcome.request.environment,
        "model": outcome.request.model,
        "folder": str(outcome.folder.path),
        "error": str(outcome.error) if outcome.error is not None else None,
        "result": result_to_json(outcome.result) if outcome.result is not None else None,
    }


def _print_table(outcomes: Sequence[EvalOutcome]) -> None:
    console = report_console()
    rows = [((one.request.environment, one.request.model or ""), one.result) for one in outcomes]
    print_results(console, ("environment", "model"), rows)
    for one in outcomes:
        console.print(Text(f"{one.request.name}: {one.folder.path}"), soft_wrap=True)
        for line in count_lines(one.result) if one.result is not None else ():
            console.print(Text(f"  {line}"))
