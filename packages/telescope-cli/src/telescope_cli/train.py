"""`telescope train`: train a model from settings files, or print the plan with `--dry-run`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.output import prints_kept_off
from telescope_cli.progress import waiting
from telescope_cli.run_report import write_finished_report
from telescope_cli.settings_files import SMALLEST_RUN, no_settings_file, require_no_dry_run
from telescope_cli.watch import find_run, run_names
from telescope_core.base.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_core.settings.config import split_arguments


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
            "was killed. With --resume-if-saved instead, it begins if there is no checkpoint.",
        ),
    ] = False,
    fork: Annotated[
        str | None,
        typer.Option(
            "--fork",
            metavar="RUN",
            help="Begin another run at step --at of RUN, with the settings of RUN but for those "
            "that are given. RUN is a folder, or a name in the folder `runs`.",
            autocompletion=run_names,
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option("--at", metavar="N", help="With --fork: a step that has a checkpoint."),
    ] = None,
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

      telescope train --fork quickstart --at 20 --learning_rate 1e-5
    """
    from telescope_train.ending import before_the_run
    from telescope_train.plan.fork import load_fork
    from telescope_train.plan.load import load_train_config
    from telescope_train.plan.plan import make_plan
    from telescope_train.plan.prepared import prepare
    from telescope_train.plan.text import render_plan

    files, flags = split_arguments(context.args)
    require_no_dry_run(flags)
    if (fork is None) != (at is None):
        raise ConfigError(
            "--fork and --at go together: telescope train --fork RUN --at N begins another run at "
            f"step N of RUN; got only {'--at' if fork is None else '--fork'}"
        )
    if not files and fork is None:
        raise no_settings_file("train run.toml [--key value ...]", SMALLEST_RUN)
    if resume or fork is not None:
        _require_one_beginning(flags, "--resume" if fork is None else "--fork")
    if resume:
        flags = [*flags, "--resume_from_checkpoint", "latest"]
    if fork is None or at is None:
        config = load_train_config(files, flags)
    else:
        config = load_fork(RunFolder.open(find_run(fork)), at, files, flags)
    reading = waiting("reading the model and the environments")
    with before_the_run(config), prints_kept_off(as_json), reading:
        prepared = prepare(config)
        plan = make_plan(prepared) if dry_run else None
    if plan is not None:
        typer.echo(json.dumps(asdict(plan), indent=2) if as_json else render_plan(plan))
        raise typer.Exit(ConfigError.exit_code if plan.problems else 0)
    prepared.require_sound()
    with before_the_run(config), waiting("loading the libraries that train"):
        # The libraries that train take seconds to load.
        from telescope_train.run import run_training

    with prints_kept_off(as_json):
        summary = run_training(prepared)
    write_finished_report(RunFolder(Path(summary["report"]).parent))
    if as_json:
        typer.echo(json.dumps(summary, indent=2))


def _require_one_beginning(flags: list[str], option: str) -> None:
    for flag in flags:
        name = flag.partition("=")[0].rpartition(".")[2].lstrip("-").replace("-", "_")
        if flag.startswith("--") and name == "resume_from_checkpoint":
            means = "the newest checkpoint of this run"
            if option == "--fork":
                means = "the checkpoint of step --at of that run"
            raise ConfigError(
                f"{option} and --resume_from_checkpoint say where to go on; give one of them: "
                f"{option} means {means}"
            )
