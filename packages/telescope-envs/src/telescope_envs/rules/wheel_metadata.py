"""Reads METADATA and WHEEL, the two files in which a wheel says what it is. Pure.

What installers would refuse, or could read in two ways, is refused, because a release that cannot
be installed could never be replaced.
"""

import re

from packaging.metadata import InvalidMetadata, Metadata, RawMetadata, parse_email

from telescope_core.errors import RegistryError
from telescope_envs.records.names import (
    check_requirement,
    check_specifier,
)

_AGAIN = "build it again with an ordinary build backend"
_ODD_ENDS = re.compile(rb"\r(?!\n)|\0")
_WHEEL_FIELDS = {
    "Wheel-Version": ("1.0",),
    "Root-Is-Purelib": ("true",),
    "Tag": ("py3-none-any",),
}
"""Field of WHEEL that must be there once -> the values that it may have."""


def read_metadata(data: bytes, filename: str) -> RawMetadata:
    """Return the fields of METADATA; raises RegistryError unless each is valid and there once."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise RegistryError(f"wheel {filename}: METADATA is not UTF-8: {error}") from error
    if _ODD_ENDS.search(data):
        raise RegistryError(
            f"wheel {filename}: its METADATA has a carriage return or a zero byte, at which "
            f"programs end lines differently; {_AGAIN}"
        )
    raw, unparsed = parse_email(data)
    odd = sorted(field for field in unparsed if _is_known(field))
    if odd:
        raise RegistryError(
            f"wheel {filename}: its METADATA has {', '.join(odd)} more than once, or not as text; "
            f"{_AGAIN}"
        )
    if "metadata_version" not in raw:
        raise RegistryError(f"wheel {filename}: its METADATA has no Metadata-Version; {_AGAIN}")
    # Not validated as a whole: build backends wrote newer fields into older versions of the format.
    checked = Metadata.from_raw(raw, validate=False)
    for field in raw:
        try:
            getattr(checked, field, None)
            if field == "requires_python":
                check_specifier(raw.get("requires_python", ""))
            for requirement in raw.get("requires_dist", []) if field == "requires_dist" else ():
                check_requirement(requirement)
        except (InvalidMetadata, ValueError, RecursionError) as error:
            cause = f": {error.__cause__}" if error.__cause__ is not None else ""
            raise RegistryError(
                f"wheel {filename}: its METADATA cannot be read: {error}{cause}; correct "
                "pyproject.toml and build it again"
            ) from error
    return raw


def check_wheel_file(text: str, filename: str) -> None:
    """Raise RegistryError unless WHEEL is that of a pure Python wheel of version 1.0."""
    found: dict[str, list[str]] = {}
    for line in filter(None, text.split("\n")):
        field, mark, value = line.partition(": ")
        if not mark or not line.isprintable() or line[0].isspace():
            raise RegistryError(f"wheel {filename}: its WHEEL has the line {line!r}; {_AGAIN}")
        found.setdefault(field.lower(), []).append(value)
    for field, values in _WHEEL_FIELDS.items():
        given = found.get(field.lower(), [])
        if len(given) != 1 or given[0] not in values:
            raise RegistryError(
                f"wheel {filename}: its WHEEL must have the line '{field}: {values[0]}' once, as a "
                f"pure Python wheel has it, got {', '.join(given) or 'none'}; {_AGAIN}"
            )


def _is_known(field: str) -> bool:
    """Return whether a field's name, as it is written in METADATA, is one of the format."""
    name = field.lower().replace("-", "_")
    known = RawMetadata.__annotations__
    return name in known or f"{name}s" in known
