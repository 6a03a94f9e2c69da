"""Which settings are not as they are by default: kept for who reads the run later."""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from telescope_core.types import JsonValue


class Origin(NamedTuple):
    """Of all settings, by `section.key`; entries of a list of tables go by their `name`."""

    chosen: list[str]
    """Other than by default: somebody set them, or another setting decides them. Of a table without
    a fixed form, its own name stands for all."""
    defaults: dict[str, JsonValue]


def origin_of(config: BaseModel) -> Origin:
    """Return what is not as it is by default in `config`, and every default that there is."""
    chosen: list[str] = []
    defaults: dict[str, JsonValue] = {}
    for name, is_chosen, default in _walk(config, ""):
        if is_chosen:
            chosen.append(name)
        if default is not PydanticUndefined:
            defaults[name] = default
    return Origin(chosen, defaults)


def _walk(section: BaseModel, prefix: str) -> Iterator[tuple[str, bool, Any]]:
    dumped = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value, full = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _walk(value, f"{full}.")
        elif isinstance(value, tuple | list) and value and isinstance(value[0], BaseModel):
            for number, one in enumerate(cast(list[BaseModel], value)):
                yield from _walk(one, f"{full}.{getattr(one, 'name', number)}.")
        else:
            default: Any = field.get_default(call_default_factory=True, validated_data={})
            if default is not PydanticUndefined:
                # As it would stand in the file: a path as text, a tuple as a list.
                default = section.model_copy(update={name: default}).model_dump(
                    mode="json", include={name}, warnings=False
                )[name]
            yield full, dumped[name] != default, default
