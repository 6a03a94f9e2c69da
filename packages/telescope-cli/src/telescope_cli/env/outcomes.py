"""Outcomes of a command that takes several environments, and how they are printed."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import typer

from telescope_core.base.errors import TelescopeError
from telescope_core.base.secret_names import secrets_line
from telescope_envs.records.release import Release

_WORDS = {"unchanged": "already installed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome for one environment."""

    name: str
    """Name as it was typed."""
    id: str = ""
    version: str = ""
    state: str
    """installed, unchanged, removed or failed."""
    secrets: tuple[str, ...] = ()
    """Names of the environment variables that it may read."""
    error: str = ""
    exit_code: int = 0


def attempt(name: str, install: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of `install`; a TelescopeError becomes a failed outcome."""
    try:
        return install()
    except TelescopeError as error:
        return Outcome(name=name, state="failed", error=str(error), exit_code=error.exit_code)


def attempt_all(installs: Mapping[str, Callable[[], Outcome]], *, at_once: int) -> list[Outcome]:
    """Run `installs` (typed name -> function), up to `at_once` together; returns their outcomes.

    The outcomes are in the order of `installs`.
    """
    with ThreadPoolExecutor(at_once) as pool:
        started = [pool.submit(attempt, name, install) for name, install in installs.items()]
        return [future.result() for future in started]


def installed(name: str, release: Release, *, is_new: bool) -> Outcome:
    """Return the outcome for an environment that is now installed."""
    return Outcome(
        name=name,
        id=release.id,
        version=release.version,
        state="installed" if is_new else "unchanged",
        secrets=release.secrets,
    )


def report(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Print each outcome; exits with the exit code of the first failure, if any.

    A line about the secrets of each environment goes to standard error, also with --json.
    """
    failed = [outcome for outcome in outcomes if outcome.error]
    if as_json:
        typer.echo(json.dumps([_row(outcome) for outcome in outcomes]))
    for outcome in outcomes:
        if outcome.error:
            typer.echo(f"telescope: {outcome.name}: {outcome.error}", err=True)
        elif not as_json:
            done = _WORDS.get(outcome.state, outcome.state)
            typer.echo(f"{outcome.id} {outcome.version}: {done}")
        if line := secrets_line(outcome.id, outcome.secrets, os.environ):
            typer.echo(line, err=True)
    if failed and len(outcomes) > 1:
        typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} are installed", err=True)
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _row(outcome: Outcome) -> dict[str, str]:
    """Return the JSON object of one outcome, for --json."""
    row = {"name": outcome.name, "state": outcome.state}
    if outcome.error:
        return {**row, "error": outcome.error}
    return {**row, "id": outcome.id, "version": outcome.version}
