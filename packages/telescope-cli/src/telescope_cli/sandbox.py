"""`telescope sandbox`: list the providers of sandboxes, and check one."""

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from telescope_cli.progress import progress_of
from telescope_cli.verbs import Verb, verb_app
from telescope_core.base.errors import ConfigError

if TYPE_CHECKING:
    from telescope_core.sandboxes.check import CheckFinding
    from telescope_core.sandboxes.protocol import SandboxProvider

app = verb_app(
    {
        "list": Verb(
            ".sandbox:list_command", "List the providers of sandboxes, and what each can give."
        ),
        "check": Verb(
            ".sandbox:check_command",
            "Try on real sandboxes of a provider what every sandbox must do.",
        ),
    },
    "Check the sandboxes in which programs of models run.",
    epilog="""Examples:

  telescope sandbox list

  telescope sandbox check local

  telescope sandbox check docker --set image=python:3.11-slim --json""",
    prints_texts_of_others=True,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of the provider, such as image."),
]
ImageOption = Annotated[
    str | None, typer.Option(help="Image of the sandboxes that are made for the check.")
]
NameArgument = Annotated[str, typer.Argument(help="Name of the provider, such as local.")]


def list_command(as_json: JsonOption = False) -> None:
    """List the providers of sandboxes, and what each can give here."""
    from telescope_core.sandboxes import open_provider, provider_names
    from telescope_core.sandboxes.protocol import SandboxUnavailableError

    rows: list[dict[str, Any]] = []
    for name in provider_names():
        try:
            provider = open_provider(name)
        except SandboxUnavailableError as error:
            rows.append({"name": name, "loads": False, "said": str(error), "limits": {}})
            continue
        limits = {limit.value: means for limit, means in provider.limits.items()}
        rows.append({"name": name, "loads": True, "said": "", "limits": limits})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=box.SIMPLE)
    for head in ("provider", "can give", "by"):
        table.add_column(head, overflow="fold")
    for row in rows:
        limits = cast(dict[str, str], row["limits"])
        # A row for each limit, so that a text that is folded stays beside its own.
        for number, (limit, means) in enumerate(limits.items()):
            table.add_row("" if number else row["name"], limit, means)
        if not limits:
            table.add_row(row["name"], "", row["said"])
        table.add_section()
    _console().print(table)


def check_command(
    name: NameArgument,
    settings: SetOption = None,
    image: ImageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try on real sandboxes of a provider what every sandbox must do.

    Exit code 0 when all is as it must be, 1 when something is not, 2 when this machine or account
    cannot make such sandboxes, and 6 when the provider failed.
    """
    from telescope_core.sandboxes import open_provider
    from telescope_core.sandboxes.protocol import SandboxSpec

    provider = open_provider(name, **_settings(settings or []))
    findings = asyncio.run(_checked(provider, SandboxSpec(image=image)))
    passed = all(finding.passed for finding in findings)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        typer.echo(json.dumps({"provider": name, "passed": passed, "checks": rows}, indent=2))
    else:
        for finding in findings:
            mark = "ok    " if finding.passed else "FAILED"
            typer.echo(f"{mark} {finding.check} ({finding.wall_s:.2f} s)")
            if finding.said:
                typer.echo(f"       {finding.said}")
        num_passed = sum(finding.passed for finding in findings)
        typer.echo(f"{name}: {num_passed} of {len(findings)} checks passed")
    if not passed:
        raise typer.Exit(1)


async def _checked(provider: "SandboxProvider", spec: Any) -> "list[CheckFinding]":
    from telescope_core.sandboxes.check import CHECKS, check_provider

    num_done = 0
    with progress_of(f"checking {provider.name}", console=_console(stderr=True)) as on_progress:

        def on_finding(finding: "CheckFinding") -> None:
            nonlocal num_done
            num_done += 1
            on_progress(num_done, len(CHECKS))

        try:
            return await check_provider(provider, spec, on_finding=on_finding)
        finally:
            await provider.close()


def _console(*, stderr: bool = False) -> Console:
    """Return a console without styles, which would be escaped, even where FORCE_COLOR is set."""
    return Console(
        stderr=stderr, force_terminal=False, color_system=None, highlight=False, markup=False
    )


def _settings(given: list[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise ConfigError(f"--set: expected NAME=VALUE, got {name!r}")
    return {name.replace("-", "_"): value for name, _, value in pairs}
