"""The options of `telescope eval`: the type and the help text of each."""

from pathlib import Path
from typing import Annotated

import typer

from telescope_core.processes.settings import Isolation
from telescope_core.types import Split

EnvironmentOption = Annotated[
    str | None,
    typer.Argument(help="Installed environment: a name, owner/name, or module:Class."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model folder, or with --base-url the name of a served model."),
]
BaseUrlOption = Annotated[
    str | None,
    typer.Option(help="OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1."),
]
ApiKeyEnvOption = Annotated[
    str, typer.Option(help="Environment variable that holds the endpoint's API key.")
]
ExamplesOption = Annotated[int, typer.Option(help="Examples of the eval split to play.")]
RolloutsOption = Annotated[int, typer.Option(help="Rollouts of each example.")]
KOption = Annotated[str, typer.Option("--k", help="The k of pass@k and pass^k, such as 1,4.")]
SplitOption = Annotated[Split, typer.Option(help="Split to play.")]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature; 0 = greedy.")]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens of one answer.")]
SeedOption = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
ConcurrencyOption = Annotated[int, typer.Option(help="Rollouts at the same time.")]
DeadlineSOption = Annotated[float, typer.Option(help="Seconds one rollout may take.")]
EnvWorkersOption = Annotated[int, typer.Option(help="Processes that play the environment.")]
EnvIsolationOption = Annotated[
    Isolation,
    typer.Option(help="Play in processes of the environment's own, or in this one (none)."),
]
EnvMemoryLimitMbOption = Annotated[
    int | None, typer.Option(min=64, help="Memory of one of these processes, MiB.")
]
EnvAddressOption = Annotated[
    list[str],
    typer.Option(help="host:port of a worker that runs elsewhere; may be repeated."),
]
OutputOption = Annotated[Path | None, typer.Option(help="Folder for the results; new or empty.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the interrupted eval in --output.")
]
AsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, on stdout alone.")
]
ReportOption = Annotated[
    Path | None, typer.Option(help="Show what the folder of a run or an eval holds.")
]
