"""Parse the flags that typer cannot: `--env.x value`, and the lists of k of `telescope eval`."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import typer

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.json_text import read_json

_PREFIX = "--env."


def parse_ks(text: str) -> tuple[int, ...]:
    """Return the numbers in text such as `1,4`, sorted and without duplicates."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"--k must be numbers separated by commas such as 1,4, got {text!r}"
        ) from None


class UnparsedArguments(NamedTuple):
    """The words of a command line that typer does not parse."""

    settings: dict[str, Any]
    """The environment's own settings."""
    environments: list[str]
    """Further environments after the first one."""


def unparsed(
    context: typer.Context, *, check: Callable[[str], None] | None = None
) -> UnparsedArguments:
    """Read the `--env.x value` and `--env.x=value` flags, and further names of environments.

    A flag without a value is true. `--env.judge.model` is the setting `model` in the table `judge`.
    Any other unparsed argument is an error: that of `check` for it, or one that names the nearest
    option.
    """
    settings: dict[str, Any] = {}
    environments: list[str] = []
    left = list(context.args)
    while left:
        flag = left.pop(0)
        if not flag.startswith("-"):
            environments.append(flag)
            continue
        if not flag.startswith(_PREFIX):
            name = flag.partition("=")[0]
            if check is not None:
                check(name)
            options = [opt for parameter in context.command.params for opt in parameter.opts]
            known = [opt for opt in options if opt.startswith("--")]
            hint = "(settings of the environment are written --env.NAME)"
            raise unknown_name("option", name, known, hint)
        name, given, text = flag.removeprefix(_PREFIX).partition("=")
        if not given:
            text = left.pop(0) if left and not left[0].startswith("--") else "true"
        _put(settings, name.replace("-", "_").split("."), _value(text, flag), flag=name)
    return UnparsedArguments(settings, environments)


def _put(settings: dict[str, Any], path: list[str], value: Any, *, flag: str) -> None:
    table = settings
    for part in path[:-1]:
        inner: object = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{_PREFIX}{flag}: {part} is also given a value of its own; remove one of them"
            )
        table = cast(dict[str, Any], inner)
    if path[-1] in table:
        raise ConfigError(f"{_PREFIX}{flag} is given twice; give it once")
    table[path[-1]] = value


def _value(text: str, flag: str) -> Any:
    """Parse lists and tables as JSON; other text is converted by the environment's settings."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return read_json(text)
    except ValueError as error:
        raise ConfigError(
            f"{flag}: {text!r} begins like JSON but is not valid JSON ({error}); check its quotes"
        ) from None
