"""Record which settings were set, and which differ from their defaults, for later readers."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from telescope_core.base.types import JsonValue


class SettingOrigin(NamedTuple):
    """Names of settings, as `section.key`; entries of a list of tables go by their `name`."""

    given: list[str]
    """Set in a file or by a flag, also to the value that they have by default. A table without
    a fixed form is listed by its own name."""
    chosen: list[str]
    """Settings that differ from their defaults, because they were set or follow from others."""
    defaults: dict[str, JsonValue]


def origin_of(config: BaseModel) -> SettingOrigin:
    """Return settings that were set, settings that differ from defaults, and all defaults."""
    fields = list(_walk(config, ""))
    return SettingOrigin(
        given=[one.name for one in fields if one.is_given],
        chosen=[one.name for one in fields if one.is_chosen],
        defaults={one.name: one.default for one in fields if one.default is not PydanticUndefined},
    )


def chosen_settings(
    config: Mapping[str, JsonValue], names: Collection[str], prefix: str = ""
) -> dict[str, JsonValue]:
    """Return the settings of `config` among `names`, which are in the form of `SettingOrigin`."""
    found: dict[str, JsonValue] = {}
    for name, value in config.items():
        full = f"{prefix}{name}"
        inner: JsonValue = None
        if isinstance(value, Mapping):
            inner = chosen_settings(value, names, f"{full}.")
        elif isinstance(value, list):
            inner = [
                chosen_settings(one, names, f"{full}.{one.get('name', number)}.")
                for number, one in enumerate(value)
                if isinstance(one, Mapping)
            ]
        if full in names:
            found[name] = value
        elif inner:
            found[name] = inner
    return found


class _Field(NamedTuple):
    name: str
    is_given: bool
    is_chosen: bool
    default: Any


def _walk(section: BaseModel, prefix: str) -> Iterator[_Field]:
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
            is_given = name in section.model_fields_set
            yield _Field(full, is_given, dumped[name] != default, default)
