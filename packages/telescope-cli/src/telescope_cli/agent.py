"""`telescope agent`: agent programs that can play environments, and their packages."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from telescope_cli.verbs import Verb, verb_app
from telescope_core.base.errors import UnknownNameError

if TYPE_CHECKING:
    from telescope_envs.install.agents import AgentState

app = verb_app(
    {
        "install": Verb(
            ".agent:install_command",
            "Install an agent program into a virtual environment of its own.",
        ),
        "list": Verb(".agent:list_command", "List the agent programs, and which are installed."),
        "uninstall": Verb(
            ".agent:uninstall_command", "Remove what was installed for an agent program."
        ),
    },
    "Install agent programs that play environments in sandboxes.",
    epilog="""Examples:

  telescope agent list

  telescope agent install mini-swe-agent""",
    prints_texts_of_others=True,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the program, such as mini-swe-agent.")]


def list_command(as_json: JsonOption = False) -> None:
    """List the agent programs, and which are installed."""
    from telescope_envs.install.agents import agent_states

    rows = [_row(state) for state in agent_states()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        where = row["folder"] if row["installed"] else "not installed"
        needs = ", ".join(row["requirements"]) or "no packages of its own"
        typer.echo(f"{row['name']}: {needs}" + (f"; {where}" if row["requirements"] else ""))


def install_command(name: NameArgument, as_json: JsonOption = False) -> None:
    """Install the packages of an agent program into a virtual environment of its own."""
    from telescope_envs.install.agents import install_agent

    row = _row(install_agent(name))
    if as_json:
        typer.echo(json.dumps(row, indent=2))
    elif row["requirements"]:
        typer.echo(f"{name} is installed in {row['folder']}")
    else:
        typer.echo(f"{name} needs no packages of its own")


def uninstall_command(name: NameArgument) -> None:
    """Remove what was installed for an agent program."""
    from telescope_envs.install.agents import uninstall_agent

    if not uninstall_agent(name):
        raise UnknownNameError(f"agent {name!r} is not installed; see: telescope agent list")
    typer.echo(f"{name} is removed")


def _row(state: "AgentState") -> dict[str, Any]:
    return {
        "name": state.name,
        "requirements": list(state.requirements),
        "installed": state.is_installed,
        "folder": str(state.folder) if state.requirements else "",
    }
