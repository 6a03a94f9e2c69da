"""`telescope train`: train a model from settings files, or print the plan with `--dry-run`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from telescope_core.config import split_arguments
from telescope_core.errors import ConfigError


def train_command(
    context: typer.Context,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything and print the plan, but start nothing."),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint of this run, in its folder, such as after it "
            "was killed.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan or the summary as JSON.")
    ] = False,
) -> None:
    """Train a model on environments with reinforcement learning.

    Settings come from TOML or YAML files, left to right, then from flags; later settings override
    earlier ones. Each setting has a flag, with its section (--rollout.group_size 16) or without it
    (--group_size 16).

    For example:

      telescope train run.toml --dry-run

      telescope train base.toml big.toml --learning_rate 1e-5 --use_tis

      telescope train run.toml --resume

      telescope train run.toml --resume-if-saved
    """
    from telescope_train.plan.load import load_train_config
    from telescope_train.plan.plan import make_plan
    from telescope_train.plan.prepared import prepare
    from telescope_train.plan.text import render_plan

    files, flags = split_arguments(context.args)
    if not files:
        raise ConfigError(
            "expected a settings file, got none; write: telescope train run.toml [--key value ...]"
        )
    if resume:
        flags = _resumed(flags)
    prepared = prepare(load_train_config(files, flags))
    if dry_run:
        plan = make_plan(prepared)
        typer.echo(json.dumps(asdict(plan), indent=2) if as_json else render_plan(plan))
        raise typer.Exit(ConfigError.exit_code if plan.problems else 0)
    prepared.require_sound()
    from telescope_train.run import run_training

    summary = run_training(prepared)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))


def _resumed(flags: list[str]) -> list[str]:
    """Return `flags` for a run that goes on from its newest checkpoint."""
    for flag in flags:
        name = flag.partition("=")[0].rpartition(".")[2].lstrip("-").replace("-", "_")
        if flag.startswith("--") and name == "resume_from_checkpoint":
            raise ConfigError(
                "--resume and --resume_from_checkpoint say where to go on; give one of them: "
                "--resume means the newest checkpoint of this run"
            )
    return [*flags, "--resume_from_checkpoint", "latest"]
