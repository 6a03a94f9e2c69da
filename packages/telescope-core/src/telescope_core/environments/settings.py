"""`EnvironmentConfig`: the typed settings of an environment, read from flags or files.

Every field of a subclass becomes a `--env.field` flag. The fields of a nested model, such as a
judge, get flags too: `--env.judge.model`. One of them changes that field alone: the others keep
what the default of the nested model says.
"""

import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from telescope_core.base.errors import ConfigError, unknown_name
from telescope_core.base.setting_problems import SettingProblem, problems_of
from telescope_core.parsers.texts import NO_NUMBER, place_of_truth_value

Config = TypeVar("Config", bound=BaseModel)


class Settings(BaseModel):
    """A table of settings that is frozen, validated, and rejects unknown names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


class EnvironmentConfig(Settings):
    """Settings of one environment; each field of a subclass becomes a `--env.field` flag.

    A docstring under a field becomes its description. A table for a nested model need not be whole:
    what it leaves out is as in the field's default.
    """

    @model_validator(mode="before")
    @classmethod
    def _complete_tables(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return _over_defaults(cls, cast(Mapping[str, Any], given), None)


def read_settings(schema: type[Config], settings: Mapping[str, Any], *, owner: str) -> Config:
    """Return validated settings; raises ConfigError with one line for each invalid setting.

    `owner` names the environment and its file in errors. Text is converted to the type of the
    field.
    """
    _require_known(schema, settings, "env", owner)
    try:
        found = schema(**settings)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_describe(problem, owner) for problem in problems_of(error, settings))
        ) from None
    place = place_of_truth_value(settings, found.model_dump(warnings=False))
    if place is not None:
        name = ".".join(map(str, ("env", *place)))
        raise ConfigError(f"{owner}: {name}: {NO_NUMBER}")
    return found


def _require_known(
    schema: type[BaseModel], settings: Mapping[str, Any], path: str, owner: str
) -> None:
    for key, value in settings.items():
        if key not in schema.model_fields:
            known = schema.model_fields
            raise unknown_name("setting", key, known, f"({path}.{key} of {owner})")
        inner = _model_in(schema.model_fields[key].annotation)
        if inner is not None and isinstance(value, Mapping):
            _require_known(inner, cast(Mapping[str, Any], value), f"{path}.{key}", owner)


def _over_defaults(
    model: type[BaseModel], given: Mapping[str, Any], default: BaseModel | None
) -> dict[str, Any]:
    """Return what was given for `model`, over the fields that `default` sets.

    Fields that neither sets are left out, so that they do not count as set.
    """
    names = () if default is None else default.model_fields_set & model.model_fields.keys()
    found = {name: getattr(default, name) for name in names} | dict(given)
    for name, value in given.items():
        field = model.model_fields.get(name)
        inner = None if field is None else _model_in(field.annotation)
        if field is not None and inner is not None and isinstance(value, Mapping):
            held = _default_of(field) if default is None else getattr(default, name, None)
            chosen = held if isinstance(held, BaseModel) else None
            found[name] = _over_defaults(inner, cast(Mapping[str, Any], value), chosen)
    return found


def _default_of(field: FieldInfo) -> object:
    """Return the default; None if there is none, or if it follows from other fields."""
    if field.is_required() or field.default_factory_takes_validated_data:
        return None
    return field.get_default(call_default_factory=True)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return `Model` of an annotation `Model` or `Model | None`; None if it names several."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    models = [one for one in parts if isinstance(one, type) and issubclass(one, BaseModel)]
    return models[0] if len(models) == 1 else None


def _describe(problem: SettingProblem, owner: str) -> str:
    name = ".".join(str(part) for part in ("env", *problem.place))
    if problem.is_missing:
        return (
            f"{owner}: {name} is required; pass --{name} VALUE, or set it in the file's env table"
        )
    return f"{owner}: {name}: {problem.message}, got {problem.got}"
