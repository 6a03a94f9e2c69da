"""`telescope ui`: show runs on one local page, or write them as pages that need no server."""

from pathlib import Path
from typing import Annotated

import typer

from telescope_cli.progress import progress_of
from telescope_core.base.errors import ConfigError
from telescope_core.base.open_files import raise_limit
from telescope_core.base.terminal import escaped

_OF_SERVERS = ("--port", "--host", "--allowed-host", "--no-open", "--json")
"""Options without meaning if no server is started."""
_OF_EXPORTS = ("--one-file", "--rollouts", "--force")


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
        typer.Option(
            metavar="PATH", help="Write the pages to a new folder PATH, and start no server."
        ),
    ] = None,
    one_file: Annotated[
        bool,
        typer.Option(
            "--one-file", help="With --export: write the pages of one run to one file PATH."
        ),
    ] = False,
    rollouts: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=20000,
            help="Rollouts of each run, spread over its steps, and of each eval, in an export; by "
            "default 500, and 40 in one file.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write an export anew that is in PATH already.")
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

      telescope ui runs/quickstart --export quickstart.html --one-file
    """
    from telescope_ui.web.export import IN_FOLDER, IN_ONE_FILE, export_one_file, export_runs
    from telescope_ui.web.serve import serve

    _require_used(context, is_export=export is not None)
    chosen = folders or [Path("runs")]
    if export is not None:
        write, num = (export_one_file, IN_ONE_FILE) if one_file else (export_runs, IN_FOLDER)
        num = num if rollouts is None else rollouts
        with progress_of("writing the export", unit="pages") as on_progress:
            written = write(chosen, export, num_rollouts=num, replaces=force, tell=on_progress)
        size = f" in {written.page.stat().st_size / 1e6:.2f} MB" if one_file else ""
        typer.echo(escaped(f"wrote {written.num_pages} pages{size}: open {written.page}"))
        if written.num_unreadable:
            typer.echo(
                f"{written.num_unreadable} of them say only why a file cannot be read", err=True
            )
        return
    raise_limit()
    serve(
        chosen,
        host=host,
        port=port,
        allowed_hosts=allowed_host or (),
        opens_browser=not (no_open or as_json),
        as_json=as_json,
    )


def _require_used(context: typer.Context, *, is_export: bool) -> None:
    """Raise ConfigError for a given option that would be ignored."""
    ignored = _OF_SERVERS if is_export else _OF_EXPORTS
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and parameter.opts[0] in ignored:
            why = "with --export, which starts no server" if is_export else "without --export PATH"
            raise ConfigError(f"{parameter.opts[0]} has no effect {why}")
