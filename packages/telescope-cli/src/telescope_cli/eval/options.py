"""The options of `telescope eval`: the type and the help text of each."""

from pathlib import Path
from typing import Annotated

import typer

from telescope_core.base.types import Split
from telescope_core.processes.settings import Isolation

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
AsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")
]
ReportOption = Annotated[
    Path | None, typer.Option(help="Show the contents of a run or eval folder.")
]
