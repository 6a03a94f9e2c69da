"""`telescope simulate run.toml`: simulate a run on GPUs that are not available."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from telescope_cli.console import print_table, report_console
from telescope_cli.progress import progress_of, waiting
from telescope_cli.settings_files import SMALLEST_RUN, no_settings_file
from telescope_core.base.errors import ConfigError
from telescope_core.settings.config import split_arguments

if TYPE_CHECKING:
    from telescope_train.config.schema import TrainConfig
    from telescope_train.models.facts import ModelFacts
    from telescope_train.simulation.estimate import Estimate, Expected, Hardware, SpeedsOf
    from telescope_train.simulation.machines import Speeds

_UNITS = {"M": 1e6, "B": 1e9}
_MOST = 1e9
"""Largest number of tokens or seconds that is no slip, and no infinity."""

GpusOption = Annotated[int, typer.Option(min=2, help="GPUs of servers and trainer together.")]
ServersOption = Annotated[
    int | None, typer.Option(min=1, help="Inference servers; by default half of the GPUs.")
]
GpuOption = Annotated[str, typer.Option(help="Kind of GPU: H100, H200, B200, A100, L40S ...")]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs of each server; default: inference_tensor_parallel_size."),
]
ParametersOption = Annotated[
    str, typer.Option(help="Size of the model, such as 8B, if its folder is not here.")
]
LengthsOption = Annotated[
    Path | None, typer.Option(help="Run folder whose rollouts say how long answers are.")
]
SpeedsOption = Annotated[
    Path | None,
    typer.Option(help="Run folder that says how fast a server and a rank are; no data sheets."),
]
MeanOption = Annotated[
    float | None,
    typer.Option(min=1, max=_MOST, help="Mean tokens of an answer; default: max_tokens / 4."),
]
SpreadOption = Annotated[
    float, typer.Option(min=0, max=10, help="Deviation of the logarithm of the lengths.")
]
TurnsOption = Annotated[str, typer.Option(help="Answers of a rollout, such as 1 or 2-40.")]
ToolOption = Annotated[
    float, typer.Option(min=0, max=_MOST, help="Mean seconds between two answers of a rollout.")
]
RewardOption = Annotated[
    float, typer.Option(min=0, max=_MOST, help="Seconds of scoring a rollout.")
]
StepsOption = Annotated[int, typer.Option(min=2, help="Steps to simulate.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")]
PageOption = Annotated[
    Path | None,
    typer.Option(help="Also write everything as a page with charts, such as plan.html."),
]


def simulate_command(
    context: typer.Context,
    gpus: GpusOption = 8,
    servers: ServersOption = None,
    gpu: GpuOption = "H100",
    tensor_parallel: TensorParallelOption = None,
    parameters: ParametersOption = "",
    lengths_of: LengthsOption = None,
    speeds_of: SpeedsOption = None,
    mean_length: MeanOption = None,
    spread: SpreadOption = 0.9,
    turns: TurnsOption = "1",
    tool_seconds: ToolOption = 0.0,
    reward_seconds: RewardOption = 0.2,
    steps: StepsOption = 20,
    page: PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a run on GPUs that are not here: steps per hour, idle time, staleness.

    The run's own scheduling works in virtual time over models of servers and trainer, for the
    number of servers that you give and for a few others. Settings come from files and flags, as
    for `telescope train`. Speeds are estimated from data sheets, so compare, and do not promise;
    or they are those of a run (--speeds-of), of whose servers and ranks there are then more.

    For example:

      telescope simulate run.toml --gpus 16 --servers 12 --parameters 8B

      telescope simulate run.toml --gpus 64 --lengths-of runs/small --max_async_rollout 2

      telescope simulate run.toml --gpus 4 --speeds-of runs/small --lengths-of runs/small

      telescope simulate run.toml --gpus 1024 --tensor-parallel 8 --parameters 70B --json
    """
    from telescope_train.plan.load import load_train_config
    from telescope_train.simulation.environments import Workload, lognormal
    from telescope_train.simulation.estimate import Hardware, estimate, recorded_workload
    from telescope_train.simulation.picture import write_page

    files, flags = split_arguments(context.args)
    if not files:
        raise no_settings_file("simulate run.toml --gpus 16", SMALLEST_RUN)
    config = load_train_config(files, flags)
    with waiting("reading the model"):
        facts = _facts(config.model.model, config.run.output_dir, parameters)
    gpus_per_server = _gpus_per_server(config, facts, tensor_parallel)
    hardware = Hardware(
        num_gpus=gpus,
        num_servers=servers or max(1, gpus // (2 * gpus_per_server)),
        gpus_per_server=gpus_per_server,
    )
    workload = Workload(
        lengths=lognormal(mean_length or config.rollout.max_tokens / 4, spread),
        num_turns=_turns(turns),
        tool_s=tool_seconds,
        reward_s=reward_seconds,
    )
    if lengths_of is not None:
        workload = recorded_workload(lengths_of, workload)
    speeds, kind = _speeds(config, facts, gpu=gpu, speeds_of=speeds_of)
    console = report_console()
    with progress_of(f"simulating {gpus} x {kind}") as on_progress:
        found = estimate(config, speeds, hardware, workload, steps=steps, on_progress=on_progress)
    if page is not None:
        write_page(page, found, title=f"{config.run.name} on {gpus} x {kind}, simulated")
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    _show(console, found, kind)


def _gpus_per_server(config: "TrainConfig", facts: "ModelFacts", given: int | None) -> int:
    """Return the GPUs of a server, from --tensor-parallel or the setting that it stands for."""
    from telescope_train.config.fields import was_set
    from telescope_train.models.facts import tensor_problem

    name = "inference_tensor_parallel_size"
    size = config.inference.inference_tensor_parallel_size
    if given is not None and given != size and was_set(config.inference, name):
        raise ConfigError(
            f"--tensor-parallel {given} and {name} = {size} of the settings both say how many GPUs "
            "a server has; give one of them"
        )
    where, size = (name, size) if given is None else ("--tensor-parallel", given)
    if problem := tensor_problem(where, size, facts):
        raise ConfigError(problem)
    return size


def _speeds(
    config: "TrainConfig", facts: "ModelFacts", *, gpu: str, speeds_of: Path | None
) -> tuple["SpeedsOf", str]:
    """Return the speeds of a server and a rank, and a name for the machines."""
    from telescope_train.simulation.machines import estimated_speeds
    from telescope_train.simulation.measured import measured_speeds

    slots = config.inference.max_num_seqs
    if speeds_of is not None:
        speeds = measured_speeds(speeds_of, hidden_size=facts.hidden_size, slots=slots)
        return (lambda hardware: speeds), f"as fast as those of {speeds_of}"

    def estimated(hardware: "Hardware") -> "Speeds":
        return estimated_speeds(
            facts,
            gpu,
            gpus_per_server=hardware.gpus_per_server,
            num_ranks=hardware.num_ranks,
            slots=slots,
        )

    return estimated, gpu


def _turns(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal() and 1 <= int(low) <= int(high or low)):
        raise ConfigError(
            f"--turns: expected a number such as 1, or a range such as 2-40, got {text!r}"
        )
    return int(low), int(high or low)


def _facts(model: str, output_dir: str, parameters: str) -> "ModelFacts":
    from telescope_train.models.facts import read_model_facts
    from telescope_train.simulation.machines import facts_by_size

    if not parameters:
        return read_model_facts(model, output_dir=output_dir)
    number, unit = parameters[:-1], parameters[-1].upper()
    try:
        size = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        size = math.nan
    if not 1 <= size < math.inf:
        raise ConfigError(f"--parameters: expected a size such as 600M or 8B, got {parameters!r}")
    return facts_by_size(size)


def _show(console: Console, found: "Estimate", kind: str) -> None:
    from telescope_train.simulation.estimate import table_of
    from telescope_train.simulation.picture import lines_of

    one = found.chosen
    console.print(
        f"{one.num_servers} servers and {one.num_ranks} trainer GPUs ({kind}): "
        f"{one.steps_per_hour:,.0f} steps an hour, {one.step_s:.1f} s each"
    )
    console.print(f"A step waits longest for {found.limit}.")
    console.print()
    for line in lines_of(found.course, console.width):
        console.print(line, markup=False)
    console.print()
    _bar(console, one)
    console.print(
        f"Staleness: mean {one.staleness_mean:.2f}, at most {one.staleness_max:.0f} updates. "
        f"Groups ready when asked: {one.groups_ready:.1f}; rollouts waiting for a slot: "
        f"{one.rollouts_waiting:.0f}; preemptions: {one.num_preemptions}."
    )
    table = Table(box=box.SIMPLE, title="other divisions of the GPUs", title_justify="left")
    for head in ("servers", "trainer", "s a step", "steps/h", "servers idle", "trainer idle"):
        table.add_column(head, justify="right")
    best = min(table_of(found), key=lambda row: row.step_s)
    for row in table_of(found):
        table.add_row(
            f"{row.num_servers}",
            f"{row.num_ranks}",
            f"{row.step_s:.1f}",
            f"{row.steps_per_hour:,.0f}",
            f"{row.servers_idle:.0%}",
            f"{row.trainer_idle:.0%}",
            style="green" if row is best else "",
        )
    print_table(console, table)
    if best is not found.chosen:
        gain = one.step_s / best.step_s
        console.print(f"With {best.num_servers} servers it would be {gain:.2f} times as fast.")


def _bar(console: Console, one: "Expected") -> None:
    """Draw the division of the trainer's time in a step."""
    parts = {"waits": one.generate_s, "trains": one.train_s, "publishes": one.sync_s}
    total = sum(parts.values()) or 1.0
    room = console.width - 2
    marks = {"waits": ".", "trains": "#", "publishes": "="}
    bar = "".join(marks[name] * round(room * value / total) for name, value in parts.items())
    console.print(f"[{bar[:room]:<{room}}]", markup=False)
    said = ", ".join(f"{marks[n]} {n} {v:.1f} s" for n, v in parts.items())
    console.print(f"The trainer in one step: {said}")
