"""What a shell offers for settings, which typer does not know: names of flags, and their values."""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from telescope_cli.env.options import complete_installed
from telescope_core.base.errors import TelescopeError
from telescope_core.settings.config import leaf_paths
from telescope_core.settings.names import names_of
from telescope_envs.install.loading import declared_settings
from telescope_envs.locator import InstalledLocator

Flags = Mapping[str, Collection[str]]
"""Flag -> its values; empty where they cannot be counted."""


def setting_texts(kind: str, context: Any, incomplete: str) -> list[str]:
    """Return the flags of settings, or the values of the last flag, that begin with `incomplete`.

    `kind` is that of a `Verb`, and `context` typer's, of the words before. Where it takes several
    environments, names of further ones are offered too. Nothing is said of an environment that
    cannot be used: the shell would print it into the line.
    """
    flags: Flags = {}
    if kind in ("environment", "environments"):
        last = incomplete if incomplete.startswith("-") else next(iter(context.args[-1:]), "")
        if not last.startswith("--env."[: max(1, len(last))]):
            # Another word is meant, and importing an environment takes a second.
            given = {context.params.get("environment"), *context.args}
            if kind == "environment" or None in given or last.startswith("-"):
                return []
            return sorted({*complete_installed(incomplete)} - given)
        named = (context.params.get(one) for one in ("environment", "env", "target"))
        with suppress(TelescopeError, OSError):
            flags = environment_flags(next((one for one in named if isinstance(one, str)), ""))
    elif kind == "sft":
        from telescope_train.sft.config import SftConfig

        flags = schema_flags(SftConfig)
    elif kind == "train":
        from telescope_train.algorithms.record import known_algorithms
        from telescope_train.config.schema import TrainConfig

        flags = schema_flags(TrainConfig) | {"--algorithm": known_algorithms()}
    return offered(flags, context.args, incomplete)


def environment_flags(name: str) -> dict[str, list[str]]:
    """Return the flags of an installed environment's own settings; none for other names.

    To know them its code is imported, which a shell must not do with what is not installed.
    """
    found = InstalledLocator().locate(name)
    if found is None:
        return {}
    interpreter = found.interpreter or sys.executable
    settings = declared_settings(interpreter, found.factory, found.search_path)
    return {
        f"--env.{one.name}": ["true", "false"]
        if one.type == "true or false"
        else re.findall(r'"([\w.+-]+)"', one.type)
        for one in settings
    }


def schema_flags(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Return the flags of every setting of `schema`, with its section and without it."""
    leaves = leaf_paths(schema)
    names = names_of(schema, leaves, foreign={}, refused={})
    values = {leaf: _values(names.annotation(path)) for leaf, path in leaves.items()}
    with_section = {f"--{'.'.join(path)}": values[leaf] for leaf, path in leaves.items()}
    return {f"--{leaf}": texts for leaf, texts in values.items()} | with_section


def _values(annotation: object) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [one for one in arguments if isinstance(one, str)]
    return [text for argument in arguments for text in _values(argument)]


def offered(flags: Flags, before: Sequence[str], incomplete: str) -> list[str]:
    """Return the `flags`, or the values of the last word `before`, that go on as `incomplete` does.

    A flag with its section is offered where one without it is not meant. Those that are given
    already are left out, and so are names that a shell would take for code.
    """
    if not incomplete.startswith("-"):
        values = flags.get(_with_underscores(before[-1]), ()) if before else ()
        return [value for value in values if value.startswith(incomplete)]
    wanted, given = _with_underscores(incomplete), {_with_underscores(word) for word in before}
    found = [flag for flag in flags if flag.startswith(wanted) and flag not in given]
    found = [flag for flag in found if re.fullmatch(r"--[\w.]+", flag)]
    found = [flag for flag in found if "." not in flag] or found
    in_hyphens = "-" in incomplete.lstrip("-")
    return [f"--{one[2:].replace('_', '-')}" if in_hyphens else one for one in found]


def _with_underscores(word: str) -> str:
    return f"--{word.lstrip('-').replace('-', '_')}" if word.startswith("-") else word
