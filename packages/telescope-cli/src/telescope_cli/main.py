"""The `telescope` command: a table of verbs, each imported only when it is called.

A verb is one line of `VERBS`. Its target is a typer app, or a function that becomes one command.
This file also holds the boundary where an error becomes a message and an exit code.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command as build_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One line of the table."""

    target: str
    """`module:name` of a typer app or of a command function."""
    help: str
    takes_settings: bool = False
    """Whether unknown `--section.key value` flags go to the verb, which checks them itself."""
    needs: str = ""
    """Import name of the optional package it runs on."""


VERBS = {
    "env": Verb(
        target="telescope_cli.env:app", help="Install, list, describe and remove environments."
    ),
    "eval": Verb(
        target="telescope_cli.eval:eval_command",
        help="Measure a model on an environment: pass@k with intervals.",
        takes_settings=True,
    ),
    "export": Verb(
        target="telescope_cli.export:export_command",
        help="Convert checkpoints to Hugging Face format, and push them to the Hub.",
        needs="telescope_train",
    ),
    "sft": Verb(
        target="telescope_cli.sft:sft_command",
        help="Train on gold answers of environments, or on a dataset of conversations.",
        takes_settings=True,
        needs="telescope_train",
    ),
    "train": Verb(
        target="telescope_cli.train:train_command",
        help="Train a model with reinforcement learning on environments.",
        takes_settings=True,
        needs="telescope_train",
    ),
}
EPILOG = """Examples:

  telescope env install math-reasoning countdown

  telescope eval math-reasoning --model ./my-model --examples 64 --rollouts 8 --k 1,4

  telescope train run.toml --dry-run

`telescope VERB --help` explains one verb."""


class VerbGroup(TyperGroup):
    """A command group that knows its verbs from the table and imports one when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs whose code is part of this installation."""
        return [name for name, verb in VERBS.items() if _is_present(verb)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the verb; None when there is no such verb."""
        verb = VERBS.get(cmd_name)
        return _load(cmd_name, verb) if verb is not None and _is_present(verb) else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Answer an unknown verb with the nearest known one."""
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            from telescope_core.errors import unknown_name

            raise unknown_name("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs without importing them."""
        rows = [(name, VERBS[name].help) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Print the examples as they are written."""
        formatter.write_paragraph()
        formatter.write("".join(f"{line}\n" for line in EPILOG.split("\n") if line.strip()))


app = typer.Typer(
    cls=VerbGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"telescope {version('telescope-cli')}")
        raise typer.Exit


@app.callback()
def telescope(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Environments, evals and reinforcement learning for language models."""


def _is_present(verb: Verb) -> bool:
    return find_spec(verb.target.partition(":")[0]) is not None


def _load(name: str, verb: Verb) -> Any:
    if verb.needs and find_spec(verb.needs) is None:
        from telescope_core.errors import ConfigError

        raise ConfigError(
            f"telescope {name} runs on {verb.needs.replace('_', '-')}, which is not installed; "
            "run: pip install 'telescope-cli[train]'"
        )
    module_name, _, attribute = verb.target.partition(":")
    target = getattr(import_module(module_name), attribute)
    if isinstance(target, typer.Typer):
        return build_command(target)
    return build_command(_single_command(target, takes_settings=verb.takes_settings))


def _single_command(function: Callable[..., object], *, takes_settings: bool) -> typer.Typer:
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    if takes_settings:
        settings |= {"allow_extra_args": True, "ignore_unknown_options": True}
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(context_settings=settings)(function)
    return single


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    try:
        app(None if arguments is None else list(arguments), prog_name="telescope")
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:  # the top of the command line: the last place to speak clearly
        from telescope_core.errors import TelescopeError

        if isinstance(error, TelescopeError):
            _fail(str(error), error.exit_code)
        raise


def _fail(message: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"telescope: {message}\n")
    raise SystemExit(exit_code)
