"""`telescope ui`: show runs on one local page, or write them as a folder that needs no server."""

from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.progress import progress_of
from telescope_core.base.errors import ConfigError

_OF_SERVERS = {
    "port": "--port",
    "host": "--host",
    "allowed_host": "--allowed-host",
    "no_open": "--no-open",
    "as_json": "--json",
}
"""Options that mean nothing where no server is started."""
_OF_EXPORTS = {"rollouts": "--rollouts", "force": "--force"}


def ui_command(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER...]", help="Runs, evals, or folders of them; by default runs/."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port to listen on; by default your own, which is 8353 or the next free one. 0 "
            "takes any free one, with a token that is new each time.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; by default 127.0.0.1.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name by which your proxy passes requests on; repeatable."
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print address and token as JSON; open no browser.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the pages to a new folder, and start no server."),
    ] = None,
    rollouts: Annotated[
        int,
        typer.Option(
            min=0,
            max=20000,
            help="Rollouts of each run, spread over its steps, and of each eval, in an export.",
        ),
    ] = 500,
    force: Annotated[
        bool, typer.Option("--force", help="Write an export anew that is in DIR already.")
    ] = False,
) -> None:
    """Show runs and evals in the browser: curves, rollouts, tokens, timelines, meters, logs.

    Every page also answers with JSON (?format=json), for programs.
    Runs may go on, have ended, or have been killed; they are only read. The page is for you: its
    address has a token, and stays the same. If your server runs already, it shows the folders from
    now on, and its address is printed. Exit codes: 0 = ended by Ctrl+C or another signal, shown by
    the server that runs already, or exported, 2 = a folder or an option cannot be used.

    For example:

      telescope ui

      telescope ui runs/quickstart ../other/runs --port 8123 --no-open

      telescope ui runs/quickstart --export quickstart-page
    """
    from telescope_ui.web.export import export_runs
    from telescope_ui.web.serve import serve

    _require_used(context, is_export=export is not None)
    chosen = folders or [Path("runs")]
    if export is not None:
        with progress_of("writing the export", unit="pages") as on_progress:
            written = export_runs(
                chosen, export, num_rollouts=rollouts, replaces=force, tell=on_progress
            )
        typer.echo(f"wrote {written.num_pages} pages: open {written.page}")
        return
    serve(
        chosen,
        host=host,
        port=port,
        allowed_hosts=allowed_host or (),
        opens_browser=not (no_open or as_json),
        as_json=as_json,
    )


def _require_used(context: typer.Context, *, is_export: bool) -> None:
    """Raise ConfigError for an option that was given and would be ignored."""
    ignored = _OF_SERVERS if is_export else _OF_EXPORTS
    for name, option in ignored.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            why = "with --export, which starts no server" if is_export else "without --export DIR"
            raise ConfigError(f"{option} has no effect {why}")
