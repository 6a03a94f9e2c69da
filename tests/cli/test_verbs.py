"""Options that need no conversion arrive as typer itself would convert them."""

from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from telescope_cli.verbs import command_of


def double(text: str) -> str:
    return 2 * text


def shout(value: str | None) -> str | None:
    return value.upper() if value else value


def application(seen: list[dict[str, Any]]) -> typer.Typer:
    app = typer.Typer(add_completion=True)

    @app.command()
    def verb(
        word: Annotated[str, typer.Argument()],
        names: Annotated[list[str] | None, typer.Argument()] = None,
        tag: Annotated[list[str] | None, typer.Option()] = None,
        number: Annotated[list[int] | None, typer.Option()] = None,
        limit: Annotated[int, typer.Option(min=1)] = 25,
        share: float = 0.5,
        is_loud: bool = False,
        note: Annotated[str | None, typer.Option(callback=shout)] = None,
        twice: Annotated[str, typer.Option(parser=double)] = "",
        folder: Annotated[str | None, typer.Option()] = None,
    ) -> None:
        seen.append(locals().copy())

    return app


@pytest.mark.parametrize(
    "arguments",
    [
        "a",
        "a b c --tag x --tag y",
        "a --number 1 --number 2 --limit 3 --share 1 --is-loud",
        "a --note low --twice ab --folder /x",
        "",
        "a --limit 0",
        "a --limit x",
        "a --number x",
        "a --unknown",
    ],
)
def test_values_and_refusals_are_those_of_typer(arguments, capsys):
    outcomes = []
    for build in (get_command, command_of):
        seen: list[dict[str, Any]] = []
        command = build(application(seen))
        with pytest.raises(SystemExit) as ended:
            command(arguments.split(), prog_name="verb")
        values = [{k: (v, type(v)) for k, v in one.items() if k != "seen"} for one in seen]
        outcomes.append((ended.value.code, values, capsys.readouterr()))
    assert outcomes[0] == outcomes[1]
