"""`telescope sft`: supervised training on environments' gold answers or on a dataset."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from telescope_cli.output import prints_kept_off
from telescope_cli.progress import waiting
from telescope_cli.settings_files import SMALLEST_SFT, no_settings_file, require_no_dry_run
from telescope_core.base.number_text import format_metric
from telescope_core.base.terminal import escaped
from telescope_core.settings.config import split_arguments

if TYPE_CHECKING:
    from telescope_train.sft.config import SftConfig
    from telescope_train.sft.run import SftRow


def sft_command(
    context: typer.Context,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Read the model and all samples, show the first, but start nothing."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan or the last measurement as JSON.")
    ] = False,
) -> None:
    """Train a model on the gold answers of environments, or on the conversations of a dataset.

    Settings come from TOML or YAML files, left to right, then from flags; later settings override
    earlier ones. Accuracy is how often a sampled answer is expected to be the gold answer, on
    examples that are not used for training.

    For example:

      telescope sft sft.toml --dry-run

      telescope sft sft.toml --number_of_steps 500 --stop_at_accuracy 0.4

      telescope sft chat.toml --dataset conversations.jsonl --too_long truncate
    """
    from telescope_train.sft.config import load_sft_config

    files, flags = split_arguments(context.args)
    if not files:
        raise no_settings_file("sft sft.toml [--key value ...]", SMALLEST_SFT)
    require_no_dry_run(flags)
    config = load_sft_config(files, flags)
    if dry_run:
        with prints_kept_off(as_json), waiting("reading the model and the samples"):
            from telescope_train.sft.plan import plan_sft, render_sft_plan

            plan = plan_sft(config)
        typer.echo(json.dumps(asdict(plan), indent=2) if as_json else render_sft_plan(plan))
        return
    last = _run(config, is_quiet=as_json)
    if as_json:
        typer.echo(json.dumps({"output": config.output, "step": last.step, **last.metrics}))
        return
    from telescope_train.sft.run import DROPPED, TRUNCATED

    truncated, dropped = last.metrics[TRUNCATED], last.metrics[DROPPED]
    left_out = f"; samples longer than seq_len: {truncated:.0f} truncated, {dropped:.0f} dropped"
    typer.echo(
        f"{escaped(config.output)}: step {last.step}, accuracy {last.accuracy:.3f} and loss "
        f"{format_metric(last.metrics['nll/held_out'])} on held-out examples, "
        f"{last.metrics['time_s']:.0f} s{left_out if truncated or dropped else ''}"
    )


def _run(config: "SftConfig", *, is_quiet: bool) -> "SftRow":
    """Run with a progress bar; returns the last measurement."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.text import Text

    from telescope_cli.console import EscapingConsole

    with waiting("loading the libraries that train"):
        from telescope_train.sft.run import run_sft

    rows: list[SftRow] = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=EscapingConsole(stderr=True),
        disable=is_quiet,
    )
    # How many steps some epochs are is known once the examples are.
    total = config.number_of_steps if config.number_of_epochs is None else None
    task = progress.add_task("reading examples", total=total)

    def show(row: "SftRow") -> None:
        rows.append(row)
        loss = row.metrics.get("loss/total")
        shown = f"loss {format_metric(loss)}, " if loss is not None else ""
        about = f"{shown}accuracy {row.accuracy:.3f}"
        progress.update(task, completed=row.step, total=row.num_steps, description=about)

    def tell(line: str) -> None:
        progress.console.print(Text(line), soft_wrap=True)

    with progress:
        run_sft(config, on_row=show, tell=tell)
    return rows[-1]
