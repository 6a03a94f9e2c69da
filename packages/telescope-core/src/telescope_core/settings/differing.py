"""Find the settings in which runs differ, by `section.key`, and those that only name a place."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

_PLACES = re.compile(
    r"run\.(name|output_dir|debug)|checkpoint\.|ray\.|observability\.(?!record_token_facts)"
    r"|[\w.]*(_host|_port|_addresses)$"
)


class Differing(NamedTuple):
    """A setting that is not the same in all runs."""

    name: str
    values: dict[str, Any]
    """Key of each run that has the setting -> its value there."""

    @property
    def is_place(self) -> bool:
        """Whether it only names a run or place or says what is reported, and has no other effect.

        These are names, folders, hosts and ports, and how often a run is saved.
        """
        return _PLACES.match(self.name) is not None


def differing(
    configs: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Differing], int]:
    """Return (settings that differ, number of equal ones); both arguments are keyed by run.

    `defaults` are those that a run recorded, by `section.key`. A setting that the version of one
    run does not know, and that the other has at its default, is no difference.
    """
    flat = {key: flat_settings(config) for key, config in configs.items()}
    names = dict.fromkeys(name for settings in flat.values() for name in settings)
    found: list[Differing] = []
    for name in names:
        values = {key: settings[name] for key, settings in flat.items() if name in settings}
        first = next(iter(values.values()))
        is_own = any(
            name not in defaults.get(key, {}) or defaults[key][name] != value
            for key, value in values.items()
        )
        is_of_some = len(values) < len(flat)
        if (is_of_some and is_own) or any(value != first for value in values.values()):
            found.append(Differing(name, values))
    return found, len(names) - len(found)


def nobody_set(name: str, given: Collection[str]) -> bool:
    """Return whether neither setting `name` nor a table that holds it is among those `given`."""
    parts = name.split(".")
    return not any(".".join(parts[:end]) in given for end in range(1, len(parts) + 1))


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by `section.key`; tables of a list go by their `name`, or are numbered."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= flat_settings(cast(dict[str, Any], value), f"{full}.")
        elif isinstance(value, list) and _has_tables(cast(list[Any], value)):
            for number, one in enumerate(cast(list[dict[str, Any]], value)):
                called = one.get("name", number)
                found |= flat_settings(one, f"{full}.{called}.")
        else:
            found[full] = value
    return found


def _has_tables(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)
