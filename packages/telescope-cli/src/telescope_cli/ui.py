"""`telescope ui`: show runs on one local page, or write them as a folder that needs no server."""

from pathlib import Path
from typing import Annotated

import typer


def ui_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER...]", help="Runs, or folders of runs; by default runs/."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
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
            min=0, max=20000, help="Newest rollouts of each run, and of each eval, in an export."
        ),
    ] = 200,
) -> None:
    """Show runs in the browser: curves, rollouts, tokens, timelines, evals, meters, logs.

    Every page also answers with JSON (?format=json), for programs.
    Runs may go on, have ended, or have been killed; they are only read. The page is for this
    machine: it is opened with a token that is new each time. Exit codes: 0 = ended by Ctrl+C or
    exported, 2 = a folder or an option cannot be used.

    For example:

      telescope ui

      telescope ui runs/quickstart ../other/runs --port 8123 --no-open

      telescope ui runs/quickstart --export quickstart-page
    """
    from telescope_ui.export import export_runs
    from telescope_ui.serve import serve

    chosen = folders or [Path("runs")]
    if export is not None:
        written = export_runs(chosen, export, num_rollouts=rollouts)
        typer.echo(f"wrote {written.num_pages} pages: open {written.page}")
        return
    serve(chosen, host=host, port=port, opens_browser=not (no_open or as_json), as_json=as_json)
